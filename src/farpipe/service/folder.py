"""Directory of an attempt: the names of its files, and the small things that are done with them. Loads little."""

import fcntl
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from farpipe.core.strict import write_text
from farpipe.engine.checkpoint.folders import CHECKPOINTS_NAME, whole_checkpoints

LOCK_NAME: Final = "lock"
STOP_NAME: Final = "stop"
"""Written by who wants the attempt to leave, with the seconds that it has for it."""
END_NAME: Final = "end.json"
LOG_NAME: Final = "log"
"""What its owner may read: warnings of its plan, its steps, and how it ended."""
RUN_NAME: Final = "run"
"""Directory of the run."""
POLL_S: Final = 0.2
MOST_BYTES: Final = 1 << 20
"""Longest part of a file that is read at once."""
SECRET_NAMES: Final = ("go.json", "token")
"""Files with what only ranks may know."""
JOB_NAME: Final = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""Pattern of names of jobs that can be names of directories."""


def take(lock: int) -> None:
    """Take the lock; BlockingIOError if another attempt has it, and not only one that looks."""
    for _ in range(20):
        with suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(POLL_S / 4)
    raise BlockingIOError


def begins(lock: Path, begun: Path) -> int | None:
    """Take the lock until this process ends, and note that it has begun; None if it is at work, or has been."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        take(descriptor)
        os.close(os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except (BlockingIOError, FileExistsError):
        os.close(descriptor)
        return None
    return descriptor


def spawn(arguments: list[str], out: Path) -> None:
    """Start Python with `arguments`, as a process that outlives this one; what it prints goes to `out`."""
    with out.open("ab") as file:
        argv = ["setsid", "--fork", sys.executable, *arguments]
        subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=True)


def stop_time(path: Path) -> float | None:
    """Seconds in which an attempt, or its share at a site, is to leave; None: it may go on."""
    try:
        return float(path.read_text() or "60")
    except FileNotFoundError:
        return None


def write_end(folder: Path, exit_code: int, why: str) -> None:
    """Say how an attempt has ended."""
    write_text(folder / END_NAME, json.dumps({"exit_code": exit_code, "why": why}) + "\n")


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
