"""The control connections of a rank to all others, which stand as long as the run does."""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from farpipe.errors import RunError
from farpipe.runtime.clock import PingTimes, offset_ns
from farpipe.runtime.transport.control import ControlLink
from farpipe.runtime.transport.health import Health
from farpipe.runtime.transport.mailbox import Mailbox
from farpipe.runtime.transport.message import ChannelKind

NUM_PINGS: Final = 12
"""Round trips per peer for one estimate of its clock; the shortest counts."""


class Mesh:
    """One control link per peer; every rank dials those below it and is dialled by those above.

    `make_link(peer, socket)` makes a link and is told of no peer twice.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        health: Health,
        mailbox: Mailbox,
        make_link: Callable[[int, socket.socket], ControlLink],
    ) -> None:
        self._rank, self._peers = rank, [peer for peer in range(world_size) if peer != rank]
        self._health, self._mailbox, self._make_link = health, mailbox, make_link
        self._links: dict[int, ControlLink] = {}
        self._changed = health.condition()
        self._dialers: list[threading.Thread] = []
        self._pinging = threading.Lock()

    def connect(self, dial: Callable[[int], socket.socket], deadline_s: float) -> None:
        """Connect to all lower ranks and wait for all higher ones; RunError naming those that are missing."""
        for peer in range(self._rank):
            self._dialers.append(
                threading.Thread(target=self._dial, args=(dial, peer), name="farpipe control", daemon=True)
            )
            self._dialers[-1].start()
        context = f"rank {self._rank} connecting to the others"
        with self._changed:
            self._health.wait(self._changed, lambda: len(self._links) == len(self._peers) or None, deadline_s, context)
            missing = [str(peer) for peer in self._peers if peer not in self._links]
        if missing:
            raise RunError(f"{context}: no connection with rank {', '.join(missing)} in time")

    def _dial(self, dial: Callable[[int], socket.socket], peer: int) -> None:
        with self._health.guard(peer, "connecting"), dial(peer) as sock:
            self.serve(peer, sock)

    def serve(self, peer: int, sock: socket.socket) -> None:
        """Take part in the connection with `peer` until both sides have ended it; a second one is refused."""
        with self._changed:
            if peer in self._links:
                return
            link = self._links[peer] = self._make_link(peer, sock)
            self._changed.notify_all()
        if error := self._health.error:  # it broke before there was a link to tell it on
            link.abort(str(error))
        link.read()

    def exchange(self, name: str, payload: bytes, deadline_s: float, waiting_for: str) -> list[bytes]:
        """Everybody's payload by rank; RunError naming who did not send it by `deadline_s` (monotonic)."""
        for peer in self._peers:
            self._links[peer].exchange(name, payload)
        received = {peer: self._take(peer, name, deadline_s, waiting_for) for peer in self._peers}
        received[self._rank] = payload
        return [received[rank] for rank in sorted(received)]

    def _take(self, peer: int, name: str, deadline_s: float, waiting_for: str) -> bytes:
        context = f"{waiting_for}: waited for rank {peer} in the exchange {name!r}"
        payload = self._mailbox.take_exchange(peer, name, deadline_s, context)
        if payload is None:
            raise RunError(f"{context}: nothing came in time")
        return payload

    def post(self, peer: int, name: str, payload: bytes) -> None:
        """Send something small that `peer` may pick up; to this rank itself at once."""
        if peer == self._rank:
            self._mailbox.put_post(peer, name, payload, deliver_ns=0)
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
        if (ping := self._mailbox.take_pong(peer, deadline_s, context)) is None:
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

    def flush(self, deadline_s: float) -> None:
        """Wait until the farewells are written, not beyond `deadline_s` (monotonic)."""
        for link in list(self._links.values()):
            link.flush(deadline_s)

    def close(self, deadline_s: float) -> None:
        """Break off all connections and wait for their threads."""
        for link in list(self._links.values()):
            link.close()
        for thread in self._dialers:
            thread.join(max(0.0, deadline_s - time.monotonic()))
