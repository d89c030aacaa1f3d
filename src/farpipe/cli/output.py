"""Output of commands: tables for eyes, JSON for machines, progress on stderr."""

import io
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

from farpipe.core.errors import InputError, RunError, UsageError
from farpipe.core.units import counted, format_seconds, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment

    from farpipe.planning.search import Progress

LINE_EVERY_S: Final = 5.0
"""Interval of progress lines where stderr is no terminal."""
_PIPED_WIDTH: Final = 140
_TRAILING_SPACES: Final = re.compile(r" +$", re.MULTILINE)


def print_json(data: Any) -> None:
    """`data` as JSON on stdout; a NaN would be a bug of ours."""
    sys.stdout.write(json.dumps(data, allow_nan=False) + "\n")


class Printable:
    """A stream for words: what would steer a terminal is shown and has no effect. `file` is the one behind it."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def write(self, text: str) -> int:
        """Write `text`, see `printable`."""
        self.file.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


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
        """Encoding of the file, by which rich chooses the lines of a table."""
        return self._file.encoding


def console(*, stderr: bool = False) -> "Console":
    """A console for plain text: what looks like rich's markup in a user's words is shown as it is, and what would steer
    the terminal is shown as well.

    Where it does not write to a terminal, lines are as wide as COLUMNS says, and without spaces at their ends.
    """
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:  # rich would leave with exit code 1
            raise BrokenPipeError

        def render(self, *arguments: Any, **options: Any) -> "Iterator[Segment]":
            for segment in super().render(*arguments, **options):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    stream = sys.stderr if stderr else sys.stdout
    file = stream.file if isinstance(stream, Printable) else stream  # rich steers the terminal itself
    lean, width = (file, None) if file.isatty() else (cast(TextIO, _Trimmed(file)), _piped_width())
    return PipedConsole(file=lean, width=width, highlight=False, markup=False, emoji=False)


def _piped_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else _PIPED_WIDTH


_RESULTS: Final = re.compile(
    rb"""<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/><meta http-equiv="Content-Security-Policy" """
    rb"""|<svg xmlns="http://www.w3.org/2000/svg" class="figure" """
    rb"""|(\x89PNG|<\?xml)(?s:.*)farpipe"""
    rb"""|\{"traceEvents":\[\{"ph":"M\""""
    rb"""|\{\s*"format": ?"farpipe/|\{"time_s": """
    rb"""|policy,[a-z]|method,step_s,|where,pipeline,|point,|request,arrival_s,src,dst,gbit_s,accepted,|owner,nodes,first_slot,slots,from_s|\d+[A-Z_]+\d+(,|\s|$)"""
)
"""Beginnings of pages, pictures (farpipe's own and matplotlib's), traces, documents, logs and orders of farpipe."""
_HEAD_BYTES: Final = 4096


def check_folder(*files: Path | None, keeping: Iterable[Path | None] = ()) -> None:
    """RunError for the first of `files` whose folder does not exist: a typing slip should not become a folder.

    InputError for one that would take the place of one of `keeping`, the files that the command reads, or of a file
    that farpipe has not written, UsageError for two that are one file.
    """
    _check_places(files, keeping)
    for file in filter(None, files):
        if (head := _head(file)) and not _RESULTS.match(head):
            raise InputError(f"{file}: exists and is not a farpipe result; choose another file")


def _head(file: Path) -> bytes:
    """The beginning of a file; nothing of a device or where no file is."""
    try:
        if not file.is_file():
            return b""
        with file.open("rb") as opened:
            return opened.read(_HEAD_BYTES)
    except OSError:  # writing there reports the reason
        return b""


def _check_places(files: Iterable[Path | None], keeping: Iterable[Path | None] = ()) -> None:
    files = [*files]
    paths = [file.resolve() for file in files if file]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise UsageError(f"{twice[0]}: two results can't be written to one file; give each its own")
    for file in filter(None, files):
        for kept in filter(None, keeping):
            if _is_same(file, kept):
                raise InputError(f"{file}: this command reads it; write to another file")
        if not file.parent.is_dir():
            what = "is not a directory" if file.parent.exists() else "does not exist"
            raise RunError(f"{file}: can't be written: {file.parent} {what}")
        with suppress(PermissionError):  # writing there reports it
            if file.is_dir():
                raise RunError(f"{file}: can't be written: Is a directory")


def _is_same(file: Path, other: Path) -> bool:
    try:
        return file.samefile(other)
    except OSError:  # not there yet, and then it takes nothing's place
        return False


def check_picture(path: Path | None, kinds: tuple[str, ...] = (".svg", ".png")) -> None:
    """UsageError unless the name of the picture at `path` ends in one of `kinds`, or has no ending."""
    if path is not None and path.suffix and path.suffix not in kinds:
        raise UsageError(f"--plot {path}: pictures are written as {' or '.join(kinds)}")


def expect_replaceable(path: Path, kind: str) -> bool:
    """True if a file of this `kind` is at `path`; InputError when it is something else, which is then left alone.

    Asked before long work, so that nobody waits for a result that is not written.
    """
    try:
        if not path.is_file():
            return False
    except OSError:  # writing there reports the reason
        return False
    if not path.read_bytes()[:200].lstrip().startswith(b"{") or f'"farpipe/{kind}/'.encode() not in path.read_bytes():
        raise InputError(f"{path}: exists and is not a farpipe {kind}; choose another --output")
    return True


def expect_new(path: Path) -> None:
    """InputError where a file is at `path` already: it may be what somebody has written by hand."""
    if path.exists():
        raise InputError(f"{path}: exists already; choose another name")
    _check_places([path])


def keep_earlier(path: Path, kind: str) -> str:
    """Give the file of this `kind` at `path`, which is about to be replaced, a second name; return a note on it.

    So it is still there, under its own name as well, when writing fails. Errors as in `expect_replaceable`.
    """
    return second_name(path) if expect_replaceable(path, kind) else ""


def second_name(path: Path) -> str:
    """Give the file at `path`, which is about to be replaced, a second name; return a note on it."""
    earlier = path.with_name(f"{path.stem}.previous{path.suffix}")
    earlier.unlink(missing_ok=True)
    try:
        earlier.hardlink_to(path)
    except OSError:  # a file system without links
        shutil.copy2(path, earlier)
    return f"; the earlier one is now {earlier}"


class PacedLog:
    """Rate-limits progress lines when stderr is not a terminal.

    `log` writes a line to stderr at once, so that a log file or `tail -f` shows it while the work goes on.
    """

    def __init__(self, every_s: float = LINE_EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._begin = self._last = clock()

    def due(self) -> bool:
        """True if `every_s` have passed since the last line; if so, the next one is due that much later."""
        now = self._clock()
        if now - self._last < self._every_s:
            return False
        self._last = now
        return True

    def report(self, text: str) -> None:
        """Write `text` with the seconds since the beginning, if a line is due."""
        if self.due():
            log(f"{text}, {self._clock() - self._begin:.0f} s")


def log(text: str) -> None:
    """One line on stderr, written out at once."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def status(what: str) -> Iterator[None]:
    """Show on stderr what is being waited for: a spinner on a terminal, elsewhere a line when it takes long."""
    if sys.stderr.isatty():
        with console(stderr=True).status(what):
            yield
        return
    begin = time.monotonic()
    timer = threading.Timer(LINE_EVERY_S, log, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if (took_s := time.monotonic() - begin) > LINE_EVERY_S:
        log(f"{what}: done after {took_s:.0f} s")


@contextmanager
def search_status(what: str) -> Iterator[Callable[["Progress"], None]]:
    """Like `status`, with a callback for the best schedule and the bound as a search goes on."""
    if not sys.stderr.isatty():
        pace = PacedLog()
        yield lambda progress: pace.report(_search_line(what, progress))
        return
    with console(stderr=True).status(what) as line:
        yield lambda progress: line.update(_search_line(what, progress))


def _search_line(what: str, progress: "Progress") -> str:
    found = f"makespan {format_seconds(progress.makespan_s)}, " if isfinite(progress.makespan_s) else ""
    return f"{what}: {progress.method}, {found}lower bound {format_seconds(progress.lower_bound_s)}"


@contextmanager
def progress_bar(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Callback for (done, total) of things called `unit`, total 0 if unknown: a bar, or a line every `LINE_EVERY_S`."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if not sys.stderr.isatty():
        pace = PacedLog()
        with status(what):
            yield lambda done, total: pace.report(
                f"{what}: {f'{done} of ' * bool(total)}{counted(total or done, unit)}"
            )
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(f"{unit}s"))
    with Progress(*columns, TimeRemainingColumn(), console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
