"""The sending side of one channel: a bounded queue of messages, and streams that carry them off in fragments."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from farpipe.core.errors import InputError, RunError
from farpipe.core.units import format_bytes
from farpipe.engine.transport.buffers import Buffers
from farpipe.engine.transport.clock import Clock
from farpipe.engine.transport.config import TransportConfig
from farpipe.engine.transport.health import Health
from farpipe.engine.transport.inbox import allocate_bytes
from farpipe.engine.transport.passages import Passage
from farpipe.engine.transport.reconnector import Reconnector
from farpipe.engine.transport.stream import Stream
from farpipe.engine.transport.wire import (
    MAX_DESCRIPTION_BYTES,
    Channel,
    FragmentHeader,
    Frame,
    Tag,
    WireError,
    pack_fragment,
)

SMALLEST_FRAGMENT_BYTES: Final = 32 << 10
LARGEST_FRAGMENT_BYTES: Final = 1 << 20
LARGEST_NEAR_BYTES: Final = 2 << 20
"""The same where the round trip is no matter, and streams are equally fast: half the frames take 8 % less CPU."""
DIRECT_BYTES: Final = 64 << 10
"""Longer messages are left to the transport's threads: copying and encrypting them takes a while."""
COPIED_BYTES_PER_S: Final = 1e9
"""Rate of a copy to fresh memory, page faults included."""


@dataclass(eq=False)
class Outgoing:
    """A message on its way out; `header` is that of a fragment which is all of it."""

    header: FragmentHeader
    data: memoryview
    passage: Passage | None
    """Times at which it is on its emulated link (machine's clock)."""
    fragment_bytes: int
    num_unacknowledged: int
    """Fragments that have not arrived, for all that is known here."""
    end_bytes: int
    """Bytes of the channel up to its end."""
    next_offset: int = 0


class Outbox:
    """Messages to one peer, all of one kind. They leave in the order in which they were put.

    It is the endpoint of all its streams (`send_over`): a stream takes the next fragment as soon as its last one is
    gone, so one that TCP slows down carries less and delays no other. A small message is handed to the kernel by the
    thread that puts it, where a stream is free. A message is kept until the peer has acknowledged all of it. `reserve`
    finds its place on an emulated link.
    """

    def __init__(
        self,
        channel: Channel,
        config: TransportConfig,
        num_streams: int,
        health: Health,
        clock: Clock,
        reserve: Callable[[Tag, int], Passage] | None,
    ) -> None:
        self.channel, self._config, self._health, self._clock = channel, config, health, clock
        self._num_streams, self._reserve = num_streams, reserve
        lock = threading.Lock()
        self._lock, self._space, self._arrived = lock, health.condition(lock), health.condition(lock)
        self._queue: deque[Outgoing] = deque()
        self._copies = Buffers(allocate_bytes)
        self._queued_bytes = self._put_bytes = 0
        self._num_unacknowledged = 0
        self._num_messages = 0
        self.reconnectors: Sequence[Reconnector] = ()
        self._streams: list[Stream] = []
        self.rate: int | None = None
        """Bytes/s that each of its connections may send at most; None: any rate."""
        self.is_near = False

    def send_over(self, reconnectors: Sequence[Reconnector]) -> None:
        """Send over these streams."""
        self.reconnectors, self._streams = reconnectors, [reconnector.stream for reconnector in reconnectors]
        self._wake()

    @property
    def num_messages(self) -> int:
        """Number of messages that were put since the beginning."""
        return self._num_messages

    @property
    def is_ready(self) -> bool:
        """True if all streams are connected, and TCP is up to the rate on each of them."""
        return all(stream.is_up and not stream.sender.is_ramping for stream in self._streams)

    def pace(self, bytes_per_s: int) -> None:
        """Send at most so fast over each stream from now on."""
        self.rate = bytes_per_s
        for stream in self._streams:
            stream.pace(bytes_per_s)

    def put(self, tag: Tag, data: memoryview, description: bytes) -> Outgoing:
        """Queue a message; waits up to `timeout_s` for space and raises RunError if there is none."""
        ready_ns = self._clock.now_ns()
        self._check(len(data), description)
        with self._space:
            if self._health.error is not None or not self.has_space(len(data)):
                self._await_space(len(data), tag)
            passage = self._reserve(tag, len(data)) if self._reserve else None
            header = FragmentHeader(
                number=self._num_messages,
                tag=tag,
                description=description,
                total_bytes=len(data),
                offset=0,
                fragment_bytes=len(data),
                ready_ns=ready_ns,
                start_ns=self._clock.from_machine_ns(passage.start_ns) if passage else 0,
                deliver_ns=passage.arrival_ns if passage else 0,
            )
            fragment_bytes = self._fragment_bytes(len(data))
            num_fragments, end_bytes = math.ceil(len(data) / fragment_bytes) or 1, self._put_bytes + len(data)
            outgoing = Outgoing(header, data, passage, fragment_bytes, num_fragments, end_bytes)
            self._put_bytes = end_bytes
            self._queue.append(outgoing)
            self._num_messages += 1
            self._num_unacknowledged += outgoing.num_unacknowledged
            self._queued_bytes += len(data)
        if len(data) > DIRECT_BYTES or not any(stream.try_advance() for stream in self._streams):
            self._wake()
        return outgoing

    def give_back(self, message: Outgoing) -> None:
        """Return when the memory of `message`, which was put, is the caller's again.

        That is when all of it has arrived, or it is copied: the caller waits for as long as a copy would take, and on
        while the rate until then promises the rest within twice that. So it never waits for the peer, nor long for a
        slow link, and where the link is fast nothing is copied.
        """
        copied_s = len(message.data) / COPIED_BYTES_PER_S
        with self._arrived:
            while message.num_unacknowledged:
                left_bytes = message.end_bytes - self._put_bytes + self._queued_bytes
                done = self._arrived.wait_for(lambda: not message.num_unacknowledged or self._health.error, copied_s)
                self._health.check(f"sending the {self.channel.kind} message of {message.header.tag}")
                now_left_bytes = message.end_bytes - self._put_bytes + self._queued_bytes
                if not done and now_left_bytes > 2 * (left_bytes - now_left_bytes):
                    break
            else:
                return
        self._copy(message)

    def _copy(self, message: Outgoing) -> None:
        import numpy as np

        copy = self._copies(len(message.data))
        np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(message.data, np.uint8))  # without Python's lock
        with self._lock:
            old, message.data = message.data, copy
        for stream in self._streams:
            stream.replace(message, copy, old)

    def _wake(self) -> None:
        """Have every stream take a fragment, all before a loop wakes: else the first one may take two of a message.

        Where every stream is paced to a share of the rate, such a message took twice its time.
        """
        streams = [stream for stream in self._streams if stream.is_up]
        for stream in streams:
            stream.advance_when_rung()
        for stream in streams:
            stream.ring()

    def _check(self, num_bytes: int, description: bytes) -> None:
        if len(description) > MAX_DESCRIPTION_BYTES:
            raise ValueError(f"a description of {len(description)} bytes; the limit is {MAX_DESCRIPTION_BYTES}")
        if num_bytes > self._config.max_message_bytes:
            limit = f"the {self._config.max_message_bytes:,} of max_message_bytes"
            raise InputError(f"a message of {num_bytes:,} bytes is longer than {limit}")

    def has_space(self, num_bytes: int) -> bool:
        """True if `num_bytes` may be queued now: they fit, or nothing else is there."""
        return not self._queued_bytes or self._queued_bytes + num_bytes <= self._config.buffer_bytes

    def _await_space(self, num_bytes: int, tag: Tag) -> None:
        context = f"sending the {self.channel.kind} message of {tag} to rank {self.channel.peer}"
        limit_bytes, timeout_s = self._config.buffer_bytes, self._config.timeout_s
        deadline_s = time.monotonic() + timeout_s
        if not self._health.wait(self._space, lambda: self.has_space(num_bytes) or None, deadline_s, context):
            raise RunError(
                f"{context}: no space for {format_bytes(num_bytes)} within {timeout_s:g} s; what waits to be sent is "
                f"{format_bytes(self._queued_bytes)}, the limit is {format_bytes(limit_bytes)} (buffer_bytes)"
            )

    def _fragment_bytes(self, total_bytes: int) -> int:
        """Equally many for every stream, but not tiny, and short enough for streams of unequal speed to even out."""
        share = math.ceil(total_bytes / self._num_streams)
        largest_bytes = LARGEST_NEAR_BYTES if self.is_near else LARGEST_FRAGMENT_BYTES
        return max(math.ceil(share / max(1, math.ceil(share / largest_bytes))), SMALLEST_FRAGMENT_BYTES)

    def pull(self) -> Frame | None:
        """The next fragment as a frame, if there is one."""
        with self._lock:
            if not self._queue:
                return None
            message = self._queue[0]
            offset, total_bytes = message.next_offset, message.header.total_bytes
            num_bytes = min(message.fragment_bytes, total_bytes - offset)
            message.next_offset += num_bytes
            data = message.data
            if message.next_offset >= total_bytes:
                self._queue.popleft()
        passage = message.passage
        start_ns = message.header.start_ns if passage else self._clock.now_ns()
        header = message.header.of_fragment(offset, num_bytes, start_ns)
        end_ns = self._clock.from_machine_ns(passage.end_ns) if passage else None
        return Frame(pack_fragment(header), data[offset : offset + num_bytes], end_ns, message, offset)

    def acknowledged(self, frame: Frame) -> None:
        with self._space:
            self._queued_bytes -= len(frame.body)
            self._num_unacknowledged -= 1
            assert isinstance(frame.message, Outgoing)
            frame.message.num_unacknowledged -= 1
            self._space.notify_all()
            if not frame.message.num_unacknowledged:  # who waits for all of a message does not wake for each part of it
                self._arrived.notify_all()

    def begin(self, head: bytes, body_bytes: int) -> tuple[Any, memoryview]:
        """WireError: nothing comes in this direction."""
        raise WireError("data against the direction of its channel")

    def complete(self, key: Any, end_ns: int) -> None:
        """Do nothing: nothing comes in this direction."""

    def flush(self, deadline_s: float) -> bool:
        """Wait until all that was put has arrived, or the peer has left; False if not by `deadline_s` (monotonic).

        Raises the error that breaks the run meanwhile. A peer that has left takes no more, and acknowledgements that
        were on a broken connection don't come any more.
        """
        peer = self.channel.peer

        def is_done() -> bool | None:
            return not self._num_unacknowledged or self._health.has_departed(peer) or None

        context = f"sending the last {self.channel.kind} messages to rank {peer}"
        with self._arrived:
            return self._health.wait(self._arrived, is_done, deadline_s, context) is not None

    def close(self, deadline_s: float) -> None:
        """Break off the streams and wait for their threads, not beyond `deadline_s` (monotonic)."""
        for reconnector in self.reconnectors:
            reconnector.close()
        for reconnector in self.reconnectors:
            reconnector.join(deadline_s)


class Loan:
    """A message that is sent from the caller's memory, which may not be written to before it `is_over`."""

    def __init__(self, outbox: Outbox, message: Outgoing) -> None:
        self._outbox, self._message = outbox, message

    @property
    def is_over(self) -> bool:
        """True if all of it has arrived."""
        return not self._message.num_unacknowledged

    def end(self) -> None:
        """Return when the memory is the caller's again: it is copied where that is sooner than the arrival.

        Raises the error that broke the run.
        """
        self._outbox.give_back(self._message)
