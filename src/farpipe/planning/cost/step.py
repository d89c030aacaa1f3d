"""The Problem of one step from a job and its placement, and what a step takes besides its pipeline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

from farpipe.core.spec import Cluster, Device, Model, Site, Training
from farpipe.core.step import Exchange, Hop, Problem, Rank, Stage, Sync, Transfer, occupied_s
from farpipe.core.step.links import CollectiveKind
from farpipe.planning.cost import memory
from farpipe.planning.cost.calibration import Calibration
from farpipe.planning.cost.layout import Layout, Placement, check_layout
from farpipe.planning.cost.links import StepLinks, ring_links
from farpipe.planning.cost.outer_exchange import exposed_exchange_s
from farpipe.planning.cost.stage import JobCosts, StageCost
from farpipe.planning.cost.transfer import (
    EffectiveLink,
    RingKind,
    effective_site_link,
    expert_replica_link,
    narrowed_bytes,
    replica_link,
    ring_bytes,
    ring_link,
    summed_over_groups_s,
)


@dataclass(frozen=True)
class StepCost:
    """One optimizer step: the Problem of its pipeline and the seconds outside it."""

    problem: Problem
    overhead_s: float
    """The optimizer on the slowest rank, the exchange that clipping needs, a fixed time, waiting for the slowest
    replica, and, when the replicas' own reduction comes first, the exchange of tied embeddings; with replicas at
    several sites what is around their exchange there."""
    optimizer_s: float
    """The optimizer's part of it."""


def step_cost(
    costs: JobCosts,
    layout: Layout,
    placements: Sequence[Placement],
    cluster: Cluster,
    like: Problem | None = None,
) -> StepCost:
    """One step of one replica of a job on `placements` (one per stage, in pipeline order).

    `like`: the Problem of the same layout on the same sites with other layers or recomputation, where one is known; its
    messages are taken from there.

    Gradients of the replicas are reduced after a stage's last W; with ZeRO-1 they are reduce-scattered, and the
    parameters gathered before the first F. Of both the Problem has what does not run beside the stage's own last
    backward and first forward (`training.overlap`). ZeRO-2 and 3 are part of every microbatch. Replicas at several
    sites reduce inside each site, then over the ring of sites, then hand the sums out inside; the Problem has the part
    between. Tied embeddings: the first and the last stage send each other their gradient of the shared matrix.

    Raises InputError when the parts do not fit together or a profile was measured for something else, InfeasibleError
    when devices or a link are missing.
    """
    step = _Step(costs, layout, tuple(placements), cluster)
    return StepCost(step.problem(like), sum(step.overhead_parts().values()), step.optimizer_s())


def overhead_parts(
    costs: JobCosts, layout: Layout, placements: Sequence[Placement], cluster: Cluster
) -> dict[str, float]:
    """The seconds of `StepCost.overhead_s` by what takes them; arguments and errors as for `step_cost`."""
    return _Step(costs, layout, tuple(placements), cluster).overhead_parts()


@dataclass(frozen=True)
class _Step:
    costs: JobCosts
    layout: Layout
    placements: tuple[Placement, ...]
    cluster: Cluster

    def __post_init__(self) -> None:
        check_layout(self.model, self.training, self.layout, self.placements, self.cluster)

    @property
    def model(self) -> Model:
        return self.costs.model

    @cached_property
    def training(self) -> Training:
        return self.costs.settled(self.layout)

    def problem(self, like: Problem | None = None) -> Problem:
        costs, links = self.stage_costs, self.links()
        hops: Sequence[Hop | None]
        if like is not None and not any(_has_times(hop) for hop in like.hops):  # times depend on what ranks compute
            hops, links.links = like.hops, dict(like.links)
        else:
            hops = self.hops(links)
        sync = self.sync(links, costs)
        return Problem.computed(
            num_microbatches=self.layout.num_microbatches,
            ranks=tuple(map(self.rank, range(self.layout.pipeline))),
            stages=tuple(map(_stage, self.placements, costs)),
            links=links.links,
            hops=tuple(hops),
            sync=tuple(sync) if any(sync) else None,
            exchanges=self.exchanges(links),
            barrier=self.training.barrier,
        )

    def overhead_parts(self) -> dict[str, float]:
        return {
            "optimizer of the slowest rank": self.optimizer_s(),
            "norm for clipping, sent to all ranks": self.clipping_s(),
            "waiting for the slowest replica": self.slowest_s(),
            "exchange of tied embeddings": self.late_tied_exchange_s(),
            "around the exchange between sites": self.around_inter_site_s(),
            "exchange after local steps, on average": self.local_exchange_s(),
            "fixed": max(self.calibration(site).step_overhead_s for site in self.sites.values()),
        }

    @cached_property
    def sites(self) -> dict[int, Site]:
        """The site of every rank."""
        return {p.rank: self.cluster.site(p.site) for p in self.placements}

    def calibration(self, site: Site) -> Calibration:
        return self.costs.calibration(site)

    def links(self) -> StepLinks:
        return StepLinks(self.cluster, self.layout, self.sites, self.pace_s)

    @cached_property
    def pace_s(self) -> float:
        """Seconds that the slowest rank computes for a microbatch."""
        work_s = dict.fromkeys(self.sites, 0.0)
        for placement, cost in zip(self.placements, self.stage_costs, strict=True):
            work_s[placement.rank] += cost.forward_s + cost.input_grad_s + cost.weight_grad_s
        return max(work_s.values())

    @cached_property
    def stage_costs(self) -> list[StageCost]:
        """The cost of every stage."""
        last = len(self.placements) - 1
        return [
            self.costs.stage(
                *(self.layout, self.sites[p.rank], p.num_layers, p.recompute),
                embedding=i == 0,
                head=i == last,
                dense_share=self.model.dense_share(p.first_layer, p.end_layer),
            )
            for i, p in enumerate(self.placements)
        ]

    @cached_property
    def _of_rank(self) -> dict[int, list[StageCost]]:
        """The costs of each rank's stages."""
        found: dict[int, list[StageCost]] = {rank: [] for rank in self.sites}
        for placement, cost in zip(self.placements, self.stage_costs, strict=True):
            found[placement.rank].append(cost)
        return found

    def rank(self, rank: int) -> Rank:
        mine = self._of_rank[rank]
        static = sum(cost.static_bytes for cost in mine) + max(cost.working_bytes for cost in mine)
        return Rank.computed(memory_bytes=self.sites[rank].plannable_bytes, static_bytes=static)

    def hops(self, links: StepLinks) -> list[Hop | None]:
        found: list[Hop | None] = []
        for here, there in zip(self.placements, self.placements[1:], strict=False):
            num_bytes = memory.boundary_bytes(self.model, self.training, self.layout)
            if here.site != there.site:
                num_bytes = narrowed_bytes(num_bytes, self.training)
            forward, backward = self._exchange(links, here, there, num_bytes, self.layout.num_microbatches)
            found.append(None if here.rank == there.rank else Hop.computed(forward=forward, backward=backward))
        return found

    def _exchange(
        self, links: StepLinks, one: Placement, other: Placement, num_bytes: float, count: int = 1
    ) -> list[Transfer | None]:
        """`num_bytes` there and back, `count` times a step; None where both are on one rank."""
        if one.rank == other.rank:
            return [None, None]
        calibration = self.calibration(self.cluster.site(one.site))
        return [links.between(a, b, num_bytes, calibration, count) for a, b in ((one, other), (other, one))]

    def sync(self, links: StepLinks, costs: Sequence[StageCost]) -> list[Sync | None]:
        """The collectives of every stage's replicas on one site, or of their sites; computed once for equal stages."""
        if self.layout.replica_sites and self.training.local_steps is not None:
            links.ring_over_sites(0.0)  # the links are there, and carry nothing in most steps
            return [None] * len(costs)
        if self.layout.replica_sites:
            once = {id(cost): cost for cost in costs}
            over_sites = {key: self._sync_over_sites(links, cost) for key, cost in once.items()}
            return [over_sites[id(cost)] for cost in costs]
        if self.layout.num_shares == 1 or self.training.zero in (2, 3):  # those are part of every microbatch
            return [None] * len(costs)
        exposed: dict[tuple[str, int], dict[CollectiveKind, float]] = {}
        found: list[Sync | None] = []
        for placement, cost in zip(self.placements, costs, strict=True):
            site, key = self.sites[placement.rank], (placement.site, id(cost))
            effective = replica_link(site, self.calibration(site), self.layout)
            if key not in exposed:
                exposed[key] = self._exposed_bytes(site, effective, cost)
            rings = {kind: links.ring(placement.rank, effective, size) for kind, size in exposed[key].items()}
            found.append(Sync.computed(**rings))
        return found

    def exchanges(self, links: StepLinks) -> tuple[Exchange, ...]:
        """Exchange of the tied matrix between the first and the last stage; not in the Problem with replicas."""
        if self.layout.data > 1:
            return ()
        last = len(self.placements) - 1
        pairs = zip(((0, last), (last, 0)), self._tied_exchange(links), strict=True)
        return tuple(Exchange(**dict(t), source_stage=a, target_stage=b) for (a, b), t in pairs if t is not None)

    def _exposed_bytes(self, site: Site, effective: EffectiveLink, cost: StageCost) -> dict[CollectiveKind, float]:
        """Bytes of each collective of a stage's replicas on one site that nothing hides."""
        whole: dict[CollectiveKind, float] = {"gather": self._weight_bytes(site, cost)} if self.training.zero1 else {}
        whole["reduce"] = self._gradient_bytes(site, cost)
        slowdown = self.calibration(site).overlap_slowdown
        return {kind: self._exposed(kind, size, effective, cost, slowdown) for kind, size in whole.items()}

    def _gradient_bytes(self, site: Site, cost: StageCost) -> float:
        """Bytes that a device sends to sum the stage's gradients over its replicas, whole or divided."""
        kind: RingKind = "reduce-scatter" if self.training.zero1 else "all-reduce"
        return self._ring_bytes(kind, site, cost, memory.gradient_bytes(self.training))

    def _weight_bytes(self, site: Site, cost: StageCost) -> float:
        return self._ring_bytes("all-gather", site, cost, memory.gathered_weight_bytes(self.training))

    def _ring_bytes(self, kind: RingKind, site: Site, cost: StageCost, width: float) -> float:
        """Bytes on the ring of a stage's replicas. Experts are the same on fewer devices than all else, which are
        farther apart: their bytes count as much more as their own ring is slower. So do those of ZeRO's groups."""
        at, calibration = self.layout, self.calibration(site)
        whole = (cost.device_params - cost.expert_params) * width
        shared_s = occupied_s(replica_link(site, calibration, at), 1.0)
        common = ring_bytes(kind, whole, at.num_shares)
        if self.training.zero1 and (size := self.training.grouped(at.num_shares)) < at.num_shares:
            grouped_s = occupied_s(ring_link(site, calibration, size, at.tensor), ring_bytes(kind, whole, size))
            if kind == "reduce-scatter":
                grouped_s += summed_over_groups_s(site, calibration, at, size, whole)
            common = grouped_s / shared_s
        experts = ring_bytes(kind, cost.expert_params * width, at.num_expert_shares)
        return common + experts * occupied_s(expert_replica_link(site, calibration, at), 1.0) / shared_s

    def _exposed(
        self, kind: CollectiveKind, num_bytes: float, effective: EffectiveLink, cost: StageCost, slowdown: float
    ) -> float:
        """Exposed bytes of a collective that runs beside the pass that waits for it, or that it waits for.

        Gradients are summed in buckets as the last microbatch's backward makes them, and parameters gathered in the
        order in which the first forward needs them (Megatron-LM's distributed optimizer, FSDP); one bucket, here a
        layer's, is always left. What is hidden slows the computation beside it, by `slowdown` of its own time.
        """
        if not self.overlap_fraction or not self.runs_beside(kind):
            return num_bytes
        left = num_bytes - self.overlap_fraction * _beside_s(kind, cost) * effective.bandwidth_bytes_per_s
        left = max(left, num_bytes / max(1, cost.num_buckets))
        return left + slowdown * (num_bytes - left)

    def runs_beside(self, kind: CollectiveKind) -> bool:
        """True if a collective runs beside computation at all."""
        return kind != "gather" or self.training.overlap_param_gather is not False

    @cached_property
    def overlap_fraction(self) -> float:
        """Share of a link's rate that collectives have beside a rank's own compute."""
        if not self.training.overlap:
            return 0.0
        return min(self.calibration(site).overlap_fraction for site in self.sites.values())

    def _sync_over_sites(self, links: StepLinks, cost: StageCost) -> Sync:
        """Whatever number of replicas a site has, everything crosses once; ZeRO-2 and 3 divide inside a site only."""
        size = len(self.layout.replica_sites)
        gradients = cost.num_params * memory.gradient_bytes(self.training)
        weights = cost.num_params * memory.gathered_weight_bytes(self.training)
        divided = self.training.zero == 1 and self.training.zero_group_size is None
        whole: dict[CollectiveKind, float] = {"gather": ring_bytes("all-gather", weights, size)} if divided else {}
        whole["reduce"] = ring_bytes("reduce-scatter" if divided else "all-reduce", gradients, size)
        return Sync(**{kind: self._exposed_over_sites(links, kind, size, cost) for kind, size in whole.items()})

    def _exposed_over_sites(
        self, links: StepLinks, kind: CollectiveKind, num_bytes: float, cost: StageCost
    ) -> Transfer:
        """Exposed seconds on a link that the collectives of all stages share: each has its part of the rate in the time
        of its own pass, so that all together never hide more than the link carries meanwhile. All bytes count."""
        part, whole = self.overlap_fraction / len(self.placements), links.ring_over_sites(num_bytes)
        if not part or not self.runs_beside(kind):
            return whole
        occupies_s, there_s = links.occupied_s(whole), links.seconds(whole)
        hidden_s = min(part * _beside_s(kind, cost), occupies_s * (1 - 1 / max(1, cost.num_buckets)))
        return whole.model_copy(update={"occupies_s": occupies_s - hidden_s, "arrives_after_s": there_s - hidden_s})

    def around_inter_site_s(self) -> float:
        """Seconds before and after the last exchange between sites: the one inside, and latencies of further rounds.

        A ring of n sites goes round in 2 (n - 1) rounds (two sites sum in one), of which the Problem has the first of
        each collective; bytes are all in the Problem.
        """
        homes = self.layout.replica_sites
        if not homes or self.training.local_steps is not None:
            return 0.0
        rounds = 2 * (len(homes) - 1) - (2 if self.training.zero == 1 else 1) if len(homes) > 2 else 0
        latency_s = max(link.latency_s for link in ring_links(self.cluster, homes))
        return rounds * latency_s + max(map(self._inside_s, self.placements, self.stage_costs))

    def local_exchange_s(self) -> float:
        """Seconds that a step stands still for other sites' differences, on average over many steps."""
        local, pairs = self.training.local_steps, permutations(self.layout.replica_sites, 2)
        links = [link for pair in pairs if (link := self.cluster.link(*pair)) is not None]
        if local is None or not links:
            return 0.0
        num_params = sum(cost.num_params for cost in self.stage_costs)
        return exposed_exchange_s(local, num_params, links, self.layout.num_microbatches * self.pace_s)

    def _inside_s(self, placement: Placement, cost: StageCost) -> float:
        """The stage's collectives inside a site that has several replicas."""
        size = self.layout.num_shares
        if size == 1 or self.training.zero in (2, 3):
            return 0.0
        site, there = self.sites[placement.rank], memory.gradient_bytes(self.training)
        back = memory.gathered_weight_bytes(self.training) if self.training.zero1 else there
        num_bytes = self._ring_bytes("reduce-scatter", site, cost, there)
        effective = replica_link(site, self.calibration(site), self.layout)
        return effective.seconds(num_bytes + self._ring_bytes("all-gather", site, cost, back))

    def _tied_exchange(self, links: StepLinks) -> list[Transfer | None]:
        """The gradient of the shared matrix from the first stage to the last and back."""
        matrix = self.model.vocab_size * self.model.hidden * memory.gradient_bytes(self.training)
        if not self.model.repeats_embedding or self.training.lora is not None:  # frozen
            return [None, None]
        return self._exchange(links, self.placements[0], self.placements[-1], float(matrix))

    def late_tied_exchange_s(self) -> float:
        """Seconds of the tied exchange of replicas, which comes after their reduction, so outside the pipeline."""
        if self.layout.data == 1:
            return 0.0
        links = self.links()
        return max((links.seconds(t) for t in self._tied_exchange(links) if t is not None), default=0.0)

    def optimizer_s(self) -> float:
        """The slowest rank's Adam; ZeRO-1 divides it over the replicas."""
        job, seconds = (self.training, self.layout), []
        shares = memory.num_shares(*job), memory.num_expert_shares(*job)
        for rank, site in self.sites.items():
            mine = self._of_rank[rank]
            num_params = sum(c.device_params - c.expert_params for c in mine) / shares[0]
            num_params += sum(c.expert_params for c in mine) / shares[1]
            seconds.append(num_params * self._optimizer_s_per_param(site.device, self.calibration(site)))
        return max(seconds)

    def _optimizer_s_per_param(self, device: Device, calibration: Calibration) -> float:
        """Bound by memory."""
        profile = self.costs.profiles.get(device.name)
        if profile is not None:
            return profile.optimizer_s_per_param
        return memory.adam_bytes(self.training) / (device.memory_bandwidth_bytes_per_s * calibration.memory_fraction)

    def slowest_s(self) -> float:
        """Time for which the slowest of the replicas keeps the others waiting (`Calibration.slowest`)."""
        num_replicas = self.layout.data * self.layout.context
        share = max(self.calibration(site).slowest(num_replicas) for site in self.sites.values())
        return share * self.layout.num_microbatches * self.pace_s

    def clipping_s(self) -> float:
        """Everybody tells everybody one number: latency alone, of the slowest pair of sites and of a tree inside."""
        if self.layout.pipeline == 1 and not self.layout.replica_sites:
            return 0.0
        sites = {site.name: site for site in self.sites.values()}
        names = {*sites, *(() if self.training.local_steps else self.layout.replica_sites)}
        far = [link.latency_s for link in self.cluster.links if {link.source, link.target} <= names]
        near = max(effective_site_link(site, self.calibration(site)).latency_s for site in sites.values())
        return max(far, default=0.0) + math.ceil(math.log2(self.layout.pipeline)) * near


def _beside_s(kind: CollectiveKind, cost: StageCost) -> float:
    """Time of the pass that a collective runs beside: the one that waits for it, or that it waits for."""
    return cost.forward_s if kind == "gather" else cost.input_grad_s + cost.weight_grad_s


def _has_times(hop: Hop | None) -> bool:
    return hop is not None and any(one is not None and one.has_times for one in (hop.forward, hop.backward))


def _stage(placement: Placement, cost: StageCost) -> Stage:
    return Stage.computed(
        rank=placement.rank,
        forward_s=cost.forward_s,
        input_grad_s=cost.input_grad_s,
        weight_grad_s=cost.weight_grad_s,
        activation_bytes=cost.activation_bytes,
        weight_stash_bytes=cost.weight_stash_bytes,
    )
