"""One run at a time in a run directory."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from farpipe.errors import InputError, RunError

LOCK_NAME: Final = ".lock"


@contextmanager
def only_run(run_dir: Path) -> Iterator[None]:
    """Within it no other process gets here for the same directory; the system ends it with the process.

    InputError when another one is at work, RunError when the directory can't be written to.
    """
    try:
        descriptor = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunError(f"{run_dir}: can't be written to: {error.strerror}") from None
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"{run_dir}: another run is at work in it; wait for its end, stop it, or choose another directory"
                ) from None
        yield
    finally:
        os.close(descriptor)
