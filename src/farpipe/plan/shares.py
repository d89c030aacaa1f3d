"""Unequal shares of a batch: numbers of microbatches that add up to it and let all finish as early as possible."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from farpipe.errors import InfeasibleError

WINDOW: Final = 32
"""Microbatches to both sides of an even finish that are looked at; beyond it no better division was ever found."""

Best = dict[int, tuple[float, float, tuple[int, ...]]]
"""By the sequences that the groups so far have together: seconds of the slowest, sum of squared seconds, numbers."""


@dataclass(frozen=True)
class Pace:
    """The seconds of one group as its microbatches grow: ``fixed_s + count x each_s``."""

    sequences: int
    """Of one microbatch."""
    fixed_s: float
    each_s: float
    pinned: int | None = None
    """Its number of microbatches where that is given."""

    def seconds(self, count: int) -> float:
        """Seconds of so many microbatches."""
        return self.fixed_s + count * self.each_s


def balanced_counts(batch: int, paces: Sequence[Pace]) -> list[int]:
    """The number of microbatches of every group, one at least, that together make `batch` sequences.

    The slowest group is as fast as it can be, exactly, among numbers within WINDOW of those that finish at once; of
    several such, those with the least sum of squared seconds are taken. InfeasibleError where no numbers add up.
    """
    even_s = _even_finish_s(batch, paces)
    best: Best = {0: (0.0, 0.0, ())}
    for pace in paces:
        best = _added(best, pace, _around(pace, even_s, batch), batch)
    if batch not in best:
        sizes = " and ".join(str(pace.sequences) for pace in paces)
        pinned = ", with those pinned," if any(pace.pinned for pace in paces) else ""
        raise InfeasibleError(
            f"no whole numbers of microbatches of {sizes} sequences{pinned} make training.global_batch {batch}; choose "
            "a smaller training.microbatch_size or another batch"
        )
    return list(best[batch][-1])


def _even_finish_s(batch: int, paces: Sequence[Pace]) -> float:
    """Time by which all together have done `batch` sequences, fractions of microbatches allowed."""
    free = [pace for pace in paces if pace.pinned is None]
    rest = batch - sum(pace.sequences * (pace.pinned or 0) for pace in paces)
    speed = sum(pace.sequences / pace.each_s for pace in free)
    return (rest + sum(pace.sequences * pace.fixed_s / pace.each_s for pace in free)) / speed if free else 0.0


def _around(pace: Pace, even_s: float, batch: int) -> range:
    if pace.pinned is not None:
        return range(pace.pinned, pace.pinned + 1)
    middle, most = (even_s - pace.fixed_s) / pace.each_s, batch // pace.sequences
    return range(max(1, math.floor(middle) - WINDOW), min(most, math.ceil(middle) + WINDOW) + 1)


def _added(best: Best, pace: Pace, counts: range, batch: int) -> Best:
    """`best` with one group more."""
    found: Best = {}
    for count in counts:
        own_s = pace.seconds(count)
        for done, (slowest_s, squares, before) in best.items():
            total = done + count * pace.sequences
            if total > batch:
                continue
            one = max(slowest_s, own_s), squares + own_s**2, (*before, count)
            if total not in found or one < found[total]:
                found[total] = one
    return found
