"""matplotlib for pictures in files."""

from typing import Any

from farpipe.errors import InputError


def load_pyplot() -> Any:
    """``matplotlib.pyplot`` without a screen; InputError without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install 'farpipe[plot]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
