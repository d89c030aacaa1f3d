"""A run as files and processes: its directory, its ranks on this machine, commands for others."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from farpipe.engine.launch.learned import Learned, learn
    from farpipe.engine.launch.runs import Run, train

_HOMES: Final = {"Learned": "learned", "learn": "learned", "Run": "runs", "train": "runs"}
__all__ = ["Learned", "Run", "learn", "train"]


def __getattr__(name: str) -> Any:
    """What this package hands out, imported when it is asked for: the ranks need none of it."""
    if name in _HOMES:
        return getattr(import_module(f"farpipe.engine.launch.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
