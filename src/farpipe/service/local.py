"""Launcher of processes on this machine, which outlive the service that started them."""

import fcntl
import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from farpipe.core.errors import InputError
from farpipe.core.strict import write_text
from farpipe.engine.checkpoint.folders import CHECKPOINTS_NAME, whole_checkpoints
from farpipe.service.attempt import (
    BEGUN_NAME,
    END_NAME,
    LOCK_NAME,
    PROCESS_NAME,
    RUN_NAME,
    STOP_NAME,
    WANTED_NAME,
    begin_of,
    end_of,
    spawn,
)
from farpipe.service.launcher import Key, Seen

MOST_BYTES: Final = 1 << 20
"""Longest part of a file that is read at once."""
SECRET_NAMES: Final = ("go.json", "token")
"""Files with what only ranks may know."""


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

    def read(self, key: Key, file: str, offset: int) -> bytes:
        return read_in(self._folder(key), file, offset)

    def _folder(self, key: Key) -> Path:
        return self._root / key.job / str(key.attempt)

    def _look(self, folder: Path) -> Seen:
        if is_locked(folder / LOCK_NAME):
            (folder / WANTED_NAME).touch()
            return Seen("alive")
        if (folder / END_NAME).exists():
            try:
                end = end_of((folder / END_NAME).read_bytes(), str(folder / END_NAME))
                return Seen("ended", int(end["exit_code"]), str(end["why"]))
            except (InputError, KeyError, TypeError, ValueError):
                return Seen("ended", 1, f"{folder / END_NAME} can't be read")
        return Seen("vanished" if (folder / BEGUN_NAME).exists() else "absent")


def stored_in(folder: Path) -> tuple[int, ...]:
    """Steps of the whole checkpoints of an attempt."""
    return tuple(whole_checkpoints(folder / RUN_NAME / CHECKPOINTS_NAME))


def read_in(folder: Path, file: str, offset: int) -> bytes:
    """A file of an attempt from `offset` on, `MOST_BYTES` at most; nothing where there is none in its directory."""
    path = (folder / file).resolve()
    if not path.is_relative_to(folder.resolve()) or path.name in SECRET_NAMES or offset < 0:
        return b""
    with suppress(FileNotFoundError, IsADirectoryError), path.open("rb") as source:
        source.seek(offset)
        return source.read(MOST_BYTES)
    return b""


def is_locked(path: Path) -> bool:
    """True if some process holds the lock."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def kill_training(folder: Path) -> None:
    """Kill the attempt's training, if that is still the process that it was."""
    with suppress(OSError, ValueError):
        number, begin = (folder / PROCESS_NAME).read_text().split()
        if begin_of(int(number)) == begin:
            os.killpg(int(number), signal.SIGKILL)
