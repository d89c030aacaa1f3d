"""ZBV: zero bubble in the memory of 1F1B, two stages per rank in a V (Qi et al., arXiv 2401.10241).

With F = I = W, no delay and 2p - 1 microbatches or more, no rank waits between its first and its last action, and none
holds more than p microbatches.
"""

import numpy as np
from numpy.typing import NDArray

from farpipe.schedule.library.list_scheduling import fill_weights, memory_headroom
from farpipe.schedule.library.placement import microbatch_bytes, require_v_shape
from farpipe.step import KINDS, Problem, Schedule

_F, _I = KINDS.index("F"), KINDS.index("I")


def zbv(problem: Problem) -> Schedule:
    """F and I by the handcrafted pattern, W where there is time."""
    ranks = require_v_shape(problem, "zbv")
    position_of = {rank: position for position, rank in enumerate(ranks)}
    passes = [_passes(position_of[rank], len(ranks), problem.num_microbatches) for rank in range(len(ranks))]
    headroom = memory_headroom(problem, len(ranks) * microbatch_bytes(problem))
    return fill_weights(problem, passes, headroom, "zbv")


def _passes(position: int, num_ranks: int, num_microbatches: int) -> NDArray[np.int64]:
    """Codes of the rank with stage `position` (down) and its mirror (up); what has run out leaves the pattern."""
    down, up = position, 2 * num_ranks - 1 - position
    to_go = num_ranks - position
    pattern: list[tuple[int, int]] = [(down, _F)] * (2 * to_go - 1)
    pattern += [(up, _F), (down, _F)] * position
    pattern += [(up, _F), (up, _I)] * to_go
    pattern += [(down, _F), (down, _I), (up, _F), (up, _I)] * num_microbatches
    done = dict.fromkeys(pattern, 0)
    codes = []
    for stage, kind in pattern:
        microbatch = done[stage, kind]
        if microbatch < num_microbatches and (kind == _F or microbatch < done[stage, _F]):
            codes.append(4 * (stage * num_microbatches + microbatch) + kind)
            done[stage, kind] += 1
    return np.array(codes)
