"""ZB-1p and ZB-2p: zero bubble within a memory limit (Qi et al., arXiv 2401.10241).

Input gradients go before forwards, forwards run ahead as far as memory lets them, and W fills the gaps. Whether a
forward may hold up the first input gradients, and a W the next pass, is tried out. Where the fixed pattern of ZB-H1 or
ZB-H2 fits the same memory and is shorter, it is taken; where both take as long, the one of the shorter period.
"""

from functools import partial
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import UsageError
from farpipe.core.schedule.check import peak_memory_bytes
from farpipe.core.schedule.library.list_scheduling import Rules, list_schedule, memory_headroom
from farpipe.core.schedule.library.one_f_one_b import one_f_one_b
from farpipe.core.schedule.library.placement import require_one_stage_per_rank
from farpipe.core.schedule.library.zero_bubble import zb_h1, zb_h2
from farpipe.core.step import Problem, Schedule
from farpipe.core.step.player import makespan_s, period_s

_FLAGS: Final = product((True, False), (1.0, 0.25), (1.0, 0.5))
RULES: Final = tuple(Rules(*flags) for flags in _FLAGS)
_CLOSE: Final = 1e-9
"""Relative difference of times below which they are equal."""
_AS_LONG: Final = 1e-3
"""Relative difference of makespans below which the period decides between the list and a pattern."""
MAX_ACTIONS: Final = 20_000
"""Stages times microbatches up to which the fixed patterns are tried too: longer steps are ruled by the list."""


def zb_1p(problem: Problem, limit: float = 1.0, limit_s: float = np.inf) -> Schedule:
    """Zero bubble in the memory of 1F1B; `limit` and `limit_s` as for `memory_limited`."""
    return memory_limited(problem, limit, "zb-1p", limit_s)


def zb_2p(problem: Problem, limit: float = 2.0, limit_s: float = np.inf) -> Schedule:
    """Zero bubble in twice the memory of 1F1B; `limit` and `limit_s` as for `memory_limited`."""
    return memory_limited(problem, limit, "zb-2p", limit_s)


def memory_limited(problem: Problem, limit: float, method: str, limit_s: float = np.inf) -> Schedule:
    """Activations take at most `limit` times what 1F1B takes on the first rank, and no more than a rank has.

    Where 1F1B itself needs more on some rank, that rank gets as much. `limit_s` as for `list_schedule`.
    """
    if not limit >= 1:
        raise UsageError(f"limit: expected a factor of at least 1 on the memory of 1F1B, found {limit}")
    require_one_stage_per_rank(problem, method)
    has_chains = problem.chains.any or problem.table("chain_bytes").any()
    wanted = _chained_1f1b_bytes(problem, limit) if has_chains else _of_1f1b_bytes(problem, limit)
    key = np.zeros((2, problem.num_stages, problem.num_microbatches))
    key[0] = 1.0
    headroom = memory_headroom(problem, wanted)
    found = list_schedule(problem, key, headroom, RULES, method, limit_s=limit_s)
    few = problem.num_stages * problem.num_microbatches <= MAX_ACTIONS
    return _or_shorter(problem, found, headroom) if few and not has_chains and np.isinf(limit_s) else found


def _or_shorter(problem: Problem, found: Schedule, headroom: NDArray[np.float64]) -> Schedule:
    """The best of `found` and the patterns ZB-H1 and ZB-H2 that fit `headroom` ([R], bytes); `found` if equal."""
    most = headroom + [rank.static_bytes for rank in problem.ranks]
    patterns = [zb_h1(problem), zb_h2(problem)]
    fitting = [pattern for pattern in patterns if np.all(peak_memory_bytes(problem, pattern) <= most)]
    if not fitting:
        return found
    shortest = min(fitting, key=partial(makespan_s, problem))
    gain = _gain(makespan_s(problem, shortest), makespan_s(problem, found))
    if problem.barrier and abs(gain) > _AS_LONG:
        return shortest.renamed(found.method) if gain > 0 else found
    found_s, shortest_s = period_s(problem, found), period_s(problem, shortest)
    same = abs(_gain(shortest_s, found_s)) <= _CLOSE
    better = gain > _CLOSE if same else shortest_s < found_s
    return shortest.renamed(found.method) if better else found


def _gain(new_s: float, old_s: float) -> float:
    """Part of `old_s` that `new_s` saves; 0 of nothing."""
    return 1 - new_s / old_s if old_s else 0.0


def _of_1f1b_bytes(problem: Problem, limit: float) -> NDArray[np.float64]:
    """[R]: `limit` times what p of the largest microbatches take on the first rank, and what 1F1B needs anywhere."""
    held = problem.table("activation_bytes").max(axis=1)
    of_1f1b = held * np.minimum(np.arange(problem.num_stages, 0, -1), problem.num_microbatches)
    wanted = np.zeros(problem.num_ranks)
    for stage, spec in enumerate(problem.stages):
        wanted[spec.rank] = max(limit * held[0] * problem.num_stages, of_1f1b[stage])
    return wanted


def _chained_1f1b_bytes(problem: Problem, limit: float) -> NDArray[np.float64]:
    """Bytes for activations of every rank where microbatches are slices of sequences: 1F1B then holds whole chains."""
    static = np.array([rank.static_bytes for rank in problem.ranks])
    of_1f1b = np.array(peak_memory_bytes(problem, one_f_one_b(problem))) - static
    return np.asarray(np.maximum(limit * of_1f1b[problem.stages[0].rank], of_1f1b))
