"""V-Half and V-Min: half or a third of 1F1B's memory (Qi et al., arXiv 2405.15362).

Two stages per rank in a V. Every microbatch repeats one building block every six slots, a slot being the time of any
F, I or W; the shorter the path of a microbatch through the block, the less it holds. Neighbouring stages follow each
other after so many slots:

    V-Half: 2 down, 1 up; going back 2 down, 1 up   peak (p + 2) // 2 microbatches
    V-Min:  1 everywhere                                       peak (p + 4) // 3 microbatches

The blocks are then pushed together: only the order of F and I is kept, and W fills the gaps.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.schedule.library.list_scheduling import fill_weights
from farpipe.core.schedule.library.placement import require_v_shape
from farpipe.core.step import KINDS, Problem, Schedule
from farpipe.core.step.codes import encode

PERIOD: Final = 6
"""Slots per microbatch on a rank: F, I and W of two stages."""

Slots = tuple[int, int, int, int]


def v_half(problem: Problem) -> Schedule:
    """Peak (p + 2) // 2 microbatches; about half of 1F1B's bubble at equal F, I and W."""
    ranks = require_v_shape(problem, "v-half")
    return _repeat_block(problem, (2, 1, 2, 1), (len(ranks) + 2) // 2, "v-half")


def v_min(problem: Problem) -> Schedule:
    """Peak (p + 4) // 3 microbatches; about two thirds of 1F1B's bubble at equal F, I and W."""
    ranks = require_v_shape(problem, "v-min")
    return _repeat_block(problem, (1, 1, 1, 1), (len(ranks) + 4) // 3, "v-min")


def _repeat_block(problem: Problem, slopes: Slots, num_in_flight: int, method: str) -> Schedule:
    block = building_block(problem.num_ranks, slopes)
    passes = [_passes(block, stages, problem.num_microbatches) for stages in problem.stages_of_rank]
    return fill_weights(problem, passes, method, most_held=2 * num_in_flight)


@cache
def building_block(num_ranks: int, slopes: Slots) -> dict[tuple[int, str], int]:
    """The slot of F and I of every stage: the shortest path on which no rank meets itself again, modulo PERIOD."""
    pauses = sorted(product(range(PERIOD), repeat=3), key=sum)
    blocks = (_block(num_ranks, slopes, pause) for pause in pauses)
    return next(block for block in blocks if _is_free_of_collisions(num_ranks, block))


def _block(num_ranks: int, slopes: Slots, pauses: Sequence[int]) -> dict[tuple[int, str], int]:
    """Down, up, back down and back up the V; at the three turns the rank goes on after a pause."""
    down, up = range(num_ranks), range(num_ranks, 2 * num_ranks)
    legs = (("F", down), ("F", up), ("I", reversed(up)), ("I", reversed(down)))
    block, slot = {}, 0
    for (kind, stages), slope, pause in zip(legs, slopes, (*pauses, 0), strict=True):
        for stage in stages:
            block[stage, kind] = slot
            slot += slope
        slot += 1 - slope + pause
    return block


def _is_free_of_collisions(num_ranks: int, block: dict[tuple[int, str], int]) -> bool:
    for rank in range(num_ranks):
        pair = (rank, 2 * num_ranks - 1 - rank)
        if len({block[stage, kind] % PERIOD for stage in pair for kind in "FI"}) < 4:
            return False
    return True


def _passes(block: dict[tuple[int, str], int], stages: tuple[int, ...], num_microbatches: int) -> NDArray[np.int64]:
    """Codes of F and I of a rank in the order in which the repeated blocks have them."""
    every, both = np.arange(num_microbatches), [(stage, kind) for stage in stages for kind in "FI"]
    codes = [encode(KINDS.index(kind), stage * num_microbatches + every) for stage, kind in both]
    slots = [block[stage, kind] + PERIOD * every for stage, kind in both]
    return np.concatenate(codes)[np.argsort(np.concatenate(slots), kind="stable")]
