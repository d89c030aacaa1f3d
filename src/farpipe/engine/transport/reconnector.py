"""Keeps one stream connected: makes its connection, makes it again when it breaks, and knows when to give up."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from farpipe.core.errors import RunError
from farpipe.engine.transport import handshake
from farpipe.engine.transport.connection import Connection
from farpipe.engine.transport.handshake import HandshakeError
from farpipe.engine.transport.health import Health, PeerError
from farpipe.engine.transport.link_events import LinkEventLog
from farpipe.engine.transport.loop import Loop
from farpipe.engine.transport.security.tls import RefusedError
from farpipe.engine.transport.stream import Stream
from farpipe.engine.transport.tcp import TcpRamp, reach
from farpipe.engine.transport.wire import FrameEndpoint, WireError

RETRY_S: Final = 0.05
PROBE_S: Final = 0.3
"""Time between two looks of a rank that waits to be dialled again whether the other one is there at all."""
REFUSED_S: Final = 5.0
"""A port on another machine that has refused connections for this long is abandoned."""


class Peer(NamedTuple):
    """The rank at the other end, for connecting and for naming it."""

    rank: int
    address: tuple[str, int]
    on_this_machine: bool
    where: str
    """`` at site 'lugano'``, or nothing."""

    def __str__(self) -> str:
        return f"rank {self.rank}{self.where}"


Dial = Callable[[int], tuple[socket.socket, int]]
"""One try to connect, given how many frames were received; a socket and how many the peer has received."""


class Surroundings(NamedTuple):
    """The parts of a transport that all its reconnectors share."""

    health: Health
    events: LinkEventLog
    now_ns: Callable[[], int]
    outage_s: float
    """Longest outage; one that lasts longer ends the run."""
    silence_s: float
    on_attached: Callable[[], None]
    """Called when a stream has got a connection."""
    on_outage: Callable[[bool], None]
    """Called with True when a stream has lost a connection, and with False when there is a new one after that."""


class Reconnector:
    """The stream `stream` with `peer`, called `what` in errors.

    `dial` None: the peer dials, this side only looks whether it is still there, if `looks`.
    """

    def __init__(
        self,
        endpoint: FrameEndpoint,
        loop: Loop,
        peer: Peer,
        what: str,
        around: Surroundings,
        *,
        dial: Dial | None,
        looks: bool,
        ramp: TcpRamp | None,
    ) -> None:
        self.peer, self._what, self._dial, self._looks = peer, what, dial, looks
        self._around, self._health, self._outage_s = around, around.health, around.outage_s
        self._reporting = threading.Lock()
        self._reason: Exception | None = None
        self._said_down = False
        self._thread: threading.Thread | None = None
        self.stream = Stream(endpoint, loop, around.now_ns, self._down, self._watch, around.silence_s, ramp)

    def connect(self, deadline_s: float) -> None:
        """Dial for the first time, until `deadline_s` (monotonic); does not wait."""
        self._start(lambda: self._keep_dialling(deadline_s))

    def _start(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            with self._health.guard(self.peer.rank, self._what):
                work()

        self._thread = threading.Thread(target=guarded, name=f"farpipe connect to {self.peer.rank}", daemon=True)
        self._thread.start()

    def join(self, deadline_s: float) -> None:
        """Wait for what is being tried, not beyond `deadline_s` (monotonic)."""
        if self._thread is not None:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def adopt(self, sock: socket.socket, num_received: int) -> bool:
        """Go on with a connection that the peer has opened, `num_received` frames of ours being there."""
        ticket, received = self.stream.displace()
        try:
            handshake.welcome(sock, received)
            return self._attach(sock, ticket, num_received)
        except OSError as error:
            if self.stream.down_since_s is not None:  # it was up before, and the loss is not reported yet
                self._down(self.stream, error)
            raise

    def _attach(self, sock: socket.socket, ticket: int, num_received: int) -> bool:
        connection = Connection(sock)
        self._report(up=True)  # before it may break again
        try:
            attached = self.stream.attach(connection, ticket, num_received)
        except WireError as error:
            raise HandshakeError(str(error)) from None
        if attached:
            self._around.events.restored(self.peer.rank, self, *self.stream.resent)
            self._around.on_attached()
        else:
            connection.close()
        return attached

    def _report(self, *, up: bool) -> None:
        """Let those who wait be patient from the loss of a connection until there is a new one."""
        with self._reporting:
            if self._said_down != up:
                return
            self._said_down = not up
            (self._health.resume if up else self._health.pause)((self, self.peer.rank))
            self._around.on_outage(not up)

    def _keep_dialling(self, deadline_s: float) -> None:
        """Dial until it succeeds; the error says why it can't."""
        assert self._dial is not None
        host, port = self.peer.address
        context = f"{self._what}: connecting to {self.peer} at {host}:{port}"
        refused_since_s = None
        while True:
            self._health.check(context)
            ticket, received = self.stream.displace()
            try:
                sock, peer_received = self._dial(received)
                self._attach(sock, ticket, peer_received)
                return
            except RefusedError as error:
                raise RunError(f"{context}: {error}") from None
            except (OSError, HandshakeError) as error:
                refused_since_s = self._see_refusal(error, refused_since_s)
                if time.monotonic() + RETRY_S > deadline_s:
                    raise self._gone(f"{context}: {error}") from None
            if self._health.has_departed(self.peer.rank):
                self._report(up=True)  # no waiting for its sake any more
                return
            time.sleep(RETRY_S)

    def _gone(self, text: str) -> RunError:
        return (
            RunError(text)
            if self._reason is None
            else PeerError(f"{self.peer} is lost: {self._for_how_long()}; {text}")
        )

    def _see_refusal(self, error: Exception, since_s: float | None) -> float | None:
        """Handle a refused connection: the peer's process has ended, and nothing brings it back."""
        if self._reason is None or not isinstance(error, ConnectionRefusedError):
            return None
        now_s = time.monotonic()
        if self.peer.on_this_machine or (since_s is not None and now_s - since_s > REFUSED_S):
            self._health.lose(self.peer.rank, f"{self._what}: {self._reason}, and its port refuses connections")
        return since_s or now_s

    def _down(self, stream: Stream, reason: Exception) -> None:
        """The connection broke: get it back, unless the peer has left or the run is over."""
        rank = self.peer.rank
        if isinstance(reason, WireError):
            text = f"rank {rank} is lost: {self._what}: {reason}"
            self._health.fail(PeerError(text), announce=text)
        if self._health.error is not None or self._health.has_departed(rank):
            return
        self._reason = reason
        if self._looks or self._dial:
            silent_s = stream.silent_s if isinstance(reason, TimeoutError) else 0.0
            self._around.events.lost(rank, self, f"{self._what}: {reason}", silent_s)
            self._report(up=False)
        if self._dial is not None:
            self._start(lambda: self._keep_dialling(time.monotonic() + self._outage_s))
        elif self._looks:
            self._start(self._keep_looking)

    def _keep_looking(self) -> None:
        refused_since_s = None
        while not self.stream.is_up and self._health.error is None and not self._health.has_departed(self.peer.rank):
            try:
                reach(self.peer.address).close()
                refused_since_s = None
            except OSError as error:
                refused_since_s = self._see_refusal(error, refused_since_s)
            time.sleep(PROBE_S)
        if self._health.has_departed(self.peer.rank):
            self._report(up=True)

    def _watch(self, stream: Stream, now_s: float) -> None:
        """End the run when an outage lasts too long; called by the loop, now and then."""
        since_s = stream.down_since_s
        if since_s is None or now_s - since_s <= self._outage_s or not (self._looks or self._dial):
            return
        if not self._health.has_departed(self.peer.rank):
            text = f"{self.peer} is lost: {self._for_how_long()}"
            self._health.fail(PeerError(text), announce=text)

    def _for_how_long(self) -> str:
        down_s = time.monotonic() - (self.stream.down_since_s or time.monotonic())
        return (
            f"{self._what} was interrupted for {down_s:.1f} s ({self._reason}); the limit is {self._outage_s:g} s "
            "(outage_s)"
        )

    def close(self) -> None:
        """Break off the connection for good."""
        with contextlib.suppress(OSError):
            self.stream.close()
