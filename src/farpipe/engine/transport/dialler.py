"""Opening connections to the other ranks, and the socket that accepts those of this run and no others."""

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from farpipe.engine.transport import handshake
from farpipe.engine.transport.config import TransportConfig
from farpipe.engine.transport.handshake import Purpose
from farpipe.engine.transport.reconnector import Peer
from farpipe.engine.transport.rendezvous import Introduction
from farpipe.engine.transport.security.tls import Credentials, RefusedError, check_address, check_site, secure
from farpipe.engine.transport.tcp import (
    choose_streams,
    fill_up,
    interrupt,
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
            if purpose.kind is not None:
                suit = suit_to_pauses if is_far(self._round_trips_s.get(purpose.target, 0.0)) else fill_up
                suit(sock)
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
        """Round trip of the link to `peer`; a connection is made to measure an unknown one. 0 without an answer."""
        if peer not in self._round_trips_s:
            with contextlib.suppress(OSError), reach(self._ranks[peer].address) as sock:
                self.measure(peer, sock)
        return self._round_trips_s.get(peer, 0.0)


MAX_STRANGERS: Final = 128
"""Connections that have not proven themselves yet; more are turned away (ranks try again)."""
_PAUSE_S: Final = 0.1
_MAX_REMEMBERED: Final = 3

Serve = Callable[[handshake.Purpose, socket.socket, int], bool]
"""Takes over a connection that has proven what it is for, and how many frames its other end has received; False: it is
to be closed. RefusedError for one that is not to be let in."""


class Listener:
    """Brings connections to `sock`, a listening socket, to `serve`, within TLS if there are certificates.

    Whatever else comes to the port, in whatever number, takes a thread for a few seconds and no more. `on_event` hears
    of it.
    """

    def __init__(
        self,
        sock: socket.socket,
        token: bytes,
        credentials: Credentials,
        serve: Serve,
        on_event: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._sock, self._token, self._credentials, self._serve = sock, token, credentials, serve
        self._on_event = on_event
        self._lock = threading.Lock()
        self._closing = False
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._turned_away: deque[str] = deque(maxlen=_MAX_REMEMBERED)
        self._acceptor = threading.Thread(target=self._accept, name="farpipe listener", daemon=True)
        self._acceptor.start()

    def turned_away(self) -> str:
        """Callers that were turned away lately, with the reasons, to be added to an error; empty if there were none."""
        return "".join(f"; turned away {text}" for text in dict.fromkeys(self._turned_away))

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._sock.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(_PAUSE_S)  # no file descriptors left, most likely; others may free some
                continue
            self._receive(connection, str(address[0]))

    def _receive(self, connection: socket.socket, host: str) -> None:
        with self._lock:
            if self._closing or len(self._connections) >= MAX_STRANGERS:
                connection.close()
                return
            thread = threading.Thread(target=self._run, args=(connection, host), name="farpipe stranger", daemon=True)
            self._connections[thread] = connection
            thread.start()

    def _run(self, connection: socket.socket, host: str) -> None:
        adopted = False
        try:
            connection.settimeout(handshake.LIMIT_S)
            if (context := self._credentials.context(server=True)) is not None:
                connection = self._connections[threading.current_thread()] = secure(connection, context, server=True)
            adopted = self._admit(connection)
        except (RefusedError, handshake.HandshakeError) as error:
            self._turned_away.append(f"{host}: {error}")
            self._on_event(f"turned away {host}: {error}")
        except OSError as error:  # a port scan, a rank that gave up
            self._on_event(f"{host}: {error}")
        finally:
            with self._lock:
                del self._connections[threading.current_thread()]
            if not adopted:
                connection.close()

    def _admit(self, connection: socket.socket) -> bool:
        purpose, num_received = handshake.accept(connection, self._token)
        try:
            return self._serve(purpose, connection, num_received)
        except RefusedError as error:
            with contextlib.suppress(OSError):
                handshake.refuse(connection, str(error))
            raise

    def close(self, deadline_s: float, *, but: socket.socket | None = None) -> None:
        """Stop listening, break off the connections that are being checked, wait until `deadline_s` (monotonic).

        `but` is one that `serve` has just taken over.
        """
        with self._lock:
            self._closing = True
            threads = [self._acceptor, *self._connections]
            for connection in self._connections.values():
                if connection is not but:
                    interrupt(connection)
        interrupt(self._sock)
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._sock.close()
