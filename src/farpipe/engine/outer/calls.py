"""Questions and answers between a run's processes and the agents of its sites: JSON over one connection. No torch.

Connections are those of the transport: within TLS where the sites have certificates, and both ends prove that they
know the run's token before anything is read.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from farpipe.core.errors import RunError
from farpipe.engine.transport import handshake
from farpipe.engine.transport.dialler import Listener
from farpipe.engine.transport.handshake import HandshakeError, Purpose
from farpipe.engine.transport.security.tls import Credentials, RefusedError, check_site, secure
from farpipe.engine.transport.tcp import prepare

ANSWER_S: Final = 5.0
"""Longest wait for an answer; the other side does nothing that takes long."""
MAX_BYTES: Final = 4 << 20
_LENGTH: Final = struct.Struct("<I")
Answer = Callable[[int, Mapping[str, Any]], Mapping[str, Any]]
"""``answer(site, question)``: `site` is the number of the site that asks, as its certificate says if there is one."""


class Caller:
    """Asks the agent of site number `target`; the connection is made at the first question and after every error."""

    def __init__(
        self,
        address: tuple[str, int],
        source: int,
        target: int,
        sites: tuple[str, ...],
        token: bytes,
        credentials: Credentials,
    ) -> None:
        """`source`: the number of the site that asks. May be used by several threads."""
        self._address, self._purpose = address, Purpose(source, target, None)
        self._site, self._token, self._credentials = sites[target], token, credentials
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None

    def call(self, question: Mapping[str, Any], limit_s: float = ANSWER_S) -> dict[str, Any]:
        """The answer. OSError when the agent can't be reached, RunError when it refuses."""
        with self._lock:
            try:
                sock = self._sock = self._sock or self._dial(limit_s)
                _send(sock, question)
                answer = _receive(sock, time.monotonic() + limit_s)
            except (OSError, HandshakeError, ValueError) as error:
                self._drop()
                if isinstance(error, RefusedError | HandshakeError):
                    raise RunError(f"the agent of site {self._site}: {error}") from None
                raise OSError(f"the agent of site {self._site} does not answer: {error}") from None
        if "refused" in answer:
            raise RunError(f"the agent of site {self._site}: {answer['refused']}")
        return answer

    def _dial(self, limit_s: float) -> socket.socket:
        sock = socket.create_connection(self._address, limit_s)
        try:
            prepare(sock)
            sock.settimeout(limit_s)
            if (context := self._credentials.context(server=False)) is not None:
                sock = secure(sock, context, server=False)
                check_site(sock, self._site)
            handshake.offer(sock, self._purpose, self._token, 0)
        except BaseException:
            sock.close()
            raise
        return sock

    def _drop(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def close(self) -> None:
        """End the connection; a later question makes another."""
        with self._lock:
            self._drop()


class CallServer:
    """Answers questions on `sock`, a listening socket, each connection in a thread of its own."""

    def __init__(
        self,
        sock: socket.socket,
        own: int,
        sites: tuple[str, ...],
        token: bytes,
        credentials: Credentials,
        answer: Answer,
    ) -> None:
        self._own, self._sites, self._answer = own, sites, answer
        self._open: set[socket.socket] = set()
        self._listener = Listener(sock, token, credentials, self._serve)

    def _serve(self, purpose: Purpose, sock: socket.socket, num_received: int) -> bool:
        if purpose.target != self._own or not 0 <= purpose.source < len(self._sites):
            raise RefusedError(f"this is the agent of site {self._sites[self._own]}, and the call is for {purpose}")
        check_site(sock, self._sites[purpose.source])
        handshake.welcome(sock, 0)
        sock.settimeout(None)
        self._open.add(sock)
        threading.Thread(target=self._talk, args=(purpose.source, sock), name="farpipe agent", daemon=True).start()
        return True

    def _talk(self, source: int, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), sock:
            while True:
                try:
                    answer = self._answer(source, _receive(sock, None))
                except RunError as error:
                    answer = {"refused": str(error)}
                _send(sock, answer)
        self._open.discard(sock)

    def close(self) -> None:
        """Stop listening and end all connections."""
        self._listener.close(time.monotonic() + 1.0)
        for sock in [*self._open]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _send(sock: socket.socket, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket, deadline_s: float | None) -> dict[str, Any]:
    """The next message; ValueError for one that is none, OSError when it does not come by the deadline (monotonic)."""
    (num_bytes,) = _LENGTH.unpack(_read(sock, _LENGTH.size, deadline_s))
    if num_bytes > MAX_BYTES:
        raise ValueError(f"a message of {num_bytes} bytes")
    message = json.loads(_read(sock, num_bytes, deadline_s))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message


def _read(sock: socket.socket, num_bytes: int, deadline_s: float | None) -> bytes:
    data = b""
    while len(data) < num_bytes:
        if deadline_s is not None:
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ConnectionResetError("it was closed")
        data += part
    return data
