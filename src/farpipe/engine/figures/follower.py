"""Follows ``metrics.jsonl`` while it is written. Needs no torch."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farpipe.engine.figures.metrics import good_lines, last_line


class Follower:
    """Passes on every line soon after it was written; lines of attempts before the first call are not passed on.

    Steps that an attempt does again are passed on again: they may have warnings of their own. Damaged lines, which the
    rank that goes on with the file puts aside and names, are not.
    """

    def __init__(self, path: Path, on_step: Callable[[dict[str, Any]], None] | None) -> None:
        self._path, self._on_step = path, on_step
        self._file_number, self._position = -1, 0
        last = last_line(path)
        self._last = (-1, -1) if last is None else (last["attempt"], last["step"])

    def read(self) -> None:
        """Pass on the lines that have been completed since the last call."""
        if self._on_step is None or not self._path.exists():
            return
        with self._path.open("rb") as file:
            if (number := os.fstat(file.fileno()).st_ino) != self._file_number:  # a restart has rewritten it
                self._file_number, self._position = number, 0
            file.seek(self._position)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in good_lines(whole, self._path):
            if (step := (line["attempt"], line["step"])) > self._last:
                self._last = step
                self._on_step(line)
