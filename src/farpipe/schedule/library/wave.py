"""Wave: CrossPipe's greedy order of two stages per rank in a V (arXiv 2507.00217)."""

from itertools import product
from typing import Final

import numpy as np

from farpipe.schedule.library.list_scheduling import Rules, list_schedule, memory_room
from farpipe.schedule.library.placement import require_v_shape
from farpipe.step import Problem, Schedule

_FLAGS: Final = product((True, False), (0.0, 1.0), (0.5, 1.0), (False, True), (1, 2))
RULES: Final = tuple(Rules(*flags) for flags in _FLAGS)


def wave(problem: Problem, limit_s: float = np.inf) -> Schedule:
    """Of what can start, backwards go before forwards or in turn with them, and always the later stage first.

    It uses all memory that the ranks have. A forward on the way down leaves room for one or two on the way up, so that
    the microbatches under way can always reach the loss. `limit_s` as for `list_schedule`.
    """
    down = len(require_v_shape(problem, "wave"))
    key = np.zeros((2, problem.num_stages, problem.num_microbatches))
    key[:] = -np.arange(problem.num_stages)[:, None]
    key[0] += problem.num_stages
    held = problem.chains.sums(problem.table("activation_bytes")).max(axis=1)
    reserve = np.concatenate((held[: down - 1 : -1], np.zeros(down)))
    return list_schedule(problem, key, memory_room(problem), RULES, "wave", reserve, limit_s)
