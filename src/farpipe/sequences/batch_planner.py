"""Planner of a batch of documents: sites, stages, degrees, replicas, ZeRO and chunks with the shortest step.

Best-first search: every layout that the pins leave open has a bound, the work of its slowest stage; then an estimate,
the best of its cuts with about what it recomputes; then a plan. Each kind of layout is searched until none of it can be
faster than its best. The number of layouts that are planned is limited, not the time, so that the same batch has the
same plan everywhere.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from farpipe.cost.chunks import ChunkCosts
from farpipe.errors import FarpipeError, InfeasibleError, InputError
from farpipe.sequences.checkpointing import token_limit
from farpipe.sequences.chunk import Ints, SliceTable
from farpipe.sequences.layout import ChunkLayout, chunk_layout, sequence_seconds, shares
from farpipe.sequences.pipelines import planning_time
from farpipe.sequences.planner import BatchOptions, SequencePlan, estimated_cuts, plan_sequences
from farpipe.spec import Job, Site

MAX_PLANNED: Final = 5
"""Number of layouts of each kind that are planned to the end and come out about as estimated; they share the budget of
a plan."""
_MAX_TRIED: Final = 20
"""Number of layouts of each kind that are planned at all: estimates do not know which numbers of slices fit memory."""
_NEAR: Final = 1.1
"""Ratio to the fastest plan up to which the best of a kind is planned once more, with all of the budget."""
_FAR: Final = 1.25
"""Ratio to the fastest plan above which a kind of layouts is not searched for a better one."""
_SMALL_STATE: Final = 1 / 8
"""Share of memory up to which parameters and optimizer leave so much that ZeRO-3 is not tried."""


class _Candidate(NamedTuple):
    """A layout with costs, the sequences of each replica, the hardest first, and a bound of the step."""

    kind: str
    zero: int
    layout: ChunkLayout
    parts: list[Ints]
    bound_s: float


@dataclass(frozen=True)
class BatchPlan:
    """One batch: a layout, the plan of every replica, and what other kinds of layouts would take."""

    kind: str
    """``one site``, ``pipeline over sites`` or ``replicas across sites``; ``, no pipeline`` is added for one stage."""
    zero: int
    layout: ChunkLayout
    replicas: tuple[SequencePlan, ...]
    """The hardest first: the longest sequence, then most work. Sequences have the numbers of the whole batch."""
    planning_s: float = 0.0
    others: "tuple[BatchPlan, ...]" = ()
    """The best plan of every other kind, the fastest first."""
    whole_step_s: float | None = None
    """Step of the hardest replica in this layout with every sequence whole, infinite where that does not fit; None: not
    asked."""

    @property
    def step_s(self) -> float:
        """Seconds of a step: those of the replica that ends last."""
        return max(plan.step_s for plan in self.replicas)

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return sum(plan.num_tokens for plan in self.replicas)

    @property
    def num_slices(self) -> int:
        """Slices of the longest sequence."""
        return max(self.replicas, key=lambda plan: int(plan.batch.sequence_length.max())).num_slices

    @property
    def use(self) -> str:
        """Use of the sites: `kind` without its stages."""
        return self.kind.partition(",")[0]

    @cached_property
    def exchange_s(self) -> float:
        """Exposed seconds of the replicas' exchange before and after the first stage's actions."""
        return _exchange_s(self.layout)

    @property
    def degrees(self) -> str:
        """``2 replicas x 4 stages x 8 devices (tensor 2), ZeRO-3``."""
        at, costs = self.layout.layout, self.layout.costs
        each = f"{costs.num_stages} x {self.layout.devices_per_stage}"
        tensor = f" (tensor {at.tensor})" if at.tensor > 1 else ""
        return (f"{at.data} x " if at.data > 1 else "") + each + tensor + (f", ZeRO-{self.zero}" if self.zero else "")

    @property
    def why(self) -> str:
        """One sentence: why the documents are cut, or why not, and why the sites are used so."""
        reason = why_cut(self.replicas[0], self.whole_step_s)
        rivals = {other.use: other for other in reversed(self.others) if other.use != self.use}
        rivals = rivals or {other.kind: other for other in self.others[:1]}
        return f"{reason}{''.join(map(self._beside, rivals.values()))}."

    def _beside(self, other: "BatchPlan") -> str:
        exchange = f", {other.exchange_s:.3g} s of it to sum gradients" if other.exchange_s > other.step_s / 100 else ""
        return f"; {other.kind} ({other.degrees}) takes {other.step_s / self.step_s:.2f} times as long{exchange}"

    def to_data(self) -> dict[str, Any]:
        """Document that ``farpipe sequences plan --json`` prints: that of a replica, or those of all, joined.

        Chunks are counted over all replicas; `replicas` has the numbers of each one's pipelines.
        """
        plans = [plan.to_data() for plan in self.replicas]
        first = np.cumsum([0, *(len(plan["chunks"]) for plan in plans)]).tolist()
        joined = {
            name: [one for plan in plans for one in plan[name]]
            for name in ("chunks", "problems", "schedules", "recomputed_layers", "makespan_s")
        }
        pipelines = [
            [[i + begin for i in one] for one in p["pipelines"]] for begin, p in zip(first, plans, strict=False)
        ]
        counts = np.cumsum([0, *map(len, pipelines)]).tolist()
        peaks = zip(*(plan.peak_memory_bytes for plan in self.replicas), strict=True)
        return joined | {
            "pipelines": [one for mine in pipelines for one in mine],
            "replicas": [list(range(a, b)) for a, b in pairwise(counts)],
            "overhead_s": plans[0]["overhead_s"],
            "step_s": self.step_s,
            "tokens_per_s": self.num_tokens / self.step_s,
            "num_slices": self.num_slices,
            "peak_memory_bytes": [max(peak) for peak in peaks],
            "planning_s": self.planning_s,
            **self.to_figures(),
            "why": self.why,
            "others": [other.to_figures() | {"step_s": other.step_s} for other in self.others],
        }

    def to_figures(self) -> dict[str, Any]:
        """The layout's figures: `kind`, `zero`, `tensor`, `num_replicas`, those of `ChunkLayout.to_figures`."""
        at = self.layout.layout
        figures = {"kind": self.kind, "zero": self.zero, "tensor": at.tensor, "num_replicas": at.data}
        return figures | self.layout.to_figures()


def plan_batch(
    job: Job, lengths: Sequence[int] | Ints, options: BatchOptions | None = None, devices_per_stage: int | None = None
) -> BatchPlan:
    """The plan of one batch with the shortest predicted step over all layouts that the job's pins leave open.

    `devices_per_stage` pins one pipeline whose stages have so many devices each (Ulysses). InfeasibleError, with the
    reason of the layout with most memory, where none fits; InputError for pins that no layout can keep.
    """
    sizes, options = np.asarray(lengths, np.int64), options or BatchOptions()
    if not sizes.size:
        raise InputError("lengths: a batch needs at least one sequence")
    with planning_time() as gone_s:
        candidates, errors = _candidates(job, sizes, devices_per_stage)
        part = replace(options, budget=options.budget // min(MAX_PLANNED, len(candidates)))
        best = _searched(candidates, sizes, part, errors)
        if not best:
            raise errors[-1]
        near_s = _NEAR * min(plan.step_s for plan in best.values())
        plans = [_finished(plan, sizes, options) if plan.step_s <= near_s else plan for plan in best.values()]
        fastest, *others = _of_all_replicas(plans, candidates, sizes, options)
        whole_s = _whole_s(fastest, options)
        return replace(fastest, others=tuple(others), whole_step_s=whole_s, planning_s=gone_s())


def _searched(
    candidates: Sequence[_Candidate], sizes: Ints, options: BatchOptions, errors: list[FarpipeError]
) -> dict[str, BatchPlan]:
    """The best plan of the hardest replica of every kind; `errors` gets why layouts do not fit."""
    best: dict[str, BatchPlan] = {}
    num_planned: Counter[str] = Counter()
    num_tried: Counter[str] = Counter()
    open_ones = [(one.bound_s, index, False) for index, one in enumerate(candidates)]
    heapq.heapify(open_ones)
    while open_ones:
        least_s, index, is_estimated = heapq.heappop(open_ones)
        one = candidates[index]
        if one.kind in best and least_s >= min(
            best[one.kind].step_s, _FAR * min(plan.step_s for plan in best.values())
        ):
            continue
        if num_planned[one.kind] == MAX_PLANNED or num_tried[one.kind] == _MAX_TRIED:
            continue
        try:
            if is_estimated:
                num_tried[one.kind] += 1
                found = _planned(one, one.parts[:1], sizes, options)
                num_planned[one.kind] += found.step_s <= _FAR * least_s
                best[one.kind] = min(best.get(one.kind, found), found, key=lambda plan: plan.step_s)
            else:
                heapq.heappush(open_ones, (max(least_s, _estimated_s(one, sizes, options)), index, True))
        except InfeasibleError as error:
            errors.append(error)
    return best


def _candidates(job: Job, sizes: Ints, devices_per_stage: int | None) -> tuple[list[_Candidate], list[FarpipeError]]:
    """(layouts that can be, errors of the others); the error of the last where the pins leave none."""
    found: list[_Candidate] = []
    errors: list[FarpipeError] = []
    if devices_per_stage is None:
        choices = list(_choices(job)) or [(job, job.layout.context or 1)]
    else:
        choices = [(job, devices_per_stage)]
    for one, context in choices:
        try:
            found += _with_zero(one, context, sizes)
        except FarpipeError as error:
            errors.append(error)
    if not found:
        raise errors[-1]
    return found, errors


def _choices(job: Job) -> Iterator[tuple[Job, int]]:
    """Jobs with all degrees pinned, and devices that share chunks."""
    for names, replicas in _site_sets(job):
        sites = [job.cluster.site(name) for name in names]
        homes = len(sites) if replicas == "across" else 1
        for tensor, context, data in _degrees(job, sites):
            if job.layout.data not in (None, data * homes):
                continue
            pins = {"tensor": tensor, "data": data * homes, "sites": names, "replicas": replicas, "context": None}
            settled = job.layout.model_copy(
                update=pins | {"pipeline": _num_ranks(job, sites, tensor * context * data, homes)}
            )
            if settled.pipeline:
                yield job.model_copy(update={"layout": settled}), context


def _site_sets(job: Job) -> Iterator[tuple[tuple[str, ...], str]]:
    """Names in pipeline order, and ``inside`` or ``across``: all sites, and each alone unless sites are pinned."""
    every = job.layout.sites or tuple(site.name for site in job.cluster.sites)
    if len(every) == 1 or job.layout.replicas != "across":
        yield every, "inside"
    if len(every) == 1:
        return
    if job.layout.replicas != "inside":
        yield every, "across"
    if job.layout.sites is None and job.layout.replicas is None:
        identical: list[Site] = []
        for site in job.cluster.sites:
            bare = site.model_copy(update={"name": "", "prices": None})
            if bare not in identical:
                yield (site.name,), "inside"
            identical.append(bare)


def _degrees(job: Job, sites: Sequence[Site]) -> Iterator[tuple[int, int, int]]:
    """(tensor, devices that share chunks, replicas on each site) that divide heads, machines and the smallest site."""
    least, pins = min(site.num_devices for site in sites), job.layout
    machine = min(site.devices_per_machine for site in sites)
    for tensor in _divisors(least, pins.tensor):
        if tensor > machine or (tensor > 1 and not job.model.divides_heads(tensor)):
            continue
        for context in _divisors(least // tensor, pins.context):
            both = tensor * context
            if context > 1 and not (job.model.divides_heads(both) and all(s.num_devices % both == 0 for s in sites)):
                continue
            yield from ((tensor, context, data) for data in _divisors(least // both))


def _divisors(number: int, pinned: int | None = None) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0 and pinned in (None, d)]


def _num_ranks(job: Job, sites: Sequence[Site], each: int, homes: int) -> int:
    """Ranks of a pipeline of `each` devices a rank; 0: too few layers or devices, or fewer ranks than sites."""
    count = [site.num_devices // each for site in sites]
    most, virtual = (min(count) if homes > 1 else sum(count)), job.layout.virtual or 1
    wanted = job.layout.pipeline or (len(job.layout.layers) // virtual if job.layout.layers else most)
    needs = len(sites) if homes == 1 else 1
    return wanted if needs <= wanted <= min(most, job.model.num_layers // virtual) else 0


def _with_zero(job: Job, context: int, sizes: Ints) -> Iterator[_Candidate]:
    """The layout with the job's stage of ZeRO; where that is open with 1, and 3 if it divides much more."""
    first = _candidate(job, context, sizes)
    yield first
    at, ranks = first.layout.layout, first.layout.costs.base.ranks
    is_small = all(rank.static_bytes <= _SMALL_STATE * (rank.memory_bytes or math.inf) for rank in ranks)
    if job.training.zero == "auto" and at.data_inside * context > 1 and not is_small:
        yield _candidate(job.model_copy(update={"training": job.training.decided(3)}), context, sizes)


def _candidate(job: Job, context: int, sizes: Ints) -> _Candidate:
    settled = job.training.decided()
    layout = chunk_layout(job.model_copy(update={"training": settled}), int(sizes.max()), context)
    costs, parts = layout.costs, shares(layout.costs, sizes, layout.layout.data)
    work_s = [float(sequence_seconds(costs, sizes[mine]).sum()) for mine in parts]
    hardest = sorted(range(len(parts)), key=lambda index: (-sizes[parts[index]].max(), -work_s[index]))
    assert settled.zero != "auto"
    bound_s = max(work_s) + costs.overhead_s + _exchange_s(layout)
    return _Candidate(_kind(layout), settled.zero, layout, [parts[index] for index in hardest], bound_s)


def _estimated_s(one: _Candidate, sizes: Ints, options: BatchOptions) -> float:
    """The best of all cuts with about what it recomputes; InfeasibleError where the longest sequence fits in none."""
    costs, mine = one.layout.costs.folded, sizes[one.parts[0]]
    cuts = estimated_cuts(costs, mine, token_limit(costs, int(sizes.max())), options)
    return min(cut.seconds + _recomputed_s(costs, cut.batch) for cut in cuts) + _exchange_s(one.layout)


def _recomputed_s(costs: ChunkCosts, batch: SliceTable) -> float:
    """Seconds that the slowest stage recomputes if chunks are equal and as many in flight as in token-level 1F1B."""
    load, seconds, tokens = batch.load, 0.0, float(batch.length.sum()) / batch.num_chunks
    headrooms = costs.headroom_bytes(load, np.zeros((costs.num_stages, batch.num_chunks), np.int64))
    for index, (stage, headroom) in enumerate(zip(costs.stages, headrooms.tolist(), strict=True)):
        held = (costs.num_stages - index + batch.num_slices - 1) * tokens
        layers = max(0.0, held * stage.activation_bytes - headroom) / (held * stage.saved_bytes)
        seconds = max(seconds, min(layers, stage.num_layers) * float(stage.layer_forward.of_load(load).sum()))
    return seconds


def _kind(found: ChunkLayout) -> str:
    across, over = found.layout.replica_sites, len({placement.site for placement in found.placements}) > 1
    kind = "replicas across sites" if across else "pipeline over sites" if over else "one site"
    return kind + ", no pipeline" * (found.costs.num_stages == 1)


def _exchange_s(found: ChunkLayout) -> float:
    """Exposed seconds of the first stage's gather and reduce, which no action of a step runs beside."""
    traffic = found.costs.base.traffic
    reduces = traffic.collectives.arrives_after_s[slice(*traffic.collectives.begin[:2].tolist())]
    return float(traffic.opening.stage_s[0] + reduces.max(initial=0.0))


def _planned(one: _Candidate, parts: Sequence[Ints], sizes: Ints, options: BatchOptions) -> BatchPlan:
    plans = [_numbered(plan_sequences(one.layout.costs, sizes[mine], options), mine) for mine in parts]
    return BatchPlan(one.kind, one.zero, one.layout, tuple(plans))


def _finished(plan: BatchPlan, sizes: Ints, options: BatchOptions) -> BatchPlan:
    """The same layout with all of the budget for its hardest replica."""
    first, *rest = plan.replicas
    mine = np.unique(first.batch.sequence)
    again = _numbered(plan_sequences(plan.layout.costs, sizes[mine], options), mine)
    return replace(plan, replicas=(min(first, again, key=lambda one: one.step_s), *rest))


def _numbered(plan: SequencePlan, sequences: Ints) -> SequencePlan:
    """The plan with the numbers that its sequences have in the whole batch."""
    return replace(plan, batch=replace(plan.batch, sequence=sequences[plan.batch.sequence]))


def _of_all_replicas(
    plans: list[BatchPlan], candidates: Sequence[_Candidate], sizes: Ints, options: BatchOptions
) -> list[BatchPlan]:
    """The same, the fastest first, with the plans of its other replicas: now and then one of these takes longest."""
    while True:
        plans = sorted(plans, key=lambda plan: plan.step_s)
        one = next(one for one in candidates if one.layout is plans[0].layout)
        if len(plans[0].replicas) == len(one.parts):
            return plans
        more = _planned(one, one.parts[1:], sizes, options).replicas
        plans[0] = replace(plans[0], replicas=(*plans[0].replicas, *more))


def _whole_s(plan: BatchPlan, options: BatchOptions) -> float | None:
    """Step of the hardest replica with every sequence whole, where it is cut and the number of slices is free."""
    return plan_whole(plan.layout.costs, plan.replicas[0], options) if options.num_slices is None else None


def plan_whole(costs: ChunkCosts, plan: SequencePlan, options: BatchOptions) -> float | None:
    """Step of the same sequences uncut, infinite where they do not fit so; None where `plan` cuts none of them."""
    if plan.num_slices == 1:
        return None
    sizes = np.zeros(int(plan.batch.sequence.max()) + 1, np.int64)
    sizes[plan.batch.sequence] = plan.batch.sequence_length
    try:
        return plan_sequences(costs, sizes[sizes > 0], replace(options, num_slices=1)).step_s
    except InfeasibleError:
        return math.inf


def why_cut(plan: SequencePlan, whole_step_s: float | None) -> str:
    """Reason for which documents are cut, or not: a clause without its full stop; `whole_step_s` of `plan_whole`."""
    if (number := plan.num_slices) == 1:
        return "No chunks: every sequence stays whole, and no number of slices was faster"
    if whole_step_s is None:
        return f"Chunks: the longest sequence in {number} slices"
    reason = f"Chunks, the longest sequence in {number} slices: with every sequence whole "
    fits = math.isfinite(whole_step_s)
    return reason + (f"this layout takes {whole_step_s / plan.step_s:.2f} times as long" if fits else "it does not fit")
