"""Exceptions for everything that can go wrong, each with the exit code that the command line returns for it."""

import os
import re
import traceback
from pathlib import Path
from typing import Final, NamedTuple


class FailedRank(NamedTuple):
    """The rank of a run that an error is about."""

    rank: int
    exit_code: int
    """Negative: the signal that ended it."""
    is_victim: bool
    """True if it ended because it had lost another."""


class FarpipeError(Exception):
    """Base of every error that farpipe raises on purpose; its text is written for the user."""

    exit_code = 1
    failed_rank: FailedRank | None = None


class UsageError(FarpipeError):
    """The command was called with wrong or contradictory options (exit 2)."""

    exit_code = 2


class InputError(FarpipeError):
    """A file or value that the user gave is wrong; the text names the place and what to do (exit 3)."""

    exit_code = 3


class ScheduleError(InputError):
    """A schedule breaks a rule; the text names the first broken rule and draws the place (exit 3)."""


class UsersCodeError(FarpipeError):
    """A function that the user gave breaks or gives what is no answer; the text names it and the line (exit 3).

    Not an InputError: with that, such a function says that it is not made for this input.
    """

    exit_code = 3


class InfeasibleError(FarpipeError):
    """The input is sound but nothing satisfies it; the text names the binding constraint (exit 4)."""

    exit_code = 4


class ToleranceError(FarpipeError):
    """A measured or published number is outside its tolerance (exit 5)."""

    exit_code = 5


class RunError(FarpipeError):
    """A run broke for a reason outside farpipe: a peer died, a message never came, the disk is full (exit 6)."""

    exit_code = 6


class DivergedError(RunError):
    """The loss or a gradient is no longer finite; starting the run again does not help (exit 7)."""

    exit_code = 7


class RunStoppedError(FarpipeError):
    """SIGTERM: the run has written a checkpoint and left; it goes on when it is started again (exit 75)."""

    exit_code = 75


class RunInterruptedError(FarpipeError):
    """Ctrl-C or SIGTERM; the text says what is left behind (exit 130)."""

    exit_code = 130


def spoken(error: BaseException) -> str:
    """An error in words: its text if it is farpipe's, which names the place, else with its type."""
    if isinstance(error, FarpipeError):
        return str(error)
    text = str(error) if isinstance(error, Exception) else ""  # that of SystemExit(0) is 0
    return f"{type(error).__name__}: {text}" if text else repr(error)


_OURS: Final = Path(__file__).parent
_STANDARD: Final = Path(os.__file__).parent
_PACKAGES: Final = re.compile("/(?:site|dist)-packages/")
_LIBRARIES: Final = re.compile(_PACKAGES.pattern + "(?:torch|transformers|numpy|numba|pydantic|peft|safetensors)/")
"""Files whose frames say less about a fault than those of the code that called them."""


def fault_in(error: BaseException) -> str:
    """An error in words, with the innermost line of the user's code that it came through, or else of farpipe's."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_OURS)]
    installed = [frame for frame in frames if frame not in ours and not _is_library(frame.filename)]
    users = [frame for frame in installed if not _PACKAGES.search(frame.filename)]
    place = (users or installed or ours or frames)[-1:]
    return spoken(error) + "".join(f" ({frame.filename}:{frame.lineno} in {frame.name})" for frame in place)


def _is_library(file: str) -> bool:
    is_standard = Path(file).is_relative_to(_STANDARD) and not _PACKAGES.search(file)
    return file.startswith("<") or is_standard or _LIBRARIES.search(file) is not None
