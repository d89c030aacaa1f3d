"""A stream of frames to and from one peer, each exactly once and in order, over as many connections as that takes.

Both sides number the frames that they send from 0, without writing the number down: the order on a connection is the
number. Each side counts what it has received and reports that, with every frame or alone. What the other side has
not acknowledged is kept; when a connection breaks and a new one is made, the two sides exchange their counts
(see handshake.py) and each goes on with the first frame that the other has not got. So nothing can be lost or doubled,
wherever a connection breaks.
"""

import select
import threading
import time
from collections.abc import Callable

from farpipe.engine.transport.connection import Connection, Retransmissions
from farpipe.engine.transport.frames import FrameReceiver, FrameSender
from farpipe.engine.transport.handshake import ClosedError
from farpipe.engine.transport.loop import Loop
from farpipe.engine.transport.tcp import TcpRamp
from farpipe.engine.transport.wire import FrameEndpoint, Receipts, WireError


class Stream:
    """The connection of a stream; `loop` serves it, `sender` and `receiver` do the two directions.

    `attach` gives it a connection, `on_down(stream, reason)` hears that it has none any more, `on_tick(stream, now_s)`
    comes at every tick of the loop; both are called in the loop's thread without any lock. `ramp`: see FrameSender.
    """

    def __init__(
        self,
        endpoint: FrameEndpoint,
        loop: Loop,
        now_ns: Callable[[], int],
        on_down: Callable[["Stream", Exception], None],
        on_tick: Callable[["Stream", float], None],
        silence_s: float,
        ramp: TcpRamp | None = None,
    ) -> None:
        self._loop, self._silence_s, self._on_down, self._on_tick = loop, silence_s, on_down, on_tick
        self._receipts = Receipts()
        self.sender = FrameSender(endpoint, self._receipts, now_ns, ramp)
        self.receiver = FrameReceiver(endpoint, self._receipts, self.sender.acknowledge)
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._ticket = 0
        self.down_since_s: float | None = None
        """Since when (monotonic) it has no connection; None while it has one and before the first."""
        self.resent = (0, 0)
        """Frames and bytes that the newest connection has to send a second time."""
        self._ack_timer_runs = False
        self._interest = (True, False)  # in reading, in writing
        self._closed = False
        loop.join(self)

    @property
    def is_up(self) -> bool:
        """True if it has a connection."""
        return self._connection is not None

    @property
    def silent_s(self) -> float:
        """Time, in seconds, for which nothing has been heard."""
        return time.monotonic() - self.receiver.heard_s

    def displace(self) -> tuple[int, int]:
        """Let go of the connection, as another one comes: a ticket for `attach` and the number of frames received."""
        with self._lock:
            self._drop()
            self._ticket += 1
            return self._ticket, self._receipts.num_frames

    def attach(self, connection: Connection, ticket: int, peer_received: int) -> bool:
        """Go on with `connection`; `peer_received` frames have arrived there. False when the ticket is out of date.

        WireError when the peer claims what can't be.
        """
        with self._lock:
            if self._closed or ticket != self._ticket or self._connection is not None:
                return False
            self.resent = self.sender.restart(peer_received)
            self.receiver.restart()
            self.down_since_s = None
            self._interest = (True, False)
            self._connection = connection
            self._loop.watch(connection.fd, self)
        # the handshake may have read more than its own
        self._loop.call(lambda: self.on_event(select.EPOLLIN | select.EPOLLOUT))
        return True

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self.down_since_s = time.monotonic()
            self._loop.forget(connection.fd)
            connection.close()

    def break_off(self, reason: Exception) -> None:
        """Let go of a connection that broke, and report it through `on_down`."""
        with self._lock:
            if self._connection is None:
                return
            self._drop()
        if not self._closed:
            self._on_down(self, reason)

    def close(self) -> None:
        """Break off the connection for good."""
        with self._lock:
            self._closed = True
            self._drop()
            self.sender.clear()

    def replace(self, message: object, data: memoryview, old: memoryview) -> None:
        """Send `message` from `data` from now on; see `FrameSender.replace`."""
        with self._lock:
            self.sender.replace(message, data, old)

    def pace(self, bytes_per_s: int) -> None:
        """Send at most so fast over the connection that it has; a new one gets its pace when it is dialled."""
        with self._lock:
            if self._connection is not None:
                self._connection.pace(bytes_per_s)

    def retransmissions(self) -> Retransmissions:
        """Packets that TCP has sent since the last call, and those of them that it has sent again."""
        connection = self._connection
        return Retransmissions(0, 0) if connection is None else connection.retransmissions()

    def on_event(self, mask: int) -> None:
        try:
            with self._lock:
                if self.receiver.is_blocked and mask & (select.EPOLLHUP | select.EPOLLERR):
                    raise ClosedError("it was closed")  # reading, which waits for space, would not find it out
                num_received = self._receipts.num_frames
                if mask & ~select.EPOLLOUT:
                    self._read()
                if mask != select.EPOLLIN or self._receipts.is_due or self._receipts.num_frames != num_received:
                    self._write()  # not for an acknowledgement: a stream that takes a frame out of turn gets two
                self._update_interest()
        except (OSError, WireError) as error:
            self.break_off(error)

    def _read(self) -> None:
        if self._connection is None:
            return
        if self.receiver.read(self._connection):
            self._loop.call(lambda: self.on_event(select.EPOLLIN))
        if self._receipts.unreported_bytes and not self._ack_timer_runs:
            self._ack_timer_runs = True
            self._loop.acknowledge_later(self)

    def _write(self) -> None:
        if self._connection is not None and self.sender.write(self._connection):
            self.advance_soon()

    def _update_interest(self) -> None:
        interest = (not self.receiver.is_blocked, self.sender.is_writing)
        if self._connection and interest != self._interest:
            self._interest = interest
            self._loop.want(self._connection.fd, read=interest[0], write=interest[1])

    def on_ack_due(self) -> None:
        with self._lock:
            self._ack_timer_runs = False
            self._receipts.is_due = self._receipts.is_due or self._receipts.unreported_bytes > 0
        self.advance()

    def on_tick(self, now_s: float) -> None:
        with self._lock:
            up = self._connection is not None
            idle = not self.sender.is_writing and now_s - self.sender.said_s > self._silence_s / 5
            silent = up and not self.receiver.is_blocked and now_s - self.receiver.heard_s > self._silence_s
            if self._connection is not None:
                self._connection.renew(now_s)
            self._receipts.is_due = due = self._receipts.is_due or (up and idle)
        if silent:
            self.break_off(TimeoutError(f"nothing was heard for {self._silence_s:g} s"))
        elif due:
            self.advance()
        self._on_tick(self, now_s)

    def advance(self) -> None:
        """Send what there is, and read on where there was no space; errors end the connection."""
        self.on_event(select.EPOLLIN if self.receiver.is_blocked else 0)

    def advance_soon(self) -> None:
        """Have the loop do it."""
        self._loop.call(self.advance)

    def advance_when_rung(self) -> None:
        """Have the loop do it after `ring`."""
        self._loop.call_when_rung(self.advance)

    def ring(self) -> None:
        """Wake the loop."""
        self._loop.ring()

    def try_advance(self) -> bool:
        """Send in this thread, if the stream is free to; False when it is not."""
        if self._connection is None or self.sender.is_writing or not self._lock.acquire(blocking=False):
            return False
        try:
            if self._connection is None or self.sender.is_writing:
                return False
            self._write()
            self._update_interest()
        except (OSError, WireError) as error:
            reason = error
            self._loop.call(lambda: self.break_off(reason))
        finally:
            self._lock.release()
        return True
