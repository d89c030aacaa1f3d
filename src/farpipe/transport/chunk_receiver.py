"""The receiving end of one stream: puts chunks into the messages that they are part of."""

import time
from collections.abc import Callable

from farpipe.transport.frames import Frame
from farpipe.transport.inbox import Inbox
from farpipe.transport.message import Channel
from farpipe.transport.wire import ChunkHeader, WireError, unpack_chunk


class ChunkReceiver:
    """The endpoint of a stream that brings chunks of `channel` to `inbox`; `go_on` makes the stream read again."""

    def __init__(self, channel: Channel, inbox: Inbox, max_message_bytes: int) -> None:
        self._channel, self._inbox, self._limit_bytes = channel, inbox, max_message_bytes
        self.go_on: Callable[[], None] = lambda: None

    def pull(self) -> Frame | None:
        """Nothing goes in the other direction."""
        return None

    def acknowledged(self, frame: Frame) -> None:
        """Nothing was sent."""

    def begin(self, head: bytes, body_bytes: int) -> tuple[ChunkHeader, memoryview] | None:
        """See FrameEndpoint."""
        header = unpack_chunk(head, self._limit_bytes)
        if header.chunk_bytes != body_bytes:
            raise WireError(f"a chunk of {header.chunk_bytes} bytes in a frame of {body_bytes}")
        place = self._inbox.place(self._channel, header, self.go_on)
        return None if place is None else (header, place)

    def complete(self, key: ChunkHeader, end_ns: int) -> None:
        """See FrameEndpoint."""
        self._inbox.fill(self._channel, key, time.monotonic_ns(), end_ns)
