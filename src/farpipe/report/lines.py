"""Line charts drawn by matplotlib, side by side in one picture."""

import io
import math
import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.report.axis import ticks
from farpipe.report.charts import Curve, Floats, LineChart

MAX_POINTS: Final = 400
"""A longer curve is drawn by the least and the greatest value of each of half as many pieces."""

_PLACE: Final = re.compile(r'^ *(?:<path d=")?[ML] [\d. -]+', re.MULTILINE)
_DIGITS: Final = re.compile(r"(\.\d\d)\d+")
"""Digits beyond hundredths of a point, left out of the places that a curve goes through: pages stay small."""
WITHOUT: Final = "Charts are left out, since matplotlib is not installed: pip install 'farpipe[plot]'."
"""Sentence for a page without charts."""
_STYLE: Final = {
    "svg.hashsalt": "farpipe",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.0,
    "axes.edgecolor": "#c9ced6",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e3e6eb",
    "xtick.color": "#5b6472",
    "ytick.color": "#5b6472",
}
_LOOKS: Final[dict[str, dict[str, Any]]] = {
    "predicted": {"color": "#5b6472", "linewidth": 1.2},
    "measured": {"color": "#2465a8", "linewidth": 1.5},
    "run0": {"color": "#2465a8", "linewidth": 2.4},
    "run1": {"color": "#c2571a", "linewidth": 1.5, "dashes": (5, 3)},
    "run2": {"color": "#4b7f52", "linewidth": 1.5, "dashes": (2, 2)},
    "run3": {"color": "#7a4fa3", "linewidth": 1.5, "dashes": (8, 3, 2, 3)},
}
_GAPS: Final = (0.2, 0.55)
"""Space between neighbouring charts, in widths and heights of one."""
_LIMIT: Final = {"color": "#a3135f", "linewidth": 1.2, "linestyle": "--"}


def draw_lines(charts: Sequence[LineChart], columns: int, inches: tuple[float, float]) -> str | None:
    """The charts as one SVG with a key of the curves; None without matplotlib. `inches`: width and height of each."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        return None
    rows = math.ceil(len(charts) / columns)
    width, height = columns * inches[0], rows * inches[1] + 0.4
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(width, height))
        grid = figure.subplots(rows, columns, squeeze=False)
        figure.subplots_adjust(0.6 / width, 0.5 / height, 1 - 0.15 / width, 1 - 0.7 / height, *_GAPS)
        for axes, chart in zip_longest(grid.flat, charts):
            if chart is None:
                axes.remove()
            else:
                _draw(axes, chart)
        known = {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()}
        figure.legend(known.values(), known, loc="upper left", ncols=4, frameon=False)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": "farpipe"})
    return _PLACE.sub(lambda place: _DIGITS.sub(r"\1", place[0]), written.getvalue())


def _draw(axes: Any, chart: LineChart) -> None:
    for curve in chart.curves:
        _draw_curve(axes, curve)
    if chart.limit_is_drawn:
        axes.axhline(chart.limit, label="limit", **_LIMIT)
    axes.set_xlim(chart.x)
    axes.set_ylim(chart.y)
    across, up = ticks(*chart.x, chart.x_axis, 5, chart.counts), ticks(*chart.y, chart.y_axis, 4)
    axes.set_xticks([tick.value for tick in across], [tick.label for tick in across])
    axes.set_yticks([tick.value for tick in up], [tick.label for tick in up])
    axes.tick_params(length=0)
    axes.grid(axis="y")
    axes.set_title(chart.title, loc="left", fontweight="bold", fontsize=9)
    axes.set_title(chart.text, loc="right", fontsize=7.5, color="#5b6472")
    axes.set_xlabel(chart.x_label)


def _draw_curve(axes: Any, curve: Curve) -> None:
    drawstyle = "steps-post" if curve.step else "default"
    marker = "o" if curve.y.size == 1 else None  # a line of one point would be invisible
    chosen = _telling_points(curve.y)
    axes.plot(
        curve.x[chosen], curve.y[chosen], drawstyle=drawstyle, label=curve.name, marker=marker, **_LOOKS[curve.look]
    )


def _telling_points(values: Floats) -> NDArray[np.intp]:
    """The indices to draw: all of them, or those of the extremes of each piece of a long curve."""
    if values.size <= MAX_POINTS:
        return np.arange(values.size)
    pieces = np.array_split(np.arange(values.size), MAX_POINTS // 2)
    extremes = [(piece[values[piece].argmin()], piece[values[piece].argmax()]) for piece in pieces]
    return np.unique([0, *np.ravel(extremes), values.size - 1])
