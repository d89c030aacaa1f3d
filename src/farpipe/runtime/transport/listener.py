"""The door of a rank: accepts connections, lets in those of this run, and serves each in a thread of its own."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from farpipe.runtime.transport import handshake
from farpipe.runtime.transport.sockets import interrupt

MAX_STRANGERS: Final = 128
"""Connections that have not proven themselves yet; more are turned away (ranks try again)."""
_PAUSE_S: Final = 0.1


class Listener:
    """Serves connections on `sock`, a listening socket: `serve(purpose, connection)` runs in the connection's thread.

    Whatever else comes to the port, in whatever number, takes a thread for a few seconds and no more.
    """

    def __init__(
        self, sock: socket.socket, token: bytes, serve: Callable[[handshake.Purpose, socket.socket], None]
    ) -> None:
        self._sock = sock
        self._token = token
        self._serve = serve
        self._lock = threading.Lock()
        self._closing = False
        self._num_strangers = 0
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._acceptor = threading.Thread(target=self._accept, name="farpipe listener", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._sock.accept()[0]
            except OSError:
                if self._closing:
                    return
                time.sleep(_PAUSE_S)  # no file descriptors left, most likely; others may free some
                continue
            self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closing or self._num_strangers >= MAX_STRANGERS:
                connection.close()
                return
            self._num_strangers += 1
            thread = threading.Thread(target=self._run, args=(connection,), name="farpipe connection", daemon=True)
            self._connections[connection] = thread
            thread.start()

    def _run(self, connection: socket.socket) -> None:
        try:
            purpose = self._check(connection)
            if purpose is not None:
                self._serve(purpose, connection)
        finally:
            with self._lock:
                connection.close()
                self._connections.pop(connection, None)

    def _check(self, connection: socket.socket) -> handshake.Purpose | None:
        """The connection's purpose; None for a stranger's."""
        try:
            return handshake.accept(connection, self._token)
        except (OSError, handshake.HandshakeError):
            return None
        finally:
            with self._lock:
                self._num_strangers -= 1

    def close(self, deadline_s: float) -> None:
        """Stop listening, break off all connections and wait for their threads until `deadline_s` (monotonic)."""
        with self._lock:
            self._closing = True
            threads = [self._acceptor, *self._connections.values()]
            for connection in self._connections:
                interrupt(connection)
        interrupt(self._sock)
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._sock.close()
