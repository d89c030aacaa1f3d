"""A small line chart as SVG: curves or steps on common axes, each named where it ends."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.report.axis import Quantity, Scale, spread, ticks
from farpipe.report.figure import Block, Figure, Markup, join, number, tag

Floats = NDArray[np.float64]

MAX_POINTS: Final = 400
"""A longer curve is drawn by the least and the greatest value of each of half as many pieces."""

_TOP_PX: Final = 30.0
_BOTTOM_PX: Final = 22.0
_LABEL_PX: Final = 15.0
_LEFT_PX: Final = 52.0
_RIGHT_PX: Final = 20.0
_LETTER_PX: Final = 6.2
_NAME_GAP_PX: Final = 14.0


@dataclass(frozen=True)
class Curve:
    """Values `y` [N] at `x` [N], N > 0; `look` is a class of figures.css, a `step` holds each value until the next."""

    name: str
    x: Floats
    y: Floats
    look: str
    step: bool = False


@dataclass(frozen=True)
class LineChart:
    """One or more curves on common axes.

    `limit` is a line across, such as the memory of a rank; it is left out where it would flatten the curves. Ranges
    that are not given follow from the curves. `named` writes the curves' names at their ends.
    """

    key: str
    title: str
    curves: Sequence[Curve]
    x_axis: Quantity
    y_axis: Quantity
    x_label: str = ""
    text: str = ""
    limit: float | None = None
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    counts: bool = False
    named: bool = True
    width: float = 420.0
    height: float = 210.0

    @cached_property
    def x(self) -> Scale:
        """Horizontal scale; room is left at the right for the names."""
        low, high = self.x_range or _range([curve.x for curve in self.curves])
        names = max(len(curve.name) for curve in self.curves) * _LETTER_PX + 26 if self.named else _RIGHT_PX
        return Scale(low, high if high > low else low + 1.0, _LEFT_PX, self.width - names)

    @cached_property
    def y(self) -> Scale:
        """Vertical scale, upwards, with a little room above and below the curves."""
        low, high = self.y_range or _roomy(_range([curve.y for curve in self.curves]))
        return Scale(low, high, self._bottom, _TOP_PX)

    @property
    def _bottom(self) -> float:
        return self.height - _BOTTOM_PX - (_LABEL_PX if self.x_label else 0.0)

    def figure(self) -> Figure:
        """The chart drawn."""
        content = [*self._head(), *self._axes(), *self._limit(), *self._curves(), *self._names()]
        described = "; ".join(_describe(curve, self.y_axis) for curve in self.curves)
        block = Block(join(content), self.height)
        return Figure(self.key, self.title, f"Line chart. {described}.", self.width, block)

    def _head(self) -> Iterator[Markup]:
        yield tag("text", self.title, class_="head", x=0, y=13)
        if self.text:
            yield tag("text", self.text, class_="muted end", x=self.width - 2, y=13)

    def _axes(self) -> Iterator[Markup]:
        up = ticks(self.y.low, self.y.high, self.y_axis, 4)
        heights = [self.y(tick.value) for tick in up]
        lines = [f"M{number(self.x.start)} {number(y)}H{number(self.x.end)}" for y in heights]
        yield tag("path", class_="grid", d="".join(lines))
        for tick, y in zip(up, heights, strict=True):
            yield tag("text", tick.label, class_="end muted", x=_LEFT_PX - 5, y=y + 4)
        for tick in ticks(self.x.low, self.x.high, self.x_axis, 5, self.counts):
            yield tag("text", tick.label, class_="mid muted", x=self.x(tick.value), y=self._bottom + 15)
        if self.x_label:
            yield tag("text", self.x_label, class_="end muted", x=self.x.end, y=self._bottom + 30)

    @property
    def limit_is_drawn(self) -> bool:
        """True if the limit lies within the chart."""
        return self.limit is not None and self.y.low <= self.limit <= self.y.high

    def _limit(self) -> Iterator[Markup]:
        if self.limit is not None and self.limit_is_drawn:
            yield tag("path", class_="limit", d=f"M{number(self.x.start)} {number(self.y(self.limit))}H{self.x.end:g}")

    def _curves(self) -> Iterator[Markup]:
        for curve in self.curves:
            title = tag("title", _describe(curve, self.y_axis))
            yield tag("path", title, class_=f"curve {curve.look}", d=_path(curve, self.x, self.y))

    def _names(self) -> Iterator[Markup]:
        """Every curve's name at its end, moved apart where curves end together."""
        if not self.named:
            return
        places = spread([self.y(float(curve.y[-1])) for curve in self.curves], _NAME_GAP_PX)
        for curve, y in zip(self.curves, places, strict=True):
            yield tag("path", class_=f"curve {curve.look}", d=f"M{number(self.x.end + 4)} {number(y)}h12")
            yield tag("text", curve.name, x=self.x.end + 20, y=y + 4)


def _range(values: Sequence[Floats]) -> tuple[float, float]:
    return min(float(v.min()) for v in values), max(float(v.max()) for v in values)


def _roomy(values: tuple[float, float]) -> tuple[float, float]:
    low, high = values
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _describe(curve: Curve, axis: Quantity) -> str:
    """The curve in a sentence, for people who hear the page or point at the curve."""
    name, factor = axis.unit(float(np.abs(curve.y).max()))
    first, last, most = (f"{value / factor:.3g} {name}".strip() for value in (*curve.y[[0, -1]], curve.y.max()))
    return f"{curve.name}: from {first} to {last}, at most {most}"


def _path(curve: Curve, x: Scale, y: Scale) -> str:
    chosen = _telling_points(curve.y)
    across, up = x.map(curve.x[chosen]), y.map(curve.y[chosen])
    if not curve.step:
        points = [f"{number(a)} {number(b)}" for a, b in zip(across, up, strict=True)]
        dot = "h.01" if len(points) == 1 else ""  # a curve of one point would be invisible
        return "M" + "L".join(points) + dot
    steps = [f"H{number(a)}V{number(b)}" for a, b in zip(across[1:], up[1:], strict=True)]
    return f"M{number(across[0])} {number(up[0])}{''.join(steps)}H{number(x.end)}"


def _telling_points(values: Floats) -> NDArray[np.intp]:
    """The indices to draw: all of them, or those of the extremes of each piece of a long curve."""
    if values.size <= MAX_POINTS:
        return np.arange(values.size)
    pieces = np.array_split(np.arange(values.size), MAX_POINTS // 2)
    extremes = [(piece[values[piece].argmin()], piece[values[piece].argmax()]) for piece in pieces]
    return np.unique([0, *np.ravel(extremes), values.size - 1])
