"""From a job and its placement to the Problem of one step, and what a step takes besides its pipeline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from farpipe.cost import memory
from farpipe.cost.calibration import Calibration
from farpipe.cost.layout import Layout, Placement, check_layout
from farpipe.cost.links import StepLinks, ring_links
from farpipe.cost.resharding import gather_s
from farpipe.cost.stage import JobCosts, StageCost
from farpipe.cost.transfer import (
    EffectiveLink,
    RingKind,
    effective_site_link,
    narrowed_bytes,
    replica_link,
    ring_bytes,
)
from farpipe.spec import Cluster, Device, Model, Site, Training
from farpipe.step import Collective, Exchange, Hop, Problem, Rank, Stage, Sync, Transfer, collectives


@dataclass(frozen=True)
class StepCost:
    """One optimizer step: the Problem of its pipeline and the seconds outside it."""

    problem: Problem
    overhead_s: float
    """The optimizer on the slowest rank, the exchange that clipping needs, a fixed time, and, when the replicas' own
    reduction comes first, the exchange of tied embeddings; with replicas at several sites what is around their
    exchange there."""


def step_cost(costs: JobCosts, layout: Layout, placements: Sequence[Placement], cluster: Cluster) -> StepCost:
    """One step of one replica of a job on `placements` (one per stage, in pipeline order).

    Gradients of the replicas are reduced after a stage's last W; with ZeRO-1 they are reduce-scattered, and the
    parameters gathered before the first F. Of both the Problem has what does not run beside the stage's own last
    backward and first forward (`training.overlap`). ZeRO-2 and 3 are part of every microbatch. Replicas at several
    sites reduce inside each site, then over the ring of sites, then hand the sums out inside; the Problem has the part
    between. Tied embeddings: the first and the last stage send each other their gradient of the shared matrix.

    Raises InputError when the parts do not fit together or a profile was measured for something else, InfeasibleError
    when devices or a link are missing.
    """
    step = _Step(costs, layout, tuple(placements), cluster)
    return StepCost(step.problem(), step.overhead_s())


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

    def problem(self) -> Problem:
        costs, links = self.stage_costs, self.links()
        hops, sync = self.hops(links), self.sync(links, costs)
        return Problem.computed(
            num_microbatches=self.layout.num_microbatches,
            ranks=tuple(self.rank(rank, costs) for rank in range(self.layout.pipeline)),
            stages=tuple(map(_stage, self.placements, costs)),
            links=links.links,
            hops=tuple(hops),
            sync=tuple(sync) if any(sync) else None,
            exchanges=self.exchanges(links),
        )

    def overhead_s(self) -> float:
        fixed = max(self.calibration(site).step_overhead_s for site in self.sites.values())
        return (
            self.optimizer_s(self.stage_costs)
            + self.clipping_s()
            + self.late_tied_exchange_s()
            + self.around_inter_site_s()
            + fixed
        )

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
                *(self.layout.of_rank(p.rank), self.sites[p.rank], p.num_layers, p.recompute),
                embedding=i == 0,
                head=i == last,
            )
            for i, p in enumerate(self.placements)
        ]

    def _of_rank(self, rank: int, costs: Sequence[StageCost]) -> list[StageCost]:
        return [cost for placement, cost in zip(self.placements, costs, strict=True) if placement.rank == rank]

    def rank(self, rank: int, costs: Sequence[StageCost]) -> Rank:
        mine = self._of_rank(rank, costs)
        static = sum(cost.static_bytes for cost in mine) + max(cost.working_bytes for cost in mine)
        return Rank.computed(memory_bytes=self.sites[rank].plannable_bytes, static_bytes=static)

    def hops(self, links: StepLinks) -> list[Hop | None]:
        found: list[Hop | None] = []
        for here, there in zip(self.placements, self.placements[1:], strict=False):
            num_bytes = memory.boundary_bytes(self.model, self.training, self.layout)
            if here.site != there.site:
                num_bytes = narrowed_bytes(num_bytes, self.training)
            sent = zip(self._exchange(links, here, there, num_bytes), ((here, there), (there, here)), strict=True)
            forward, backward = (one and self._gathered(links, one, *ends) for one, ends in sent)
            found.append(None if here.rank == there.rank else Hop.computed(forward=forward, backward=backward))
        return found

    def _exchange(self, links: StepLinks, one: Placement, other: Placement, num_bytes: float) -> list[Transfer | None]:
        """`num_bytes` there and back; None where both are on one rank."""
        if one.rank == other.rank:
            return [None, None]
        calibration = self.calibration(self.cluster.site(one.site))
        return [links.between(a, b, num_bytes, calibration) for a, b in ((one, other), (other, one))]

    def _gathered(self, links: StepLinks, sent: Transfer, source: Placement, target: Placement) -> Transfer:
        """`sent` with what the rank of `target` takes to put it together, see `farpipe.cost.resharding`."""
        if not self.layout.shapes:
            return sent
        seconds = gather_s(self.costs, self.layout, source.rank, target.rank, self.sites[target.rank])
        return sent.model_copy(update={"arrives_after_s": links.seconds(sent) + seconds}) if seconds else sent

    def sync(self, links: StepLinks, costs: Sequence[StageCost]) -> list[Sync | None]:
        return [self._replica_sync(links, p, cost) for p, cost in zip(self.placements, costs, strict=True)]

    def exchanges(self, links: StepLinks) -> tuple[Exchange, ...]:
        """Of the matrix that the first and the last stage share; with replicas it is no part of the Problem."""
        if self.layout.replica_sites or self.layout.max_shares > 1:
            return ()
        last = len(self.placements) - 1
        pairs = zip(((0, last), (last, 0)), self._tied_exchange(links), strict=True)
        return tuple(Exchange(**dict(t), source_stage=a, target_stage=b) for (a, b), t in pairs if t is not None)

    def _replica_sync(self, links: StepLinks, placement: Placement, cost: StageCost) -> Sync | None:
        """The collectives of the stage's replicas on one site, or of their sites."""
        if self.layout.replica_sites:
            return self._sync_over_sites(links, cost)
        at = self.layout.of_rank(placement.rank)
        if at.num_shares == 1 or self.training.zero in (2, 3):  # those are part of every microbatch
            return None
        site = self.sites[placement.rank]
        effective = replica_link(site, self.calibration(site), at)
        whole = Sync.computed(
            gather=links.ring(placement.rank, effective, self._weight_bytes(cost, at)) if self.training.zero1 else None,
            reduce=links.ring(placement.rank, effective, self._gradient_bytes(cost, at)),
        )
        return Sync.computed(**{one.kind: self._exposed(one, effective, cost) for one in collectives([whole])})

    def _gradient_bytes(self, cost: StageCost, at: Layout) -> float:
        """Bytes that a device sends to sum the stage's gradients over its replicas, whole or divided."""
        kind: RingKind = "reduce-scatter" if self.training.zero1 else "all-reduce"
        return _ring_bytes(kind, cost, memory.gradient_bytes(self.training.precision), at)

    def _weight_bytes(self, cost: StageCost, at: Layout) -> float:
        return _ring_bytes("all-gather", cost, memory.element_bytes(self.training.precision), at)

    def _exposed(self, whole: Collective, effective: EffectiveLink, cost: StageCost) -> Transfer:
        """Exposed seconds of a collective that runs beside the pass that waits for it, or that it waits for.

        Gradients are summed in buckets as the last microbatch's backward makes them, and parameters gathered in the
        order in which the first forward needs them (Megatron-LM's distributed optimizer, FSDP); one bucket, here a
        layer's, is always left.
        """
        if not self.overlap_fraction:
            return whole.transfer
        assert isinstance(whole.transfer.bytes, float)
        num_bytes = whole.transfer.bytes
        left = num_bytes - self.overlap_fraction * _beside_s(whole, cost) * effective.bandwidth_bytes_per_s
        return whole.transfer.model_copy(update={"bytes": max(left, num_bytes / max(1, cost.num_buckets))})

    @cached_property
    def overlap_fraction(self) -> float:
        """Share of a link's rate that collectives have beside a rank's own compute."""
        if not self.training.overlap:
            return 0.0
        return min(self.calibration(site).overlap_fraction for site in self.sites.values())

    def _sync_over_sites(self, links: StepLinks, cost: StageCost) -> Sync:
        """Whatever number of replicas a site has, everything crosses once; ZeRO-2 and 3 divide inside a site only."""
        size, precision = len(self.layout.replica_sites), self.training.precision
        gradients = cost.num_params * memory.gradient_bytes(precision)
        weights = cost.num_params * memory.element_bytes(precision)
        divided = self.training.zero == 1
        whole = Sync(
            gather=links.ring_over_sites(ring_bytes("all-gather", weights, size)) if divided else None,
            reduce=links.ring_over_sites(ring_bytes("reduce-scatter" if divided else "all-reduce", gradients, size)),
        )
        return Sync(**{one.kind: self._exposed_over_sites(links, one, cost) for one in collectives([whole])})

    def _exposed_over_sites(self, links: StepLinks, whole: Collective, cost: StageCost) -> Transfer:
        """As `_exposed`, on a link that the collectives of all stages share: each has its part of the rate for the time
        of its own pass, so that all together never hide more than the link carries meanwhile. All bytes count."""
        part = self.overlap_fraction / len(self.placements)
        if not part:
            return whole.transfer
        occupies_s, there_s = links.occupied_s(whole.transfer), links.seconds(whole.transfer)
        hidden_s = min(part * _beside_s(whole, cost), occupies_s * (1 - 1 / max(1, cost.num_buckets)))
        return whole.transfer.model_copy(
            update={"occupies_s": occupies_s - hidden_s, "arrives_after_s": there_s - hidden_s}
        )

    def around_inter_site_s(self) -> float:
        """Seconds before and after the last exchange between sites: the one inside, and latencies of further rounds.

        A ring of n sites goes round in 2 (n - 1) rounds (two sites sum in one), of which the Problem has the first of
        each collective; bytes are all in the Problem.
        """
        homes = self.layout.replica_sites
        if not homes:
            return 0.0
        rounds = 2 * (len(homes) - 1) - (2 if self.training.zero == 1 else 1) if len(homes) > 2 else 0
        latency_s = max(link.latency_s for link in ring_links(self.cluster, homes))
        return rounds * latency_s + max(map(self._inside_s, self.placements, self.stage_costs))

    def _inside_s(self, placement: Placement, cost: StageCost) -> float:
        """The stage's collectives inside a site that has several replicas."""
        size, precision = self.layout.num_shares, self.training.precision
        if size == 1 or self.training.zero in (2, 3):
            return 0.0
        site, num_params = self.sites[placement.rank], cost.device_params
        back = memory.element_bytes(precision) if self.training.zero1 else memory.gradient_bytes(precision)
        num_bytes = ring_bytes("reduce-scatter", num_params * memory.gradient_bytes(precision), size)
        effective = replica_link(site, self.calibration(site), self.layout)
        return effective.seconds(num_bytes + ring_bytes("all-gather", num_params * back, size))

    def _tied_exchange(self, links: StepLinks) -> list[Transfer | None]:
        """The gradient of the shared matrix from the first stage to the last and back."""
        matrix = self.model.vocab_size * self.model.hidden * memory.gradient_bytes(self.training.precision)
        if not self.model.tied_embeddings:
            return [None, None]
        return self._exchange(links, self.placements[0], self.placements[-1], float(matrix))

    def late_tied_exchange_s(self) -> float:
        """With replicas the exchange comes after their reduction, so outside the pipeline."""
        if not self.layout.replica_sites and self.layout.max_shares == 1:
            return 0.0
        links = self.links()
        return max((links.seconds(t) for t in self._tied_exchange(links) if t is not None), default=0.0)

    def optimizer_s(self, costs: Sequence[StageCost]) -> float:
        """The slowest rank's Adam; ZeRO-1 divides it over the replicas."""
        seconds = []
        for rank, site in self.sites.items():
            at = self.layout.of_rank(rank)
            num_params = sum(cost.device_params for cost in self._of_rank(rank, costs))
            num_params /= memory.num_shares(self.training, at)
            seconds.append(num_params * self._optimizer_s_per_param(site.device, self.calibration(site), at))
        return max(seconds)

    def _optimizer_s_per_param(self, device: Device, calibration: Calibration, at: Layout) -> float:
        """Bound by memory."""
        profile = self.costs.profile(device, at)
        if profile is not None:
            return profile.optimizer_s_per_param
        return memory.adam_bytes(self.training.precision) / (
            device.memory_bandwidth_bytes_per_s * calibration.memory_fraction
        )

    def clipping_s(self) -> float:
        """Everybody tells everybody one number: latency alone, of the slowest pair of sites and of a tree inside."""
        if self.layout.pipeline == 1 and not self.layout.replica_sites:
            return 0.0
        sites = {site.name: site for site in self.sites.values()}
        names = {*sites, *self.layout.replica_sites}
        far = [link.latency_s for link in self.cluster.links if {link.source, link.target} <= names]
        near = max(effective_site_link(site, self.calibration(site)).latency_s for site in sites.values())
        return max(far, default=0.0) + math.ceil(math.log2(self.layout.pipeline)) * near


def _beside_s(collective: Collective, cost: StageCost) -> float:
    """Time of the pass that a collective runs beside: the one that waits for it, or that it waits for."""
    return cost.forward_s if collective.before is not None else cost.input_grad_s + cost.weight_grad_s


def _stage(placement: Placement, cost: StageCost) -> Stage:
    return Stage.computed(
        rank=placement.rank,
        forward_s=cost.forward_s,
        input_grad_s=cost.input_grad_s,
        weight_grad_s=cost.weight_grad_s,
        activation_bytes=cost.activation_bytes,
        weight_stash_bytes=cost.weight_stash_bytes,
    )


def _ring_bytes(kind: RingKind, cost: StageCost, width: int, at: Layout) -> float:
    """Experts are the same on fewer devices than all else."""
    size = at.num_shares
    common = ring_bytes(kind, (cost.device_params - cost.expert_params) * width, size)
    return common + ring_bytes(kind, cost.expert_params * width, size // at.expert)
