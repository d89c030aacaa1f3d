"""Launcher of processes on this machine, which outlive the service that started them."""

import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from farpipe.core.errors import InputError
from farpipe.core.strict import write_text
from farpipe.service.attempt import (
    BEGUN_NAME,
    END_NAME,
    LOCK_NAME,
    PROCESS_NAME,
    STOP_NAME,
    WANTED_NAME,
    begin_of,
    end_of,
)
from farpipe.service.launcher import Key, Seen


class LocalLauncher:
    """Attempts as local processes: all ranks of one here, whatever its sites, with the links between them emulated.

    All that is known lies in the attempts' directories, below `root`: a launcher that is made anew sees the same.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._children = list[int]()

    def start(self, key: Key, folder: Path, where: Mapping[str, int]) -> None:
        (folder / WANTED_NAME).touch()
        argv = [sys.executable, "-m", "farpipe.service.attempt", str(folder)]
        # Not with subprocess, whose children are expected to end before their starter.
        appended = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        files = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(folder / "attempt.log"), appended, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        self._children.append(os.posix_spawn(sys.executable, argv, os.environ, file_actions=files, setsid=True))

    def look(self, keys: Iterable[Key]) -> Mapping[Key, Seen]:
        self._children = [child for child in self._children if os.waitpid(child, os.WNOHANG) == (0, 0)]  # no zombies
        return {key: self._look(self._folder(key)) for key in keys}

    def stop(self, key: Key, leave_s: float) -> None:
        folder = self._folder(key)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / STOP_NAME).exists():
            write_text(folder / STOP_NAME, f"{leave_s:g}\n")
        elif time.time() > (folder / STOP_NAME).stat().st_mtime + 2 * leave_s and self._look(folder).state == "alive":
            kill_training(folder)  # the process that should have done it is gone or hangs

    def read(self, key: Key, file: str, offset: int) -> bytes:
        with suppress(FileNotFoundError), (self._folder(key) / file).open("rb") as source:
            source.seek(offset)
            return source.read()
        return b""

    def _folder(self, key: Key) -> Path:
        return self._root / key.job / str(key.attempt)

    def _look(self, folder: Path) -> Seen:
        if _is_locked(folder / LOCK_NAME):
            (folder / WANTED_NAME).touch()
            return Seen("alive")
        if (folder / END_NAME).exists():
            try:
                end = end_of((folder / END_NAME).read_bytes(), str(folder / END_NAME))
                return Seen("ended", int(end["exit_code"]), str(end["why"]))
            except (InputError, KeyError, TypeError, ValueError):
                return Seen("ended", 1, f"{folder / END_NAME} can't be read")
        return Seen("vanished" if (folder / BEGUN_NAME).exists() else "absent")


def _is_locked(path: Path) -> bool:
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
