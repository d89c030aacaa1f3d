"""The two halves of a stream: frames to write that are kept until acknowledged, and bytes read as frames."""

import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from farpipe.engine.transport.connection import Connection
from farpipe.engine.transport.tcp import TcpRamp
from farpipe.engine.transport.wire import (
    ACKNOWLEDGEMENT,
    FRAME,
    KINDS,
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    PADDING,
    PREFIX,
    STAMP,
    TURN_BYTES,
    Frame,
    FrameEndpoint,
    Receipts,
    WireError,
)

WHOLE_BYTES: Final = 64 << 10
"""A frame up to here is handed over in one piece, with its stamp."""
_PADDING: Final = bytes(16 << 10)
_SHARE_BYTES: Final = 32 << 10
"""Bytes after which a stream stops at the end of a frame and another stream of the channel goes on."""


class FrameSender:
    """Writes the frames of `endpoint` to one connection after another; `receipts` go with every prefix.

    `ramp` says how long a new connection is filled with padding; None: not at all. Not to be used by two threads at
    once.
    """

    def __init__(
        self, endpoint: FrameEndpoint, receipts: Receipts, now_ns: Callable[[], int], ramp: TcpRamp | None
    ) -> None:
        self._endpoint, self._receipts, self._now_ns, self._ramp = endpoint, receipts, now_ns, ramp
        self._unacknowledged: deque[Frame] = deque()  # those from _cursor on are still to be sent
        self._cursor = 0
        self._num_acknowledged = 0
        self._out: list[bytes | memoryview] = []
        self._open_stamp: Frame | None = None
        self.said_s = 0.0
        """Time at which something was handed over last (monotonic)."""

    @property
    def is_writing(self) -> bool:
        """True if a frame is begun and not handed over to its end."""
        return bool(self._out)

    @property
    def num_unacknowledged(self) -> int:
        """Frames that were pulled and not acknowledged yet."""
        return len(self._unacknowledged)

    @property
    def is_ramping(self) -> bool:
        """True while TCP is being brought up to the rate."""
        return self._ramp is not None and not self._ramp.is_over

    def all_handed_over(self) -> bool:
        """True if the kernel has all that was pulled."""
        return self._cursor == len(self._unacknowledged) and not self._out

    def restart(self, peer_received: int) -> tuple[int, int]:
        """Go on over a new connection, `peer_received` frames being there; frames and bytes that are sent again.

        WireError when the peer claims what can't be.
        """
        self.acknowledge(peer_received)
        again = [len(frame.head) + len(frame.body) for frame in islice(self._unacknowledged, self._cursor)]
        self._cursor, self._out, self._open_stamp = 0, [], None
        self.said_s = time.monotonic()
        if self._ramp is not None:
            self._ramp.begin(self.said_s)
        return len(again), sum(again)

    def clear(self) -> None:
        """Forget everything; the stream is closed."""
        self._unacknowledged.clear()
        self._cursor = 0

    def acknowledge(self, num_frames: int) -> None:
        """The peer has received this number of frames in all; WireError when that can't be."""
        news = num_frames - self._num_acknowledged
        if not 0 <= news <= self._cursor:
            raise WireError(f"{num_frames} frames acknowledged of {self._num_acknowledged + len(self._unacknowledged)}")
        for _ in range(news):
            self._endpoint.acknowledged(self._unacknowledged.popleft())
        self._cursor -= news
        self._num_acknowledged = num_frames

    def replace(self, message: object, data: memoryview, old: memoryview) -> None:
        """Take the bytes of `message` from `data` from now on, and none from `old`, which has the same."""
        for frame in self._unacknowledged:
            if frame.message is message:
                frame.body = data[frame.offset : frame.offset + len(frame.body)]
        loaded = self._unacknowledged[self._cursor - 1] if self._cursor else None
        if loaded is not None and loaded.message is message:
            self._out = [
                loaded.body[len(loaded.body) - len(piece) :]
                if isinstance(piece, memoryview) and piece.obj is old.obj
                else piece
                for piece in self._out
            ]

    def write(self, connection: Connection) -> bool:
        """Hand over what the kernel takes, up to a turn's share; whether there may be more for another turn."""
        budget = TURN_BYTES
        while self._out or self._load(connection):
            num_bytes = connection.send(self._out)
            if not num_bytes:
                return False
            self.said_s = time.monotonic()
            self._consume(num_bytes)
            budget -= num_bytes
            if budget < 0 or (not self._out and budget < TURN_BYTES - _SHARE_BYTES):
                return not self._out
        return False

    def _consume(self, num_bytes: int) -> None:
        out = self._out
        while out and num_bytes >= len(out[0]):
            num_bytes -= len(out.pop(0))
        if num_bytes:
            out[0] = memoryview(out[0])[num_bytes:]
        elif not out and self._open_stamp is not None:
            stamped, self._open_stamp = self._open_stamp, None
            out.append(self._stamp(stamped))

    def _stamp(self, frame: Frame) -> bytes:
        return STAMP.pack(self._now_ns() if frame.end_ns is None else frame.end_ns)

    def _load(self, connection: Connection) -> bool:
        """Take up the next thing to send; whether there is any."""
        if self._cursor == len(self._unacknowledged) and (frame := self._endpoint.pull()) is not None:
            self._unacknowledged.append(frame)
        if self._cursor < len(self._unacknowledged):
            self._load_frame(self._unacknowledged[self._cursor])
            self._cursor += 1
        elif self._receipts.is_due:
            self._out = [PREFIX.pack(ACKNOWLEDGEMENT, 0, 0, self._receipts.report())]
        elif self._is_to_be_padded(connection):
            self._out = [PREFIX.pack(PADDING, 0, len(_PADDING), self._receipts.report()), _PADDING]
        return bool(self._out)

    def _is_to_be_padded(self, connection: Connection) -> bool:
        """True while the ramp goes on; when it has just ended, the congestion control starts over with its window."""
        if self._ramp is None or self._ramp.is_over:
            return False
        now_s = time.monotonic()
        if self._ramp.goes_on(connection.delivered_bytes_per_s, now_s):
            return True
        connection.renew(now_s, at_once=True)
        return False

    def _load_frame(self, frame: Frame) -> None:
        prefix = PREFIX.pack(FRAME, len(frame.head), len(frame.body), self._receipts.report())
        self._out = [prefix + frame.head]
        if len(frame.body):
            self._out.append(frame.body)
        if len(frame.body) <= WHOLE_BYTES:
            self._out.append(self._stamp(frame))
        else:
            self._open_stamp = frame


_BUFFER_BYTES: Final = 64 << 10


class FrameReceiver:
    """Hands complete frames to `endpoint` and counts them in `receipts`.

    `on_acknowledged(count)` hears the peer's count of our frames, which comes with every prefix. Not to be used by two
    threads at once.
    """

    def __init__(self, endpoint: FrameEndpoint, receipts: Receipts, on_acknowledged: Callable[[int], None]) -> None:
        self._endpoint, self._receipts, self._on_acknowledged = endpoint, receipts, on_acknowledged
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self.is_blocked = False
        """True if the endpoint had no space for the frame that comes next."""
        self.restart()

    def restart(self) -> None:
        """Forget what came in part: it comes again over a new connection."""
        self.heard_s = time.monotonic()
        """Time at which something came last (monotonic)."""
        self.is_blocked = False
        self._first = self._last = 0  # what is in the buffer
        self._expects: tuple[int, int] | None = None  # lengths of head and body, once the prefix is there
        self._key: Any = None
        self._target: memoryview | None = None  # what is missing of the body, once there is space for it
        self._padding_bytes = 0  # what is still to come of a padding

    def read(self, connection: Connection) -> bool:
        """Take what has come, up to a turn's share; whether there may be more for another turn."""
        self.is_blocked = connection.is_drained = False
        budget = TURN_BYTES
        has_space = self._parse()  # what there was no space for the last time
        while has_space and not connection.is_drained:
            num_bytes = self._read_some(connection)
            if not num_bytes:
                return False
            self.heard_s = time.monotonic()
            has_space = self._parse()
            budget -= num_bytes
            if budget < 0:
                return True  # TLS may hold what the kernel does not know of
        self.is_blocked = not has_space
        return False

    def _read_some(self, connection: Connection) -> int:
        if self._target is None or len(self._target) <= len(self._buffer) // 2 or self._first != self._last:
            return self._fill_buffer(connection)
        num_bytes = connection.receive_into(self._target)
        self._target = self._target[num_bytes:]
        return num_bytes

    def _fill_buffer(self, connection: Connection) -> int:
        if self._first == self._last:
            self._first = self._last = 0
        elif self._last == len(self._buffer):
            rest = bytes(self._buffer[self._first : self._last])
            self._buffer[: len(rest)] = rest
            self._first, self._last = 0, len(rest)
        num_bytes = connection.receive_into(self._buffer[self._last :])
        self._last += num_bytes
        return num_bytes

    def _parse(self) -> bool:
        """Work through what has come; False when there is no space for what comes next."""
        while True:
            if self._expects is None and not self._take_prefix():
                return True
            assert self._expects is not None
            if self._target is None:
                if self._last - self._first < self._expects[0]:
                    return True
                if not self._take_head(*self._expects):
                    return False
            if not self._take_body():
                return True

    def _take_prefix(self) -> bool:
        while self._skip_padding() and self._last - self._first >= PREFIX.size:
            kind, head_bytes, body_bytes, acknowledged = PREFIX.unpack_from(self._buffer, self._first)
            if kind not in KINDS or head_bytes > MAX_HEAD_BYTES or body_bytes > MAX_BODY_BYTES:
                raise WireError(f"not a frame: {bytes(self._buffer[self._first : self._first + 8])!r}")
            self._first += PREFIX.size
            self._on_acknowledged(acknowledged)
            if kind == FRAME:
                self._expects = (head_bytes, body_bytes)
                return True
            self._padding_bytes = body_bytes
        return False

    def _skip_padding(self) -> bool:
        """Drop what there is of a padding; whether it is over."""
        num_bytes = min(self._padding_bytes, self._last - self._first)
        self._first += num_bytes
        self._padding_bytes -= num_bytes
        return not self._padding_bytes

    def _take_head(self, head_bytes: int, body_bytes: int) -> bool:
        found = self._endpoint.begin(bytes(self._buffer[self._first : self._first + head_bytes]), body_bytes)
        if found is None:
            return False
        self._key, self._target = found
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
        if len(self._target) or self._last - self._first < STAMP.size:
            return False
        (end_ns,) = STAMP.unpack_from(self._buffer, self._first)
        self._first += STAMP.size
        key, size = self._key, sum(self._expects) + PREFIX.size
        self._expects = self._key = self._target = None
        self._endpoint.complete(key, end_ns)
        self._receipts.add(size)
        return True
