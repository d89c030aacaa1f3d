"""A Problem as the searches read it: the simulator's flat tables, memory, and what makes a good order good."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farpipe.step import KINDS, Holding, Problem, Schedule, byte_tables, holdings
from farpipe.step.lowering import Floats, Ints, StepArrays, Tables, lower

_I, _W, _B = map(KINDS.index, "IWB")

CodedSchedule = tuple[Ints, Ints]
"""The orders of all ranks as codes, and where each rank's begins: as `Schedule` has them."""


@dataclass(frozen=True)
class SearchStep:
    """One Problem, lowered once for many evaluations."""

    problem: Problem
    arrays: StepArrays
    headroom_bytes: Floats
    """[R]: what a rank has for activations; infinite where memory is unlimited."""
    taken_bytes: Floats
    freed_bytes: Floats
    """By code: what an action takes when it starts and frees when it ends (`farpipe.step.byte_tables`)."""
    holdings: tuple[Holding, ...]
    """The same as spans of time."""
    stages: Ints
    """[S]: the stages of rank 0, then those of rank 1, ..., each ascending."""
    stages_begin: Ints
    """[R + 1]: where each rank's stages begin in `stages`."""
    alike: bool
    """True if all microbatches are, so that they may be done in their own order without loss; chains are not."""

    @property
    def tables(self) -> Tables:
        """The arrays that compiled loops read."""
        return self.arrays.tables

    @property
    def num_actions(self) -> int:
        """Actions of a schedule whose backwards are split."""
        return 3 * self.problem.num_stages * self.problem.num_microbatches

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of stages and of microbatches."""
        return self.problem.num_stages, self.problem.num_microbatches

    @property
    def activation_bytes(self) -> Floats:
        """[S, M]: taken at the start of F."""
        return self.problem.table("activation_bytes")

    @property
    def work_s(self) -> Floats:
        """[R]: all computation of every rank."""
        stage_s = self.arrays.duration_s[[0, 3]].sum(axis=(0, 2))
        return np.asarray(np.bincount(self.arrays.rank_of_stage, stage_s, self.problem.num_ranks), np.float64)

    @property
    def mean_action_s(self) -> float:
        """The mean duration of F, I and W."""
        return float(self.arrays.duration_s[:3].mean())


def search_step(problem: Problem) -> SearchStep:
    """Lower `problem` for a search."""
    arrays = lower(problem)
    taken_bytes, freed_bytes = byte_tables(problem)
    counts = [len(stages) for stages in problem.stages_of_rank]
    names = ("activation_bytes", "weight_stash_bytes", "chain_bytes")
    messages = arrays.messages
    rows = [*arrays.duration_s, *messages.link, *messages.occupies_s, *messages.arrives_after_s]
    rows += map(problem.table, names)
    return SearchStep(
        problem=problem,
        arrays=arrays,
        headroom_bytes=np.array([_headroom_bytes(problem, rank) for rank in range(problem.num_ranks)]),
        taken_bytes=taken_bytes,
        freed_bytes=freed_bytes,
        holdings=holdings(problem),
        stages=np.array([stage for stages in problem.stages_of_rank for stage in stages], np.int32),
        stages_begin=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        alike=not problem.chains.any
        and all(bool((row == row[:, :1]).all()) for row in (*rows, *map(problem.table, names))),
    )


def _headroom_bytes(problem: Problem, rank: int) -> float:
    """Rounded up by half of what `check` forgives."""
    spec = problem.ranks[rank]
    if spec.memory_bytes is None:
        return np.inf
    return spec.memory_bytes * (1 + 5e-10) - spec.static_bytes


def fits_memory(step: SearchStep, orders: CodedSchedule) -> bool:
    """True if no rank ever holds more than its memory."""
    codes, begin = orders
    taken, given = step.taken_bytes[codes], step.freed_bytes[codes]
    for rank, headroom in enumerate(step.headroom_bytes):
        mine = slice(begin[rank], begin[rank + 1])
        in_use = np.cumsum(taken[mine]) - (np.cumsum(given[mine]) - given[mine])
        if in_use.max(initial=0.0) > headroom:
            return False
    return True


class Player:
    """Plays orders of one step again and again in the same memory; not to be used by two threads at once."""

    def __init__(self, step: SearchStep):
        from farpipe.step import player  # here, for numba takes a third of a second to import

        self.step = step
        self._compiled: Any = player
        arrays = step.arrays
        num_links, any_shared = arrays.shared.size, bool(arrays.shared.any())
        sizes = (arrays.num_ranks, num_links, any_shared, arrays.collectives.link.size)
        self.scratch = self._compiled.new_scratch(step.tables.shape, *sizes)
        self._no_limit = np.full(arrays.num_ranks, np.inf)

    def out(self, num_actions: int) -> tuple[NDArray[Any], ...]:
        """New memory for what a play finds."""
        size, num_collectives = self.step.arrays.messages.link.size, self.step.arrays.collectives.link.size
        return np.empty(num_actions), np.zeros(size), np.empty(size), np.empty(num_collectives)

    def makespan_s(self, orders: CodedSchedule) -> float:
        """The step time of `orders`; infinite when they deadlock. Memory is not looked at."""
        return self.play(orders)[0]

    def start_s(self, orders: CodedSchedule) -> Floats:
        """Start of every action: [num_actions]."""
        return np.asarray(self.play(orders)[1][0])

    def play(self, orders: CodedSchedule) -> tuple[float, tuple[NDArray[Any], ...]]:
        """(step time, what the player wrote: starts of actions, of messages, arrivals, starts of collectives)."""
        codes, begin = orders
        out = self.out(codes.size)
        return float(self._compiled.makespan(codes, begin, self.step.tables, out, self.scratch, self._no_limit)), out


def to_schedule(orders: CodedSchedule, num_microbatches: int, method: str) -> Schedule:
    """The Schedule that `orders` encode."""
    return Schedule.from_codes(num_microbatches, *orders, method)


def split_backwards(orders: CodedSchedule) -> CodedSchedule:
    """Every B as I and W.

    Never slower: the gradient leaves at the end of I instead of B, and the same memory is free at the end of W.
    """
    codes, begin = orders
    joined = (codes & 3) == _B
    parts = np.repeat(codes, 1 + joined)
    place = np.cumsum(1 + joined) - 1  # of the last part of every action
    parts[place[joined]] += _W - _B
    parts[place[joined] - 1] += _I - _B
    return parts, np.concatenate(([0], np.cumsum(1 + joined)))[begin].astype(np.int32)


def to_orders(schedule: Schedule) -> CodedSchedule:
    """The codes of a Schedule."""
    return schedule.codes, schedule.begin
