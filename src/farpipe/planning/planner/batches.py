"""Planner of a batch of documents: sites, stages, degrees, replicas, ZeRO and chunks with the shortest step.

Best-first search: every layout that the pins leave open has a bound, the work of its slowest stage; then an estimate,
the best of its cuts with about what it recomputes; then a plan. Each kind of layout is searched until none of it can be
faster than its best. The number of layouts that are planned is limited, not the time, so that the same batch has the
same plan everywhere.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from farpipe.core.errors import FarpipeError, InfeasibleError, InputError
from farpipe.core.spec import Job, Site
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.planner.candidates import ZERO_STAGES
from farpipe.planning.planner.site_sets import site_sets_of_batch
from farpipe.planning.workload.batch_options import BatchOptions
from farpipe.planning.workload.batch_plan import BatchPlan, exchange_s, plan_whole
from farpipe.planning.workload.candidate_cuts import estimated_cuts
from farpipe.planning.workload.checkpointing import token_limit
from farpipe.planning.workload.chunk import Ints, SliceTable
from farpipe.planning.workload.device_groups import plan_groups
from farpipe.planning.workload.layout import ChunkLayout, chunk_layout, sequence_seconds, shares
from farpipe.planning.workload.pipelines import planning_time
from farpipe.planning.workload.sequence_plan import SequencePlan, plan_sequences, plan_with_cut

MAX_PLANNED: Final = 5
"""Number of layouts of each kind that are planned to the end and come out about as estimated; they share the budget of
a plan."""
_MAX_TRIED: Final = 20
"""Number of layouts of each kind that are planned at all: estimates do not know which numbers of slices fit memory."""
_NEAR: Final = 1.1
"""Ratio to the fastest plan up to which the best of a kind is planned once more, with all of the budget."""
_FAR: Final = 1.25
"""Ratio to the fastest plan above which a kind of layouts is not searched for a better one."""
_TOLD: Final = 2.0
"""Ratio to the fastest plan up to which the best groups of each use of the sites are planned, to be told beside it."""
_SMALL_STATE: Final = 1 / 8
"""Share of memory up to which parameters and optimizer leave so much that ZeRO-3 is not tried."""


class _Candidate(NamedTuple):
    """A layout with costs, the sequences of each replica, the hardest first, and a bound of the step."""

    zero: int
    layout: ChunkLayout
    parts: list[Ints]
    bound_s: float


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
        if devices_per_stage is None and options.packs_to_memory:
            plans += _in_groups(job, sizes, options, _TOLD * min(plan.step_s for plan in plans))
        fastest, *others = sorted(plans, key=lambda plan: plan.step_s)
        asks_whole = not fastest.places and options.num_slices is None
        whole_s = plan_whole(fastest.layout.costs, fastest.replicas[0], options) if asks_whole else None
        return replace(fastest, others=tuple(others), whole_step_s=whole_s, planning_s=gone_s())


def _searched(
    candidates: Sequence[_Candidate], sizes: Ints, options: BatchOptions, errors: list[FarpipeError]
) -> dict[str, BatchPlan]:
    """The best plan of every kind; `errors` gets why layouts do not fit.

    A layout's replicas are planned one by one, as long as it is the most promising one.
    """
    # Bounds, estimates and plans share one heap: a kind is done when what comes off it is a whole plan. Estimates do
    # not know which numbers of slices fit memory. Once six layouts that hold no slices used up the five plans of their
    # kind, and a step of 498 s was taken where 139 s was there; so a plan that comes out 25 % over its estimate does
    # not count. Limits are numbers, not seconds: with a third of the time plans were up to 7 % slower.
    best: dict[str, BatchPlan] = {}
    begun: dict[int, BatchPlan] = {}
    num_planned: Counter[str] = Counter()
    num_tried: Counter[str] = Counter()
    open_ones = [(one.bound_s, index, False) for index, one in enumerate(candidates)]
    heapq.heapify(open_ones)
    while open_ones:
        least_s, index, is_estimated = heapq.heappop(open_ones)
        one = candidates[index]
        kind = one.layout.kind
        is_far = least_s >= min([_FAR * plan.step_s for plan in best.values()], default=math.inf)
        if kind in best or (is_far and any(plan.kind == kind for plan in begun.values())):
            continue
        if index not in begun and (num_planned[kind] == MAX_PLANNED or num_tried[kind] == _MAX_TRIED):
            continue
        try:
            if not is_estimated:
                heapq.heappush(open_ones, (max(least_s, _estimated_s(one, sizes, options)), index, True))
                continue
            if index not in begun:
                num_tried[kind] += 1
                begun[index] = _begun(one, sizes, options)
                num_planned[kind] += begun[index].step_s <= _FAR * least_s
            elif len(begun[index].replicas) < len(one.parts):
                begun[index] = _continued(begun[index], one, sizes, options)
            else:  # and no other of its kind can be faster
                best[kind] = begun[index]
                continue
            heapq.heappush(open_ones, (begun[index].step_s, index, True))
        except InfeasibleError as error:
            begun.pop(index, None)
            errors.append(error)
    return best | _far_ones(best, begun, candidates, sizes, options)


def _far_ones(
    best: Mapping[str, BatchPlan],
    begun: Mapping[int, BatchPlan],
    candidates: Sequence[_Candidate],
    sizes: Ints,
    options: BatchOptions,
) -> dict[str, BatchPlan]:
    """The best of what was begun of the other kinds, to be told beside the fastest."""
    found = dict[str, BatchPlan]()
    open_ones = [(plan.step_s, index, plan) for index, plan in begun.items() if plan.kind not in best]
    heapq.heapify(open_ones)
    while open_ones:
        _, index, plan = heapq.heappop(open_ones)
        if plan.kind in found:
            continue
        if len(plan.replicas) == len(candidates[index].parts):
            found[plan.kind] = plan
            continue
        with suppress(InfeasibleError):
            plan = _continued(plan, candidates[index], sizes, options)
            heapq.heappush(open_ones, (plan.step_s, index, plan))
    return found


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
    for site_set in site_sets_of_batch(job):
        sites, homes = [job.cluster.sites[index] for index in site_set.sites], max(1, len(site_set.homes))
        where = {"sites": tuple(site.name for site in sites), "replicas": "across" if site_set.homes else "inside"}
        for tensor, context, data in _degrees(job, sites):
            if job.layout.data not in (None, data * homes):
                continue
            pins = {"tensor": tensor, "data": data * homes, "context": None} | where
            settled = job.layout.model_copy(
                update=pins | {"pipeline": _num_ranks(job, sites, tensor * context * data, homes)}
            )
            if settled.pipeline:
                yield job.model_copy(update={"layout": settled}), context


def _in_groups(job: Job, sizes: Ints, options: BatchOptions, below_s: float) -> list[BatchPlan]:
    """The best plan on groups of devices at one site, and the best across the sites, of those below `below_s`."""
    by_use: dict[str | None, list[Job]] = {}
    for one in _jobs_of_groups(job):
        by_use.setdefault(one.layout.replicas, []).append(one)
    found = (plan_groups(jobs, sizes, options, below_s) for jobs in by_use.values())
    return [plan for plan in found if plan is not None]


def _jobs_of_groups(job: Job) -> list[Job]:
    """Jobs with one stage and a replica on every device, for ZeRO-1 and 3 where that is open; none for pinned degrees
    or several stages on a rank.

    Tensors are divided only where that is pinned.
    """
    pins = job.layout
    if {pins.context, pins.data} != {None} or (pins.virtual or 1) > 1:
        return []
    plain = job.model_copy(update={"layout": pins.model_copy(update={"tensor": pins.tensor or 1})})
    settled = [one for one, context in _choices(plain) if context == 1 and one.layout.pipeline == 1]
    widest = {(one.layout.sites, one.layout.replicas): one for one in settled}
    trainings = dict.fromkeys((job.training.decided(), job.training.decided(ZERO_STAGES[1])))
    return [one.model_copy(update={"training": each}) for one in widest.values() for each in trainings]


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
        yield _candidate(job.model_copy(update={"training": job.training.decided(ZERO_STAGES[1])}), context, sizes)


def _candidate(job: Job, context: int, sizes: Ints) -> _Candidate:
    settled = job.training.decided()
    layout = chunk_layout(job.model_copy(update={"training": settled}), int(sizes.max()), context)
    costs, parts = layout.costs, shares(layout.costs, sizes, layout.layout.data)
    work_s = [float(sequence_seconds(costs, sizes[mine]).sum()) for mine in parts]
    hardest = sorted(range(len(parts)), key=lambda index: (-sizes[parts[index]].max(), -work_s[index]))
    assert settled.zero != "auto"
    bound_s = max(work_s) + costs.overhead_s + exchange_s(layout)
    return _Candidate(settled.zero, layout, [parts[index] for index in hardest], bound_s)


def _estimated_s(one: _Candidate, sizes: Ints, options: BatchOptions) -> float:
    """The best of all cuts with about what it recomputes; InfeasibleError where the longest sequence fits in none."""
    costs, mine = one.layout.costs.folded, sizes[one.parts[0]]
    cuts = estimated_cuts(costs, mine, token_limit(costs, int(sizes.max())), options)
    keeps_attention = options.tries_keeping_attention
    again_s = [each.seconds + _recomputed_s(costs, each.batch, keeps_attention=keeps_attention) for each in cuts]
    outside_s = 0.0 if costs is one.layout.costs else exchange_s(one.layout)  # cuts for ranks have no collectives
    return min(again_s) + outside_s


def _recomputed_s(costs: ChunkCosts, batch: SliceTable, *, keeps_attention: bool) -> float:
    """Seconds that the slowest stage recomputes if chunks are equal and as many in flight as in token-level 1F1B."""
    load, seconds, tokens = batch.load, 0.0, float(batch.length.sum()) / batch.num_chunks
    headrooms = costs.headroom_bytes(load, np.zeros((costs.num_stages, batch.num_chunks), np.int64))
    for index, (stage, headroom) in enumerate(zip(costs.stages, headrooms.tolist(), strict=True)):
        held = (costs.num_stages - index + batch.num_slices - 1) * tokens
        missing = max(0.0, held * stage.activation_bytes - headroom) / held
        each = [(one, float(one.layer_forward.of_load(load).sum())) for one in stage.kinds(keeps_attention)]
        fitting = [layer_s * layers for one, layer_s in each if (layers := missing / one.saved_bytes) <= one.num_layers]
        seconds = max(seconds, min(fitting, default=each[0][1] * stage.num_layers))
    return seconds


def _begun(one: _Candidate, sizes: Ints, options: BatchOptions) -> BatchPlan:
    """A layout with the plan of its hardest replica."""
    return BatchPlan(one.zero, one.layout, (_replica(one, 0, sizes, options),))


def _continued(plan: BatchPlan, one: _Candidate, sizes: Ints, options: BatchOptions) -> BatchPlan:
    """The same with the plan of one replica more.

    Cut as the hardest one where that ends no later than all so far: a shorter plan would not shorten the step.
    """
    costs, mine, cut = one.layout.costs, one.parts[len(plan.replicas)], plan.replicas[0].cut
    found = None
    with suppress(InfeasibleError):
        found = plan_with_cut(costs, sizes[mine], cut, options) if options.num_slices is None else None
    if found is None or found.step_s > plan.step_s:
        found = plan_sequences(costs, sizes[mine], options)
    return replace(plan, replicas=(*plan.replicas, found.numbered(mine)))


def _replica(one: _Candidate, index: int, sizes: Ints, options: BatchOptions) -> SequencePlan:
    mine = one.parts[index]
    return plan_sequences(one.layout.costs, sizes[mine], options).numbered(mine)


def _finished(plan: BatchPlan, sizes: Ints, options: BatchOptions) -> BatchPlan:
    """The same layout with all of the budget for the replica that ends last, until it is one that has had it."""
    replicas, done = list(plan.replicas), set[int]()
    while (last := max(range(len(replicas)), key=lambda index: replicas[index].step_s)) not in done:
        done.add(last)
        mine = np.unique(replicas[last].batch.sequence)
        again = plan_sequences(plan.layout.costs, sizes[mine], options).numbered(mine)
        replicas[last] = min(replicas[last], again, key=lambda one: one.step_s)
    return replace(plan, replicas=tuple(replicas))


@dataclass(frozen=True)
class Gain:
    """One batch on a job's cluster, with long sequences cut and with all sequences whole."""

    step_s: float
    num_slices: int
    num_chunks: int
    whole_step_s: float | None
    """Step time with every sequence whole in one chunk; None: it does not fit."""
    whole_obstacle: str = ""

    @property
    def speedup(self) -> float | None:
        """Time of a step whose sequences stay whole over that of this one."""
        return None if self.whole_step_s is None else self.whole_step_s / self.step_s


def gain_of_chunks(job: Job, batch: Ints, devices_per_stage: int | None = None) -> Gain:
    """Gain of cutting long sequences for one batch, both in their best layout; errors as for `plan_batch`."""
    best = plan_batch(job, batch, None, devices_per_stage)
    try:
        whole_s, obstacle = plan_batch(job, batch, BatchOptions(num_slices=1), devices_per_stage).step_s, ""
    except InfeasibleError as error:
        whole_s, obstacle = None, str(error)
    if whole_s is not None and best.num_slices == 1:
        whole_s = best.step_s
    return Gain(best.step_s, best.num_slices, sum(len(plan.chunks) for plan in best.replicas), whole_s, obstacle)
