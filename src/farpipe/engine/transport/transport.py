"""The transport of one rank: what the executor calls."""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Final, Self

from farpipe.core.errors import RunError, spoken
from farpipe.engine.transport.clock import Clock
from farpipe.engine.transport.config import MAX_STREAMS, TransportConfig
from farpipe.engine.transport.control_link import ControlInbox, ControlLink
from farpipe.engine.transport.control_plane import ControlPlane, ControlTopology
from farpipe.engine.transport.dialler import Dialler, Listener
from farpipe.engine.transport.handshake import Purpose
from farpipe.engine.transport.health import Breaking, Health
from farpipe.engine.transport.inbox import Accept, Allocate, FragmentReceiver, Inbox
from farpipe.engine.transport.link_events import LinkEvent, LinkEventLog
from farpipe.engine.transport.loop import Loop
from farpipe.engine.transport.outbox import Loan, Outbox
from farpipe.engine.transport.passages import Links, Passage, Shape
from farpipe.engine.transport.reconnector import Dial, Reconnector, Surroundings
from farpipe.engine.transport.rendezvous import Introduction, Meeting
from farpipe.engine.transport.security.tls import Credentials, RefusedError, check_site
from farpipe.engine.transport.tcp import TcpRamp, is_far, num_threads
from farpipe.engine.transport.wire import Channel, ChannelKind, FrameEndpoint, Message, Tag, as_bytes

FAREWELL_S: Final = 1.0
"""Time for which a rank that leaves tries to report why, and then waits for its threads."""
_POLL_S: Final = 0.005
LINGER_S: Final = 0.5
"""Time for which a rank that has said goodbye waits for the goodbyes of the others."""


class Transport:
    """Messages between this rank and the others. Made by `connect`; use it as a context manager or `close` it.

    Calls may come from several threads. Every wait has a limit and raises RunError (PeerError when another rank is
    to blame) that names what was waited for; after the first such error all calls raise.
    """

    def __init__(self, rank: int, world_size: int, config: TransportConfig, clock: Clock, allocate: Allocate) -> None:
        self.rank: Final = rank
        self.world_size: Final = world_size
        self.clock: Final = clock
        """The clock of all stamps that this rank makes; the executor stamps its actions with the same."""
        self._config = config
        self._health = Health(lambda reason: self._control.abort(reason))
        self._breaking = Breaking(self._health)
        self._inbox = Inbox(config, self._health, clock, allocate)
        self._control_inbox = ControlInbox(self._health)
        topology = ControlTopology(rank, [self.site(other) for other in range(world_size)])
        self._control = ControlPlane(topology, world_size, self._health, self._control_inbox, self._inbox.goodbye)
        self._events = LinkEventLog()
        self._around = Surroundings(
            self._health,
            self._events,
            clock.now_ns,
            config.outage_s,
            config.silence_s,
            on_attached=self._control.notice,
            on_outage=self._control.report_outage,
        )
        self._outboxes: dict[Channel, Outbox] = {}
        self._incoming: dict[tuple[Channel, int], Reconnector] = {}
        self.links: Links | None = None
        """The emulated links of this run; None where all are real."""
        self._lock = threading.Lock()
        self._closed = False

    def start(
        self,
        listener: socket.socket,
        rendezvous: Meeting,
        ranks: list[Introduction],
        links: Links | None,
        credentials: Credentials,
    ) -> None:
        """Connect to the ranks that have introduced themselves, and see that all have come so far; for `connect`."""
        token = rendezvous.token
        self.links, self._dialler = links, Dialler(self.rank, ranks, token, credentials, self._config)
        config, tick_s = self._config, self._config.silence_s / 5
        on_fault = partial(self._health.fault, what="moving messages")
        self._loops = [Loop(f"farpipe transport {index}", tick_s, on_fault) for index in range(num_threads())]
        for peer in self._control.topology.neighbours:
            link = self._control_link(peer)
            self._control.add(link, self._control_reconnector(link))
        self._listener = Listener(listener, token, credentials, self._serve)
        deadline_s = time.monotonic() + config.connect_timeout_s
        with self._breaking:
            self._control.connect(deadline_s, self._listener.turned_away, rendezvous.heard)
            self._control.exchange("farpipe start", b"", deadline_s, "starting")

    def _control_reconnector(self, link: ControlLink) -> Reconnector:
        peer, dials = link.peer, link.peer < self.rank
        return self._reconnector(
            link,
            peer,
            "the control connection",
            0,
            dial=partial(self._dialler.dial, Purpose(self.rank, peer, None), None) if dials else None,
            looks=not dials,
        )

    def _reconnector(
        self,
        endpoint: FrameEndpoint,
        peer: int,
        what: str,
        stream: int,
        dial: Dial | None,
        *,
        looks: bool = False,
        ramp: TcpRamp | None = None,
    ) -> Reconnector:
        loop, who = self._loops[stream % len(self._loops)], self._dialler.peer(peer)
        return Reconnector(endpoint, loop, who, what, self._around, dial=dial, looks=looks, ramp=ramp)

    def _serve(self, purpose: Purpose, sock: socket.socket, num_received: int) -> bool:
        """Take over a connection that another rank has opened; the Listener calls it (`Serve`)."""
        peer = purpose.source
        if purpose.target != self.rank or peer == self.rank or peer >= self.world_size or purpose.stream >= MAX_STREAMS:
            raise RefusedError(f"this is rank {self.rank} of {self.world_size}, and the call is for {purpose}")
        if (site := self._config.site(peer)) is not None:
            check_site(sock, site)
        if purpose.kind is not None:
            return self._incoming_reconnector(Channel(peer, purpose.kind), purpose.stream).adopt(sock, num_received)
        if peer < self.rank:
            raise RefusedError(f"rank {self.rank} calls rank {peer}, and not vice versa")
        if peer not in self._control.reconnectors:
            raise RefusedError(f"rank {self.rank} has no control connection with rank {peer}")
        self._dialler.measure(peer, sock)
        return self._control.reconnectors[peer].adopt(sock, num_received)

    def _incoming_reconnector(self, channel: Channel, stream: int) -> Reconnector:
        with self._lock:
            if (reconnector := self._incoming.get((channel, stream))) is None:
                fragments = FragmentReceiver(channel, self._inbox, self._config.max_message_bytes)
                what = f"receiving {channel.kind} messages"
                reconnector = self._reconnector(fragments, channel.peer, what, stream, None)
                fragments.go_on = reconnector.stream.advance_soon
                self._incoming[channel, stream] = reconnector
            return reconnector

    def _control_link(self, peer: int) -> ControlLink:
        name = self._config.emulated_link(self.rank, peer)
        reserve = partial(self.links.reserve_beside, name) if self.links and name else None
        return ControlLink(peer, self._health, self.clock, self._control.on_message, reserve)

    def open(self, peer: int, kind: ChannelKind, streams: int | None = None) -> None:
        """Open the channel to `peer` now and not with the first message; does not wait.

        `streams` None: as many as the configuration says, or the link needs. It counts for a channel that is new.
        """
        self._outbox(peer, kind, streams)

    def await_channels(self, limit_s: float) -> bool:
        """Wait until all open channels are connected and up to their rate, `limit_s` at most; whether they are."""
        deadline_s = time.monotonic() + limit_s
        while not (ready := all(outbox.is_ready for outbox in list(self._outboxes.values()))):
            self._health.check("waiting for the channels")
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
        return ready

    def _outbox(self, peer: int, kind: ChannelKind, streams: int | None = None) -> Outbox:
        if peer == self.rank or not 0 <= peer < self.world_size:
            raise ValueError(f"rank {self.rank} can't send to rank {peer} of {self.world_size}")
        channel = Channel(peer, kind)
        if outbox := self._outboxes.get(channel):
            return outbox
        with self._lock:
            if channel not in self._outboxes:
                self._outboxes[channel] = self._make_outbox(channel, streams)
            return self._outboxes[channel]

    def _make_outbox(self, channel: Channel, streams: int | None) -> Outbox:
        config, (peer, kind) = self._config, channel
        num_streams = streams or self._dialler.num_streams(peer)
        limit, distance_s = self._dialler.pace(peer, num_streams), self._dialler.round_trip_s(peer)
        outbox = Outbox(channel, config, num_streams, self._health, self.clock, self._reservation(channel))
        outbox.rate, outbox.is_near = limit if config.paced else None, not is_far(distance_s)

        def dial(stream: int, num_received: int) -> tuple[socket.socket, int]:
            return self._dialler.dial(Purpose(self.rank, peer, kind, stream), outbox.rate, num_received)

        reconnectors = [
            self._reconnector(
                outbox,
                peer,
                f"sending {kind} messages",
                stream,
                partial(dial, stream),
                ramp=TcpRamp(limit / config.headroom, distance_s) if limit is not None else None,
            )
            for stream in range(num_streams)
        ]
        outbox.send_over(reconnectors)
        for reconnector in reconnectors:
            reconnector.connect(time.monotonic() + config.connect_timeout_s)
        return outbox

    def _reservation(self, channel: Channel) -> Callable[[Tag, int], Passage] | None:
        """Return how a message gets its times on an emulated link, or on a path of its own; None: its link is real."""
        name, links = self._config.emulated_link(self.rank, channel.peer), self.links
        own_paths = self._config.own_paths or (lambda kind, tag: None)
        if name is None or links is None:
            return None

        def reserve(tag: Tag, num_bytes: int) -> Passage:
            own = own_paths(channel.kind, tag)
            return links.reserve(name, num_bytes) if own is None else own.passage(num_bytes, time.monotonic_ns())

        return reserve

    def send(
        self, peer: int, kind: ChannelKind, tag: Tag, data: bytes | bytearray | memoryview, description: bytes = b""
    ) -> None:
        """Queue `data` for rank `peer` and return; the peer need not have asked for it.

        It is not copied: don't change it afterwards. `description` (MAX_DESCRIPTION_BYTES at most) arrives with it.
        Blocks only while more than `buffer_bytes` wait in this channel; RunError when that lasts longer than
        `timeout_s`. InputError for a message over `max_message_bytes`.
        """
        self.lend(peer, kind, tag, data, description)

    def lend(
        self, peer: int, kind: ChannelKind, tag: Tag, data: bytes | bytearray | memoryview, description: bytes = b""
    ) -> Loan:
        """Send as `send` does, from memory that the caller wants back, perhaps before the peer has all of it."""
        outbox = self._outbox(peer, kind)
        if self._health.has_departed(peer):
            raise RunError(f"rank {peer} has ended its work; the {kind} message of {tag} is too late")
        with self._breaking:
            return Loan(outbox, outbox.put(tag, as_bytes(data), description))

    def has_space(self, peer: int, kind: ChannelKind, num_bytes: int) -> bool:
        """True if `send` would not wait with a message of `num_bytes`, provided that no other thread sends there."""
        return self._outbox(peer, kind).has_space(num_bytes)

    def site(self, rank: int) -> str:
        """The site of `rank`, empty if the sites are not known."""
        return self._config.site(rank) or ""

    def check(self, context: str) -> None:
        """Raise the error that broke the run, if any, with the words of `context` before it."""
        self._health.check(context)

    def receive(self, peer: int, kind: ChannelKind, tag: Tag, *, waiting_for: str) -> Message:
        """The message `tag` from rank `peer`, once, as soon as it is there; `waiting_for` names it in errors.

        Raises RunError after `timeout_s` (all other ranks hear of it as well), and at once when a peer is lost, when a
        rank aborts, or when `peer` has closed without sending it.
        """
        with self._breaking:
            return self._inbox.take(Channel(peer, kind), tag, waiting_for)

    def expect(
        self, peer: int, kind: ChannelKind, tag: Tag, *, waiting_for: str, accept: Accept = lambda size, words: None
    ) -> Future[Message]:
        """Receive without waiting: a thread gives the future the message or the error, see `Inbox.expect`."""
        self._health.expect_own_process()
        return self._inbox.expect(Channel(peer, kind), tag, waiting_for, accept)

    def limit(self, peer: int, kind: ChannelKind, tag: Tag) -> None:
        """Let the time (`timeout_s`) of a message that is expected begin."""
        self._inbox.limit(Channel(peer, kind), tag)

    def exchange(self, name: str, payload: bytes, *, waiting_for: str) -> list[bytes]:
        """Payloads of all ranks, by rank; all call it with the same `name`. Takes one one-way latency between sites."""
        with self._breaking:
            return self._control.exchange(name, payload, time.monotonic() + self._config.timeout_s, waiting_for)

    def post(self, peer: int, name: str, payload: bytes) -> None:
        """Send a small payload that `peer` finds with `poll(name)`; never blocks. `peer` may be this rank."""
        with self._breaking:
            self._health.check(f"posting {name!r} to rank {peer}")
            self._control.post(peer, name, payload)

    def poll(self, name: str) -> list[tuple[int, bytes]]:
        """The payloads posted under `name` that have arrived since the last call, with the ranks that sent them.

        Raises the error that broke the run when there are none: no more will come.
        """
        broken = self._health.error is not None  # looked at first: what came before the end is there by now
        found = self._control_inbox.take_posted(name)
        if broken and not found:
            self._health.check(f"waiting for {name!r}")
        return found

    def paused_s(self) -> float:
        """Total time for which outages have kept messages from arriving."""
        return self._health.paused_s()

    def take_events(self) -> list[LinkEvent]:
        """Outages, reconnections and bursts of retransmissions since the last call."""
        streams = [(reconnector.peer.rank, reconnector.stream) for reconnector in self._sending_reconnectors()]
        for peer in {peer for peer, _ in streams}:
            counts = [stream.retransmissions() for other, stream in streams if other == peer]
            self._events.retransmitted(peer, *map(sum, zip(*counts, strict=True)))
        return self._events.take()

    def _sending_reconnectors(self) -> list[Reconnector]:
        data = [reconnector for outbox in list(self._outboxes.values()) for reconnector in outbox.reconnectors]
        return [*self._control.reconnectors.values(), *data]

    def change_link(self, name: str, shape: Shape) -> None:
        """Change an emulated link for all ranks from now on."""
        assert self.links is not None
        self.links.change(name, shape)

    def expect_rate(self, peer: int, bytes_per_s: float) -> None:
        """Pace the channels to `peer`, the open ones too, by what its real link carries from now on."""
        self._dialler.expect_rate(peer, bytes_per_s)
        for outbox in [outbox for channel, outbox in list(self._outboxes.items()) if channel.peer == peer]:
            if outbox.rate is not None and (rate := self._dialler.pace(peer, len(outbox.reconnectors))) is not None:
                outbox.pace(rate)

    def clock_offsets(self) -> list[int]:
        """Nanoseconds to subtract from each rank's stamps to have them on rank 0's clock.

        Estimated at every call from several pings to every rank, which answer without knowing: no other rank
        needs to call anything. Any rank may ask. Wrong by half the difference between the latencies of the two
        directions; emulated latencies don't count.
        """
        with self._breaking:
            return self._control.clock_offsets(time.monotonic() + self._config.timeout_s)

    def abort(self, reason: str) -> None:
        """Tell all ranks, as far as they can be reached, why the run ends; from now on every wait raises."""
        if self._health.is_of_a_fork:
            return
        self._health.fail(RunError(f"this rank gave up: {reason}"), announce=reason)
        self._control.flush(time.monotonic() + FAREWELL_S)

    def close(self) -> None:
        """Send what is queued, say goodbye, end all threads and connections.

        A process through which others talk (see control_plane.py) waits for their farewells, `timeout_s` at most.
        RunError when what is queued can't be sent within `timeout_s` or the run breaks meanwhile. If it was broken
        before, nothing is sent and nothing raised. A second call does nothing, nor does one in a forked process, which
        has the parent's connections.
        """
        if self._health.is_of_a_fork:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            if self._health.error is None:
                self._leave()
        finally:
            self._end()

    def _leave(self) -> None:
        deadline_s = time.monotonic() + self._config.timeout_s
        with self._breaking:
            for channel, outbox in self._outboxes.items():
                if not outbox.flush(deadline_s):
                    raise RunError(f"closing: the last {channel.kind} messages to rank {channel.peer} can't be sent")
        self._control.goodbye(self._num_messages)
        self._control.flush(deadline_s, acknowledged=True)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        if self._control.topology.is_relay:  # others need this process to hear each other's farewells
            self._health.await_departures(others, max(LINGER_S, deadline_s - time.monotonic()))
            self._control.flush(min(deadline_s, time.monotonic() + FAREWELL_S))
        else:
            self._health.await_departures(others, LINGER_S)

    def _num_messages(self, peer: int) -> Mapping[ChannelKind, int]:
        return {channel.kind: outbox.num_messages for channel, outbox in self._outboxes.items() if channel.peer == peer}

    def _end(self) -> None:
        self._health.fail(RunError("the transport is closed"), announce=None)
        self._control.flush(time.monotonic() + FAREWELL_S)
        deadline_s = time.monotonic() + FAREWELL_S
        self._listener.close(deadline_s)
        for reconnector in list(self._incoming.values()):  # a connection may just be coming in
            reconnector.close()
        for outbox in self._outboxes.values():
            outbox.close(deadline_s)
        self._control.close(deadline_s)
        for loop in self._loops:
            loop.close(deadline_s)
        if self.links:
            self.links.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Close; when an error is passing through, abort with its text before."""
        if error is not None:
            self.abort(spoken(error))
        self.close()
