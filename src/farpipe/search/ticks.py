"""Seconds as whole ticks, for solvers that know only integers."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from farpipe.step.lowering import Floats, Ints, StepArrays

_MAX_TICKS: Final = 1_000_000
_CLOSE: Final = 1e-9


@dataclass(frozen=True)
class Ticks:
    """The length of a tick; `exact`: every duration is a whole number of them (to nine digits)."""

    seconds: float
    exact: bool

    def down(self, seconds: Floats | float) -> Ints:
        """Whole ticks that fit: never more than the time itself, so that what is computed with them is a bound."""
        ticks = np.asarray(seconds, np.float64) / self.seconds
        near = np.rint(ticks)
        return np.where(np.abs(ticks - near) <= _CLOSE * np.maximum(near, 1), near, np.floor(ticks)).astype(np.int64)

    def up(self, seconds: float) -> int:
        """Whole ticks in which the time fits."""
        return -int(self.down(-seconds))


def choose_ticks(durations_s: Floats, horizon_s: float) -> Ticks:
    """The longest tick that divides all durations, or a millionth of `horizon_s` where there is none so long."""
    tick = 0.0
    for value in np.unique(durations_s[durations_s > 0]):
        tick = _common(tick, float(value), horizon_s / _MAX_TICKS)
        if tick == 0.0:
            return Ticks(horizon_s / _MAX_TICKS, exact=False)
    tick = tick or 1.0
    counts = durations_s / tick
    exact = bool((np.abs(counts - np.rint(counts)) <= _CLOSE * np.maximum(counts, 1)).all())
    return Ticks(tick, exact=True) if exact else Ticks(horizon_s / _MAX_TICKS, exact=False)


def durations_s(arrays: StepArrays) -> Floats:
    """All durations of a step."""
    times = [(part.occupies_s, part.arrives_after_s) for part in (arrays.messages, arrays.collectives)]
    return np.concatenate([part.ravel() for part in (arrays.duration_s, *times[0], *times[1], arrays.opens_s)])


def _common(one: float, other: float, smallest: float) -> float:
    """The greatest common divisor (Euclid's algorithm, forgiving rounding), 0 if it is below `smallest`."""
    larger = max(one, other)
    while other > _CLOSE * larger:
        one, other = other, abs(one - round(one / other) * other)
    return one if one >= smallest else 0.0
