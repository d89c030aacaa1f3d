"""Messages that have come in and were not yet asked for, put together from their fragments, with bounded memory."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from farpipe.core.errors import RunError
from farpipe.core.units import format_bytes
from farpipe.engine.transport.clock import Clock
from farpipe.engine.transport.config import TransportConfig
from farpipe.engine.transport.health import LONGEST_WAIT_S, Health, Later, PeerError
from farpipe.engine.transport.wire import (
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

Allocate = Callable[[int], memoryview]
"""Gives writable memory for a message of this size; the receiver of the message owns it."""


Accept = Callable[[int, bytes], memoryview | None]
"""Gives the receiver's own memory for a message of this size and description; None: other memory."""


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
    filled: list[slice] = field(default_factory=list)
    """Its parts that are there."""

    def move(self, accept: Accept) -> None:
        """Go on in the receiver's own memory, unless most of it has come already: that is copied when it is taken."""
        if 2 * self.missing_bytes < self.header.total_bytes:
            return
        own = accept(self.header.total_bytes, self.header.description)
        if own is not None:
            for part in self.filled:
                own[part] = self.data[part]
            self.data = own

    def fill(self, header: FragmentHeader, place: memoryview) -> None:
        """A fragment has come in to `place`."""
        part = slice(header.offset, header.offset + header.fragment_bytes)
        if place.obj is not self.data.obj:  # moved meanwhile
            self.data[part] = place
        self.filled.append(part)
        self.missing_bytes -= header.fragment_bytes

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


class _Expected(NamedTuple):
    """A message that is waited for without a thread; see `Inbox.expect`."""

    wait: _Wait
    future: Future[Message]


class _Limit(NamedTuple):
    """End of the time for a message."""

    deadline_s: float
    paused_s: float
    """Outages before."""


@dataclass
class _ChannelQueue:
    """Messages that have come in over one channel."""

    by_number: dict[int, _PartialMessage] = field(default_factory=dict)
    """Messages that are not complete."""
    by_tag: dict[Tag, _PartialMessage] = field(default_factory=dict)
    """Messages that were not taken."""
    awaited: dict[Tag, Accept | None] = field(default_factory=dict)
    """Messages that somebody waits for, and where they may go."""
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
        accept = self.awaited.get(header.tag)
        own = None if accept is None else accept(header.total_bytes, header.description)
        memory = allocate(header.total_bytes) if own is None else own
        partial = _PartialMessage(header, memory, header.total_bytes, header.start_ns)
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
        self._expected: dict[tuple[Channel, Tag], _Expected] = {}
        self._limits: dict[tuple[Channel, Tag], _Limit] = {}
        """Ends of the times of those whose time has begun, the earliest first."""
        self._ready: list[tuple[int, Channel, Tag]] = []
        """A heap: from when (machine's clock) to look at which of them."""
        self._brings = False

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

    def fill(self, channel: Channel, header: FragmentHeader, place: memoryview, received_ns: int, end_ns: int) -> None:
        """The fragment is in `place`: at `received_ns` (machine's clock), sent by `end_ns` (sender's clock)."""
        with self._changed:
            queue = self._queues[channel]
            partial = queue.by_number[header.number]
            partial.start_ns, partial.end_ns = min(partial.start_ns, header.start_ns), max(partial.end_ns, end_ns)
            partial.fill(header, place)
            if partial.missing_bytes <= 0:
                partial.received_ns = received_ns
                queue.num_complete += 1
                del queue.by_number[header.number]
                if (channel, header.tag) in self._expected:
                    heappush(self._ready, (header.deliver_ns, channel, header.tag))
                if queue.num_complete >= queue.num_announced:
                    self._look_at_all(channel)
                self._changed.notify_all()

    def goodbye(self, peer: int, num_messages: Mapping[ChannelKind, int]) -> None:
        """`peer` has ended its work; `num_messages` of each kind is all that it has sent here since the beginning."""
        with self._changed:
            for kind, number in num_messages.items():
                self._queue_of(Channel(peer, kind)).num_announced = number
                self._look_at_all(Channel(peer, kind))
            self._changed.notify_all()

    def take(self, channel: Channel, tag: Tag, waiting_for: str) -> Message:
        """The message `tag` as soon as it is there; see `Transport.receive`."""
        context = _Wait(waiting_for, channel, tag)
        with self._changed:
            queue = self._await(channel, tag, None)
            try:
                deadline_s = time.monotonic() + self._config.timeout_s
                partial = self._health.wait(self._changed, lambda: queue.find(tag, context), deadline_s, context)
            finally:
                del queue.awaited[tag]
            if partial is None:
                raise self._too_late(context)
            return self._taken(queue, partial)

    def _await(self, channel: Channel, tag: Tag, accept: Accept | None) -> _ChannelQueue:
        queue = self._queue_of(channel)
        queue.awaited[tag] = accept
        if accept is not None and (partial := queue.by_tag.get(tag)) is not None:
            partial.move(accept)
        self._make_space(queue)  # what is ahead of it may come in now, even beyond the limit
        return queue

    def _too_late(self, context: _Wait) -> RunError:
        limit, queue = f"{self._config.timeout_s:g} s", self._queue_of(context.channel)
        return RunError(f"{context}: it did not come within {limit}{_describe(queue)}")

    def _taken(self, queue: _ChannelQueue, partial: _PartialMessage) -> Message:
        del queue.by_tag[partial.header.tag]
        queue.num_bytes -= partial.header.total_bytes
        self._make_space(queue)
        return Message(partial.data, partial.header.description, self._times(partial))

    # Without a thread for each wait

    def expect(self, channel: Channel, tag: Tag, waiting_for: str, accept: Accept) -> Future[Message]:
        """Future of a message that is taken as soon as it is there; one thread sets the futures of all such messages.

        A message most of which is still to come goes to the memory that `accept` gives for it, if it gives any. Its
        time begins with `limit`.
        """
        context, future = _Wait(waiting_for, channel, tag), Future[Message]()
        with self._changed:
            self._await(channel, tag, accept)
            self._expected[channel, tag] = _Expected(context, future)
            heappush(self._ready, (0, channel, tag))  # it may be there
            if not self._brings:
                self._brings = True
                threading.Thread(target=self._bring, name="farpipe receives", daemon=True).start()
            self._changed.notify_all()
        return future

    def limit(self, channel: Channel, tag: Tag) -> None:
        """Begin the time of an expected message, `timeout_s`."""
        with self._changed:
            if (channel, tag) in self._expected:
                deadline_s = time.monotonic() + self._config.timeout_s
                self._limits[channel, tag] = _Limit(deadline_s, self._health.paused_s())
                self._changed.notify_all()

    def _look_at_all(self, channel: Channel) -> None:
        """Look at all that is expected over `channel`, of which no more comes."""
        for other, tag in self._expected:
            if other == channel:
                heappush(self._ready, (0, channel, tag))

    def _bring(self) -> None:
        try:
            while (found := self._next()) is not None:
                future, outcome = found
                if isinstance(outcome, RunError):
                    self._health.fail(outcome, announce=str(outcome))
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)
        except Exception as error:
            self._health.fault(error, "receiving")

    def _next(self) -> tuple[Future[Message], Message | RunError] | None:
        """The next expected message that is here, or will not come; None when nothing is expected any more."""
        with self._changed:
            while self._expected:
                while self._ready and self._ready[0][0] <= time.monotonic_ns():
                    _, channel, tag = heappop(self._ready)
                    if (channel, tag) in self._expected and (outcome := self._look(channel, tag)) is not None:
                        return self._forget(channel, tag), outcome
                channel, tag = next(iter(self._limits or self._expected))
                left_s = self._left_s(channel, tag)
                if left_s <= 0 or self._health.error is not None:
                    outcome = self._look(channel, tag) or self._too_late(self._expected[channel, tag].wait)
                    return self._forget(channel, tag), outcome
                due_s = self._ready[0][0] / 1e9 - time.monotonic() if self._ready else LONGEST_WAIT_S
                self._changed.wait(max(0.0, min(left_s, due_s, LONGEST_WAIT_S)))
            self._brings = False
            self._ready.clear()
            return None

    def _left_s(self, channel: Channel, tag: Tag) -> float:
        """Time that an expected message has left; outages don't count."""
        limit = self._limits.get((channel, tag))
        if limit is None:
            return LONGEST_WAIT_S
        return limit.deadline_s + self._health.paused_s() - limit.paused_s - time.monotonic()

    def _look(self, channel: Channel, tag: Tag) -> Message | RunError | None:
        """The expected message if it is here, or why it will not come; one that arrives later is looked at then."""
        queue, wait = self._queue_of(channel), self._expected[channel, tag].wait
        try:
            self._health.check(wait)
            found = queue.find(tag, wait)
        except RunError as error:
            return error
        if isinstance(found, Later):
            heappush(self._ready, (found.machine_ns, channel, tag))
            return None
        return None if found is None else self._taken(queue, found)

    def _forget(self, channel: Channel, tag: Tag) -> Future[Message]:
        del self._queue_of(channel).awaited[tag]
        self._limits.pop((channel, tag), None)
        return self._expected.pop((channel, tag)).future

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

    def begin(self, head: bytes, body_bytes: int) -> tuple[tuple[FragmentHeader, memoryview], memoryview] | None:
        header = unpack_fragment(head, self._limit_bytes)
        if header.fragment_bytes != body_bytes:
            raise WireError(f"a fragment of {header.fragment_bytes} bytes in a frame of {body_bytes}")
        place = self._inbox.place(self._channel, header, self.go_on)
        return None if place is None else ((header, place), place)

    def complete(self, key: tuple[FragmentHeader, memoryview], end_ns: int) -> None:
        self._inbox.fill(self._channel, *key, time.monotonic_ns(), end_ns)
