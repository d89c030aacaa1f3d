"""A thread that serves many connections: waits for whichever can be read or written, and keeps their clocks."""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

ACK_DELAY_S: Final = 0.02
"""A message is acknowledged at the latest after this; most acknowledgements ride on something else."""


class Served(Protocol):
    """Interface of an object that a loop serves."""

    def on_event(self, mask: int) -> None:
        """Serve the connection, which can be read or written, or has ended."""

    def on_ack_due(self) -> None:
        """Acknowledge what was received."""

    def on_tick(self, now_s: float) -> None:
        """Another `tick_s` has passed."""


class Loop:
    """Serves connections in a thread of its own; all methods may be called from any thread.

    `on_fault` hears of an error that none of the members has dealt with; the loop goes on.
    """

    def __init__(self, name: str, tick_s: float, on_fault: Callable[[Exception], None]) -> None:
        self._on_fault = on_fault
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._bell_lock = threading.Lock()
        self._by_fd: dict[int, Served] = {}
        self._members: list[Served] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._acks: deque[Served] = deque()
        self._ack_s = 0.0
        self._tick_s, self._next_tick_s = tick_s, time.monotonic() + tick_s
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, member: Served) -> None:
        """Tell `member` the time from now on."""
        self.call(lambda: self._members.append(member))

    def watch(self, fd: int, member: Served) -> None:
        """Serve the connection `fd` of `member`."""
        self._by_fd[fd] = member
        self._epoll.register(fd, select.EPOLLIN)

    def want(self, fd: int, *, read: bool, write: bool) -> None:
        """Set the events to wait for on `fd`."""
        self._epoll.modify(fd, (select.EPOLLIN if read else 0) | (select.EPOLLOUT if write else 0))

    def forget(self, fd: int) -> None:
        """Serve `fd` no more; to be called before it is closed."""
        self._by_fd.pop(fd, None)
        self._epoll.unregister(fd)

    def call(self, what: Callable[[], None]) -> None:
        """Call `what` in the loop's thread, soon."""
        self.call_when_rung(what)
        self.ring()

    def call_when_rung(self, what: Callable[[], None]) -> None:
        """Call `what` in the loop's thread after the next `ring`, or before."""
        self._calls.append(what)

    def ring(self) -> None:
        """Wake the loop's thread."""
        with self._bell_lock:
            if not self._closing:
                os.eventfd_write(self._bell, 1)

    def acknowledge_later(self, member: Served) -> None:
        """Call `on_ack_due` before long; only from the loop's thread."""
        if not self._acks:
            self._ack_s = time.monotonic() + ACK_DELAY_S
        self._acks.append(member)

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception as error:
                self._on_fault(error)
        self._epoll.close()
        with self._bell_lock:
            os.close(self._bell)

    def _turn(self) -> None:
        due_s = min(self._next_tick_s, self._ack_s) if self._acks else self._next_tick_s
        for fd, mask in self._epoll.poll(max(0.0, due_s - time.monotonic())):
            if fd == self._bell:
                os.eventfd_read(fd)
            elif member := self._by_fd.get(fd):
                member.on_event(mask)
        for _ in range(len(self._calls)):  # those that they ask for come after what else there is to do
            self._calls.popleft()()
        self._keep_time()

    def _keep_time(self) -> None:
        now_s = time.monotonic()
        if self._acks and now_s >= self._ack_s:
            members = list(self._acks)
            self._acks.clear()
            for member in members:
                member.on_ack_due()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + self._tick_s
            for member in list(self._members):
                member.on_tick(now_s)

    def close(self, deadline_s: float) -> None:
        """End the thread; waits for it, not beyond `deadline_s` (monotonic)."""
        if not self._closing:
            self.call(self._end)
        self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _end(self) -> None:
        with self._bell_lock:
            self._closing = True
