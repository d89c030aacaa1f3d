"""Opening connections to the other ranks."""

import contextlib
import socket
from collections.abc import Sequence

from farpipe.transport import handshake
from farpipe.transport.config import TransportConfig
from farpipe.transport.handshake import Purpose
from farpipe.transport.introduction import Introduction
from farpipe.transport.reconnector import Peer
from farpipe.transport.security.tls import Credentials, check_address, check_site, secure
from farpipe.transport.sockets import pace, prepare, reach
from farpipe.transport.tuning import is_far, round_trip_s, suit_to_pauses


class Dialler:
    """Opens this rank's connections to those that have introduced themselves, and knows how far away they are."""

    def __init__(
        self, rank: int, ranks: Sequence[Introduction], token: bytes, credentials: Credentials, config: TransportConfig
    ) -> None:
        self._rank, self._ranks, self._token = rank, ranks, token
        self._credentials, self._config = credentials, config
        self._round_trips_s: dict[int, float] = {}

    def peer(self, rank: int) -> Peer:
        """Return the description of another rank for errors and events."""
        own, other, site = self._ranks[self._rank], self._ranks[rank], self._config.site(rank)
        return Peer(rank, other.address, other.machine == own.machine, f" (site {site})" if site else "")

    def dial(self, purpose: Purpose, rate: int | None, num_received: int) -> tuple[socket.socket, int]:
        """One try to connect, to send `rate` bytes/s at most; see Dial."""
        address, site = self._ranks[purpose.target].address, self._config.site(purpose.target)
        sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        try:
            prepare(sock)
            if purpose.kind is not None and is_far(self._round_trips_s.get(purpose.target, 0.0)):
                suit_to_pauses(sock)
            if rate is not None:
                pace(sock, rate)
            sock.settimeout(handshake.LIMIT_S)
            sock.connect(address)
            if (context := self._credentials.context(server=False)) is not None:
                sock = secure(sock, context, server=False)
                check_address(sock, address[0])
                if site is not None:
                    check_site(sock, site)
            received = handshake.offer(sock, purpose, self._token, num_received)
            self.measure(purpose.target, sock)
        except BaseException:
            sock.close()
            raise
        return sock, received

    def measure(self, peer: int, sock: socket.socket) -> None:
        """Take the round trip to `peer` from a connection with it."""
        self._round_trips_s[peer] = round_trip_s(sock)

    def round_trip_s(self, peer: int) -> float:
        """Of the link to `peer`; where none is known yet, one connection is made for that. 0 where nobody answers."""
        if peer not in self._round_trips_s:
            with contextlib.suppress(OSError), reach(self._ranks[peer].address) as sock:
                self.measure(peer, sock)
        return self._round_trips_s.get(peer, 0.0)
