"""How long an order takes, to choose between orders that a formula makes; `farpipe.simulate` tells all about one."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from farpipe.step import Problem, Schedule

Floats = NDArray[np.float64]
OnLinks = tuple[NDArray[np.int32], Floats, Floats]
"""(link, negative for none, seconds on it, seconds from the start there until the arrival)."""


def makespan_s(problem: Problem, schedule: Schedule) -> float:
    """The end of the last action or collective, as `simulate` has it; infinite where ranks wait for each other."""
    from farpipe.schedule.library import makespan_kernel  # here, for numba takes a third of a second to import

    last_end: Any = makespan_kernel.last_end
    forward, inputs, weights = (problem.table(name) for name in ("forward_s", "input_grad_s", "weight_grad_s"))
    duration_s = np.stack([forward, inputs, weights, inputs + weights])
    rank_of_stage = np.array([stage.rank for stage in problem.stages])
    messages, collectives = (
        (part.link, part.occupies_s, part.arrives_after_s)
        for part in (problem.traffic.messages, problem.traffic.collectives)
    )
    opens_s, link_free_s = _after_gathers(problem, collectives)
    orders = (schedule.codes, schedule.begin, duration_s, rank_of_stage)
    return float(last_end(*orders, messages, collectives, opens_s, link_free_s))


def _after_gathers(problem: Problem, collectives: OnLinks) -> tuple[Floats, Floats]:
    """(when every stage may begin [S], when every link is free [L]): gathers go first, one stage after the other."""
    opens_s, link_free_s = problem.traffic.opens_s.copy(), np.zeros(len(problem.links))
    for stage, (link, occupies_s, arrives_s) in enumerate(zip(*(rows[0] for rows in collectives), strict=True)):
        if link >= 0:
            opens_s[stage] += link_free_s[link] + arrives_s
            link_free_s[link] += occupies_s
    return opens_s, link_free_s
