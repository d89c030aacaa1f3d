"""One run at a time in a run directory."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final

from farpipe.core.errors import InputError, RunError
from farpipe.engine.figures.metrics import PLAN_NAME, RUN_NAME

LOCK_NAME: Final = ".lock"
LOCK_VARIABLE: Final = "FARPIPE_RUN_LOCK_FD"
"""Environment variable with the descriptor of the lock that rank 0 inherits from its launcher."""


RUN_SHA256_VARIABLE: Final = "FARPIPE_RUN_SHA256"
"""Environment variable with the digest of the run that the ranks were started for."""


def digest_of(run_dir: Path) -> str:
    """SHA-256 of ``run.json`` and of the plan beside it, in hexadecimal."""
    paths = [run_dir / name for name in (RUN_NAME, PLAN_NAME)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths if path.exists())).hexdigest()


@contextmanager
def only_run(run_dir: Path, *, make: bool = False) -> Iterator[int]:
    """Lock a run directory; gives out the lock's descriptor. The system unlocks it when all who have that have ended.

    `make`: make the directory where there is none. InputError when another process holds the lock, RunError when the
    directory can't be written to.
    """
    try:
        if make:
            run_dir.mkdir(parents=True, exist_ok=True)
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
        yield descriptor
    finally:
        os.close(descriptor)


def lock_of_rank_0(run_dir: Path) -> AbstractContextManager[object]:
    """Lock of a run's directory on its rank 0: that of its launcher, or under torchrun one of its own."""
    return nullcontext() if LOCK_VARIABLE in os.environ else only_run(run_dir)
