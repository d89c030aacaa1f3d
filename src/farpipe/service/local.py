"""Launcher of processes on this machine, which outlive the service that started them."""

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from farpipe.core.strict import write_text
from farpipe.fleet.events import Event
from farpipe.service.folder import (
    BEGUN_NAME,
    LOCK_NAME,
    PROCESS_NAME,
    STOP_NAME,
    WANTED_NAME,
    begin_of,
    is_locked,
    read_in,
    spawn,
    stored_in,
)
from farpipe.service.launcher import Key, Seen, noted_end


class LocalLauncher:
    """Attempts as local processes: all ranks of one here, whatever its sites, with the links between them emulated.

    All that is known lies in the attempts' directories, below `root`: a launcher that is made anew sees the same.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def start(self, key: Key, folder: Path, where: Mapping[str, int]) -> None:
        (folder / WANTED_NAME).touch()
        spawn(["-m", "farpipe.service.attempt", str(folder)], folder / "attempt.log")

    def look(self, keys: Iterable[Key]) -> Mapping[Key, Seen]:
        return {
            key: replace(self._look(folder), stored=stored_in(folder)) for key in keys if (folder := self._folder(key))
        }

    def stop(self, key: Key, leave_s: float) -> None:
        folder = self._folder(key)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / STOP_NAME).exists():
            write_text(folder / STOP_NAME, f"{leave_s:g}\n")
        elif time.time() > (folder / STOP_NAME).stat().st_mtime + 2 * leave_s and self._look(folder).state == "alive":
            kill_training(folder)  # the process that should have done it is gone or hangs

    def site_events(self, up: Mapping[str, bool], now_s: float) -> Sequence[Event]:
        """None: all sites are this machine."""
        return ()

    def read(self, key: Key, file: str, offset: int) -> bytes:
        return read_in(self._folder(key), file, offset)

    def _folder(self, key: Key) -> Path:
        return self._root / key.job / str(key.attempt)

    def _look(self, folder: Path) -> Seen:
        if is_locked(folder / LOCK_NAME):
            (folder / WANTED_NAME).touch()
            return Seen("alive")
        return noted_end(folder) or Seen("vanished" if (folder / BEGUN_NAME).exists() else "absent")


def kill_training(folder: Path) -> None:
    """Kill the attempt's training, if that is still the process that it was."""
    with suppress(OSError, ValueError):
        number, begin = (folder / PROCESS_NAME).read_text().split()
        if begin_of(int(number)) == begin:
            os.killpg(int(number), signal.SIGKILL)
