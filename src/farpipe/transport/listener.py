"""The listening socket of a rank: accepts connections, keeps those of this run and refuses all others."""

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from farpipe.transport import handshake
from farpipe.transport.security.tls import Credentials, RefusedError, secure
from farpipe.transport.tcp import interrupt

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
        """Callers that were turned away lately, with the reasons, to be put behind an error; empty if nobody was."""
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
