"""Orders chosen together with the network: the gain of a warm-up depends on the light paths' delays."""

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np

from farpipe.core.errors import InfeasibleError
from farpipe.core.schedule import check
from farpipe.core.schedule.library import order
from farpipe.core.schedule.library.eager import eager
from farpipe.core.step import Problem, Schedule
from farpipe.optical.demands import TransferPolicy
from farpipe.optical.shared_network import SharedNetwork, play_steps
from farpipe.optical.transfers import UNIT_GBIT, LightTraining, nominal_problem

ZERO_BUBBLE: Final = ("zb-h1", "zb-h2", "zb-1p", "zb-2p")
MAX_EXTRA: Final = 3
"""Most extra forwards in flight per hop between nodes."""


def candidate_orders(problem: Problem, nodes: Sequence[str]) -> list[Schedule]:
    """Orders worth trying on a network, without those that memory forbids.

    GPipe, 1F1B, eager by its closed form, 1F1B with one, two, ... more forwards in flight per hop between nodes, and
    the zero-bubble orders where the backward can be split.
    """
    between = [int(a != b) for a, b in itertools.pairwise(nodes)]
    splits = ZERO_BUBBLE if all(np.min(stage.weight_grad_s) > 0 for stage in problem.stages) else ()
    orders = [order(name, problem) for name in ("gpipe", "1f1b", "eager", *splits)]
    for extra in range(1, MAX_EXTRA + 1):
        of_stage = [extra * sum(between[stage:]) for stage in range(problem.num_stages)]
        orders.append(eager(problem, of_stage))
    return [schedule for schedule in orders if _fits(problem, schedule)]


def _fits(problem: Problem, schedule: Schedule) -> bool:
    try:
        check(problem, schedule)
    except InfeasibleError:
        return False
    return True


def joint_order(
    shared: SharedNetwork,
    problem: Problem,
    nodes: tuple[str, ...],
    policy: TransferPolicy,
    *,
    num_steps: int = 3,
    begin_s: float = 0.0,
) -> Schedule:
    """The candidate order whose steps are shortest on the network itself; InfeasibleError when none fits in memory.

    All are played on the same background, which should not be the one that the answer is judged on.
    """
    nominal = nominal_problem(problem, nodes, shared.paths, 6 * UNIT_GBIT)
    candidates = candidate_orders(nominal, nodes)
    if not candidates:
        raise InfeasibleError("none of the orders fits in the memory of the ranks")
    played = [
        play_steps(shared, LightTraining(nominal, one, nodes), policy, num_steps=num_steps, begin_s=begin_s, skipped=1)
        for one in candidates
    ]
    return min(played, key=lambda each: each.mean_s).schedule
