"""Reads ``metrics.jsonl`` as it grows."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Follower:
    """Passes on every line soon after it was written; steps that are done again after a restart are not told again."""

    def __init__(self, path: Path, on_step: Callable[[dict[str, Any]], None] | None) -> None:
        self._path, self._on_step = path, on_step
        self._file_number, self._position, self._last_step = -1, 0, -1

    def read(self) -> None:
        """Pass on the lines that have been completed since the last call."""
        if self._on_step is None or not self._path.exists():
            return
        with self._path.open("rb") as file:
            if (number := os.fstat(file.fileno()).st_ino) != self._file_number:  # a restart has written it anew
                self._file_number, self._position = number, 0
            file.seek(self._position)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._position += len(whole)
        for text in whole.splitlines():
            line = json.loads(text)
            if line["step"] > self._last_step:
                self._last_step = line["step"]
                self._on_step(line)
