"""The sending half of a stream: the bytes to write next, and the frames that the peer has not acknowledged."""

import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from farpipe.transport.connection import Connection
from farpipe.transport.tcp import TcpRamp
from farpipe.transport.wire import (
    ACKNOWLEDGEMENT,
    FRAME,
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
"""A stream that has sent so much stops at the end of a frame: the next one is for another stream of the channel."""


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
        """The peer has received so many frames in all; WireError when that can't be."""
        news = num_frames - self._num_acknowledged
        if not 0 <= news <= self._cursor:
            raise WireError(f"{num_frames} frames acknowledged of {self._num_acknowledged + len(self._unacknowledged)}")
        for _ in range(news):
            self._endpoint.acknowledged(self._unacknowledged.popleft())
        self._cursor -= news
        self._num_acknowledged = num_frames

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
        """True while the ramp goes on; when it has just ended, the congestion control begins anew with its window."""
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
