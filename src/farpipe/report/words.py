"""Times as the report writes them."""

import math

from farpipe.report.axis import TIME
from farpipe.units import format_seconds


def duration(seconds: float) -> str:
    """A length of time in three digits; zero is plainly 0."""
    return format_seconds(seconds) if abs(seconds) >= 5e-10 else "0"


def moment(seconds: float, finest: float) -> str:
    """A time on the axis, told to a hundredth of `finest`: ``1.2345 s`` where things last 10 ms."""
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
