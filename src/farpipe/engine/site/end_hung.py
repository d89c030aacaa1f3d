"""End of a process whose main thread waits inside one of torch's collectives while the run has broken."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from farpipe.core.errors import FarpipeError, RunError
from farpipe.engine.transport.health import PeerError

GRACE_S: Final = 3.0
"""Time for the main thread to leave by itself once the run has broken."""
_POLL_S: Final = 0.25


@contextmanager
def ending_hung(check: Callable[[str], None], end: Callable[[FarpipeError], None]) -> Iterator[None]:
    """Context whose collectives end with the run: a process that is lost breaks them, one that is stopped does not.

    ``check(context)`` raises the error that broke the run. If the block goes on for GRACE_S after that, ``end(error)``
    is called, by another thread, and has to end the process. A collective that breaks raises RunError.
    """
    left = threading.Event()
    watch = threading.Thread(target=_watch, args=(check, end, left), name="farpipe collectives", daemon=True)
    watch.start()
    try:
        yield
    except RuntimeError as error:
        if "gloo" not in str(error) and "NCCL" not in str(error):
            raise
        raise _reason(check, str(error).splitlines()[0]) from error
    finally:
        left.set()


def _watch(check: Callable[[str], None], end: Callable[[FarpipeError], None], left: threading.Event) -> None:
    while not left.wait(_POLL_S):
        try:
            check("inside a collective of the replicas at this site")
        except FarpipeError as error:
            if not left.wait(GRACE_S):
                end(error)
            return


def _reason(check: Callable[[str], None], broken: str) -> FarpipeError:
    """The reason that the transport hears within GRACE_S, or else that of the collective."""
    deadline_s = time.monotonic() + GRACE_S
    while time.monotonic() < deadline_s:
        try:
            check("in a collective of the replicas at this site")
        except RunError as error:
            return error
        time.sleep(_POLL_S)
    return PeerError(f"a collective of the replicas at this site broke: {broken}")
