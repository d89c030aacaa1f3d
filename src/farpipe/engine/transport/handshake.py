"""Beginning of a connection: each side proves that it knows the run's token, without sending it.

    connector -> acceptor    hello: version, which stream the connection is for, the connector's nonce
    acceptor -> connector    the acceptor's nonce, MAC over both
    connector -> acceptor    how many frames of this stream it has received, MAC over all
    acceptor -> connector    how many it has received, or why it refuses

Each side draws a nonce; a MAC (HMAC-SHA256 under the token) is over the role of the side that makes it and all that was
said so far, so it can't be used in another conversation or the other role. It covers the whole
hello, so a connection can't be turned into another. MACs prove who opened the connection; without TLS they don't
protect what is sent on it later. With TLS (`transport.security`) all of this goes within it, and the acceptor checks
that the certificate is that of the rank's site.
"""

import hmac
import secrets
import socket
import ssl
import struct
import time
from typing import Final, NamedTuple

from farpipe.core.units import printable
from farpipe.engine.transport.security.tls import RefusedError, explained
from farpipe.engine.transport.wire import CHANNEL_KINDS, ChannelKind

NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32
VERSION: Final = 3
LIMIT_S: Final = 5.0
"""A connection that has not proven itself by then is closed."""

_MAGIC: Final = b"farpipe\0"
_HELLO: Final = struct.Struct(f"<8sHBxIII{NONCE_BYTES}s")
_COUNT: Final = struct.Struct("<Q")
_ANSWER: Final = struct.Struct("<?xHQ")
_MAX_REASON_BYTES: Final = 1024
_CONTROL: Final = len(CHANNEL_KINDS)
"""The code of the control connection, which carries no data, in the hello."""


class ClosedError(ConnectionError):
    """The other side has closed the connection."""


def nonce() -> bytes:
    """Random bytes that make a conversation differ from all others."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(secret: bytes, role: bytes, talk: bytes) -> bytes:
    """The proof that `role` knows `secret`, after `talk`."""
    return hmac.digest(secret, role + talk, "sha256")


def is_proof(proof: bytes, secret: bytes, role: bytes, talk: bytes) -> bool:
    """True if `proof` is the proof that `prove` makes of the rest."""
    return hmac.compare_digest(proof, prove(secret, role, talk))


def receive_before(sock: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """The next `num_bytes`, however slowly they drip in, but not after `deadline_s` (monotonic): TimeoutError."""
    data = b""
    while len(data) < num_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left_s)
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ClosedError("it was closed")
        data += part
    return data


class HandshakeError(Exception):
    """The other side is not a rank of this run."""


class Purpose(NamedTuple):
    """Stream that a connection is for: number `stream` of the messages of one kind from `source` to `target`, or,
    with kind None, their control."""

    source: int
    target: int
    kind: ChannelKind | None
    stream: int = 0


def offer(sock: socket.socket, purpose: Purpose, token: bytes, num_received: int) -> int:
    """The connector's side: how many frames the acceptor has received.

    HandshakeError or OSError when the other side is not who it should be, RefusedError when it says why it refuses.
    """
    deadline_s = time.monotonic() + LIMIT_S
    code = _CONTROL if purpose.kind is None else CHANNEL_KINDS.index(purpose.kind)
    hello = _HELLO.pack(_MAGIC, VERSION, code, purpose.source, purpose.target, purpose.stream, nonce())
    sock.settimeout(LIMIT_S)
    with explained():
        _send(sock, hello)
        answer = receive_before(sock, NONCE_BYTES + PROOF_BYTES, deadline_s)
        talk = hello + answer[:NONCE_BYTES]
        if not is_proof(answer[NONCE_BYTES:], token, b"acceptor", talk):
            raise HandshakeError("it does not know this run's token")
        count = _COUNT.pack(num_received)
        _send(sock, count + prove(token, b"connector", talk + count))
        welcome, reason_bytes, peer_received = _ANSWER.unpack(receive_before(sock, _ANSWER.size, deadline_s))
        if not welcome:
            raise RefusedError(printable(receive_before(sock, reason_bytes, deadline_s).decode(errors="replace")))
    return int(peer_received)


def _send(sock: socket.socket, data: bytes) -> None:
    """Send all; where the other side has hung up, its reason may be there to be read, and is raised."""
    try:
        sock.sendall(data)
    except OSError:
        sock.recv(1)
        raise


def accept(sock: socket.socket, token: bytes) -> tuple[Purpose, int]:
    """The acceptor's side: what the connection is for and how many frames the connector has received.

    HandshakeError or OSError when the other side is not a rank of this run. `welcome` or `refuse` comes next.
    """
    deadline_s = time.monotonic() + LIMIT_S
    hello = receive_before(sock, _HELLO.size, deadline_s)
    magic, version, code, source, target, stream, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or version != VERSION or code > _CONTROL:
        tls = "" if isinstance(sock, ssl.SSLSocket) or hello[:2] != b"\x16\x03" else "; it speaks TLS, this side not"
        raise HandshakeError(f"it does not speak this version of farpipe's protocol{tls}")
    talk = hello + nonce()
    sock.sendall(talk[_HELLO.size :] + prove(token, b"acceptor", talk))
    count = receive_before(sock, _COUNT.size, deadline_s)
    proof = receive_before(sock, PROOF_BYTES, deadline_s)
    if not is_proof(proof, token, b"connector", talk + count):
        raise HandshakeError("it does not know this run's token")
    (num_received,) = _COUNT.unpack(count)
    return Purpose(source, target, None if code == _CONTROL else CHANNEL_KINDS[code], stream), num_received


def welcome(sock: socket.socket, num_received: int) -> None:
    """Let the connector in and report how many of its frames are here."""
    sock.settimeout(LIMIT_S)
    sock.sendall(_ANSWER.pack(True, 0, num_received))


def refuse(sock: socket.socket, reason: str) -> None:
    """Report to the connector, which has proven itself, why it is not let in."""
    text = reason.encode()[:_MAX_REASON_BYTES]
    sock.settimeout(LIMIT_S)
    sock.sendall(_ANSWER.pack(False, len(text), 0) + text)
