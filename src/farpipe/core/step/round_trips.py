"""Round trips over hops, and the forwards in flight that hide them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farpipe.core.step.problem import Problem

_ROUNDING = 1e-9


def round_trip_s(problem: Problem, hop: int) -> float:
    """A message over a hop and one back, the mean over the microbatches, on free links."""
    there_s, back_s = problem.traffic.messages.arrives_after_s
    return float(there_s[hop].mean() + back_s[hop + 1].mean())


def hiding_forwards(trips_s: ArrayLike, pace_s: float, most: int, *, whole: bool = True) -> NDArray[np.int64]:
    """Forwards in flight that hide each round trip: ceil(trip / `pace_s`), at most `most`.

    The pace is what the slowest rank computes for one microbatch. Not `whole`: rounded down, which hides most of a trip
    with one forward less.
    """
    trips = np.asarray(trips_s, np.float64)
    ratio = np.divide(trips, pace_s, out=np.where(trips > 0, np.inf, 0.0), where=pace_s > 0)
    ratio = np.minimum(ratio, most)
    return (np.ceil(ratio - _ROUNDING) if whole else np.floor(ratio)).astype(np.int64)


def upstream_sums(of_hop: Sequence[int] | NDArray[np.int64]) -> list[int]:
    """Sum over the hops at or downstream of every stage."""
    return [int(sum(of_hop[stage:])) for stage in range(len(of_hop) + 1)]
