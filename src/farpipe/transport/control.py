"""The control connection between two ranks: exchanges, posts, pings and farewells, never behind data."""

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from farpipe.emulate import Passage
from farpipe.errors import RunError
from farpipe.transport.clock import Clock, PingTimes
from farpipe.transport.control_inbox import ControlInbox
from farpipe.transport.frames import Frame
from farpipe.transport.health import Health, PeerError
from farpipe.transport.inbox import Inbox
from farpipe.transport.message import CHANNEL_KINDS, ChannelKind
from farpipe.transport.stream import Stream
from farpipe.transport.wire import (
    CONTROL_HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MAX_NAME_BYTES,
    ControlFrame,
    ControlHeader,
    WireError,
    pack_control,
    unpack_control,
)

_PONG: Final = struct.Struct("<qq")
_GOODBYE: Final = struct.Struct(f"<{len(CHANNEL_KINDS)}Q")
_MAX_REASON_BYTES: Final = 4096
_POLL_S: Final = 0.005


class _ControlMessage(NamedTuple):
    kind: ControlFrame
    name: bytes = b""
    payload: bytes = b""
    deliver_ns: int = 0


class _Incoming(NamedTuple):
    header: ControlHeader
    name: str
    payload: bytearray
    received_ns: int


class ControlLink:
    """The control link with `peer`: the endpoint of a stream, which `carry_on` hands it.

    `reserve` gives payloads their passage over an emulated link. Pings and farewells are not emulated: the clocks on
    one machine have no offset that an uneven WAN could hide, and bad news should travel fast.
    """

    def __init__(
        self,
        peer: int,
        health: Health,
        clock: Clock,
        inbox: Inbox,
        control_inbox: ControlInbox,
        reserve: Callable[[int], Passage] | None,
    ) -> None:
        self.peer, self._health, self._clock = peer, health, clock
        self._inbox, self._control_inbox, self._reserve = inbox, control_inbox, reserve
        self._queue: deque[_ControlMessage] = deque()
        self._queued_bytes = 0
        self._closing = False
        self._lock = threading.Lock()
        self._stream: Stream | None = None

    def carry_on(self, stream: Stream) -> None:
        """Send over `stream`, which has this link as its ends."""
        self._stream = stream

    def exchange(self, name: str, payload: bytes) -> None:
        """Send this rank's part of the exchange `name`."""
        self._send_payload(ControlFrame.EXCHANGE, name, payload)

    def post(self, name: str, payload: bytes) -> None:
        """Send something that the peer may pick up."""
        self._send_payload(ControlFrame.POST, name, payload)

    def ping(self) -> None:
        """Ask for the peer's clock."""
        self._enqueue(_ControlMessage(ControlFrame.PING))

    def abort(self, reason: str) -> None:
        """Tell why the run ends, ahead of everything that is queued; nothing follows."""
        with self._lock:
            self._queue.clear()
            self._queue.append(_ControlMessage(ControlFrame.ABORT, payload=reason.encode()[:_MAX_REASON_BYTES]))
            self._closing = True
        self._advance()

    def goodbye(self, num_messages: Mapping[ChannelKind, int]) -> None:
        """Tell how many messages of each kind the peer should have got; nothing follows."""
        counts = _GOODBYE.pack(*(num_messages.get(kind, 0) for kind in CHANNEL_KINDS))
        with self._lock:
            self._queue.append(_ControlMessage(ControlFrame.GOODBYE, payload=counts))
            self._closing = True
        self._advance()

    def tell_of_outage(self, *, begins: bool) -> None:
        """This rank has lost a connection and tries to get it back, or has it back."""
        self._enqueue(_ControlMessage(ControlFrame.DOWN if begins else ControlFrame.UP))

    def _send_payload(self, kind: ControlFrame, name: str, payload: bytes) -> None:
        if len(name.encode()) > MAX_NAME_BYTES or len(payload) > MAX_CONTROL_BYTES:
            raise ValueError(f"control message {name[:40]!r} of {len(payload)} bytes: too long")
        deliver_ns = self._reserve(len(payload)).arrival_ns if self._reserve else 0
        self._enqueue(_ControlMessage(kind, name.encode(), payload, deliver_ns))

    def _enqueue(self, message: _ControlMessage) -> None:
        with self._lock:
            if self._queued_bytes > MAX_CONTROL_BYTES:
                raise RunError(f"rank {self.peer} does not take its control messages; it may be stopped")
            if self._closing:
                return
            self._queue.append(message)
            self._queued_bytes += len(message.payload)
        self._advance()

    def _advance(self) -> None:
        if self._stream is not None and not self._stream.try_advance():
            self._stream.advance_soon()

    def pull(self) -> Frame | None:
        """See FrameEndpoint."""
        with self._lock:
            if not self._queue:
                return None
            message = self._queue.popleft()
        sizes = (len(message.name), len(message.payload))
        header = ControlHeader(message.kind, *sizes, self._clock.now_ns(), message.deliver_ns)
        return Frame(pack_control(header) + message.name, message.payload)

    def acknowledged(self, frame: Frame) -> None:
        """See FrameEndpoint."""
        with self._lock:
            self._queued_bytes -= len(frame.body)

    def begin(self, head: bytes, body_bytes: int) -> tuple[Any, memoryview]:
        """See FrameEndpoint."""
        received_ns = self._clock.now_ns()
        header = unpack_control(head[:CONTROL_HEADER_BYTES])
        name = head[CONTROL_HEADER_BYTES:]
        if (header.name_bytes, header.payload_bytes) != (len(name), body_bytes):
            raise WireError(f"a control frame whose lengths contradict each other: {header}")
        payload = bytearray(body_bytes)
        return _Incoming(header, name.decode(errors="replace"), payload, received_ns), memoryview(payload)

    def complete(self, key: _Incoming, end_ns: int) -> None:
        """See FrameEndpoint."""
        self._take(key.header, key.received_ns, key.name, bytes(key.payload))

    def _take(self, header: ControlHeader, received_ns: int, name: str, payload: bytes) -> None:
        match header.kind:
            case ControlFrame.EXCHANGE:
                self._control_inbox.put_exchange(self.peer, name, payload, header.deliver_ns)
            case ControlFrame.POST:
                self._control_inbox.put_post(self.peer, name, payload, header.deliver_ns)
            case ControlFrame.PING:
                self._enqueue(_ControlMessage(ControlFrame.PONG, payload=_PONG.pack(header.sent_ns, received_ns)))
            case ControlFrame.PONG:
                self._control_inbox.put_pong(self.peer, _ping_times(header, payload, received_ns))
            case ControlFrame.DOWN:
                self._health.pause(self)
            case ControlFrame.UP:
                self._health.resume(self)
            case ControlFrame.ABORT:
                reason = payload.decode(errors="replace")
                self._health.fail(PeerError(f"rank {self.peer} gave up: {reason}"), announce=None)
            case ControlFrame.GOODBYE:
                self._health.resume(self, for_good=True)  # should it have been DOWN, no UP follows
                self._inbox.goodbye(self.peer, dict(zip(CHANNEL_KINDS, _GOODBYE.unpack(payload), strict=True)))
                self._control_inbox.depart(self.peer)

    def flush(self, deadline_s: float, *, acknowledged: bool) -> bool:
        """Wait until the farewell, if there is one, is handed over, or received; whether it was by `deadline_s`."""
        while self._closing and self._stream is not None and not self._is_through(self._stream, acknowledged):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _is_through(self, stream: Stream, acknowledged: bool) -> bool:
        if self._health.has_departed(self.peer) or (not acknowledged and not stream.is_up):
            return True
        return not self._queue and (
            stream.sender.num_unacknowledged == 0 if acknowledged else stream.sender.all_handed_over()
        )


def _ping_times(header: ControlHeader, payload: bytes, answered_ns: int) -> PingTimes:
    sent_ns, received_ns = _PONG.unpack(payload)
    return PingTimes(sent_ns, received_ns, header.sent_ns, answered_ns)
