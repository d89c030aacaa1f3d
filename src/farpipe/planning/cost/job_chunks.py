"""The costs of a job's stages for chunks of sequences, from the cost model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from farpipe.core.errors import InputError
from farpipe.core.spec import Cluster, Site
from farpipe.core.step import Problem, Rank
from farpipe.planning.cost import memory, stash
from farpipe.planning.cost.chunk_laws import Law, Laws, layer_on_several, model_laws
from farpipe.planning.cost.chunk_profile import ChunkProfile
from farpipe.planning.cost.chunks import PROBE_TOKENS, ChunkCosts, StageChunks
from farpipe.planning.cost.layout import Layout, Placement
from farpipe.planning.cost.stage import JobCosts, StageCost
from farpipe.planning.cost.step import StepCost, step_cost
from farpipe.planning.cost.transfer import ring_bytes, ring_link


def job_chunk_costs(
    costs: JobCosts,
    layout: Layout,
    placements: Sequence[Placement],
    cluster: Cluster,
    longest: int,
    context: int = 1,
    profiles: Mapping[str, ChunkProfile] | None = None,
) -> ChunkCosts:
    """Costs of chunks of sequences on the stages of one job.

    `context` devices share every chunk of a stage (Ulysses): activations, work, and with ZeRO-1 the optimizer.
    `longest` is the longest sequence that laws have to hold for; `profiles`, by device, take the place of modelled
    ones, on several devices with their work and bytes divided and the exchange as modelled. InputError for a profile of
    something else, or beside tensor parallelism, and without flash attention, whose absence would make memory grow with
    the square of a length; errors of `step_cost` for the rest.
    """
    if not costs.training.flash_attention:
        raise InputError("training.flash_attention: chunks of sequences need it; leave it out or set it to true")
    known = profiles or {}
    for site in cluster.sites:
        if site.device.name in known:
            known[site.device.name].expect(costs.model, costs.training, site.device, longest)
    if known and layout.tensor > 1:
        raise InputError(
            f"a profile of chunks was measured on one device; with layout.tensor = {layout.tensor} leave it out, "
            "or pin tensor = 1"
        )
    job = _ChunkJob(costs, layout, tuple(placements), cluster, longest, context, known)
    stages = tuple(job.stage(index) for index in range(len(placements)))
    return ChunkCosts(stages, job.base(), context, job.overhead_s())


class _ChunkJob:
    """One job and layout, whose laws of a site are fitted once."""

    def __init__(
        self,
        costs: JobCosts,
        layout: Layout,
        placements: tuple[Placement, ...],
        cluster: Cluster,
        longest: int,
        context: int,
        profiles: Mapping[str, ChunkProfile],
    ) -> None:
        self._profiles = profiles
        self.model, self.layout, self.placements, self.context = costs.model, layout, placements, context
        self.longest = longest
        probe = costs.training.model_copy(
            update={"sequence_length": PROBE_TOKENS, "global_batch": layout.data, "microbatch_size": 1}
        )
        self._probe = probe.model_copy(update={"recompute": "none"})
        self._layout = replace(layout, microbatch_size=1, num_microbatches=1)
        self._divided = replace(self._layout, context=context)
        plain = [replace(placement, recompute="none") for placement in placements]
        self._costs = JobCosts(
            self.model, self._probe, None, {s.device.name: costs.calibration(s) for s in cluster.sites}
        )
        self.step: StepCost = step_cost(self._costs, self._layout, plain, cluster)
        self._sites = [cluster.site(p.site) for p in placements]
        self._laws: dict[str, tuple[Laws, Laws, Laws]] = {}

    def stage(self, index: int) -> StageChunks:
        """Laws and bytes of one stage."""
        profile = self._profiles.get(self._sites[index].device.name)
        if profile is not None:
            return self._measured(index, profile)
        num_layers, last = self.placements[index].num_layers, len(self.placements) - 1
        layer, embedding, head = self._laws_at(self._sites[index])
        overhead = Law(fixed_s=self._costs.calibration(self._sites[index]).action_overhead_s)
        laws = layer.times(num_layers).plus(Laws(overhead, overhead, Law()))
        late_head = Laws(Law(), head.forward + head.input_grad, head.weight_grad)
        for part in [embedding] * (index == 0) + [late_head] * (index == last):
            laws = laws.plus(part)
        held = self._bytes(num_layers, index == 0, index == last)
        if self._sites[index].device.name == "cpu":
            held = self._eager_bytes(held, num_layers, index == 0, index == last)
        return StageChunks(laws, layer, num_layers, **held)

    def _measured(self, index: int, profile: ChunkProfile) -> StageChunks:
        num_layers, ends = self.placements[index].num_layers, (index == 0, index == len(self.placements) - 1)
        site, share = self._sites[index], self.context
        at = (self.model, self._probe, self._layout, site, self._costs.calibration(site))
        layer = layer_on_several(profile.layer.laws, *at, share)
        laws, held = layer.times(num_layers), num_layers * profile.layer.held_bytes
        laws = laws.plus(Laws(Law(fixed_s=profile.action_forward_s), Law(fixed_s=profile.action_backward_s), Law()))
        held += profile.boundary_bytes
        for part in [one for one, is_there in zip((profile.embedding, profile.head), ends, strict=True) if is_there]:
            laws, held = laws.plus(part.laws.spread(share)), held + part.held_bytes - profile.boundary_bytes
        modelled = self._bytes(num_layers, *ends)
        whole, again, again_part = profile.layer.held_bytes, profile.recomputed_bytes, profile.recomputed_slice_bytes
        slice_bytes = whole if profile.slice_bytes is None else profile.slice_bytes
        measured = {
            "activation_bytes": (held - num_layers * (whole - slice_bytes)) / share,
            "whole_bytes": (whole - slice_bytes) / share,
            "saved_bytes": (slice_bytes - again) / share,
            "key_bytes": modelled["key_bytes"] if again_part is None else max(0.0, again_part - again) / share,
            "working_bytes": max(whole, slice_bytes) / share,
        }
        if profile.device != "cpu":  # where slices are computed once more, whatever is kept
            layer = layer._replace(input_grad=replace(layer.input_grad, split_pair_s=0.0))
        return StageChunks(laws, layer, num_layers, **modelled | measured)

    def _laws_at(self, site: Site) -> tuple[Laws, Laws, Laws]:
        if site.name not in self._laws:
            job = (self.model, self._probe, self._layout, site, self._costs.calibration(site))
            self._laws[site.name] = model_laws(*job, longest=self.longest, context=self.context)
        return self._laws[site.name]

    def _bytes(self, num_layers: int, is_first: bool, is_last: bool) -> dict[str, float]:
        job = (self.model, self._probe, self._layout)
        share = self._probe.sequence_length * self.context
        layer = memory.layer_activation_bytes(*job)
        least = memory.layer_activation_bytes(self.model, self._probe.model_copy(update={"recompute": "full"}), job[2])
        ends = is_first * memory.embedding_activation_bytes(*job) + is_last * memory.boundary_bytes(*job)
        logits = 2 * 4 * self._probe.sequence_length * self.model.vocab_size / self.layout.tensor
        ends_stash = is_first * stash.embedding_stash_bytes(*job) + is_last * stash.head_stash_bytes(*job)
        num_shares, element = self.layout.tensor * self.context, memory.element_bytes(self._probe.precision)
        keys = 2 * self.model.kv_hidden / num_shares
        return {
            "activation_bytes": (num_layers * layer + ends) / share,
            "stash_bytes": (num_layers * stash.layer_stash_bytes(*job) + ends_stash) / share,
            "saved_bytes": (layer - least) / share,
            "key_bytes": keys * element,
            "attention_bytes": (self.model.attention_hidden * element + 4 * self.model.num_heads) / num_shares,
            "chain_bytes": num_layers * keys * memory.gradient_bytes(self._probe),
            "working_bytes": layer / share,
            "logit_bytes": is_last * logits / share,
        }

    def _eager_bytes(self, held: dict[str, float], num_layers: int, is_first: bool, is_last: bool) -> dict[str, float]:
        """The same with what PyTorch's kernels on a CPU and farpipe's engine keep beside the formulas' fused kernels.

        Of each norm what the gain multiplies, and a scale in 32 bit; of a whole sequence's attention its output beside
        the copy that the next product takes, and the logarithms of its sums; of a chunk the angles of its positions
        and what the stage has sent.
        """
        element = memory.element_bytes(self._probe.precision)
        norms = 2 * (self.model.hidden * element + 4 if self.model.norm == "rmsnorm" else 8) / self.context
        ends = self.model.head_dim * element * (self.model.positions == "rotary")
        ends += 8 * is_first + self.model.hidden * element * (not is_last)
        return held | {
            "activation_bytes": held["activation_bytes"] + num_layers * norms + ends / self.context,
            "saved_bytes": held["saved_bytes"] + norms,
            "working_bytes": held["working_bytes"] + norms,
            "whole_bytes": held["attention_bytes"] * self.layout.tensor,
        }

    def base(self) -> Problem:
        """The step of one microbatch, less the state that ZeRO divides over the devices that share chunks."""
        shared, problem = self._state_shared_bytes(), self.step.problem
        ranks = tuple(
            Rank(memory_bytes=rank.memory_bytes, static_bytes=rank.static_bytes - less)
            for rank, less in zip(problem.ranks, shared, strict=True)
        )
        return problem.model_copy(update={"ranks": ranks})

    def _state_shared_bytes(self) -> list[float]:
        """Bytes of state of every rank that the devices which share its chunks divide."""
        shared = [0.0] * len(self.step.problem.ranks)
        for index, placement in enumerate(self.placements):
            whole, part = (self._stage(index, layout).static_bytes for layout in (self._layout, self._divided))
            shared[placement.rank] += whole - part
        return shared

    def _stage(self, index: int, layout: Layout) -> StageCost:
        site, num_layers = self._sites[index], self.placements[index].num_layers
        ends = {"embedding": index == 0, "head": index == len(self.placements) - 1}
        return self._costs.stage(layout, site, num_layers, "none", **ends)

    def overhead_s(self) -> float:
        """Seconds outside the pipeline; the devices that share chunks divide the optimizer's as they do its state."""
        alone, divided = (memory.num_shares(self._probe, layout) for layout in (self._layout, self._divided))
        return self.step.overhead_s - self.step.optimizer_s * (1 - alone / divided) + self._context_sync_s()

    def _context_sync_s(self) -> float:
        """Seconds after the step to sum gradients over the devices that share chunks; ZeRO-2 and 3 do in each chunk."""
        if self.context == 1 or self._probe.zero in (2, 3):
            return 0.0
        seconds = []
        for index, site in enumerate(self._sites):
            effective = ring_link(site, self._costs.calibration(site), self.context, self.layout.tensor)
            gradients = (
                self._stage(index, self._layout).num_params / self.layout.tensor * memory.gradient_bytes(self._probe)
            )
            seconds.append(effective.seconds(ring_bytes("all-reduce", gradients, self.context)))
        return max(seconds)
