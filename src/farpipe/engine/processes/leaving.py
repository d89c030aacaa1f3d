"""Requests to leave: SIGTERM, or SIGHUP when a terminal closes, as one request however many times they are sent.

And the end of a process whose work is done: it does not wait for ever for what the user's code has left behind.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

SAME_REQUEST_S: Final = 5.0
"""Time, in seconds, in which further signals repeat the first request.

systemd and Slurm signal every process of a job step, and launchers pass the signal on: a rank gets it twice.
"""
END_S: Final = 10.0
"""Time, in seconds, that a process whose work is done has for the threads and handlers that are left in it."""
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
def ending_on_request(request: LeaveRequest, end: Callable[[], None]) -> Iterator[None]:
    """Inside, a request to leave calls `end` at once, in a thread: the main one may wait in C++, where no handler runs.

    Outside of the main thread the request never comes, see `leave_request`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while numbers := os.read(reader, 64):
            if set(numbers) & set(_SIGNALS):
                end()

    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watching = threading.Thread(target=watch, name="farpipe leave", daemon=True)
    watching.start()
    try:
        if request:  # it came before
            end()
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        watching.join()
        os.close(reader)


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


def end_soon(exit_code: int, say: Callable[[str], None], limit_s: float = END_S) -> None:
    """Have this process, whose work is done, end with `exit_code` within `limit_s`; `say` hears what it waited for.

    Python waits for every thread that is no daemon, and for handlers of `atexit`, however long they take.
    """

    def end() -> None:
        time.sleep(limit_s)
        say(
            f"its work is done, but the process did not end within {limit_s:g} s, and was ended: {_what_runs()}; let "
            "threads of your own be daemons, and stop what you have started"
        )
        if (started := sys.modules.get("multiprocessing")) is not None:
            for child in started.active_children():
                child.kill()
        os._exit(exit_code)

    threading.Thread(target=end, name="farpipe end", daemon=True).start()


def _what_runs() -> str:
    """Threads that keep this process from ending, or what its main thread does, with the places."""
    main = threading.main_thread()
    threads = [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]
    frames = sys._current_frames()
    names = {thread.ident: f"thread {thread.name!r} still runs" for thread in threads}
    places = [
        (what, traceback.extract_stack(frames[ident])[-1])
        for ident, what in (names or {main.ident: "at its exit Python waits"}).items()
        if ident in frames
    ]
    return ", ".join(f"{what} ({frame.filename}:{frame.lineno} in {frame.name})" for what, frame in places)


def end_fork_of(process: int, error: BaseException | None = None) -> None:
    """End this process at once if it is not `process`: a child that the user's code has forked, and let come back.

    It shares the connections and files of `process`, and goodbyes or lines of its own there would be wrong.
    """
    if os.getpid() == process:
        return
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None or (isinstance(error, SystemExit) and not error.code) else 1)


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
