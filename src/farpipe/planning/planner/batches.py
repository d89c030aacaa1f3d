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
from typing import Final

import numpy as np

from farpipe.core.errors import FarpipeError, InfeasibleError, InputError
from farpipe.core.spec import Job
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.planner.candidates import ZERO_STAGES, Candidate, decided, figures, placed
from farpipe.planning.planner.document_layouts import document_layouts, jobs_of_groups
from farpipe.planning.workload.batch_options import BatchOptions
from farpipe.planning.workload.batch_plan import BatchPlan, exchange_s, plan_whole
from farpipe.planning.workload.candidate_cuts import estimated_cuts
from farpipe.planning.workload.checkpointing import token_limit
from farpipe.planning.workload.chunk import Ints, SliceTable
from farpipe.planning.workload.device_groups import plan_groups
from farpipe.planning.workload.layout import pinned_layout, placed_layout, sequence_seconds, shares
from farpipe.planning.workload.pipelines import planning_time
from farpipe.planning.workload.sequence_plan import plan_sequences, plan_with_cut

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
"""Alternatives are reported whose step is within this ratio of the best."""
_SMALL_STATE: Final = 1 / 8
"""Share of memory up to which parameters and optimizer leave so much that ZeRO-3 is not tried."""


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
        if job.layout.sites is None:
            reverse = [other for plan in best.values() for other in _reversed(job, plan, sizes)]
            for kind, plan in _searched(reverse, sizes, part, errors).items():
                best[kind] = min(best[kind], plan, key=lambda one: one.step_s)
        near_s = _NEAR * min(plan.step_s for plan in best.values())
        plans = [_finished(plan, sizes, options) if plan.step_s <= near_s else plan for plan in best.values()]
        if devices_per_stage is None and options.packs_to_memory:
            plans += _in_groups(job, sizes, options, _TOLD * min(plan.step_s for plan in plans))
        fastest, *others = sorted(plans, key=lambda plan: plan.step_s)
        asks_whole = not fastest.places and options.num_slices is None
        whole_s = plan_whole(fastest.layout.costs, fastest.replicas[0], options) if asks_whole else None
        return replace(fastest, others=tuple(others), whole_step_s=whole_s, planning_s=gone_s())


def _searched(
    candidates: Sequence[BatchPlan], sizes: Ints, options: BatchOptions, errors: list[FarpipeError]
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
        kind = one.kind
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
                begun[index] = _continued(one, sizes, options)
                num_planned[kind] += begun[index].step_s <= _FAR * least_s
            elif begun[index].is_open:
                begun[index] = _continued(begun[index], sizes, options)
            else:  # and no other of its kind can be faster
                best[kind] = begun[index]
                continue
            heapq.heappush(open_ones, (begun[index].step_s, index, True))
        except InfeasibleError as error:
            begun.pop(index, None)
            errors.append(error)
    return best | _far_ones(best, begun, sizes, options)


def _far_ones(
    best: Mapping[str, BatchPlan],
    begun: Mapping[int, BatchPlan],
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
        if not plan.is_open:
            found[plan.kind] = plan
            continue
        with suppress(InfeasibleError):
            plan = _continued(plan, sizes, options)
            heapq.heappush(open_ones, (plan.step_s, index, plan))
    return found


def _candidates(job: Job, sizes: Ints, devices_per_stage: int | None) -> tuple[list[BatchPlan], list[FarpipeError]]:
    """(layouts that can be, errors of the others); the error of the last where the pins leave none."""
    found: list[BatchPlan] = []
    errors: list[FarpipeError] = []
    choices = document_layouts(job, sizes, sizes.size) if devices_per_stage is None else []
    for one in choices or [_pinned(job, devices_per_stage or job.layout.context or 1)]:
        try:
            found += _with_zero(job, one, sizes)
        except FarpipeError as error:
            errors.append(error)
    if not found:
        raise errors[-1]
    return found, errors


def _pinned(job: Job, context: int) -> Candidate:
    layout, sites = pinned_layout(job, context)
    return Candidate(layout, tuple(sites))


def _reversed(job: Job, plan: BatchPlan, sizes: Ints) -> Iterator[BatchPlan]:
    """The layout of a pipeline over several sites, on these in reverse, where that is not the same in all but names."""
    order, at = [*plan.layout.devices], plan.layout.layout
    if at.replica_sites or figures(job.cluster, order) == figures(job.cluster, order[::-1]):
        return
    candidate = placed(job, [job.cluster.site(name) for name in order[::-1]], at, in_v=False)
    with suppress(FarpipeError):
        if candidate is not None:
            yield _open_plan(decided(job, plan.zero), candidate, sizes)


def _in_groups(job: Job, sizes: Ints, options: BatchOptions, below_s: float) -> list[BatchPlan]:
    """The best plan on groups of devices at one site, and the best across the sites, of those below `below_s`."""
    by_use: dict[str | None, list[Job]] = {}
    for one in jobs_of_groups(job, sizes):
        by_use.setdefault(one.layout.replicas, []).append(one)
    found = (plan_groups(jobs, sizes, options, below_s) for jobs in by_use.values())
    return [plan for plan in found if plan is not None]


def _with_zero(job: Job, at: Candidate, sizes: Ints) -> Iterator[BatchPlan]:
    """The layout with the job's stage of ZeRO; where that is open with 1, and 3 if it divides much more."""
    first = _open_plan(job, at, sizes)
    yield first
    ranks = first.layout.costs.base.ranks
    is_small = all(rank.static_bytes <= _SMALL_STATE * (rank.memory_bytes or math.inf) for rank in ranks)
    if job.training.zero == "auto" and at.layout.num_shares > 1 and not is_small:
        yield _open_plan(decided(job, ZERO_STAGES[1]), at, sizes)


def _open_plan(job: Job, at: Candidate, sizes: Ints) -> BatchPlan:
    """A layout with its costs and the documents of each replica, the hardest first, none of which is planned yet."""
    settled = decided(job)
    layout = placed_layout(settled, at.layout, at.sites, int(sizes.max()))
    costs, parts = layout.costs, shares(layout.costs, sizes, layout.layout.data)
    work_s = [float(sequence_seconds(costs, sizes[mine]).sum()) for mine in parts]
    hardest = sorted(range(len(parts)), key=lambda index: (-sizes[parts[index]].max(), -work_s[index]))
    assert settled.training.zero != "auto"
    bound_s = max(work_s) + costs.overhead_s + exchange_s(layout)
    return BatchPlan(settled.training.zero, layout, (), parts=[parts[index] for index in hardest], bound_s=bound_s)


def _estimated_s(one: BatchPlan, sizes: Ints, options: BatchOptions) -> float:
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


def _continued(plan: BatchPlan, sizes: Ints, options: BatchOptions) -> BatchPlan:
    """The same with the plan of one replica more, of the hardest first.

    Cut as the hardest one where that ends no later than all so far: a shorter plan would not shorten the step.
    """
    costs, mine, found = plan.layout.costs, plan.parts[len(plan.replicas)], None
    if plan.replicas and options.num_slices is None:
        with suppress(InfeasibleError):
            found = plan_with_cut(costs, sizes[mine], plan.replicas[0].cut, options)
    if found is None or found.step_s > plan.step_s:
        found = plan_sequences(costs, sizes[mine], options)
    return replace(plan, replicas=(*plan.replicas, found.numbered(mine)))


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
