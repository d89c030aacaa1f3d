"""matplotlib for pictures in files."""

import io
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.strict import write_bytes


def load_pyplot() -> Any:
    """``matplotlib.pyplot`` without a screen, which writes names with ``$`` as they are; InputError without it."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install 'farpipe[plot]'") from None
    mpl.use("Agg")
    mpl.rcParams["text.parse_math"] = False
    from matplotlib import pyplot

    return pyplot


MOST_DECADES: Final = 3.0
"""Decades of a logarithmic axis up to which 2 and 5 have labels too."""


def plain_ticks(figure: Any) -> None:
    """Labels such as 0.1 and 20 on logarithmic axes: matplotlib's own are formulas, which `load_pyplot` has switched
    off, so that they would be shown as their source."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (one for axes in figure.axes for one in (axes.xaxis, axes.yaxis) if one.get_scale() == "log"):
        low, high = axis.get_view_interval()
        steps = (1.0, 2.0, 5.0) if low <= 0 or high <= low * 10**MOST_DECADES else (1.0,)
        axis.set_major_locator(LogLocator(subs=steps, numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def save_figure(figure: Any, path: Path | str, *, dpi: int) -> None:
    """Write a figure whole or not at all, in the format of the file's ending, .svg or .png; errors as `write_bytes`."""
    plain_ticks(figure)
    written = io.BytesIO()
    form = Path(path).suffix.removeprefix(".") or "svg"
    figure.savefig(written, format=form, dpi=dpi, metadata={"Software" if form == "png" else "Creator": "farpipe"})
    write_bytes(path, written.getvalue())
