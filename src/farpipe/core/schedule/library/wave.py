"""Wave: CrossPipe's greedy order of two stages per rank in a V (arXiv 2507.00217)."""

from dataclasses import replace
from itertools import chain, product, zip_longest
from typing import Final

import numpy as np

from farpipe.core.schedule.library.list_scheduling import Floats, Rules, list_schedule, memory_headroom
from farpipe.core.schedule.library.placement import require_v_shape
from farpipe.core.step import Problem, Schedule, num_fitting, round_trip_s

_FLAGS: Final = product((True, False), (0.0, 1.0), (0.5, 1.0), (1, 2))
RULES: Final = tuple(Rules(*flags) for flags in _FLAGS)
_SHARING_FLAGS: Final = product((False,), (0.0,), (0.5, 1.0), (0, 1))
SHARING: Final = tuple(Rules(*flags) for flags in _SHARING_FLAGS)
"""Rules for stages that share their rank's memory by how long each holds a microbatch."""
PACES: Final = (0.5, 1.0, 2.0)
"""Time by which a stage holds a microbatch longer than alone, as its rank has others to do: in F + I + W of a rank."""


def wave(problem: Problem, limit_s: float = np.inf) -> Schedule:
    """Backwards that can start go before forwards or in turn with them, and always the later stage first.

    It uses all memory that the ranks have. A forward on a stage down leaves room for one or two on those up, so that
    the microbatches in flight can always reach the loss. Where links are slow that is too little: the stages down take
    nearly all memory, and those up do one microbatch after the other. So it is also tried with stages down that hold no
    more than their share. `limit_s` as for `list_schedule`.
    """
    down = len(require_v_shape(problem, "wave"))
    key = np.zeros((2, problem.num_stages, problem.num_microbatches))
    key[:] = -np.arange(problem.num_stages)[:, None]
    key[0] += problem.num_stages
    held = problem.chains.sums(problem.table("activation_bytes")).max(axis=1)
    reserve = np.concatenate((held[: down - 1 : -1], np.zeros(down)))
    headroom = memory_headroom(problem)
    return list_schedule(problem, key, headroom, _rules(problem, headroom), "wave", reserve, limit_s)


def _rules(problem: Problem, headroom: Floats) -> tuple[Rules, ...]:
    """Rules with and without shares of memory, in turn, so that the first few show how good the order will be."""
    if np.isinf(headroom).all() or problem.chains.any:
        return RULES
    shares = dict.fromkeys(_shares(problem, headroom, paces) for paces in PACES)
    sharing = [replace(rules, most_in_flight=most) for most in shares for rules in SHARING]
    return tuple(rules for rules in chain(*zip_longest(RULES, sharing)) if rules is not None)


def _shares(problem: Problem, headroom: Floats, paces: float) -> tuple[int, ...]:
    """The number of microbatches that every stage down may hold, so that both stages of its rank have memory for them.

    By Little's law the two need memory as bytes times seconds; a stage up is not limited but by memory.
    """
    seconds, held = _holding_s(problem, paces), problem.table("activation_bytes").max(axis=1)
    most = [problem.num_microbatches + 1] * problem.num_stages
    for (down, up), bytes_ in zip(problem.stages_of_rank, headroom.tolist(), strict=True):
        needed = float(seconds[down] * held[down] + seconds[up] * held[up])
        if np.isfinite(bytes_) and needed > 0 and held[down] > 0:
            beside_one_up = num_fitting(bytes_ - held[up], held[down])
            share = num_fitting(bytes_ * seconds[down], needed)
            most[down] = max(1, min(share, beside_one_up, problem.num_microbatches + 1))
    return tuple(most)


def _holding_s(problem: Problem, paces: float) -> Floats:
    """Seconds from the start of a microbatch's F to the end of its I on every stage, all links free: [S]."""
    forward, inputs, weights = (
        problem.table(name).mean(axis=1) for name in ("forward_s", "input_grad_s", "weight_grad_s")
    )
    hops = [round_trip_s(problem, index) for index in range(len(problem.hops))]
    passes = np.cumsum((forward + inputs)[::-1])[::-1]
    trips = np.append(np.cumsum(hops[::-1])[::-1], 0.0)
    of_rank = [sum((forward + inputs + weights)[list(mine)]) for mine in problem.stages_of_rank]
    return np.asarray(passes + trips + paces * max(of_rank))
