"""Plays of many orders of one step, for their step times."""

from typing import Any

import numpy as np

from farpipe.core.step.arrays import Floats, Ints, Played, StepArrays, step_arrays
from farpipe.core.step.problem import Problem
from farpipe.core.step.schedule import Schedule

CodedSchedule = tuple[Ints, Ints]
"""The orders of all ranks as codes, and where each rank's begins: as `Schedule` has them."""


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

    def start_s(self, orders: CodedSchedule) -> Floats:
        """Start of every action: [num_actions]."""
        return self.play(orders)[1][0]

    def play(self, orders: CodedSchedule) -> tuple[float, Played]:
        """(step time, all times)."""
        codes, begin = orders
        out = self.arrays.new_out(codes.size)
        makespan = self._kernel.makespan
        return float(makespan(codes, begin, self.arrays.tables, out, self.scratch, self._no_limit)), out


def makespan_s(problem: Problem, schedule: Schedule) -> float:
    """The end of the last action or collective, as `simulate` has it; infinite where ranks wait for each other."""
    return Player(step_arrays(problem)).makespan_s((schedule.codes, schedule.begin))
