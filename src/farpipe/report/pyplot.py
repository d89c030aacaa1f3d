"""matplotlib for pictures in files."""

import io
from pathlib import Path
from typing import Any

from farpipe.errors import InputError
from farpipe.strict import write_bytes


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


def save_figure(figure: Any, path: Path | str, *, dpi: int) -> None:
    """Write a figure whole or not at all, in the format of the file's ending, .svg or .png; errors as `write_bytes`."""
    written = io.BytesIO()
    form = Path(path).suffix.removeprefix(".") or "svg"
    figure.savefig(written, format=form, dpi=dpi, metadata={"Software" if form == "png" else "Creator": "farpipe"})
    write_bytes(path, written.getvalue())
