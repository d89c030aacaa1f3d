"""The control connection between two ranks: exchanges, posts, pings and farewells, never behind data."""

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from farpipe.emulate import Passage
from farpipe.errors import RunError
from farpipe.runtime.clock import Clock, PingTimes
from farpipe.runtime.transport.health import Health, PeerError
from farpipe.runtime.transport.inbox import Inbox
from farpipe.runtime.transport.mailbox import Mailbox
from farpipe.runtime.transport.message import CHANNEL_KINDS, ChannelKind
from farpipe.runtime.transport.sockets import interrupt, receive_exactly, send_all
from farpipe.runtime.transport.wire import (
    CONTROL_HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MAX_NAME_BYTES,
    ControlFrame,
    ControlHeader,
    pack_control,
    unpack_control,
)

_PONG: Final = struct.Struct("<qq")
_GOODBYE: Final = struct.Struct(f"<{len(CHANNEL_KINDS)}Q")
_MAX_REASON_BYTES: Final = 4096


class _Frame(NamedTuple):
    kind: ControlFrame
    name: bytes = b""
    payload: bytes = b""
    deliver_ns: int = 0


class ControlLink:
    """The control connection with `peer`. A thread of its own writes; `read` is the work of another.

    `reserve` gives payloads their passage over an emulated link. Pings and farewells are not emulated: the clocks on
    one machine have no offset that an uneven WAN could hide, and bad news should travel fast.
    """

    def __init__(
        self,
        peer: int,
        sock: socket.socket,
        health: Health,
        clock: Clock,
        inbox: Inbox,
        mailbox: Mailbox,
        reserve: Callable[[int], Passage] | None,
    ) -> None:
        self._peer, self._sock, self._health, self._clock = peer, sock, health, clock
        self._inbox, self._mailbox, self._reserve = inbox, mailbox, reserve
        self._queue: deque[_Frame] = deque()
        self._queued_bytes = 0
        self._closing = False
        self._changed = threading.Condition()  # not one of health's: why the run broke must still be told
        self._writer = threading.Thread(target=self._write, name=f"farpipe control to {peer}", daemon=True)
        self._writer.start()

    def exchange(self, name: str, payload: bytes) -> None:
        """Send this rank's part of the exchange `name`."""
        self._send_payload(ControlFrame.EXCHANGE, name, payload)

    def post(self, name: str, payload: bytes) -> None:
        """Send something that the peer may pick up."""
        self._send_payload(ControlFrame.POST, name, payload)

    def ping(self) -> None:
        """Ask for the peer's clock."""
        self._enqueue(_Frame(ControlFrame.PING))

    def abort(self, reason: str) -> None:
        """Tell why the run ends, ahead of everything that is queued; nothing follows."""
        with self._changed:
            self._queue.clear()
            self._queue.append(_Frame(ControlFrame.ABORT, payload=reason.encode()[:_MAX_REASON_BYTES]))
            self._close()

    def goodbye(self, num_messages: Mapping[ChannelKind, int]) -> None:
        """Tell how many messages of each kind the peer should have got; nothing follows."""
        counts = _GOODBYE.pack(*(num_messages.get(kind, 0) for kind in CHANNEL_KINDS))
        with self._changed:
            self._queue.append(_Frame(ControlFrame.GOODBYE, payload=counts))
            self._close()

    def _close(self) -> None:
        self._closing = True
        self._changed.notify()

    def _send_payload(self, kind: ControlFrame, name: str, payload: bytes) -> None:
        if len(name.encode()) > MAX_NAME_BYTES or len(payload) > MAX_CONTROL_BYTES:
            raise ValueError(f"control message {name[:40]!r} of {len(payload)} bytes: too long")
        deliver_ns = self._reserve(len(payload)).arrival_ns if self._reserve else 0
        self._enqueue(_Frame(kind, name.encode(), payload, deliver_ns))

    def _enqueue(self, frame: _Frame) -> None:
        with self._changed:
            if self._queued_bytes > MAX_CONTROL_BYTES:
                raise RunError(f"rank {self._peer} does not take its control messages; it may be stopped")
            if not self._closing:
                self._queue.append(frame)
                self._queued_bytes += len(frame.payload)
                self._changed.notify()

    def _write(self) -> None:
        with self._health.guard(self._peer, "writing to its control connection"):
            while (frame := self._next()) is not None:
                sizes = (len(frame.name), len(frame.payload))
                header = ControlHeader(frame.kind, *sizes, self._clock.now_ns(), frame.deliver_ns)
                send_all(self._sock, pack_control(header), frame.name, frame.payload)
            self._sock.shutdown(socket.SHUT_WR)

    def _next(self) -> _Frame | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            frame = self._queue.popleft()
            self._queued_bytes -= len(frame.payload)
            return frame

    def read(self) -> None:
        """Take what the peer sends until it closes the connection; without a goodbye before, it is lost.

        Returns when this side has written its last as well: it may still have a goodbye to say.
        """
        with self._health.guard(self._peer, "its control connection ended without a goodbye", patience_s=0):
            while True:
                self._read_frame()
        self._writer.join()

    def _read_frame(self) -> None:
        header = unpack_control(receive_exactly(self._sock, CONTROL_HEADER_BYTES))
        received_ns = self._clock.now_ns()
        name = receive_exactly(self._sock, header.name_bytes).decode(errors="replace")
        self._take(header, received_ns, name, bytes(receive_exactly(self._sock, header.payload_bytes)))

    def _take(self, header: ControlHeader, received_ns: int, name: str, payload: bytes) -> None:
        match header.kind:
            case ControlFrame.EXCHANGE:
                self._mailbox.put_exchange(self._peer, name, payload, header.deliver_ns)
            case ControlFrame.POST:
                self._mailbox.put_post(self._peer, name, payload, header.deliver_ns)
            case ControlFrame.PING:
                self._enqueue(_Frame(ControlFrame.PONG, payload=_PONG.pack(header.sent_ns, received_ns)))
            case ControlFrame.PONG:
                self._mailbox.put_pong(self._peer, _ping_times(header, payload, received_ns))
            case ControlFrame.ABORT:
                reason = payload.decode(errors="replace")
                self._health.fail(PeerError(f"rank {self._peer} gave up: {reason}"), announce=None)
            case ControlFrame.GOODBYE:
                self._inbox.goodbye(self._peer, dict(zip(CHANNEL_KINDS, _GOODBYE.unpack(payload), strict=True)))
                self._mailbox.depart(self._peer)

    def flush(self, deadline_s: float) -> None:
        """Wait until the farewell, if there is one, is written; not beyond `deadline_s` (monotonic)."""
        if self._closing:
            self._writer.join(max(0.0, deadline_s - time.monotonic()))

    def close(self) -> None:
        """Break off the connection, which ends both threads."""
        with self._changed:
            self._queue.clear()
            self._close()
        interrupt(self._sock)


def _ping_times(header: ControlHeader, payload: bytes, answered_ns: int) -> PingTimes:
    sent_ns, received_ns = _PONG.unpack(payload)
    return PingTimes(sent_ns, received_ns, header.sent_ns, answered_ns)
