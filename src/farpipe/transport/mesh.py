"""The control links of a rank to all others, which stand as long as the run does."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from farpipe.errors import RunError
from farpipe.transport.clock import PingTimes, offset_ns
from farpipe.transport.control import ControlLink
from farpipe.transport.control_inbox import ControlInbox
from farpipe.transport.health import Health
from farpipe.transport.message import ChannelKind
from farpipe.transport.reconnector import Reconnector

NUM_PINGS: Final = 12
"""Round trips per peer for one estimate of its clock; the shortest counts."""


class Mesh:
    """One control link per peer; every rank dials those below it and is dialled by those above."""

    def __init__(self, rank: int, world_size: int, health: Health, control_inbox: ControlInbox) -> None:
        self._rank, self._peers = rank, [peer for peer in range(world_size) if peer != rank]
        self._health, self._control_inbox = health, control_inbox
        self._links: dict[int, ControlLink] = {}
        self.reconnectors: dict[int, Reconnector] = {}
        self._changed = health.condition()
        self._pinging = threading.Lock()

    def add(self, link: ControlLink, reconnector: Reconnector) -> None:
        """The link with a peer, and what keeps it connected."""
        link.carry_on(reconnector.stream)
        self._links[link.peer] = link
        self.reconnectors[link.peer] = reconnector

    def notice(self) -> None:
        """A connection was made."""
        with self._changed:
            self._changed.notify_all()

    def tell_of_outage(self, begins: bool) -> None:
        """A connection of this rank was lost, or is back: the others have to be patient, or not any more."""
        for peer, link in self._links.items():
            if self._health.error is None and not self._health.has_departed(peer):
                link.tell_of_outage(begins=begins)

    def connect(self, deadline_s: float, turned_away: Callable[[], str]) -> None:
        """Connect to all lower ranks and wait for all higher ones.

        RunError naming those that are missing, and what `turned_away` says of others that came.
        """
        for peer, reconnector in self.reconnectors.items():
            if peer < self._rank:
                reconnector.connect(deadline_s)
        context = f"rank {self._rank} connecting to the others"

        def missing() -> list[str]:
            return [str(peer) for peer, line in self.reconnectors.items() if not line.stream.is_up]

        with self._changed:
            self._health.wait(self._changed, lambda: not missing() or None, deadline_s, context)
        if found := missing():
            raise RunError(f"{context}: no connection with rank {', '.join(found)} in time{turned_away()}")

    def exchange(self, name: str, payload: bytes, deadline_s: float, waiting_for: str) -> list[bytes]:
        """Everybody's payload by rank; RunError naming who did not send it by `deadline_s` (monotonic)."""
        for peer in self._peers:
            self._links[peer].exchange(name, payload)
        received = {peer: self._take(peer, name, deadline_s, waiting_for) for peer in self._peers}
        received[self._rank] = payload
        return [received[rank] for rank in sorted(received)]

    def _take(self, peer: int, name: str, deadline_s: float, waiting_for: str) -> bytes:
        context = f"{waiting_for}: waited for rank {peer} in the exchange {name!r}"
        payload = self._control_inbox.take_exchange(peer, name, deadline_s, context)
        if payload is None:
            raise RunError(f"{context}: nothing came in time")
        return payload

    def post(self, peer: int, name: str, payload: bytes) -> None:
        """Send something small that `peer` may pick up; to this rank itself at once."""
        if peer == self._rank:
            self._control_inbox.put_post(peer, name, payload, deliver_ns=0)
        else:
            self._links[peer].post(name, payload)

    def clock_offsets(self, deadline_s: float) -> list[int]:
        """By rank, its clock minus rank 0's, in nanoseconds."""
        with self._pinging:
            rounds = [self._ping_all(deadline_s) for _ in range(NUM_PINGS)]
        ahead = {peer: offset_ns([pings[peer] for pings in rounds]) for peer in self._peers} | {self._rank: 0}
        return [ahead[rank] - ahead[0] for rank in sorted(ahead)]

    def _ping_all(self, deadline_s: float) -> dict[int, PingTimes]:
        for peer in self._peers:
            self._links[peer].ping()
        return {peer: self._take_pong(peer, deadline_s) for peer in self._peers}

    def _take_pong(self, peer: int, deadline_s: float) -> PingTimes:
        context = f"estimating the clock of rank {peer}"
        if (ping := self._control_inbox.take_pong(peer, deadline_s, context)) is None:
            raise RunError(f"{context}: it did not answer in time")
        return ping

    def abort(self, reason: str) -> None:
        """Tell all peers that can be reached why the run ends; does not wait."""
        for link in list(self._links.values()):
            link.abort(reason)

    def goodbye(self, num_messages: Callable[[int], Mapping[ChannelKind, int]]) -> None:
        """Tell all peers that this rank has ended its work, and how many messages (by peer) they should have got."""
        for peer, link in self._links.items():
            link.goodbye(num_messages(peer))

    def flush(self, deadline_s: float, *, acknowledged: bool = False) -> bool:
        """Wait until the farewells are sent, or `acknowledged`; whether they are by `deadline_s` (monotonic)."""
        through = [link.flush(deadline_s, acknowledged=acknowledged) for link in list(self._links.values())]
        return all(through)

    def close(self, deadline_s: float) -> None:
        """Break off all connections and wait for their threads."""
        for reconnector in self.reconnectors.values():
            reconnector.close()
        for reconnector in self.reconnectors.values():
            reconnector.join(max(deadline_s, time.monotonic()))
