"""Planner of one replica's sequences on a layout that `planner.batches` chose: chunks, recomputation, orders, time."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, Self

import numpy as np

from farpipe.core.errors import InfeasibleError, InputError
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.workload.batch_options import BatchOptions
from farpipe.planning.workload.candidate_cuts import (
    EstimatedCut,
    cut_law,
    estimate_s,
    estimated_cuts,
    hiding_warm_ups,
    mean_trips,
    total_law,
)
from farpipe.planning.workload.checkpointing import token_limit
from farpipe.planning.workload.chunk import Chunk, Ints, SliceTable, as_load
from farpipe.planning.workload.cut import Cut, cut_batch, num_slices_within
from farpipe.planning.workload.pipelines import (
    CandidateBudget,
    ChunkPipeline,
    Grouping,
    group,
    make_pipelines,
    planning_time,
    refill_s,
)
from farpipe.planning.workload.virtual_stages import interleaved

MAX_SLICES: Final = 2048
"""Most slices of the longest sequence, where nothing coarser fits memory."""
MAX_CHUNKS: Final = 1 << 17
"""Most chunks of a batch, where nothing coarser fits memory."""
_MAX_PLANNED: Final = 3
"""Number of cuts that are planned to the end, the best by the estimate."""
_ORDER_S: Final = 0.1
"""Seconds for the search of orders of ranks with several stages, at least."""
_MAX_ORDER_S: Final = 60.0
"""Seconds for that search without a limit: all orders that are tried take less."""
_NOT_WORTH: Final = 1.02
"""Ratio to the best plan above which a cut's estimate is dropped: estimates are about so exact."""


@dataclass(frozen=True)
class SequencePlan:
    """One batch: its chunks in the order of their forwards, and the pipelines that they go through."""

    batch: SliceTable
    pipelines: tuple[ChunkPipeline, ...]
    num_slices: int
    """Slices of the longest sequence."""
    cut: Cut
    overhead_s: float
    """Seconds of the step outside the pipelines."""
    planning_s: float
    """Seconds of planning, without those in which kernels were compiled."""
    keeps_attention: bool = False
    """True if recomputed layers keep their attention's output and sums."""

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks in the order of their forwards."""
        return tuple(self.batch.chunks())

    @property
    def step_s(self) -> float:
        """Seconds of a step: the pipelines one after the other, and the overhead."""
        return sum(pipeline.makespan_s for pipeline in self.pipelines) + self.overhead_s

    @property
    def peak_memory_bytes(self) -> list[float]:
        """The most that every rank ever holds."""
        return [max(peaks) for peaks in zip(*(p.peak_memory_bytes for p in self.pipelines), strict=True)]

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return int(self.batch.length.sum())

    def numbered(self, sequences: Ints) -> Self:
        """The same with the numbers that its sequences have in the whole batch."""
        return replace(self, batch=replace(self.batch, sequence=sequences[self.batch.sequence]))

    def to_data(self) -> dict[str, Any]:
        """Document that ``farpipe sequences plan --json`` prints.

        `pipelines`: numbers of the chunks in the order of their forwards; microbatch j of `problems` and `schedules`
        [i] is the j-th of pipeline i. `recomputed_layers` [pipeline][stage][chunk of the pipeline].
        """
        return {
            "chunks": [chunk.to_data() for chunk in self.chunks],
            "pipelines": [list(pipeline.chunks) for pipeline in self.pipelines],
            "problems": [pipeline.problem.to_data() for pipeline in self.pipelines],
            "schedules": [pipeline.schedule.to_data() for pipeline in self.pipelines],
            "recomputed_layers": [pipeline.recomputed.tolist() for pipeline in self.pipelines],
            "keeps_attention": [self.keeps_attention] * len(self.pipelines),
            "makespan_s": [pipeline.makespan_s for pipeline in self.pipelines],
            "overhead_s": self.overhead_s,
            "step_s": self.step_s,
            "tokens_per_s": self.num_tokens / self.step_s,
            "num_slices": self.num_slices,
            "peak_memory_bytes": self.peak_memory_bytes,
            "planning_s": self.planning_s,
        }


class _Grouped(NamedTuple):
    """The same with what memory makes of it: recomputation and several pipelines."""

    seconds: float
    one: EstimatedCut
    grouping: Grouping
    ends: list[int]


def plan_sequences(
    costs: ChunkCosts, lengths: Sequence[int] | Ints, options: BatchOptions | None = None
) -> SequencePlan:
    """The plan of one batch with the shortest predicted step among all cuts that are worth trying.

    Every cut has an estimate without memory; from the best on, recomputation and grouping are estimated by the relaxed
    program until no other cut can win, and the most promising are planned to the end and simulated. InfeasibleError,
    with the numbers and what would help, when no number of slices fits memory.
    """
    options, sizes = options or BatchOptions(), np.asarray(lengths, np.int64)
    if not sizes.size:
        raise InputError("lengths: a batch needs at least one sequence")
    return _with_better_recomputation(costs, options, partial(_searched, sizes), _MAX_ORDER_S)


def _with_better_recomputation(
    costs: ChunkCosts,
    options: BatchOptions,
    of_ranks: Callable[[ChunkCosts, BatchOptions, float], SequencePlan],
    most_s: float,
) -> SequencePlan:
    """The faster of two plans: recomputed layers keep nothing, or their attention's output and sums.

    `of_ranks` of folded costs, options and a step: InfeasibleError where no plan is likely to be below that.
    """

    def planned(of: ChunkCosts, left: BatchOptions, below_s: float = math.inf) -> SequencePlan:
        return _over_stages(of, of_ranks(of.folded, left, below_s), min(most_s, options.limit_s - gone_s()))

    with planning_time() as gone_s:
        found = planned(costs, options)
        left = replace(options, limit_s=options.limit_s - gone_s())
        is_open = options.tries_keeping_attention and left.limit_s > 0
        if is_open and any(pipeline.recomputed.any() for pipeline in found.pipelines):
            with suppress(InfeasibleError):  # keeping results takes memory
                below_s = found.step_s if costs.folded is costs else math.inf
                kept = replace(planned(costs.keeping_attention, left, below_s), keeps_attention=True)
                found = min(found, kept, key=lambda plan: plan.step_s)
        return replace(found, planning_s=gone_s())


def _searched(sizes: Ints, costs: ChunkCosts, options: BatchOptions, below_s: float) -> SequencePlan:
    """The best cut into slices of equal time; where these are recomputed, into equal tokens if that is faster.

    The first slices of equal time are the longest, and it is these that memory has no room for.
    """
    began_s, limit = time.perf_counter(), token_limit(costs, int(sizes.max()))
    found = _best_cut(costs, sizes, limit, options, below_s)
    left_s = options.limit_s - (time.perf_counter() - began_s)
    is_short = found.num_slices > 1 and any(pipeline.recomputed.any() for pipeline in found.pipelines)
    if is_short and options.equal == "time" and options.rule == "best-fit" and left_s > 0:
        with suppress(InfeasibleError):
            by_tokens = replace(options, equal="tokens", limit_s=left_s)
            other = _best_cut(costs, sizes, limit, by_tokens, min(below_s, found.step_s))
            found = min(found, other, key=lambda plan: plan.step_s)
    return found


def _best_cut(
    costs: ChunkCosts, sizes: Ints, limit: int, options: BatchOptions, below_s: float = math.inf
) -> SequencePlan:
    """The fastest plan of the cuts; InfeasibleError where none fits, or none is estimated near `below_s`."""
    began_s = time.perf_counter()
    near_s, every = _NOT_WORTH * below_s, estimated_cuts(costs, sizes, limit, options)
    ranked = sorted((one for one in every if one.seconds < near_s), key=lambda one: one.seconds)
    budget = CandidateBudget(options.budget, began_s + options.limit_s / 2)
    grouped = _grouped(costs, ranked, options, budget)
    if not ranked or (grouped and grouped[0].seconds >= near_s):
        raise InfeasibleError(f"no cut is estimated to take less than {near_s:.3g} s")
    if not grouped and options.num_slices is None:
        grouped = _finer(costs, sizes, limit, options, ranked, budget)
    if not grouped:
        raise _infeasible(costs, ranked, options)
    plans: list[SequencePlan] = []
    for one in grouped[:_MAX_PLANNED]:
        is_late = time.perf_counter() > began_s + options.limit_s
        least_s = min([below_s, *(plan.step_s for plan in plans)])
        if plans and (is_late or one.seconds >= least_s * _NOT_WORTH):
            break
        plans.append(_planned(costs, one))
    return min(plans, key=lambda plan: plan.step_s)


def plan_with_cut(
    costs: ChunkCosts, lengths: Sequence[int] | Ints, cut: Cut, options: BatchOptions | None = None
) -> SequencePlan:
    """The plan of one batch under a cut that was found for another, where there is no time to search.

    InfeasibleError when the batch does not fit like that.
    """
    options, sizes = options or BatchOptions(), np.asarray(lengths, np.int64)
    return _with_better_recomputation(costs, options, partial(_with_cut, sizes, cut), _ORDER_S)


def _with_cut(sizes: Ints, cut: Cut, costs: ChunkCosts, options: BatchOptions, below_s: float) -> SequencePlan:
    limit = min(cut.token_limit, token_limit(costs, int(sizes.max())))
    law = cut_law(total_law(costs, as_load(sizes)), sizes, cut.equal)
    batch = cut_batch(sizes, replace(cut, token_limit=limit), law)
    ranked = [_fallback(costs, cut, batch)]
    grouped = _grouped(costs, ranked, replace(options, several_pipelines=False), CandidateBudget(0))
    if not grouped:
        raise _infeasible(costs, ranked, options)
    return _planned(costs, grouped[0])


def _over_stages(costs: ChunkCosts, plan: SequencePlan, limit_s: float) -> SequencePlan:
    """A plan for ranks that have several stages each, or as it is."""
    if costs.folded is costs:
        return plan
    return replace(plan, pipelines=interleaved(costs, plan.batch, plan.pipelines, max(_ORDER_S, limit_s)))


def _grouped(
    costs: ChunkCosts, ranked: Sequence[EstimatedCut], options: BatchOptions, budget: CandidateBudget
) -> list[_Grouped]:
    """Groups that memory makes of the cuts, the best first; none of those that can't win or are beyond the budget.

    First every cut in one pipeline, which is soon priced; then, where memory is short, several of those that can win.
    """
    found: list[_Grouped] = []
    for several in (False, True)[: 1 + options.several_pipelines]:
        ranked = sorted(ranked, key=lambda one: min((e.seconds for e in found if e.one is one), default=math.inf))
        for one in ranked:
            best_s = min((each.seconds for each in found), default=math.inf)
            if found and budget.is_spent:
                break
            if one.seconds < best_s:
                found += _groups(costs, one, options, several=several, limit_s=best_s, budget=budget)
    return sorted(found, key=lambda each: each.seconds)


def _groups(
    costs: ChunkCosts,
    one: EstimatedCut,
    options: BatchOptions,
    *,
    several: bool,
    limit_s: float,
    budget: CandidateBudget,
) -> Iterator[_Grouped]:
    """Groups of one cut, one for every extra warm-up; of several pipelines only if they may be below `limit_s`."""
    for extra in dict.fromkeys(hiding_warm_ups(costs, one.batch.load, one.trips, options)):
        grouping = Grouping(extra, options.checkpointing, several, options.shrinks)
        if several and one.seconds + refill_s(costs, one.batch.load, grouping) >= limit_s:
            continue
        more_s, ends = group(costs, one.batch, grouping, budget)
        if more_s < math.inf:
            yield _Grouped(estimate_s(costs, one.batch, grouping, one.trips) + more_s, one, grouping, ends)
        if more_s == 0 or (more_s < math.inf and budget.is_spent):
            break


def _finer(
    costs: ChunkCosts,
    sizes: Ints,
    limit: int,
    options: BatchOptions,
    ranked: Sequence[EstimatedCut],
    budget: CandidateBudget,
) -> list[_Grouped]:
    """Groups of the first cut that fits, of more and more slices, where no cut that is fast fits.

    Slices of equal tokens: the more of them, the less is held beside the longest sequence, down to what `token_limit`
    has found to fit. Of equal time, the first slices of the next sequence come in longer than the last ones of the one
    before go out, which takes up to 1.41 times the longest sequence however many they are.
    """
    law = cut_law(total_law(costs, as_load(sizes)), sizes, "tokens")
    longest = int(sizes.max())
    longest_s = law.pair_s * longest**2 / 2 + law.token_s * longest
    slices = 2 * max(num_slices_within(longest, one.cut, law) for one in ranked)
    while slices <= min(longest, MAX_SLICES):
        cut = Cut(longest_s / slices, limit, options.rule, equal="tokens")
        batch = cut_batch(sizes, cut, law)
        if batch.num_chunks > MAX_CHUNKS:
            break
        found = _grouped(costs, [_fallback(costs, cut, batch)], replace(options, hide_links=False), budget)
        if found:
            return found
        slices *= 2
    return []


def _fallback(costs: ChunkCosts, cut: Cut, batch: SliceTable) -> EstimatedCut:
    """A cut that competes with no other."""
    return EstimatedCut(0.0, cut, batch, mean_trips(costs, batch))


def _infeasible(costs: ChunkCosts, ranked: Sequence[EstimatedCut], options: BatchOptions) -> InfeasibleError:
    """Error of the cut that is nearest to fitting: the one with the shortest chunks."""
    one = max(ranked, key=lambda each: each.batch.num_chunks)
    grouping = Grouping((0,) * costs.num_stages, options.checkpointing, False, options.shrinks)
    try:
        make_pipelines(costs, one.batch, grouping, [one.batch.num_chunks])
    except InfeasibleError as error:
        return InfeasibleError(f"{error}, in the best of {len(ranked)} ways to cut the batch{_hint(options)}")
    raise AssertionError("a cut that fits was not found")


def _hint(options: BatchOptions) -> str:
    if options.checkpointing == "none":
        return "; let it recompute"
    if options.num_slices is not None:
        return f"; more than {options.num_slices} slices may fit"
    return "; more memory, more stages or more devices for each stage would help"


def _planned(costs: ChunkCosts, one: _Grouped) -> SequencePlan:
    batch, cut = one.one.batch, one.one.cut
    pipelines = make_pipelines(costs, batch, one.grouping, one.ends)
    return SequencePlan(batch, tuple(pipelines), batch.num_slices, cut, costs.overhead_s, planning_s=0.0)
