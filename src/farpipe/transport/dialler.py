"""Opening connections to the other ranks."""

import contextlib
import socket
from collections.abc import Sequence

from farpipe.transport import handshake
from farpipe.transport.config import TransportConfig
from farpipe.transport.handshake import Purpose
from farpipe.transport.reconnector import Peer
from farpipe.transport.rendezvous import Introduction
from farpipe.transport.security.tls import Credentials, check_address, check_site, secure
from farpipe.transport.tcp import (
    choose_streams,
    is_far,
    pace,
    pacing_rate,
    prepare,
    reach,
    round_trip_s,
    suit_to_pauses,
)


class Dialler:
    """Opens this rank's connections to the others, and knows how far away these are and how fast their links are."""

    def __init__(
        self, rank: int, ranks: Sequence[Introduction], token: bytes, credentials: Credentials, config: TransportConfig
    ) -> None:
        self._rank, self._ranks, self._token = rank, ranks, token
        self._credentials, self._config = credentials, config
        self._round_trips_s: dict[int, float] = {}
        self._rates = {target: rate for (source, target), rate in config.bandwidths.items() if source == rank}

    def peer(self, rank: int) -> Peer:
        """Return the description of another rank for errors and events."""
        own, other, site = self._ranks[self._rank], self._ranks[rank], self._config.site(rank)
        return Peer(rank, other.address, other.machine == own.machine, f" (site {site})" if site else "")

    def expect_rate(self, peer: int, bytes_per_s: float) -> None:
        """Take `bytes_per_s` for what the link to `peer` carries from now on."""
        self._rates[peer] = bytes_per_s

    def num_streams(self, peer: int) -> int:
        """Connections for a channel to `peer`, unless the configuration says it."""
        return self._config.streams or choose_streams(self.round_trip_s(peer), self._most_bytes_per_s(peer))

    def pace(self, peer: int, num_streams: int) -> int | None:
        """Bytes/s that each of a channel's connections to `peer` may send at most; None: any rate."""
        is_emulated = self._config.emulated_link(self._rank, peer) is not None
        rate = None if is_emulated else self._most_bytes_per_s(peer)
        return pacing_rate(self.round_trip_s(peer), rate, num_streams)

    def _most_bytes_per_s(self, peer: int) -> float | None:
        return None if (rate := self._rates.get(peer)) is None else self._config.headroom * rate

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
        """Round trip of the link to `peer`; a connection is made to measure an unknown one. 0 where nobody answers."""
        if peer not in self._round_trips_s:
            with contextlib.suppress(OSError), reach(self._ranks[peer].address) as sock:
                self.measure(peer, sock)
        return self._round_trips_s.get(peer, 0.0)
