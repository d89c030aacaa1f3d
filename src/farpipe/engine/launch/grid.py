"""Grids of points, played in processes of this machine; a file keeps the row of each."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farpipe.core.errors import InputError, RunError
from farpipe.core.strict import read_text
from farpipe.engine.processes import die_with_parent

Row = dict[str, Any]
"""Result at a point, as it is kept: a line of JSON."""
Play = Callable[[Any], Row]
"""Function from a point to its row; it and the points can be pickled."""
GridPlayer = Callable[[Play, Sequence[Any]], Iterator[tuple[int, Row]]]
"""Play points somewhere, in any order: the number of a point and its row, as they come."""
Progress = Callable[[int, int], None]
"""Called with (points done, points in all)."""


@dataclass(frozen=True)
class RowFile:
    """File that keeps the rows of a grid, so that a sweep that was cut goes on where it was."""

    path: Path
    name_of: Callable[[Row], Hashable | None]
    """Name of a row's point; None for a line that is no row."""
    header: Row
    """First line, by whose `format` the file is known."""

    def read(self) -> dict[Hashable, Row]:
        """Rows by the names of their points, without a last line that was cut; InputError for another kind of file."""
        if not self.path.exists() or (self.path.is_file() and not self.path.stat().st_size):
            return {}
        lines = [_parsed(line) for line in read_text(self.path).splitlines()]
        rows = {name: row for row in lines if (name := self.name_of(row)) is not None}
        if lines[0].get("format") != self.header["format"]:
            raise InputError(
                f"{self.path}: is there already, and no rows of a sweep of farpipe; give another file with --output"
            )
        return rows

    @contextmanager
    def open(self) -> Iterator[Callable[[Row], None]]:
        """Yield the function that appends a row; RunError where the file can't be written."""
        begun = self.path.exists() and self.path.stat().st_size > 0
        cut = begun and not self.path.read_bytes().endswith(b"\n")
        try:
            with self.path.open("a", encoding="utf-8") as file:

                def append(row: Row) -> None:
                    file.write(json.dumps(row, default=str) + "\n")
                    file.flush()

                if cut:
                    file.write("\n")
                if not begun:
                    append(self.header)
                yield append
        except OSError as error:
            if error.filename not in (None, str(self.path)):
                raise
            raise RunError(f"{self.path}: can't be written: {error.strerror}; rows before this one stay") from None


def _parsed(line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def play_grid(
    points: Sequence[Any], names: Sequence[Hashable], play: Play, file: RowFile, player: GridPlayer, progress: Progress
) -> list[Row]:
    """Return the row of every point; points whose names are in `file` are not played again, new rows are added to it.

    Every row is written when it is there. InputError when `file` is something else, and what `play` raises.
    """
    rows = file.read()
    left = [number for number, name in enumerate(names) if name not in rows]
    progress(len(points) - len(left), len(points))
    with file.open() as append:
        for done, (place, row) in enumerate(player(play, [points[number] for number in left]) if left else (), 1):
            rows[names[left[place]]] = row
            append(row)
            progress(len(points) - len(left) + done, len(points))
    return [rows[name] for name in names]


def here(num_processes: int) -> GridPlayer:
    """Play points in this number of processes of this machine; in this one with 1."""

    def play_all(play: Play, points: Sequence[Any]) -> Iterator[tuple[int, Row]]:
        if num_processes == 1 or len(points) == 1:
            yield from ((number, play(point)) for number, point in enumerate(points))
            return
        # spawned, for a forked child of a process with numba's threads may hang
        context = multiprocessing.get_context("spawn")
        size = min(num_processes, len(points))
        pool = ProcessPoolExecutor(size, mp_context=context, initializer=_begin, initargs=(os.getpid(),))
        with _stopped_at_once(pool):
            numbers = {pool.submit(play, point): number for number, point in enumerate(points)}
            for future in as_completed(numbers):
                try:
                    yield numbers[future], future.result()
                except BrokenProcessPool:
                    raise RunError(
                        "a process of the sweep died, perhaps for lack of memory: use --processes 1"
                    ) from None

    return play_all


@contextmanager
def _stopped_at_once(pool: ProcessPoolExecutor) -> Iterator[None]:
    """Whatever ends the block, points that have not begun are dropped and the processes go."""
    try:
        yield
    except BaseException:
        processes = list((getattr(pool, "_processes", None) or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        raise
    pool.shutdown(wait=True)


def _begin(parent: int) -> None:
    """Begin a process: Ctrl-C is the parent's to handle, and without a parent it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
