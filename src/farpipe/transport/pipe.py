"""Frames to and from one peer, each exactly once and in order, over as many connections as that takes.

Both sides number the frames that they send from 0, without writing the number down: the order on a connection is the
number. Each side counts what it has received and tells the other, with every frame or alone. What the other side has
not acknowledged is kept; when a connection breaks and a new one is made, the two sides tell each other their counts
(see handshake.py) and each goes on with the first frame that the other has not got. So nothing can be lost or doubled,
wherever a connection breaks.

    frame:  prefix (kind, length of head and body, frames received so far), head, body, stamp
    note:   prefix alone; an acknowledgement, and a sign of life for a side that has nothing else to say
    filler: prefix and bytes that mean nothing, while a connection warms up (see warm_up.py); not counted, not kept
"""

import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from farpipe.transport.connection import Connection
from farpipe.transport.loop import Loop
from farpipe.transport.security.proof import ClosedError
from farpipe.transport.warm_up import WarmUp
from farpipe.transport.wire import WireError

MAX_HEAD_BYTES: Final = 1024
MAX_BODY_BYTES: Final = 64 << 20
ACK_BYTES: Final = 256 << 10
"""After so many bytes an acknowledgement is due at once."""

_FRAME: Final = 0xF1
_NOTE: Final = 0xA1
_FILLER: Final = 0xE1
_KINDS: Final = (_FRAME, _NOTE, _FILLER)
_PREFIX: Final = struct.Struct("<BxHIQ")
_STAMP: Final = struct.Struct("<q")
_WHOLE_BYTES: Final = 64 << 10
"""A frame up to here is handed over in one piece, with its stamp."""
_FILLING: Final = bytes(16 << 10)
_TURN_BYTES: Final = 1 << 20
"""A pipe that has moved so much lets the others have their turn."""
_SHARE_BYTES: Final = 32 << 10
"""One that has sent so much does so at the end of a frame: the next one is for another stream of the channel."""


@dataclass(eq=False, slots=True)
class Frame:
    """One frame on its way out; `body` must not change until it is acknowledged."""

    head: bytes
    body: bytes | memoryview
    end_ns: int | None = None
    """What the stamp is to say; None: when the last byte was handed over."""
    owner: Any = None


class Ends(Protocol):
    """Where a pipe's frames come from and go to. Called under the pipe's lock; must not wait."""

    def pull(self) -> Frame | None:
        """The next frame to send, if there is one."""

    def acknowledged(self, frame: Frame) -> None:
        """The peer has got it."""

    def begin(self, head: bytes, body_bytes: int) -> tuple[Any, memoryview] | None:
        """Something to know the frame by and where its body goes, for a frame that comes in; None: no room as yet.

        Called again with the same frame after a None, and when the connection breaks in the middle of it.
        """

    def complete(self, known: Any, end_ns: int) -> None:
        """The frame is there; its stamp."""


class Pipe:
    """One pipe; `loop` serves it. `attach` gives it a connection, `on_down` hears that it has none any more.

    `warm_up` says how long a new connection is filled up; None: not at all. `on_down(reason)` and `on_tick` (see
    Served) are called in the loop's thread without any lock.
    """

    def __init__(
        self,
        ends: Ends,
        loop: Loop,
        now_ns: Callable[[], int],
        on_down: Callable[["Pipe", Exception], None],
        watch: Callable[["Pipe", float], None],
        silence_s: float,
        warm_up: WarmUp | None = None,
    ) -> None:
        self._ends, self.loop, self._now_ns, self._silence_s = ends, loop, now_ns, silence_s
        self._warm_up = warm_up
        self._on_down, self._watch = on_down, watch
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._ticket = 0
        self.down_since_s: float | None = None
        """Since when (monotonic) it has no connection; None while it has one and before the first."""
        self._kept: deque[Frame] = deque()  # not acknowledged; those from _cursor on are still to be sent
        self._cursor = 0
        self._num_acknowledged = 0
        self._out: list[bytes | memoryview] = []
        self._open_stamp: Frame | None = None
        self._note_due = False
        self._heard_s = self._said_s = 0.0
        self.num_received = 0
        self._unsaid_bytes = 0
        self._waiting_for_timer = False
        self._paused = self._was_paused = False
        self._wants_write = False
        self._closed = False
        self._buffer = memoryview(bytearray(_WHOLE_BYTES))
        self._first = self._last = 0  # what is in the buffer
        self._forget_incoming()
        loop.join(self)

    # Connections

    @property
    def is_up(self) -> bool:
        """Whether it has a connection."""
        return self._connection is not None

    def displace(self) -> tuple[int, int]:
        """Let go of the connection for a new one: a ticket for `attach` and the number of frames received."""
        with self._lock:
            self._drop()
            self._ticket += 1
            return self._ticket, self.num_received

    def attach(self, connection: Connection, ticket: int, peer_received: int) -> bool:
        """Go on with `connection`; `peer_received` frames have arrived there. False when the ticket is out of date.

        WireError when the peer claims what can't be.
        """
        with self._lock:
            if self._closed or ticket != self._ticket or self._connection is not None:
                return False
            self._acknowledge(peer_received)
            self._cursor, self._out, self._open_stamp = 0, [], None
            self._heard_s = self._said_s = time.monotonic()
            self.down_since_s = None
            self._forget_incoming()
            self._first = self._last = 0
            self._paused = self._was_paused = self._wants_write = False
            self._connection = connection
            if self._warm_up is not None:
                self._warm_up.begin(time.monotonic())
            self.loop.watch(connection.fd, self)
        self.loop.call(self._begin)  # the handshake may have read more than its own
        return True

    def _begin(self) -> None:
        self.on_event(select.EPOLLIN | select.EPOLLOUT)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self.down_since_s = time.monotonic()
            self.loop.forget(connection.fd)
            connection.close()

    def break_off(self, reason: Exception) -> None:
        """Let go of the connection, which is of no use any more, and say so."""
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
            self._kept.clear()
            self._cursor = 0

    # What the loop calls

    def on_event(self, mask: int) -> None:
        """See Served."""
        try:
            with self._lock:
                if self._paused and mask & (select.EPOLLHUP | select.EPOLLERR):  # reading would not find it out
                    raise ClosedError("it was closed")
                num_received = self.num_received
                if mask & ~select.EPOLLOUT:
                    self._receive()
                if mask != select.EPOLLIN or self._note_due or self.num_received != num_received:
                    self._send()  # not for an acknowledgement: a stream that takes a frame out of turn gets two
                self._set_interest()
        except (OSError, WireError) as error:
            self.break_off(error)

    def on_ack_due(self) -> None:
        """See Served."""
        with self._lock:
            self._waiting_for_timer = False
            self._note_due = self._note_due or self._unsaid_bytes > 0
        self.advance()

    def on_tick(self, now_s: float) -> None:
        """See Served."""
        with self._lock:
            up, idle = self._connection is not None, not self._out and now_s - self._said_s > self._silence_s / 5
            silent = up and not self._paused and now_s - self._heard_s > self._silence_s
            self._note_due = self._note_due or (up and idle)
        if silent:
            self.break_off(TimeoutError(f"nothing was heard for {self._silence_s:g} s"))
        elif self._note_due:
            self.advance()
        self._watch(self, now_s)

    def advance(self) -> None:
        """Send what there is, and read on where there was no room; errors end the connection."""
        self.on_event(select.EPOLLIN if self._paused else 0)

    def advance_soon(self) -> None:
        """Have the loop do it."""
        self.loop.call(self.advance)

    def try_advance(self) -> bool:
        """Send in this thread, if the pipe is free to; False when it is not."""
        if self._connection is None or self._out or not self._lock.acquire(blocking=False):
            return False
        try:
            if self._connection is None or self._out:
                return False
            self._send()
            self._set_interest()
        except (OSError, WireError) as error:
            reason = error
            self.loop.call(lambda: self.break_off(reason))
        finally:
            self._lock.release()
        return True

    @property
    def num_kept(self) -> int:
        """Frames that were pulled and not acknowledged yet."""
        return len(self._kept)

    def all_handed_over(self) -> bool:
        """Whether the kernel has all that was pulled."""
        return self._cursor == len(self._kept) and not self._out

    def _set_interest(self) -> None:
        wants_write = bool(self._out)
        if self._connection and (wants_write != self._wants_write or self._paused != self._was_paused):
            self._wants_write, self._was_paused = wants_write, self._paused
            self.loop.want(self._connection.fd, read=not self._paused, write=wants_write)

    # Sending

    def _send(self) -> None:
        budget = _TURN_BYTES
        while self._connection is not None and (self._out or self._load()):
            num_bytes = self._connection.send(self._out)
            if not num_bytes:
                return
            self._said_s = time.monotonic()
            self._consume(num_bytes)
            budget -= num_bytes
            if budget < 0 or (not self._out and budget < _TURN_BYTES - _SHARE_BYTES):  # the rest in another turn
                if not self._out:
                    self.advance_soon()
                return

    def _consume(self, num_bytes: int) -> None:
        out = self._out
        while out and num_bytes >= len(out[0]):
            num_bytes -= len(out.pop(0))
        if num_bytes:
            out[0] = memoryview(out[0])[num_bytes:]
        elif not out and self._open_stamp is not None:
            stamped, self._open_stamp = self._open_stamp, None
            out.append(_STAMP.pack(self._now_ns() if stamped.end_ns is None else stamped.end_ns))

    def _load(self) -> bool:
        """Take up the next thing to send; whether there is any."""
        if self._cursor == len(self._kept) and (frame := self._ends.pull()) is not None:
            self._kept.append(frame)
        if self._cursor < len(self._kept):
            self._load_frame(self._kept[self._cursor])
            self._cursor += 1
            return True
        if self._note_due:
            self._out = [_PREFIX.pack(_NOTE, 0, 0, self._say_received())]
            return True
        if self._is_cold():
            self._out = [_PREFIX.pack(_FILLER, 0, len(_FILLING), self._say_received()), _FILLING]
            return True
        return False

    def _is_cold(self) -> bool:
        return (
            self._warm_up is not None
            and self._connection is not None
            and self._warm_up.goes_on(self._connection.delivered_bytes_per_s, time.monotonic())
        )

    def _load_frame(self, frame: Frame) -> None:
        prefix = _PREFIX.pack(_FRAME, len(frame.head), len(frame.body), self._say_received())
        self._out = [prefix + frame.head]
        if len(frame.body):
            self._out.append(frame.body)
        if len(frame.body) <= _WHOLE_BYTES:
            self._out.append(_STAMP.pack(self._now_ns() if frame.end_ns is None else frame.end_ns))
        else:
            self._open_stamp = frame

    def _say_received(self) -> int:
        self._note_due, self._unsaid_bytes = False, 0
        return self.num_received

    def _acknowledge(self, num_frames: int) -> None:
        """The peer has received so many frames in all."""
        news = num_frames - self._num_acknowledged
        if not 0 <= news <= self._cursor:
            raise WireError(f"{num_frames} frames acknowledged of {self._num_acknowledged + len(self._kept)}")
        for _ in range(news):
            self._ends.acknowledged(self._kept.popleft())
        self._cursor -= news
        self._num_acknowledged = num_frames

    # Receiving

    def _forget_incoming(self) -> None:
        self._expects: tuple[int, int] | None = None  # lengths of head and body, once the prefix is there
        self._known: Any = None
        self._target: memoryview | None = None  # what is missing of the body, once there is room for it
        self._filler_bytes = 0  # what is still to come of a filler

    def _receive(self) -> None:
        self._paused = False
        budget = _TURN_BYTES
        if self._connection is not None:
            self._connection.is_drained = False
        roomy = self._parse()  # what there was no room for the last time
        while roomy and (connection := self._connection) is not None and not connection.is_drained:
            num_bytes = self._read()
            if not num_bytes:
                return
            self._heard_s = time.monotonic()
            roomy = self._parse()
            budget -= num_bytes
            if budget < 0:
                self.loop.call(self._read_on)  # TLS may hold what the kernel does not know of
                return
        self._paused = not roomy

    def _read(self) -> int:
        assert self._connection is not None
        if self._target is None or len(self._target) <= len(self._buffer) // 2 or self._first != self._last:
            return self._fill_buffer()
        num_bytes = self._connection.receive_into(self._target)
        self._target = self._target[num_bytes:]
        return num_bytes

    def _read_on(self) -> None:
        self.on_event(select.EPOLLIN)

    def _fill_buffer(self) -> int:
        assert self._connection is not None
        if self._first == self._last:
            self._first = self._last = 0
        elif self._last == len(self._buffer):
            rest = bytes(self._buffer[self._first : self._last])
            self._buffer[: len(rest)] = rest
            self._first, self._last = 0, len(rest)
        num_bytes = self._connection.receive_into(self._buffer[self._last :])
        self._last += num_bytes
        return num_bytes

    def _parse(self) -> bool:
        """Work through what has come; False when there is no room for what comes next."""
        while True:
            if self._expects is None and not self._take_prefix():
                return True
            assert self._expects is not None
            if self._target is None:
                if self._last - self._first < self._expects[0]:
                    return True
                if not self._take_head():
                    return False
            if not self._take_body():
                return True

    def _take_prefix(self) -> bool:
        while self._skip_filler() and self._last - self._first >= _PREFIX.size:
            kind, head_bytes, body_bytes, acknowledged = _PREFIX.unpack_from(self._buffer, self._first)
            if kind not in _KINDS or head_bytes > MAX_HEAD_BYTES or body_bytes > MAX_BODY_BYTES:
                raise WireError(f"not a frame: {bytes(self._buffer[self._first : self._first + 8])!r}")
            self._first += _PREFIX.size
            self._acknowledge(acknowledged)
            if kind == _FRAME:
                self._expects = (head_bytes, body_bytes)
                return True
            self._filler_bytes = body_bytes
        return False

    def _skip_filler(self) -> bool:
        """Drop what there is of a filler; whether it is over."""
        num_bytes = min(self._filler_bytes, self._last - self._first)
        self._first += num_bytes
        self._filler_bytes -= num_bytes
        return not self._filler_bytes

    def _take_head(self) -> bool:
        assert self._expects is not None
        head_bytes, body_bytes = self._expects
        found = self._ends.begin(bytes(self._buffer[self._first : self._first + head_bytes]), body_bytes)
        if found is None:
            return False
        self._known, self._target = found
        self._first += head_bytes
        return True

    def _take_body(self) -> bool:
        """Move what is in the buffer to where it belongs; whether the frame is complete."""
        assert self._target is not None
        assert self._expects is not None
        num_bytes = min(len(self._target), self._last - self._first)
        if num_bytes:
            self._target[:num_bytes] = self._buffer[self._first : self._first + num_bytes]
            self._target = self._target[num_bytes:]
            self._first += num_bytes
        if len(self._target) or self._last - self._first < _STAMP.size:
            return False
        (end_ns,) = _STAMP.unpack_from(self._buffer, self._first)
        self._first += _STAMP.size
        known, size = self._known, sum(self._expects) + _PREFIX.size
        self._expects = self._known = self._target = None
        self._ends.complete(known, end_ns)
        self._count(size)
        return True

    def _count(self, num_bytes: int) -> None:
        self.num_received += 1
        self._unsaid_bytes += num_bytes
        if self._unsaid_bytes >= ACK_BYTES:
            self._note_due = True
        elif not self._waiting_for_timer:
            self._waiting_for_timer = True
            self.loop.acknowledge_later(self)
