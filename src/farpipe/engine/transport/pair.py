"""Two processes that meet on a port of one of them, and then are a run of two ranks of their own.

The one that asks dials the other's `Listener`. Both prove that they know the same token (`handshake`), within TLS where
there are certificates. Then each says where it is to be reached and draws a nonce, from which follows the token of
their run. From then on they have a transport like that of a training.
"""

import contextlib
import json
import socket
import struct
import time
from typing import Any, Final

from farpipe.engine.transport import handshake
from farpipe.engine.transport.handshake import Purpose, nonce, prove, receive_before
from farpipe.engine.transport.rendezvous import Meeting
from farpipe.engine.transport.security.tls import RefusedError, TlsFiles, check_address, secure
from farpipe.engine.transport.tcp import prepare

LIMIT_S: Final = 5.0
"""Longest wait for the other side at the meeting."""
_LENGTH: Final = struct.Struct("<I")
_MAX_TEXT_BYTES: Final = 64 << 10


def dial(address: tuple[str, int], tls: TlsFiles | None, token: bytes, purpose: Purpose) -> socket.socket:
    """The first connection, whose other side has proven itself.

    OSError where nobody listens, HandshakeError for another token, RefusedError where one side refuses the other.
    """
    sock = socket.create_connection(address, timeout=LIMIT_S)
    try:
        prepare(sock)
        if tls is not None:
            dialled = str(sock.getpeername()[0])
            sock = secure(sock, tls.context(server=False), server=False)
            check_address(sock, dialled)
        handshake.offer(sock, purpose, token, 0)
    except BaseException:
        sock.close()
        raise
    return sock


class PairMeeting(Meeting):
    """The Meeting over `sock`, whose ends know each other. An address is the one at which the connection found it."""

    token = b""

    def __init__(self, sock: socket.socket, rank: int, token: bytes, *, asks: bool) -> None:
        """`rank`: this side's, 0 or 1. `asks`: whether it is the one that has dialled."""
        self._sock, self._rank, self._asks, self.token = sock, rank, asks, token

    def introduce(self, introduction: str, timeout_s: float) -> list[str]:
        """Introductions of both sides; the one that asks speaks first, for the other listens for the run by then."""
        deadline_s = time.monotonic() + timeout_s
        own = {"nonce": nonce().hex(), "introduction": introduction}
        if self._asks:
            say(self._sock, own)
        theirs = _introduced(hear(self._sock, deadline_s))
        if not self._asks:
            say(self._sock, own)
        both = (own, theirs) if self._asks else (theirs, own)
        self.token = prove(self.token, b"run", "".join(one["nonce"] for one in reversed(both)).encode())
        found = json.dumps(json.loads(theirs["introduction"]) | {"host": str(self._sock.getpeername()[0])})
        return [introduction, found] if self._rank == 0 else [found, introduction]


def say(sock: socket.socket, said: dict[str, str]) -> None:
    """Send a short text by keys."""
    text = json.dumps(said).encode()
    sock.sendall(_LENGTH.pack(len(text)) + text)


def hear(sock: socket.socket, deadline_s: float) -> dict[str, Any]:
    """Receive what the other side says with `say`, not after `deadline_s`; RefusedError if that makes no sense."""
    (num_bytes,) = _LENGTH.unpack(receive_before(sock, _LENGTH.size, deadline_s))
    if num_bytes <= _MAX_TEXT_BYTES:
        with contextlib.suppress(ValueError, RecursionError):
            said = json.loads(receive_before(sock, num_bytes, deadline_s))
            if isinstance(said, dict):
                return said
    raise _senseless()


def _introduced(said: dict[str, Any]) -> dict[str, str]:
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        if isinstance(json.loads(said["introduction"]), dict):
            return {name: str(said[name]) for name in ("nonce", "introduction")}
    raise _senseless()


def _senseless() -> RefusedError:
    return RefusedError("what it says makes no sense; are both sides of the same version?")
