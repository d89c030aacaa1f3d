"""Intervals of time: how much of every bin they cover, and lanes on which none overlap."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def covered(start: Floats, end: Floats, edges: Floats) -> Floats:
    """Seconds that the intervals [N] spend between neighbours of the last axis of `edges` [..., B + 1]: [..., B].

    Where intervals overlap, each counts.
    """
    return np.diff(_passed(start, edges) - _passed(end, edges))


def _passed(times: Floats, edges: Floats) -> Floats:
    """Sum of ``max(0, t - time)`` for every edge t."""
    ordered = np.sort(times)
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    count = np.searchsorted(ordered, edges)
    return np.asarray(count * edges - sums[count], dtype=np.float64)


def lanes(start: NDArray[Any], end: NDArray[Any]) -> NDArray[np.int64]:
    """The lowest lane for every interval so that none overlap on a lane; intervals sorted by start."""
    chosen, free = np.zeros(start.size, np.int64), [-np.inf]
    for index in range(start.size):
        lane = next((i for i, until in enumerate(free) if until <= start[index]), len(free))
        if lane == len(free):
            free.append(-np.inf)
        free[lane], chosen[index] = end[index], lane
    return chosen
