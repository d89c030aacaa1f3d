"""Axes: where a value lies in the picture, ticks and their words; and intervals of time in bins and lanes."""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.units import format_seconds

_STEPS: Final = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` evenly onto pixels from `start` to `end` (which may run backwards)."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of one value; a scale without extent puts everything at its start."""
        span = self.high - self.low
        return self.start + (value - self.low) / span * (self.end - self.start) if span else self.start

    def map(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The pixels of many values."""
        span = self.high - self.low or math.inf
        return np.asarray(self.start + (values - self.low) / span * (self.end - self.start), dtype=np.float64)


@dataclass(frozen=True)
class Quantity:
    """Quantity along an axis: its units as (name, factor), largest first."""

    units: tuple[tuple[str, float], ...]

    def unit(self, largest: float) -> tuple[str, float]:
        """The unit in which a person would give `largest`."""
        return next((unit for unit in self.units if abs(largest) >= unit[1] * 0.9995), self.units[-1])


TIME: Final = Quantity((("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)))
MEMORY: Final = Quantity((("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0)))
SHARE: Final = Quantity((("%", 0.01),))
PLAIN: Final = Quantity((("", 1.0),))


@dataclass(frozen=True)
class AxisTick:
    """A place on an axis and its label."""

    value: float
    label: str


def ticks(low: float, high: float, quantity: Quantity, about: int = 8, whole: bool = False) -> list[AxisTick]:
    """Round places in [low, high], `about` that many; the last one's label carries the unit.

    `whole` leaves no fractions of the unit, for axes that count things.
    """
    name, factor = quantity.unit(max(abs(low), abs(high)))
    step = _round_step((high - low) / factor / max(about, 1))
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / factor / step - 1e-9), math.floor(high / factor / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    labels = [f"{index * step:.{digits}f}" if index else "0" for index in range(first, last + 1)]
    if labels and name:
        labels[-1] += f"\N{NO-BREAK SPACE}{name}"
    return [AxisTick((first + i) * step * factor, label) for i, label in enumerate(labels)]


def _round_step(step: float) -> float:
    """The next 1, 2 or 5 times a power of ten from `step` on."""
    if step <= 0 or not math.isfinite(step):
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in _STEPS if power * factor >= step * (1 - 1e-9))


def duration(seconds: float) -> str:
    """A length of time in three digits; zero is plainly 0."""
    return format_seconds(seconds) if abs(seconds) >= 5e-10 else "0"


def moment(seconds: float, finest: float) -> str:
    """A time on the axis, to a hundredth of `finest`: ``1.2345 s`` where things last 10 ms."""
    if abs(seconds) < 5e-10:
        return "0"
    unit, factor = TIME.unit(seconds)
    digits = 2 - math.floor(math.log10(max(finest, 1e-9) / factor))
    return f"{seconds / factor:.{min(max(digits, 0), 9)}f} {unit}"


def span(start: float, end: float) -> str:
    """``12.30 ms to 14.50 ms (2.20 ms)``"""
    finest = end - start or abs(end)
    return f"{moment(start, finest)} to {moment(end, finest)} ({duration(end - start)})"


def shorten(text: str, length: int) -> str:
    """`text`, cut with an ellipsis where it is longer than `length`."""
    return text if len(text) <= length else text[: length - 1] + "…"


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
