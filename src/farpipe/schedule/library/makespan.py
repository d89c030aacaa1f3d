"""How long an order takes, to choose between orders that a formula makes; `farpipe.simulate` tells all about one."""

from typing import Any

import numpy as np

from farpipe.step import Problem, Schedule


def makespan_s(problem: Problem, schedule: Schedule) -> float:
    """The end of the last action or collective, as `simulate` has it; infinite where ranks wait for each other."""
    from farpipe.schedule.library import makespan_kernel  # here, for numba takes a third of a second to import

    last_end: Any = makespan_kernel.last_end
    forward, inputs, weights = (problem.table(name) for name in ("forward_s", "input_grad_s", "weight_grad_s"))
    duration_s = np.stack([forward, inputs, weights, inputs + weights])
    rank_of_stage = np.array([stage.rank for stage in problem.stages])
    traffic = problem.traffic
    orders = (schedule.codes, schedule.begin, duration_s, rank_of_stage)
    collectives = (*traffic.collectives.figures, traffic.collectives.begin)
    return float(last_end(*orders, traffic.messages.figures, collectives, *traffic.opening[:2]))
