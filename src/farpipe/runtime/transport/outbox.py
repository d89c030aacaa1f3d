"""The sending side of one channel: a bounded queue of tensors, and streams that carry them off in chunks."""

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from farpipe.emulate import Passage
from farpipe.errors import InputError, RunError
from farpipe.runtime.clock import Clock
from farpipe.runtime.transport.config import TransportConfig
from farpipe.runtime.transport.health import Health
from farpipe.runtime.transport.message import Channel, Tag
from farpipe.runtime.transport.sockets import interrupt, send_all
from farpipe.runtime.transport.wire import END_FRAME, STAMP, ChunkHeader, check_sendable, pack_chunk, tensor_bytes
from farpipe.units import format_bytes

SMALLEST_CHUNK_BYTES: Final = 128 << 10
LARGEST_CHUNK_BYTES: Final = 1 << 20


@dataclass
class _Outgoing:
    """A message on its way out; `header` is that of a chunk which is all of it."""

    header: ChunkHeader
    data: memoryview
    passage: Passage | None
    """When it is on its emulated link (machine's clock)."""
    chunk_bytes: int
    next_offset: int = 0


class _Chunk(NamedTuple):
    header: ChunkHeader
    data: memoryview
    passage: Passage | None


class Outbox:
    """Messages to one peer, all of one kind. They leave in the order in which they were put.

    Every stream is a connection, made by `dial`, with a thread of its own that takes the next chunk as soon as its
    last one is gone: a stream that TCP slows down carries less and holds nobody up. `reserve` finds a message's place
    on an emulated link.
    """

    def __init__(
        self,
        channel: Channel,
        config: TransportConfig,
        health: Health,
        clock: Clock,
        dial: Callable[[], socket.socket],
        reserve: Callable[[int], Passage] | None,
    ) -> None:
        self._channel, self._config, self._health, self._clock = channel, config, health, clock
        self._dial, self._reserve = dial, reserve
        lock = threading.Lock()
        self._work, self._room = health.condition(lock), health.condition(lock)
        self._queue: deque[_Outgoing] = deque()
        self._queued_bytes = 0
        self._num_messages = 0
        self._closing = False
        self._num_streams = config.streams
        self._sockets: list[socket.socket] = []
        name = f"farpipe send {channel.kind} to {channel.peer}"
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(config.streams)]
        for thread in self._threads:
            thread.start()

    @property
    def num_messages(self) -> int:
        """How many messages were put since the beginning."""
        return self._num_messages

    def put(self, tag: Tag, tensor: torch.Tensor) -> None:
        """Queue a contiguous CPU tensor; waits up to `timeout_s` for room and raises RunError if there is none."""
        ready_ns, data = self._clock.now_ns(), tensor_bytes(tensor)
        self._check(tensor, len(data))
        with self._room:
            self._await_room(
                len(data), f"sending the {self._channel.kind} message of {tag} to rank {self._channel.peer}"
            )
            passage = self._reserve(len(data)) if self._reserve else None
            header = ChunkHeader(
                number=self._num_messages,
                tag=tag,
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                total_bytes=len(data),
                offset=0,
                chunk_bytes=len(data),
                ready_ns=ready_ns,
                start_ns=self._clock.from_machine_ns(passage.start_ns) if passage else 0,
                deliver_ns=passage.arrival_ns if passage else 0,
            )
            outgoing = _Outgoing(header, data, passage, self._chunk_bytes(len(data)))
            self._queue.append(outgoing)
            self._num_messages += 1
            self._queued_bytes += len(data)
            self._work.notify(math.ceil(len(data) / outgoing.chunk_bytes) or 1)

    def _check(self, tensor: torch.Tensor, num_bytes: int) -> None:
        check_sendable(tensor)
        if num_bytes > self._config.max_message_bytes:
            limit = format_bytes(self._config.max_message_bytes)
            raise InputError(f"a message of {format_bytes(num_bytes)} is longer than {limit} (max_message_bytes)")

    def _await_room(self, num_bytes: int, context: str) -> None:
        """Wait until `num_bytes` may be queued: they fit, or nothing else is there."""
        limit_bytes, timeout_s = self._config.buffer_bytes, self._config.timeout_s

        def ready() -> bool | None:
            return True if not self._queued_bytes or self._queued_bytes + num_bytes <= limit_bytes else None

        if not self._health.wait(self._room, ready, time.monotonic() + timeout_s, context):
            raise RunError(
                f"{context}: no room for {format_bytes(num_bytes)} within {timeout_s:g} s; what waits to be sent is "
                f"{format_bytes(self._queued_bytes)}, the limit is {format_bytes(limit_bytes)} (buffer_bytes)"
            )

    def _chunk_bytes(self, total_bytes: int) -> int:
        """An equal share for every stream, but not tiny, and short enough for streams of unequal speed to even out."""
        share = math.ceil(total_bytes / self._config.streams)
        return min(max(share, SMALLEST_CHUNK_BYTES), LARGEST_CHUNK_BYTES)

    def _run(self) -> None:
        """One stream, from its connection to its end."""
        with (
            self._health.guard(self._channel.peer, f"sending {self._channel.kind} messages"),
            self._connection() as sock,
        ):
            self._carry(sock)
        with self._room:
            self._num_streams -= 1
            self._room.notify_all()

    @contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        sock = self._dial()
        with self._room:
            self._sockets.append(sock)
        try:
            yield sock
        finally:
            with self._room:
                self._sockets.remove(sock)
                sock.close()

    def _carry(self, sock: socket.socket) -> None:
        while (chunk := self._next_chunk()) is not None:
            self._send(sock, chunk)
            with self._room:
                self._queued_bytes -= chunk.header.chunk_bytes
                self._room.notify_all()
        send_all(sock, END_FRAME)
        sock.shutdown(socket.SHUT_WR)

    def _next_chunk(self) -> _Chunk | None:
        """The next piece to send; None when the channel is closed and all is sent."""
        with self._work:
            ready = self._health.wait(
                self._work, lambda: bool(self._queue) or self._closing or None, math.inf, "sending"
            )
            if not ready or not self._queue:
                return None
            message = self._queue[0]
            offset, total_bytes = message.next_offset, message.header.total_bytes
            num_bytes = min(message.chunk_bytes, total_bytes - offset)
            message.next_offset += num_bytes
            if message.next_offset >= total_bytes:
                self._queue.popleft()
        header = message.header._replace(offset=offset, chunk_bytes=num_bytes)
        return _Chunk(header, message.data[offset : offset + num_bytes], message.passage)

    def _send(self, sock: socket.socket, chunk: _Chunk) -> None:
        """Hand a chunk to the kernel, with the time at which it took it (or the emulated link would have) after it."""
        if chunk.passage:
            end_ns = self._clock.from_machine_ns(chunk.passage.end_ns)
            send_all(sock, pack_chunk(chunk.header), chunk.data, STAMP.pack(end_ns))
        else:
            header = chunk.header._replace(start_ns=self._clock.now_ns())
            send_all(sock, pack_chunk(header), chunk.data)
            send_all(sock, STAMP.pack(self._clock.now_ns()))

    def flush(self, deadline_s: float) -> bool:
        """Send what is queued and end the streams; whether that was done by `deadline_s` (monotonic).

        Raises the error that breaks the run meanwhile.
        """
        with self._room:
            self._closing = True
            self._work.notify_all()
            context = f"sending the last {self._channel.kind} messages to rank {self._channel.peer}"
            return self._health.wait(self._room, lambda: not self._num_streams or None, deadline_s, context) is not None

    def interrupt(self) -> None:
        """Break off whatever the streams do."""
        with self._room:
            for sock in self._sockets:
                interrupt(sock)

    def join(self, deadline_s: float) -> None:
        """Wait for the streams' threads, not beyond `deadline_s` (monotonic)."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
