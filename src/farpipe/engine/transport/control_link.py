"""The control connection with one neighbour: small messages that never wait behind data."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from farpipe.core.errors import RunError
from farpipe.engine.transport.clock import Clock, PingTimes
from farpipe.engine.transport.health import Health, Later, PeerError
from farpipe.engine.transport.passages import Passage
from farpipe.engine.transport.stream import Stream
from farpipe.engine.transport.wire import (
    CONTROL_HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MAX_NAME_BYTES,
    ControlFrame,
    ControlHeader,
    Frame,
    WireError,
    pack_control,
    unpack_control,
)

_POLL_S: Final = 0.005
EMULATED: Final = frozenset({ControlFrame.EXCHANGE, ControlFrame.POST})
"""Kinds that take an emulated link. Pings and farewells don't: the clocks on one machine have no offset that an uneven
WAN could hide, and bad news should travel fast."""


class ControlMessage(NamedTuple):
    """A control message on its way from rank `source` to rank `target`, or to everybody (wire.EVERYBODY)."""

    kind: ControlFrame
    source: int
    target: int
    name: str = ""
    payload: bytes = b""
    sent_ns: int = 0
    """Time of sending on the source's clock; 0: not sent yet."""
    deliver_ns: int = 0
    """Arrival here over emulated links, machine's clock; 0: it is there."""
    received_ns: int = 0
    """Time of receipt on this process's clock."""


class _Incoming(NamedTuple):
    header: ControlHeader
    name: str
    payload: bytearray
    received_ns: int


class ControlLink:
    """The control link with `peer`: the FrameEndpoint of a stream, see `send_over`.

    `on_message(peer, message)` gets what comes, in a thread of the transport. `reserve` gives payloads their passage
    over an emulated link.
    """

    def __init__(
        self,
        peer: int,
        health: Health,
        clock: Clock,
        on_message: Callable[[int, ControlMessage], None],
        reserve: Callable[[int], Passage] | None,
    ) -> None:
        self.peer, self._health, self._clock = peer, health, clock
        self._on_message, self._reserve = on_message, reserve
        self._queue: deque[ControlMessage] = deque()
        self._queued_bytes = 0
        self._closing = False
        self._lock = threading.Lock()
        self._stream: Stream | None = None

    def send_over(self, stream: Stream) -> None:
        """Send over `stream`, which has this link as its endpoint."""
        self._stream = stream

    def send(self, message: ControlMessage) -> None:
        """Queue `message`; never waits. RunError when the peer takes nothing, ValueError for one that is too long."""
        if len(message.name.encode()) > MAX_NAME_BYTES or len(message.payload) > MAX_CONTROL_BYTES:
            raise ValueError(f"control message {message.name[:40]!r} of {len(message.payload)} bytes: too long")
        if self._reserve is not None and message.kind in EMULATED:
            wait_ns = max(0, message.deliver_ns - time.monotonic_ns())  # for what has still to arrive here
            arrival_ns = self._reserve(len(message.payload)).arrival_ns + wait_ns
            message = message._replace(deliver_ns=arrival_ns)
        with self._lock:
            if self._queued_bytes > MAX_CONTROL_BYTES:
                raise RunError(f"rank {self.peer} does not take its control messages; it may be stopped")
            if self._closing:
                return
            self._queue.append(message)
            self._queued_bytes += len(message.payload)
        self._advance()

    def send_last(self, message: ControlMessage) -> None:
        """Put `message` ahead of everything that is queued; nothing follows."""
        with self._lock:
            if self._closing:
                return
            self._queue.clear()
            self._queue.append(message)
            self._queued_bytes += len(message.payload)
            self._closing = True
        self._advance()

    def _advance(self) -> None:
        if self._stream is not None and not self._stream.try_advance():
            self._stream.advance_soon()

    def pull(self) -> Frame | None:
        with self._lock:
            if not self._queue:
                return None
            message = self._queue.popleft()
        name, sent_ns = message.name.encode(), message.sent_ns or self._clock.now_ns()
        sizes = (len(name), len(message.payload))
        header = ControlHeader(message.kind, *sizes, message.source, message.target, sent_ns, message.deliver_ns)
        return Frame(pack_control(header) + name, message.payload)

    def acknowledged(self, frame: Frame) -> None:
        with self._lock:
            self._queued_bytes -= len(frame.body)

    def begin(self, head: bytes, body_bytes: int) -> tuple[Any, memoryview]:
        received_ns = self._clock.now_ns()
        header = unpack_control(head[:CONTROL_HEADER_BYTES])
        name = head[CONTROL_HEADER_BYTES:]
        if (header.name_bytes, header.payload_bytes) != (len(name), body_bytes):
            raise WireError(f"a control frame whose lengths contradict each other: {header}")
        payload = bytearray(body_bytes)
        return _Incoming(header, name.decode(errors="replace"), payload, received_ns), memoryview(payload)

    def complete(self, key: _Incoming, end_ns: int) -> None:
        kind, _, _, source, target, sent_ns, deliver_ns = key.header
        stamps = (sent_ns, deliver_ns, key.received_ns)
        self._on_message(self.peer, ControlMessage(kind, source, target, key.name, bytes(key.payload), *stamps))

    def flush(self, deadline_s: float, *, acknowledged: bool) -> bool:
        """Wait until all that is queued is handed over, or received; whether it was by `deadline_s` (monotonic)."""
        while self._stream is not None and not self._is_through(self._stream, acknowledged):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _is_through(self, stream: Stream, acknowledged: bool) -> bool:
        acknowledged = acknowledged and not self._health.has_departed(self.peer)
        if not stream.is_up:
            return not acknowledged
        sender = stream.sender
        return not self._queue and (not sender.num_unacknowledged if acknowledged else sender.all_handed_over())


class ControlInbox:
    """Messages that arrived on the control connections of one rank."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._changed = health.condition()
        self._exchanged: defaultdict[tuple[str, int], deque[ControlMessage]] = defaultdict(deque)
        self._posted: defaultdict[str, list[ControlMessage]] = defaultdict(list)
        self._pongs: defaultdict[int, deque[PingTimes]] = defaultdict(deque)

    def put_exchange(self, message: ControlMessage) -> None:
        """Take in its source's part of an exchange."""
        with self._changed:
            self._exchanged[message.name, message.source].append(message)
            self._changed.notify_all()

    def put_post(self, message: ControlMessage) -> None:
        """Take in a post."""
        with self._changed:
            self._posted[message.name].append(message)

    def put_pong(self, peer: int, ping: PingTimes) -> None:
        """`peer`'s answer to a ping."""
        with self._changed:
            self._pongs[peer].append(ping)
            self._changed.notify_all()

    def take_exchange(self, peer: int, name: str, deadline_s: float, context: str) -> bytes | None:
        """`peer`'s part of the exchange `name`; None when it is not there by `deadline_s` (monotonic)."""

        def find() -> bytes | Later | None:
            messages = self._exchanged.get((name, peer))
            if not messages:
                self._check_present(peer, context)
                return None
            if messages[0].deliver_ns > time.monotonic_ns():
                return Later(messages[0].deliver_ns)
            payload = messages.popleft().payload
            if not messages:
                del self._exchanged[name, peer]
            return payload

        with self._changed:
            return self._health.wait(self._changed, find, deadline_s, context)

    def take_pong(self, peer: int, deadline_s: float, context: str) -> PingTimes | None:
        """`peer`'s next answer; None when there is none by `deadline_s` (monotonic)."""

        def find() -> PingTimes | None:
            if pongs := self._pongs[peer]:
                return pongs.popleft()
            self._check_present(peer, context)
            return None

        with self._changed:
            return self._health.wait(self._changed, find, deadline_s, context)

    def _check_present(self, peer: int, context: str) -> None:
        if self._health.has_departed(peer):
            raise PeerError(f"{context}: that rank has ended its work")

    def take_posted(self, name: str) -> list[tuple[int, bytes]]:
        """Take the messages posted under `name` that have arrived, each once."""
        now_ns = time.monotonic_ns()
        with self._changed:
            messages = self._posted.pop(name, [])
            if later := [message for message in messages if message.deliver_ns > now_ns]:
                self._posted[name] = later
        return [(message.source, message.payload) for message in messages if message.deliver_ns <= now_ns]
