"""Long steps: the order of a few hundred microbatches, its steady state repeated as often as the step asks for.

Where microbatches are identical, an order is a sequence of stages and kinds; the microbatch follows from counting.
Take two moments of a valid order at which every stage has the same numbers in flight between F, I and W. Between them
every stage has done each kind equally often, say q times; so what happened between them can be done again, for q more
microbatches, and again: memory stands where it stood, and everything finds its input q microbatches further on.
"""

from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.step import Hop, Problem, Transfer
from farpipe.core.step.arrays import Floats, Ints
from farpipe.core.step.codes import NUM_KINDS, B, I, cell_of, encode, kind_of
from farpipe.core.step.player import CodedSchedule
from farpipe.core.step.problem import STAGE_FIGURES
from farpipe.planning.search.step import SearchStep

LONG_ACTIONS: Final = 400_000
"""Steps with more actions than that are extended from shorter ones."""
_SHORT_MICROBATCHES: Final = 256
_SHORT_PER_STAGE: Final = 16
_WORTH_IT: Final = 4
"""The least ratio of the whole step to the short one."""
_MAX_PERIODS: Final = 4
"""Candidates of one order: what looks fastest need not be when it is repeated, so the simulator judges a few."""


def short_microbatches(step: SearchStep) -> int | None:
    """Number of microbatches that show the steady state of a long step; None: not long, or they differ."""
    problem = step.problem
    count = max(_SHORT_MICROBATCHES, _SHORT_PER_STAGE * problem.num_stages)
    long = step.num_actions > LONG_ACTIONS and problem.num_microbatches > _WORTH_IT * count
    return count if long and step.identical else None


def shortened(problem: Problem, num_microbatches: int) -> Problem:
    """The same step with fewer microbatches, all identical."""

    def first(value: Any) -> Any:
        return value[0] if isinstance(value, tuple) else value

    def of_one(transfer: Transfer | None) -> Transfer | None:
        return transfer and Transfer(**{name: first(figure) for name, figure in transfer})

    stages = tuple(
        stage.model_copy(update={name: first(getattr(stage, name)) for name in STAGE_FIGURES})
        for stage in problem.stages
    )
    hops = tuple(hop and Hop(forward=of_one(hop.forward), backward=of_one(hop.backward)) for hop in problem.hops)
    changed = {"num_microbatches": num_microbatches, "stages": stages, "hops": hops, "follows": None}
    return problem.model_copy(update=changed)


@dataclass(frozen=True)
class Period:
    """The part that repeats: on every rank the actions from `low` up to `high`, each stage and kind `count` times."""

    low: Ints
    high: Ints
    count: int


def find_periods(step: SearchStep, orders: CodedSchedule, start_s: Floats) -> list[Period]:
    """Steady states in the middle half of `orders`, each between two equal moments; the fastest per microbatch first.

    Moments are those at which the last stage begins a backward. None in orders that have both B and I.
    """
    codes, begin = orders
    num_stages, num_microbatches = step.shape
    kinds, (stages, _) = kind_of(codes), cell_of(codes, num_microbatches)
    if (kinds == B).any() and (kinds == I).any():
        return []
    moments = np.sort(start_s[(stages == num_stages - 1) & ((kinds == I) | (kinds == B))])
    moments = moments[num_microbatches // 4 : 3 * num_microbatches // 4]
    lane = encode(kinds, stages)
    lanes = [np.sort(start_s[lane == one]) for one in range(NUM_KINDS * num_stages)]
    done = np.array([np.searchsorted(lane, moments) for lane in lanes if lane.size])
    rows = [start_s[begin[r] : begin[r + 1]] for r in range(begin.size - 1)]

    def period(low: int, high: int) -> Period:
        first, end = (begin[:-1] + [np.searchsorted(row, moments[at]) for row in rows] for at in (low, high))
        return Period(first, end, int(done[0, high] - done[0, low]))

    return [period(*pair) for pair in _fastest_pairs(done - done[0], done[0], moments)]


def _fastest_pairs(states: NDArray[np.int64], done: NDArray[np.int64], moments: Floats) -> list[tuple[int, int]]:
    """Moments, of all [T] with equal columns of `states` [lanes, T], with the least time per microbatch `done`.

    Of those that take the same the shortest, and only a few that differ.
    """
    equal: dict[bytes, list[int]] = {}
    for at, state in enumerate(states.T):
        equal.setdefault(state.tobytes(), []).append(at)
    best: dict[float, tuple[int, int, int]] = {}
    for low, high in chain.from_iterable(combinations(group, 2) for group in equal.values()):
        count = int(done[high] - done[low])
        if count > 0:
            rate = float(f"{(moments[high] - moments[low]) / count:.9g}")
            best[rate] = min(best.get(rate, (count, low, high)), (count, low, high))
    return [best[rate][1:] for rate in sorted(best)[:_MAX_PERIODS]]


def extended(step: SearchStep, orders: CodedSchedule, period: Period, num_microbatches: int) -> CodedSchedule:
    """`orders` with `period` repeated until `num_microbatches` are done; what is too much at the end is left out."""
    codes, begin = orders
    short = step.shape[1]
    repeats = -(-(num_microbatches - short) // period.count) + 1
    rows = []
    for rank in range(begin.size - 1):
        low, high = period.low[rank], period.high[rank]
        parts = (codes[begin[rank] : low], np.tile(codes[low:high], repeats), codes[high : begin[rank + 1]])
        rows.append(_numbered(np.concatenate(parts), short, num_microbatches))
    sizes = [row.size for row in rows]
    return np.concatenate(rows), np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)


def _numbered(codes: Ints, short: int, num_microbatches: int) -> Ints:
    """Codes of a step with more microbatches: those of one stage and kind are counted; what is beyond is left out."""
    kinds, (stages, _) = kind_of(codes), cell_of(codes, short)
    lane = encode(kinds, stages)
    order = np.argsort(lane, kind="stable")
    sorted_lanes = lane[order]
    first = np.searchsorted(sorted_lanes, sorted_lanes)
    microbatch = np.empty(codes.size, np.int64)
    microbatch[order] = np.arange(codes.size) - first
    keep = microbatch < num_microbatches
    return encode(kinds, stages.astype(np.int64) * num_microbatches + microbatch)[keep].astype(np.int32)
