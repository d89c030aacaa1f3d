"""How commands show what they found: tables for eyes, JSON for machines, progress on stderr."""

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

    from farpipe.search import Progress

_TRAILING_SPACES: Final = re.compile(r" +$", re.MULTILINE)


def print_json(data: Any) -> None:
    """`data` as JSON on stdout; a NaN would be a bug of ours."""
    sys.stdout.write(json.dumps(data, allow_nan=False) + "\n")


class _Trimmed(io.TextIOBase):
    """Writes to `file` without the spaces that rich fills the lines of a table with, up to its last column."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        self._file.write(_TRAILING_SPACES.sub("", text))
        return len(text)

    def flush(self) -> None:
        self._file.flush()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """By which rich chooses the lines of a table."""
        return self._file.encoding


def console(*, stderr: bool = False) -> "Console":
    """A console for plain text: what looks like rich's markup in a user's words is shown as it is.

    Where it does not write to a terminal, lines are whole, and without spaces at their ends.
    """
    from rich.console import Console

    class Pipe(Console):
        def on_broken_pipe(self) -> None:  # rich would leave with exit code 1
            raise BrokenPipeError

    file = sys.stderr if stderr else sys.stdout
    lean, width = (file, None) if file.isatty() else (cast(TextIO, _Trimmed(file)), 140)
    return Pipe(file=lean, width=width, highlight=False, markup=False, emoji=False)


@contextmanager
def status(what: str) -> Iterator[None]:
    """Say on stderr what is being waited for, if a person watches."""
    if not sys.stderr.isatty():
        yield
        return
    with console(stderr=True).status(what):
        yield


@contextmanager
def search_status(what: str) -> Iterator[Callable[["Progress"], None]]:
    """Like `status`, told of the best order and the bound as a search goes on; silent where nobody watches."""
    from farpipe.units import format_seconds

    if not sys.stderr.isatty():
        yield lambda progress: None
        return
    with console(stderr=True).status(what) as line:
        yield lambda progress: line.update(
            f"{what}: {progress.method}, "
            + (f"step {format_seconds(progress.makespan_s)}, " if isfinite(progress.makespan_s) else "")
            + f"at least {format_seconds(progress.lower_bound_s)}"
        )


@contextmanager
def progress_bar(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr that is told (done, total); silent where nobody watches."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    shown = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    with Progress(
        *columns, TimeRemainingColumn(), console=shown, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
