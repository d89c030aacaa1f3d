"""Makespan of an order, to choose between orders that a formula makes; `farpipe.simulate` tells all about one."""

from typing import Any

import numpy as np

from farpipe.step import Problem, Schedule, lower


def makespan_s(problem: Problem, schedule: Schedule) -> float:
    """The end of the last action or collective, as `simulate` has it; infinite where ranks wait for each other."""
    from farpipe.step import player  # here, for numba takes a third of a second to import

    new_scratch: Any = player.new_scratch
    makespan: Any = player.makespan
    arrays = lower(problem)
    size, num_collectives = arrays.messages.link.size, arrays.collectives.link.size
    sizes = (problem.num_ranks, len(problem.links), bool(arrays.shared.any()), num_collectives)
    scratch = new_scratch(arrays.tables.shape, *sizes)
    out = (np.empty(schedule.codes.size), np.empty(size), np.empty(size), np.empty(num_collectives))
    never = np.full(problem.num_ranks, np.inf)
    return float(makespan(schedule.codes, schedule.begin, arrays.tables, out, scratch, never))
