"""Messages that have come in and were not yet asked for, put together from their fragments, with bounded memory."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from farpipe.errors import RunError
from farpipe.transport.clock import Clock
from farpipe.transport.config import TransportConfig
from farpipe.transport.health import Health, Later, PeerError
from farpipe.transport.wire import (
    Channel,
    ChannelKind,
    FragmentHeader,
    Frame,
    Message,
    MessageTimes,
    Tag,
    WireError,
    unpack_fragment,
)
from farpipe.units import format_bytes

Allocate = Callable[[int], memoryview]
"""Gives writable memory for a message of so many bytes; whoever receives the message owns it."""


def allocate_bytes(num_bytes: int) -> memoryview:
    """Ordinary memory, not cleared."""
    import numpy as np

    return np.empty(num_bytes, np.uint8).data


@dataclass
class _PartialMessage:
    """A message that is coming in, or has come and waits."""

    header: FragmentHeader
    data: memoryview
    missing_bytes: int
    start_ns: int
    end_ns: int = 0
    received_ns: int | None = None
    """Time at which it was complete, on the machine's clock."""

    def available(self) -> "_PartialMessage | Later | None":
        """Itself when it is complete and, on an emulated link, has arrived."""
        if self.received_ns is None:
            return None
        return self if self.header.deliver_ns <= time.monotonic_ns() else Later(self.header.deliver_ns)


class _Wait(NamedTuple):
    """Description of a wait; its words are put together only if they are needed."""

    waiting_for: str
    channel: Channel
    tag: Tag

    def __str__(self) -> str:
        peer, kind = self.channel
        return f"{self.waiting_for}: waited for the {kind} message of {self.tag} from rank {peer}"


@dataclass
class _ChannelQueue:
    """Messages that have come in over one channel."""

    by_number: dict[int, _PartialMessage] = field(default_factory=dict)
    """Messages that are not complete."""
    by_tag: dict[Tag, _PartialMessage] = field(default_factory=dict)
    """Messages that were not taken."""
    awaited: list[Tag] = field(default_factory=list)
    num_bytes: int = 0
    num_complete: int = 0
    stopped: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks to go on with the streams whose next message found no space."""
    num_announced: float = math.inf
    """Number of messages that the peer has sent in all; known once it has said goodbye."""

    def has_space(self, header: FragmentHeader, limit_bytes: int) -> bool:
        """True if the message may come in: it fits, or someone waits for one that is not here or not complete.

        Without the second rule a full buffer, and a consumer that takes messages in another order than they were
        sent in, would wait for each other for ever.
        """
        if not self.num_bytes or self.num_bytes + header.total_bytes <= limit_bytes:
            return True
        return not all(tag in self.by_tag and self.by_tag[tag].received_ns for tag in self.awaited)

    def open(self, header: FragmentHeader, allocate: Allocate) -> _PartialMessage:
        """Memory for a new message."""
        if header.tag in self.by_tag:
            raise WireError(f"the message of {header.tag} was sent twice")
        partial = _PartialMessage(header, allocate(header.total_bytes), header.total_bytes, header.start_ns)
        self.by_number[header.number] = self.by_tag[header.tag] = partial
        self.num_bytes += header.total_bytes
        return partial

    def find(self, tag: Tag, context: _Wait) -> _PartialMessage | Later | None:
        """The message, if it may be taken; PeerError when it will never come."""
        if partial := self.by_tag.get(tag):
            return partial.available()
        if self.num_complete >= self.num_announced:
            raise PeerError(f"{context}: that rank has ended its work without sending it")
        return None


class Inbox:
    """All that a rank receives, in memory that `allocate` gives: loops bring fragments, `receive` takes messages."""

    def __init__(self, config: TransportConfig, health: Health, clock: Clock, allocate: Allocate) -> None:
        self._config, self._allocate = config, allocate
        self._health = health
        self._clock = clock
        self._changed = health.condition()
        self._queues: dict[Channel, _ChannelQueue] = {}

    def place(self, channel: Channel, header: FragmentHeader, go_on: Callable[[], None]) -> memoryview | None:
        """Memory for the fragment's bytes; None if a new message finds no space: `go_on` is called when it does.

        WireError for a fragment that contradicts the others.
        """
        with self._changed:
            queue = self._queue_of(channel)
            partial = queue.by_number.get(header.number)
            if partial is None:
                if not queue.has_space(header, self._config.buffer_bytes):
                    if go_on not in queue.stopped:
                        queue.stopped.append(go_on)
                    return None
                partial = queue.open(header, self._allocate)
        if not header.same_message(partial.header):
            raise WireError(f"the fragments of message {header.number} contradict each other")
        return partial.data[header.offset : header.offset + header.fragment_bytes]

    def _make_space(self, queue: _ChannelQueue) -> None:
        stopped, queue.stopped = queue.stopped, []
        for go_on in stopped:
            go_on()

    def _queue_of(self, channel: Channel) -> _ChannelQueue:
        return self._queues.setdefault(channel, _ChannelQueue())

    def fill(self, channel: Channel, header: FragmentHeader, received_ns: int, end_ns: int) -> None:
        """The fragment's bytes are in place: at `received_ns` (machine's clock), sent by `end_ns` (sender's clock)."""
        with self._changed:
            queue = self._queues[channel]
            partial = queue.by_number[header.number]
            partial.start_ns, partial.end_ns = min(partial.start_ns, header.start_ns), max(partial.end_ns, end_ns)
            partial.missing_bytes -= header.fragment_bytes
            if partial.missing_bytes <= 0:
                partial.received_ns = received_ns
                queue.num_complete += 1
                del queue.by_number[header.number]
                self._changed.notify_all()

    def goodbye(self, peer: int, num_messages: Mapping[ChannelKind, int]) -> None:
        """`peer` has ended its work; `num_messages` of each kind is all that it has sent here since the beginning."""
        with self._changed:
            for kind, number in num_messages.items():
                self._queue_of(Channel(peer, kind)).num_announced = number
            self._changed.notify_all()

    def take(self, channel: Channel, tag: Tag, waiting_for: str) -> Message:
        """The message `tag` as soon as it is there; see `Transport.receive`."""
        context = _Wait(waiting_for, channel, tag)
        with self._changed:
            queue = self._queue_of(channel)
            queue.awaited.append(tag)
            self._make_space(queue)  # what is ahead of it may come in now, even beyond the limit
            try:
                deadline_s = time.monotonic() + self._config.timeout_s
                partial = self._health.wait(self._changed, lambda: queue.find(tag, context), deadline_s, context)
            finally:
                queue.awaited.remove(tag)
            if partial is None:
                raise RunError(f"{context}: it did not come within {self._config.timeout_s:g} s{_describe(queue)}")
            del queue.by_tag[tag]
            queue.num_bytes -= partial.header.total_bytes
            self._make_space(queue)
        return Message(partial.data, partial.header.description, self._times(partial))

    def _times(self, partial: _PartialMessage) -> MessageTimes:
        assert partial.received_ns is not None
        arrival_ns = self._clock.from_machine_ns(max(partial.received_ns, partial.header.deliver_ns))
        return MessageTimes(partial.header.ready_ns, partial.start_ns, partial.end_ns, arrival_ns)


def _describe(queue: _ChannelQueue) -> str:
    """List the messages that are there instead: the nearest hint to why an order does not fit."""
    if not queue.by_tag:
        return "; nothing else waits in this channel"
    waiting = ", ".join(f"({tag})" for tag in list(queue.by_tag)[:4])
    return f"; waiting in this channel, {format_bytes(queue.num_bytes)}: {waiting}{', ...' * (len(queue.by_tag) > 4)}"


class FragmentReceiver:
    """The FrameEndpoint of a stream that brings fragments of `channel` to `inbox`; `go_on`: the stream reads again."""

    def __init__(self, channel: Channel, inbox: Inbox, max_message_bytes: int) -> None:
        self._channel, self._inbox, self._limit_bytes = channel, inbox, max_message_bytes
        self.go_on: Callable[[], None] = lambda: None

    def pull(self) -> Frame | None:
        """No frame: nothing goes in the other direction."""
        return None

    def acknowledged(self, frame: Frame) -> None:
        """Do nothing: nothing was sent."""

    def begin(self, head: bytes, body_bytes: int) -> tuple[FragmentHeader, memoryview] | None:
        header = unpack_fragment(head, self._limit_bytes)
        if header.fragment_bytes != body_bytes:
            raise WireError(f"a fragment of {header.fragment_bytes} bytes in a frame of {body_bytes}")
        place = self._inbox.place(self._channel, header, self.go_on)
        return None if place is None else (header, place)

    def complete(self, key: FragmentHeader, end_ns: int) -> None:
        self._inbox.fill(self._channel, key, time.monotonic_ns(), end_ns)
