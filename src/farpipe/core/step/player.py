"""Plays of many orders of one step, for their step times."""

from itertools import pairwise
from typing import Any, Final

import numpy as np

from farpipe.core.step.arrays import Floats, Ints, Played, StepArrays, step_arrays
from farpipe.core.step.problem import Problem
from farpipe.core.step.schedule import Schedule

CodedSchedule = tuple[Ints, Ints]
"""The orders of all ranks as codes, and where each rank's begins: as `Schedule` has them."""

_MAX_STEPS: Final = 32
"""Steps in a row after which a period that still swings is taken from the later half of them."""
_CLOSE: Final = 1e-9


class Player:
    """Plays orders of one step again and again in the same memory; not to be used by two threads at once."""

    def __init__(self, arrays: StepArrays) -> None:
        from farpipe.core.step import player_kernel  # here, for numba takes a third of a second to import

        self.arrays = arrays
        self._kernel: Any = player_kernel
        self.scratch: tuple[Any, ...] = self._kernel.new_scratch(arrays.tables, arrays.num_ranks)
        self._no_limit = np.full(arrays.num_ranks, np.inf)

    def makespan_s(self, orders: CodedSchedule) -> float:
        """The step time of `orders`; infinite when they deadlock. Memory is not looked at."""
        return self.play(orders)[0]

    def period_s(self, orders: CodedSchedule) -> float:
        """Time from one step to the next when `orders` are repeated without a common barrier; infinite for a deadlock.

        A rank begins the next step when its own part of this one is done, collectives that it waits for included, and
        the gradient's norm of the step before is known. Links go on where they were.
        """
        codes, begin = orders
        tables, rank_of_stage = self.arrays.tables, self.arrays.rank_of_stage
        ready_s, link_s = [np.zeros(begin.size - 1)], np.zeros(tables.link_opens_s.size)
        for _ in range(_MAX_STEPS):
            links_s = np.maximum(link_s, np.where(tables.link_opens_s > 0, ready_s[-1].min(), 0.0))
            opens_s = tables.opens_s + ready_s[-1][rank_of_stage]
            now = tables._replace(opens_s=opens_s, link_opens_s=links_s + tables.link_opens_s)
            out = self.arrays.new_out(codes.size)
            if not np.isfinite(self._kernel.makespan(codes, begin, now, out, self.scratch, self._no_limit)):
                return float(np.inf)
            ready_s.append(np.maximum(self._ready_s(out[3]), ready_s[-1].max()))
            link_s = self.scratch[0].copy()
            gained = ready_s[-1] - ready_s[-2]
            if np.ptp(gained) <= _CLOSE * gained.max() and len(ready_s) > 2:
                return float(gained.max())
        later = ready_s[_MAX_STEPS // 2 :]
        return float(np.mean([(after - before).max() for before, after in pairwise(later)]))

    def _ready_s(self, collective_start_s: Floats) -> Floats:
        """[R]: when every rank has played its order and has what its optimizer waits for."""
        others, ready_s = self.arrays.collectives, self.scratch[4].copy()
        after = slice(int(others.begin[0]), None)
        there_s = collective_start_s[after] + others.arrives_after_s[after]
        np.maximum.at(ready_s, self.arrays.rank_of_stage[others.target[after]], there_s)
        return np.asarray(ready_s)

    def start_s(self, orders: CodedSchedule) -> Floats:
        """Start of every action: [num_actions]."""
        return self.play(orders)[1][0]

    def play(self, orders: CodedSchedule) -> tuple[float, Played]:
        """(step time, all times)."""
        codes, begin = orders
        out = self.arrays.new_out(codes.size)
        makespan = self._kernel.makespan
        return float(makespan(codes, begin, self.arrays.tables, out, self.scratch, self._no_limit)), out


def period_s(problem: Problem, schedule: Schedule) -> float:
    """Time from one step to the next without a barrier between them: see `Player.period_s`."""
    return Player(step_arrays(problem)).period_s((schedule.codes, schedule.begin))


def makespan_s(problem: Problem, schedule: Schedule) -> float:
    """The end of the last action or collective, as `simulate` has it; infinite where ranks wait for each other."""
    return Player(step_arrays(problem)).makespan_s((schedule.codes, schedule.begin))
