"""The receiving half of a stream: reads what a connection brings and takes it apart into frames."""

import time
from collections.abc import Callable
from typing import Any, Final

from farpipe.transport.connection import Connection
from farpipe.transport.wire import (
    FRAME,
    KINDS,
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    PREFIX,
    STAMP,
    TURN_BYTES,
    FrameEndpoint,
    Receipts,
    WireError,
)

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
