"""One batch's chunks in one pipeline or in several, one after the other, with what each recomputes.

Chunks that do not fit in memory together need recomputation, or fewer of them at once. Several pipelines, each with the
sequences of similar numbers of slices, hold fewer, and each costs filling and draining once more: which sequences go
together is a dynamic program over the sequences by their number of slices (InfiniPipe, arXiv 2509.21275, section 5.3).
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from farpipe.core.errors import InfeasibleError
from farpipe.core.schedule import peak_memory_bytes
from farpipe.core.simulate import Timeline, simulate
from farpipe.core.step import Problem, Schedule
from farpipe.core.step.chains import chains
from farpipe.planning.cost.chunk_laws import Load
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.workload.checkpointing import (
    CheckpointRule,
    MemoryModel,
    choose_layers,
    memory_model,
    recomputation_bound_s,
    recomputation_s,
)
from farpipe.planning.workload.chunk import Floats, Ints, SliceTable
from farpipe.planning.workload.order import chunk_order

MAX_BLOCKS: Final = 10
"""Largest number of blocks of sequences that stay together, so that at most 55 groups are priced."""
_LEAST_PRICED: Final = 100
"""Chunks that a candidate counts at least: below, pricing takes no less time."""


@dataclass(frozen=True)
class ChunkPipeline:
    """Some of the chunks, in the order of their forwards, as a Problem with its Schedule and what it will do."""

    chunks: tuple[int, ...]
    recomputed: Ints
    """Layers, [num_stages, num_chunks]."""
    problem: Problem
    schedule: Schedule
    timeline: Timeline

    @property
    def makespan_s(self) -> float:
        """Seconds from the first forward to the last backward."""
        return self.timeline.makespan_s

    @property
    def peak_memory_bytes(self) -> list[float]:
        """Peak memory of every rank."""
        return peak_memory_bytes(self.problem, self.schedule)


@contextmanager
def planning_time() -> Iterator[Callable[[], float]]:
    """Seconds since then, without those in which kernels were compiled."""
    from numba.core import event

    began_s, compiling = time.perf_counter(), event.TimingListener()  # type: ignore[no-untyped-call]
    with event.install_listener("numba:compile", compiling):
        yield lambda: time.perf_counter() - began_s - (compiling.duration if compiling.done else 0.0)


@dataclass
class CandidateBudget:
    """Work that a plan may still take, in chunks of priced candidates, so that plans are the same on every machine.

    A deadline besides for callers that can't wait.
    """

    num_chunks: int
    deadline_s: float = math.inf
    """Moment of `time.perf_counter` after which no further candidate is priced."""

    @property
    def is_spent(self) -> bool:
        """True if no further candidate should be priced."""
        return self.num_chunks <= 0 or self.is_late

    @property
    def is_late(self) -> bool:
        """True behind the deadline."""
        return time.perf_counter() > self.deadline_s


@dataclass(frozen=True)
class Grouping:
    """Options of making pipelines: which rule recomputes, extra forwards per stage, whether there may be several, and
    whether chunks in flight get fewer where the longest sequences are over."""

    extra: tuple[int, ...]
    rule: CheckpointRule = "chunk"
    several: bool = True
    shrinks: bool = True


def make_pipelines(
    costs: ChunkCosts, batch: SliceTable, grouping: Grouping, ends: Sequence[int]
) -> list[ChunkPipeline]:
    """The chunks in pipelines that end at `ends`; InfeasibleError when memory is not enough."""
    starts = [0, *ends[:-1]]
    return [
        _pipeline(_PartOfBatch(costs, batch, grouping, *pair), pair[1] == batch.num_chunks)
        for pair in zip(starts, ends, strict=True)
    ]


@dataclass(frozen=True)
class _PartOfBatch:
    """Some consecutive chunks of a batch as a pipeline of their own."""

    costs: ChunkCosts
    batch: SliceTable
    grouping: Grouping
    begin: int
    end: int

    @property
    def load(self) -> Load:
        return self.batch.load.part(self.begin, self.end)

    @property
    def follows(self) -> tuple[int | None, ...]:
        return self.batch.follows_within(self.begin, self.end)

    def memory(self) -> MemoryModel:
        order = chunk_order(self.follows, self.grouping.extra, shrinks=self.grouping.shrinks)
        return memory_model(self.costs, self.load, order)


def _pipeline(part: _PartOfBatch, is_last: bool) -> ChunkPipeline:
    model = part.memory()
    layers = choose_layers(model, part.grouping.rule)
    problem = part.costs.problem(part.load, part.follows, layers, gather=part.begin == 0, reduce=is_last)
    schedule = model.order.schedule()
    return ChunkPipeline(tuple(range(part.begin, part.end)), layers, problem, schedule, simulate(problem, schedule))


def group(costs: ChunkCosts, batch: SliceTable, grouping: Grouping, budget: CandidateBudget) -> tuple[float, list[int]]:
    """(what recomputation and further pipelines cost, where the pipelines end as numbers of chunks); infinite where
    memory is not enough.

    One pipeline is best if its recomputation costs no more than filling and draining another one. When the budget is
    spent, one pipeline is taken if it fits, and the price of others is that of recomputing everything. Where no group
    of the dynamic program fits, pipelines get as many sequences as fit.
    """

    def most(begin: int, end: int) -> float:
        rule = "full" if grouping.rule == "chunk" else grouping.rule
        return _recomputation_s(_PartOfBatch(costs, batch, grouping, begin, end), rule)

    def price(begin: int, end: int) -> float:
        is_spent = budget.is_spent
        budget.num_chunks -= max(_LEAST_PRICED, end - begin)
        if is_spent:
            return most(begin, end)
        return _recomputation_s(_PartOfBatch(costs, batch, grouping, begin, end), grouping.rule)

    whole_s, again_s = price(0, batch.num_chunks), refill_s(costs, batch.load, grouping)
    if not grouping.several or whole_s <= again_s:
        return whole_s, [batch.num_chunks]
    found = _shortest_path(_blocks(batch.follows), price, again_s, lambda: whole_s < math.inf and budget.is_spent)
    if whole_s == np.inf and found is not None and found[0] == np.inf:
        found = _as_many_as_fit(_borders(batch.follows), most, again_s)
    return found or (whole_s, [batch.num_chunks])


def _borders(follows: Sequence[int | None]) -> Ints:
    """Places at which pipelines may begin and end: between sequences."""
    return np.append(np.unique(chains(follows, len(follows)).first), len(follows))


def _as_many_as_fit(borders: Ints, price: Callable[[int, int], float], refill_s: float) -> tuple[float, list[int]]:
    """Every pipeline gets as many sequences as fit, which finds a grouping if there is one at all."""
    total_s, ends, at = -refill_s, [], 0
    while at < borders.size - 1:
        low, high, low_s, step = at, borders.size, np.inf, 1
        while high - low > 1:  # low fits, high does not; first in growing steps
            middle = min(low + step, high - 1) if high == borders.size else (low + high) // 2
            seconds = price(int(borders[at]), int(borders[middle]))
            low, high, low_s, step = (middle, high, seconds, 2 * step) if seconds < np.inf else (low, middle, low_s, 1)
        if low == at:
            return np.inf, [int(borders[-1])]
        total_s, at = total_s + low_s + refill_s, low
        ends.append(int(borders[low]))
    return total_s, ends


def _blocks(follows: Sequence[int | None]) -> list[int]:
    """Places at which groups may begin and end: 0, behind the first sequence, where chunks are split no more, ...

    The others are evenly over the chunks, but between sequences.
    """
    borders = _borders(follows)
    wanted = np.linspace(0, len(follows), MAX_BLOCKS - 1)[1:-1]
    near = borders[np.abs(borders[:, None] - wanted).argmin(axis=0)]
    single = np.flatnonzero(np.diff(borders) == 1)
    batched = borders[single[0]] if single.size else len(follows)
    return sorted({0, len(follows), int(borders[1]), int(batched), *near.tolist()})


def _shortest_path(
    places: Sequence[int], price: Callable[[int, int], float], refill_s: float, ends_early: Callable[[], bool]
) -> tuple[float, list[int]] | None:
    """The dynamic program: the least sum of recomputation and refills; the first filling is not counted.

    None where it ends early.

    A pipeline that has more sequences never costs less, so larger ones are not asked for once one costs too much.
    """
    best = [0.0] + [np.inf] * (len(places) - 1)
    before = [0] * len(places)
    for end in range(1, len(places)):
        least_s = 0.0
        if ends_early():
            return None
        for begin in reversed(range(end)):
            if best[begin] + refill_s + least_s < best[end]:
                least_s = price(places[begin], places[end])
            if best[begin] + refill_s + least_s < best[end]:
                best[end], before[end] = best[begin] + refill_s + least_s, begin
            if least_s == np.inf:
                break
    found, at = [], len(places) - 1
    while at:
        found.append(places[at])
        at = before[at]
    return best[-1] - refill_s, found[::-1]


def _recomputation_s(part: _PartOfBatch, rule: CheckpointRule) -> float:
    """Time of recomputation if these chunks are a pipeline; infinite where memory is not enough."""
    model = part.memory()
    if rule == "chunk":
        return recomputation_bound_s(model)
    try:
        return recomputation_s(model, choose_layers(model, rule))
    except InfeasibleError:
        return np.inf


def refill_s(costs: ChunkCosts, load: Load, grouping: Grouping) -> float:
    """Filling and draining one more pipeline."""
    total: Floats = sum(costs.seconds(load), start=np.zeros((costs.num_stages, load.tokens.size)))
    return (costs.num_stages - 1 + grouping.extra[0]) * float(total.mean(axis=1).max())
