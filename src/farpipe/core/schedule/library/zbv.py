"""ZBV: zero bubble in the memory of 1F1B, two stages per rank in a V (Qi et al., arXiv 2401.10241).

With F = I = W, no delay and 2p - 1 microbatches or more, no rank waits between its first and its last action, and none
holds more than p microbatches: 2p of its two stages, whatever these take (a head's activations count no more).
"""

import numpy as np
from numpy.typing import NDArray

from farpipe.core.schedule.library.list_scheduling import fill_weights
from farpipe.core.schedule.library.placement import microbatch_bytes, require_v_shape
from farpipe.core.step import Problem, Schedule
from farpipe.core.step.codes import NUM_KINDS, F, I, encode


def zbv(problem: Problem) -> Schedule:
    """F and I by the handcrafted pattern, W where there is time."""
    return fill_weights(problem, _pattern(problem, "zbv"), "zbv", most_held=2 * problem.num_ranks)


def zbv_late(problem: Problem) -> Schedule:
    """ZBV whose W wait until the bytes of p microbatches are in use: beside a heavy head more, for less waiting."""
    wanted = problem.num_ranks * microbatch_bytes(problem)
    return fill_weights(problem, _pattern(problem, "zbv-late"), "zbv-late", wanted=wanted)


def _pattern(problem: Problem, method: str) -> list[NDArray[np.int64]]:
    """F and I of every rank."""
    ranks = require_v_shape(problem, method)
    position_of = {rank: position for position, rank in enumerate(ranks)}
    return [_passes(position_of[rank], len(ranks), problem.num_microbatches) for rank in range(len(ranks))]


def _passes(position: int, num_ranks: int, num_microbatches: int) -> NDArray[np.int64]:
    """Codes of the rank with stage `position` (down) and its mirror (up); what has run out leaves the pattern."""
    down, up = position, 2 * num_ranks - 1 - position
    to_go = num_ranks - position
    firsts = [encode(kind, stage * num_microbatches) for kind in (F, I) for stage in (down, up)]
    down_f, up_f, down_i, up_i = firsts
    pattern = [down_f] * (2 * to_go - 1) + [up_f, down_f] * position + [up_f, up_i] * to_go
    codes = np.array(pattern + [down_f, down_i, up_f, up_i] * num_microbatches)
    microbatch = np.empty_like(codes)
    for first in firsts:
        microbatch[codes == first] = np.arange(np.count_nonzero(codes == first))
    return np.asarray((codes + NUM_KINDS * microbatch)[microbatch < num_microbatches])
