"""The control plane: exchanges among all processes, posts, pings, outages, farewells, over few connections.

Each process talks to its neighbours, which pass on what is for others, in the order in which it came: nothing that one
process sends to another is overtaken by what it sends later. The connections are a tree within each site, and every
site's leader, its lowest rank, with every other. With one connection between each two sites an exchange still takes one
one-way latency between them; inside, each process has a parent and at most FAN_OUT children. So 64 processes need 63
connections where each with each would be 2,016.
"""

import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from farpipe.core.errors import RunError
from farpipe.core.units import printable
from farpipe.engine.transport.clock import PingTimes, offset_ns
from farpipe.engine.transport.control_link import ControlInbox, ControlLink, ControlMessage
from farpipe.engine.transport.health import Health, PeerError
from farpipe.engine.transport.reconnector import Reconnector
from farpipe.engine.transport.rendezvous import LOOK_S
from farpipe.engine.transport.wire import CHANNEL_KINDS, EVERYBODY, ChannelKind, ControlFrame, WireError

FAN_OUT: Final = 8


class ControlTopology:
    """The connections of `rank`, one of as many ranks as there are `sites`: that of every rank."""

    def __init__(self, rank: int, sites: Sequence[str]) -> None:
        self.rank: Final = rank
        self._sites = sites
        members = [other for other, site in enumerate(sites) if site == sites[rank]]
        chains = {member: [members[place] for place in _up(index)] for index, member in enumerate(members)}
        """Processes from each member of the site up to its leader, both included."""
        self._above = chains[rank][1:]
        self.parent = self._above[0] if self._above else None
        """The process through which this one talks to the rest of its site; None for the leader."""
        below = {member: chain for member, chain in chains.items() if rank in chain[1:]}
        through = {member: chain[chain.index(rank) - 1] for member, chain in below.items()}
        self.children = tuple(dict.fromkeys(through.values()))
        """Processes of this site that talk through this one."""
        self.height = max((chain.index(rank) for chain in below.values()), default=0)
        """Processes between this one and the farthest below it, that one included; 0 for one without children."""
        leaders = [sites.index(site) for site in dict.fromkeys(sites)]
        self.other_leaders = tuple(leader for leader in leaders if leader != rank) if self.parent is None else ()
        up = {other: sites.index(site) if self.parent is None else self.parent for other, site in enumerate(sites)}
        self._next = {other: hop for other, hop in (up | through).items() if other != rank}

    @property
    def neighbours(self) -> tuple[int, ...]:
        """All processes with which this one has a control connection."""
        up = self.other_leaders if self.parent is None else (self.parent,)
        return (*up, *self.children)

    @property
    def is_relay(self) -> bool:
        """True if others talk to each other through this process."""
        return len(self.neighbours) > 1 and bool(self.children)

    def next_hop(self, target: int) -> int:
        """The neighbour to which a message for `target` goes."""
        return self._next[target]

    def farthest_first(self) -> list[int]:
        """All other ranks, each before those through which this process reaches it.

        Below a leader the lower ranks pass on to the higher ones; from here up to the own leader it is the reverse.
        """
        others = [rank for rank in sorted(self._next, reverse=True) if rank not in self._above]
        return others + sorted(self._above)

    def flood(self, origin: int, came_from: int | None) -> list[int]:
        """The neighbours to which a message of `origin` for all goes on, `came_from` being where it is from.

        Between sites only the leader of the origin's own site sends it, so every process gets it once.
        """
        to_leaders = self.other_leaders if self._sites[origin] == self._sites[self.rank] else ()
        up = to_leaders if self.parent is None else (self.parent,)
        return [other for other in (*up, *self.children) if other != came_from]


def _up(place: int) -> Iterator[int]:
    """Places among a site's processes from `place` up to its leader's, which is 0; a heap with FAN_OUT children."""
    yield place
    while place:
        place = (place - 1) // FAN_OUT
        yield place


NUM_PINGS: Final = 12
"""Round trips per peer for one estimate of its clock; the shortest counts."""
_PONG: Final = struct.Struct("<qq")
_GOODBYE: Final = struct.Struct(f"<{len(CHANNEL_KINDS)}Q")
_PART: Final = struct.Struct("<II")
_MAX_REASON_BYTES: Final = 4096
_SLACK_S: Final = 0.2
"""Extra time for which a process waits for what another has to wait for first: the nearest one names who is late."""

OnGoodbye = Callable[[int, Mapping[ChannelKind, int]], None]
"""Hears how many messages of each kind a process that leaves has sent here."""


class ControlPlane:
    """The control links of this process to its neighbours in `topology`, and what goes over them."""

    def __init__(
        self, topology: ControlTopology, world_size: int, health: Health, inbox: ControlInbox, on_goodbye: OnGoodbye
    ) -> None:
        self.topology, self._rank, self._world_size = topology, topology.rank, world_size
        self._health, self._inbox, self._on_goodbye = health, inbox, on_goodbye
        self._links: dict[int, ControlLink] = {}
        self.reconnectors: dict[int, Reconnector] = {}
        self._changed = health.condition()
        self._pinging = threading.Lock()

    def add(self, link: ControlLink, reconnector: Reconnector) -> None:
        """The link with a neighbour, and what keeps it connected."""
        link.send_over(reconnector.stream)
        self._links[link.peer] = link
        self.reconnectors[link.peer] = reconnector

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank != self._rank]

    # Connections

    def notice(self) -> None:
        """A connection was made."""
        with self._changed:
            self._changed.notify_all()

    def connect(self, deadline_s: float, turned_away: Callable[[], str], heard: Callable[[], str]) -> None:
        """Connect to all lower neighbours and wait for all higher ones.

        RunError naming those that are missing, and what `turned_away` says of others that came; PeerError with the
        reason that `heard` has of one that gave up.
        """
        for peer, reconnector in self.reconnectors.items():
            if peer < self._rank:
                reconnector.connect(deadline_s)
        context = f"rank {self._rank} connecting to the others"

        def missing() -> list[str]:
            return [str(peer) for peer, reconnector in self.reconnectors.items() if not reconnector.stream.is_up]

        while found := missing():
            with self._changed:
                look_s = min(deadline_s, time.monotonic() + LOOK_S)
                self._health.wait(self._changed, lambda: not missing() or None, look_s, context)
            if missing() and (reason := heard()):
                raise PeerError(f"{context}: {reason}{turned_away()}")
            if missing() and time.monotonic() > deadline_s:
                raise RunError(f"{context}: no connection with rank {', '.join(found)} in time{turned_away()}")

    # What this process sends

    def exchange(self, name: str, payload: bytes, deadline_s: float, waiting_for: str) -> list[bytes]:
        """Payloads of all ranks, by rank; RunError naming who did not send it by `deadline_s` (monotonic).

        Parts are collected towards the leader of the site, go once to every other site, and are handed out from there.
        """
        topology, parts = self.topology, {self._rank: payload}

        def take(neighbour: int, levels: int) -> None:
            parts.update(self._take_parts(neighbour, name, deadline_s + levels * _SLACK_S, waiting_for))

        for child in topology.children:
            take(child, topology.height - 1)
        bundle = b"".join(_pack_parts(parts))
        if topology.parent is not None:
            self._send(topology.parent, ControlFrame.EXCHANGE, name, bundle)
            take(topology.parent, 8)
        for leader in topology.other_leaders:
            self._send(leader, ControlFrame.EXCHANGE, name, bundle)
        for leader in topology.other_leaders:
            take(leader, 4)
        everything = b"".join(_pack_parts(parts)) if topology.children else b""
        for child in topology.children:
            self._send(child, ControlFrame.EXCHANGE, name, everything)
        return [parts[rank] for rank in range(self._world_size)]

    def _take_parts(self, neighbour: int, name: str, deadline_s: float, waiting_for: str) -> dict[int, bytes]:
        context = f"{waiting_for}: waited for rank {neighbour} in the exchange {name!r}"
        bundle = self._inbox.take_exchange(neighbour, name, deadline_s, context)
        if bundle is None:
            raise RunError(f"{context}: nothing came in time")
        return _unpack_parts(bundle)

    def _send(self, target: int, kind: ControlFrame, name: str = "", payload: bytes = b"") -> None:
        hop = self.topology.next_hop(target)
        self._links[hop].send(ControlMessage(kind, self._rank, target, name, payload))

    def post(self, peer: int, name: str, payload: bytes) -> None:
        """Send something small that `peer` may pick up; to this rank itself at once."""
        if peer == self._rank:
            self._inbox.put_post(ControlMessage(ControlFrame.POST, peer, peer, name, payload))
        else:
            self._send(peer, ControlFrame.POST, name, payload)

    def clock_offsets(self, deadline_s: float) -> list[int]:
        """Each rank's clock minus rank 0's, by rank, in nanoseconds."""
        with self._pinging:
            rounds = [self._ping_all(deadline_s) for _ in range(NUM_PINGS)]
        ahead = {peer: offset_ns([pings[peer] for pings in rounds]) for peer in self._others()} | {self._rank: 0}
        return [ahead[rank] - ahead[0] for rank in sorted(ahead)]

    def _ping_all(self, deadline_s: float) -> dict[int, PingTimes]:
        for peer in self._others():
            self._send(peer, ControlFrame.PING)
        return {peer: self._take_pong(peer, deadline_s) for peer in self._others()}

    def _take_pong(self, peer: int, deadline_s: float) -> PingTimes:
        context = f"estimating the clock of rank {peer}"
        if (ping := self._inbox.take_pong(peer, deadline_s, context)) is None:
            raise RunError(f"{context}: it did not answer in time")
        return ping

    def report_outage(self, begins: bool) -> None:
        """A connection of this rank was lost, or is back: the others have to be patient, or not any more."""
        if self._health.error is None:
            self._pass_to_all(ControlMessage(ControlFrame.DOWN if begins else ControlFrame.UP, self._rank, EVERYBODY))

    def abort(self, reason: str) -> None:
        """Tell all that can be reached why the run ends; does not wait."""
        payload = reason.encode()[:_MAX_REASON_BYTES]
        self._pass_to_all(ControlMessage(ControlFrame.ABORT, self._rank, EVERYBODY, payload=payload))

    def goodbye(self, num_messages: Callable[[int], Mapping[ChannelKind, int]]) -> None:
        """Tell all peers that this rank has ended its work, and how many messages (by peer) they should have got.

        Those that pass farewells on hear of it last: they may leave as soon as they have heard it from everybody.
        """
        for peer in self.topology.farthest_first():
            counts = num_messages(peer)
            self._send(peer, ControlFrame.GOODBYE, payload=_GOODBYE.pack(*(counts.get(k, 0) for k in CHANNEL_KINDS)))

    # What comes

    def on_message(self, neighbour: int, message: ControlMessage) -> None:
        """Pass on what comes from `neighbour`, and take in what is for this process."""
        if not (0 <= message.source < self._world_size and -1 <= message.target < self._world_size):
            raise WireError(f"a control frame from rank {message.source} to rank {message.target}")
        if message.target == EVERYBODY:
            self._pass_to_all(message, neighbour)
        elif message.target != self._rank:
            self._links[self.topology.next_hop(message.target)].send(message)
            return
        self._take_in(message)

    def _pass_to_all(self, message: ControlMessage, came_from: int | None = None) -> None:
        for neighbour in self.topology.flood(message.source, came_from):
            link = self._links.get(neighbour)
            if link is None or (message.kind != ControlFrame.ABORT and self._health.has_departed(neighbour)):
                continue
            (link.send_last if message.kind == ControlFrame.ABORT else link.send)(message)

    def _take_in(self, message: ControlMessage) -> None:
        kind, source, payload = message.kind, message.source, message.payload
        match kind:
            case ControlFrame.EXCHANGE:
                self._inbox.put_exchange(message)
            case ControlFrame.POST:
                self._inbox.put_post(message)
            case ControlFrame.PING:
                self._send(source, ControlFrame.PONG, payload=_PONG.pack(message.sent_ns, message.received_ns))
            case ControlFrame.PONG:
                sent_ns, received_ns = _PONG.unpack(payload)
                self._inbox.put_pong(source, PingTimes(sent_ns, received_ns, message.sent_ns, message.received_ns))
            case ControlFrame.DOWN:
                self._health.pause(("outage", source))
            case ControlFrame.UP:
                self._health.resume(("outage", source))
            case ControlFrame.ABORT:
                reason = printable(payload.decode(errors="replace"))
                self._health.fail(PeerError(f"rank {source} gave up: {reason}"), announce=None)
            case ControlFrame.GOODBYE:
                self._health.resume(("outage", source), for_good=True)  # should it have been DOWN, no UP follows
                self._on_goodbye(source, dict(zip(CHANNEL_KINDS, _GOODBYE.unpack(payload), strict=True)))
                self._health.depart(source)

    # The end

    def flush(self, deadline_s: float, *, acknowledged: bool = False) -> bool:
        """Wait until what is queued is sent, or `acknowledged`; whether it is by `deadline_s` (monotonic)."""
        through = [link.flush(deadline_s, acknowledged=acknowledged) for link in list(self._links.values())]
        return all(through)

    def close(self, deadline_s: float) -> None:
        """Break off all connections and wait for their threads."""
        for reconnector in self.reconnectors.values():
            reconnector.close()
        for reconnector in self.reconnectors.values():
            reconnector.join(max(deadline_s, time.monotonic()))


def _pack_parts(parts: Mapping[int, bytes]) -> Iterator[bytes]:
    for rank, payload in parts.items():
        yield _PART.pack(rank, len(payload))
        yield payload


def _unpack_parts(bundle: bytes) -> dict[int, bytes]:
    parts, start = {}, 0
    while start < len(bundle):
        rank, num_bytes = _PART.unpack_from(bundle, start)
        start += _PART.size
        parts[rank] = bundle[start : start + num_bytes]
        start += num_bytes
    return parts
