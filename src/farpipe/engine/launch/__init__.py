"""A run as files and processes: its directory, its ranks on this machine, commands for others."""

from typing import TYPE_CHECKING

from farpipe.core.lazy import lazy

if TYPE_CHECKING:
    from farpipe.engine.launch.learned import Learned, learn
    from farpipe.engine.launch.runs import Run, train

__all__ = ["Learned", "Run", "learn", "train"]

# Imported when they are asked for: the ranks need none of it.
__getattr__ = lazy(
    __name__, {"Learned": "learned:Learned", "learn": "learned:learn", "Run": "runs:Run", "train": "runs:train"}
)
