"""Requests to leave: SIGTERM, or SIGHUP when a terminal closes, as one request however many times they are sent."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

SAME_REQUEST_S: Final = 5.0
"""Time, in seconds, in which further signals repeat the first request.

systemd and Slurm signal every process of a job step, and launchers pass the signal on: a rank gets it twice.
"""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)


class LeaveRequest:
    """Request to this process to leave; true once it has come."""

    def __init__(self) -> None:
        self.time_s: float | None = None
        """Monotonic time of the first signal; None before."""

    def __bool__(self) -> bool:
        return self.time_s is not None


@contextmanager
def leave_request(again: Callable[[int], None]) -> Iterator[LeaveRequest]:
    """Record signals to leave in the request given out; `again(number)` for one that is a second request.

    Outside of the main thread, which alone can handle signals, the request never comes. An ignored signal stays so.
    """
    request = LeaveRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.time_s is None:
            request.time_s = time.monotonic()
        elif time.monotonic() > request.time_s + SAME_REQUEST_S:
            again(number)

    with _handling(handle):
        yield request


@contextmanager
def interrupting() -> Iterator[None]:
    """Treat signals to leave as Ctrl-C."""
    with _handling(lambda number, frame: interrupt(number)):
        yield


def interrupt(number: int) -> None:
    """Raise KeyboardInterrupt, as Ctrl-C does."""
    raise KeyboardInterrupt


def end_at_once(number: int) -> None:
    """End this process by the signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def ignore_requests() -> None:
    """Ignore Ctrl-C and signals to leave: they are for the process that started this one, and that ends it."""
    for number in (signal.SIGINT, *_SIGNALS):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _handling(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    heard = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]
    try:
        for number in heard:
            signal.signal(number, handle)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])
