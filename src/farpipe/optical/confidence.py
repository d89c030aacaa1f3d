"""Confidence intervals of means over seeds, plain and paired."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import NormalDist, fmean, stdev
from typing import Final

_T_975: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t at 97.5 % for 1 to 30 degrees of freedom."""


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval."""
        return (self.high - self.low) / 2


def mean_interval(values: Sequence[float]) -> Interval:
    """Student's interval of the mean of independent values; of a single value it is infinite."""
    if len(values) < 2:
        return Interval(values[0], -inf, inf)
    mean, half = fmean(values), t_975(len(values) - 1) * stdev(values) / sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def paired_change(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Interval of the relative change ``value / baseline - 1`` over pairs that saw the same random stream."""
    return mean_interval([value / base - 1 for value, base in zip(values, baseline, strict=True)])


def t_975(freedom: int) -> float:
    """Student's t at 97.5 %; beyond 30 degrees by the first correction to the normal quantile, within 0.001."""
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom)
