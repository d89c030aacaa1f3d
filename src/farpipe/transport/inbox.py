"""What has come in and was not yet asked for: tensors put together from their chunks, with bounded memory."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from farpipe.errors import RunError
from farpipe.transport.clock import Clock
from farpipe.transport.config import TransportConfig
from farpipe.transport.health import Health, Later, PeerError
from farpipe.transport.host_memory import host_tensor
from farpipe.transport.message import Channel, ChannelKind, Message, MessageTimes, Tag
from farpipe.transport.wire import ChunkHeader, WireError, tensor_bytes
from farpipe.units import format_bytes


@dataclass
class _Parcel:
    """A message that is coming in, or has come and waits."""

    header: ChunkHeader
    tensor: torch.Tensor
    data: memoryview
    """The tensor's memory."""
    missing_bytes: int
    start_ns: int
    end_ns: int = 0
    received_ns: int | None = None
    """When it was complete, on the machine's clock."""

    def available(self) -> "_Parcel | Later | None":
        """Itself when it is complete and, on an emulated link, has arrived."""
        if self.received_ns is None:
            return None
        return self if self.header.deliver_ns <= time.monotonic_ns() else Later(self.header.deliver_ns)


class _Wait(NamedTuple):
    """What somebody waits for; its words are put together only where they are needed."""

    waiting_for: str
    channel: Channel
    tag: Tag

    def __str__(self) -> str:
        peer, kind = self.channel
        return f"{self.waiting_for}: waited for the {kind} message of {self.tag} from rank {peer}"


@dataclass
class _Shelf:
    """What has come in over one channel."""

    by_number: dict[int, _Parcel] = field(default_factory=dict)
    """Messages that are not complete."""
    by_tag: dict[Tag, _Parcel] = field(default_factory=dict)
    """Messages that were not taken."""
    awaited: list[Tag] = field(default_factory=list)
    num_bytes: int = 0
    num_complete: int = 0
    stopped: list[Callable[[], None]] = field(default_factory=list)
    """How to go on with the pipes whose next message found no room."""
    num_announced: float = math.inf
    """How many messages the peer has sent in all; known once it has said goodbye."""

    def has_room(self, header: ChunkHeader, limit_bytes: int) -> bool:
        """Whether the message may come in: it fits, or someone waits for one that is not here or not complete.

        Without the second rule a full buffer, and a consumer that takes messages in another order than they were
        sent in, would wait for each other for ever.
        """
        if not self.num_bytes or self.num_bytes + header.total_bytes <= limit_bytes:
            return True
        return not all(tag in self.by_tag and self.by_tag[tag].received_ns for tag in self.awaited)

    def open(self, header: ChunkHeader, *, pinned: bool) -> _Parcel:
        """Room for a new message; `pinned` as in TransportConfig."""
        if header.tag in self.by_tag:
            raise WireError(f"the message of {header.tag} was sent twice")
        tensor = host_tensor(header.shape, header.dtype, pinned=pinned)
        parcel = _Parcel(header, tensor, tensor_bytes(tensor), header.total_bytes, header.start_ns)
        self.by_number[header.number] = self.by_tag[header.tag] = parcel
        self.num_bytes += header.total_bytes
        return parcel

    def find(self, tag: Tag, context: _Wait) -> _Parcel | Later | None:
        """The message, if it may be taken; PeerError when it will never come."""
        if parcel := self.by_tag.get(tag):
            return parcel.available()
        if self.num_complete >= self.num_announced:
            raise PeerError(f"{context}: that rank has ended its work without sending it")
        return None


class Inbox:
    """All that a rank receives. Reader threads bring chunks, the executor takes messages."""

    def __init__(self, config: TransportConfig, health: Health, clock: Clock) -> None:
        self._config = config
        self._health = health
        self._clock = clock
        self._changed = health.condition()
        self._shelves: dict[Channel, _Shelf] = {}

    def place(self, channel: Channel, header: ChunkHeader, go_on: Callable[[], None]) -> memoryview | None:
        """Where the chunk's bytes go; None if it is of a new message and there is no room, `go_on` is called when.

        WireError for a chunk that contradicts the others.
        """
        with self._changed:
            shelf = self._shelf(channel)
            parcel = shelf.by_number.get(header.number)
            if parcel is None:
                if not shelf.has_room(header, self._config.buffer_bytes):
                    if go_on not in shelf.stopped:
                        shelf.stopped.append(go_on)
                    return None
                parcel = shelf.open(header, pinned=self._config.pinned)
        if not header.same_message(parcel.header):
            raise WireError(f"the chunks of message {header.number} contradict each other")
        return parcel.data[header.offset : header.offset + header.chunk_bytes]

    def _make_room(self, shelf: _Shelf) -> None:
        stopped, shelf.stopped = shelf.stopped, []
        for go_on in stopped:
            go_on()

    def _shelf(self, channel: Channel) -> _Shelf:
        return self._shelves.setdefault(channel, _Shelf())

    def fill(self, channel: Channel, header: ChunkHeader, received_ns: int, end_ns: int) -> None:
        """The chunk's bytes are in place: at `received_ns` (machine's clock), sent by `end_ns` (sender's clock)."""
        with self._changed:
            shelf = self._shelves[channel]
            parcel = shelf.by_number[header.number]
            parcel.start_ns, parcel.end_ns = min(parcel.start_ns, header.start_ns), max(parcel.end_ns, end_ns)
            parcel.missing_bytes -= header.chunk_bytes
            if parcel.missing_bytes <= 0:
                parcel.received_ns = received_ns
                shelf.num_complete += 1
                del shelf.by_number[header.number]
                self._changed.notify_all()

    def goodbye(self, peer: int, num_messages: Mapping[ChannelKind, int]) -> None:
        """`peer` has ended its work; `num_messages` of each kind is all that it has sent here since the beginning."""
        with self._changed:
            for kind, number in num_messages.items():
                self._shelf(Channel(peer, kind)).num_announced = number
            self._changed.notify_all()

    def take(self, channel: Channel, tag: Tag, waiting_for: str) -> Message:
        """The message `tag` as soon as it is there; see `Transport.receive`."""
        context = _Wait(waiting_for, channel, tag)
        with self._changed:
            shelf = self._shelf(channel)
            shelf.awaited.append(tag)
            self._make_room(shelf)  # what is ahead of it may come in now, even beyond the limit
            try:
                deadline_s = time.monotonic() + self._config.timeout_s
                parcel = self._health.wait(self._changed, lambda: shelf.find(tag, context), deadline_s, context)
            finally:
                shelf.awaited.remove(tag)
            if parcel is None:
                raise RunError(f"{context}: it did not come within {self._config.timeout_s:g} s{_describe(shelf)}")
            del shelf.by_tag[tag]
            shelf.num_bytes -= parcel.header.total_bytes
            self._make_room(shelf)
        return Message(parcel.tensor, self._times(parcel))

    def _times(self, parcel: _Parcel) -> MessageTimes:
        assert parcel.received_ns is not None
        arrival_ns = self._clock.from_machine_ns(max(parcel.received_ns, parcel.header.deliver_ns))
        return MessageTimes(parcel.header.ready_ns, parcel.start_ns, parcel.end_ns, arrival_ns)


def _describe(shelf: _Shelf) -> str:
    """What is there instead: the nearest hint to why an order does not fit."""
    if not shelf.by_tag:
        return "; nothing else waits in this channel"
    waiting = ", ".join(f"({tag})" for tag in list(shelf.by_tag)[:4])
    return f"; waiting in this channel, {format_bytes(shelf.num_bytes)}: {waiting}{', ...' * (len(shelf.by_tag) > 4)}"
