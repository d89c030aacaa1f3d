"""How a connection begins: each side proves that it knows the run's token, without sending it.

    connector -> acceptor    hello: version, what the connection is for, the connector's nonce
    acceptor -> connector    the acceptor's nonce, MAC over both
    connector -> acceptor    MAC over both

The MACs (HMAC-SHA256 under the token) cover the whole hello, so nobody can turn a connection into another. They prove
who opened the connection; they don't protect what is sent on it later, which is plaintext.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from farpipe.errors import RunError
from farpipe.runtime.transport.health import Health
from farpipe.runtime.transport.message import CHANNEL_KINDS, ChannelKind
from farpipe.runtime.transport.sockets import receive_before

VERSION: Final = 1
LIMIT_S: Final = 5.0
"""A connection that has not proven itself by then is closed."""

_MAGIC: Final = b"farpipe\0"
_NONCE_BYTES: Final = 16
_MAC_BYTES: Final = 32
_HELLO: Final = struct.Struct(f"<8sHBxII{_NONCE_BYTES}s")
_RETRY_S: Final = 0.05
_MESH: Final = len(CHANNEL_KINDS)
"""The code of the control connection, which carries no tensors, in the hello."""


class HandshakeError(Exception):
    """The other side is not a rank of this run."""


class Purpose(NamedTuple):
    """What a connection is for: messages of one kind from `source` to `target`, or, with kind None, their control."""

    source: int
    target: int
    kind: ChannelKind | None


def offer(sock: socket.socket, purpose: Purpose, token: bytes) -> None:
    """The connector's side; HandshakeError or OSError when the other side is not who it should be."""
    deadline_s = time.monotonic() + LIMIT_S
    code = _MESH if purpose.kind is None else CHANNEL_KINDS.index(purpose.kind)
    hello = _HELLO.pack(_MAGIC, VERSION, code, purpose.source, purpose.target, secrets.token_bytes(_NONCE_BYTES))
    sock.settimeout(LIMIT_S)
    sock.sendall(hello)
    answer = receive_before(sock, _NONCE_BYTES + _MAC_BYTES, deadline_s)
    talk = hello + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _mac(token, b"acceptor", talk)):
        raise HandshakeError("it does not know this run's token")
    sock.sendall(_mac(token, b"connector", talk))
    sock.settimeout(None)


def accept(sock: socket.socket, token: bytes) -> Purpose:
    """The acceptor's side; HandshakeError or OSError when the other side is not a rank of this run."""
    deadline_s = time.monotonic() + LIMIT_S
    hello = receive_before(sock, _HELLO.size, deadline_s)
    magic, version, code, source, target, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or version != VERSION or code > _MESH:
        raise HandshakeError("it does not speak this version of farpipe's protocol")
    talk = hello + secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(talk[_HELLO.size :] + _mac(token, b"acceptor", talk))
    proof = receive_before(sock, _MAC_BYTES, deadline_s)
    if not hmac.compare_digest(proof, _mac(token, b"connector", talk)):
        raise HandshakeError("it does not know this run's token")
    sock.settimeout(None)
    return Purpose(source, target, None if code == _MESH else CHANNEL_KINDS[code])


def _mac(token: bytes, role: bytes, talk: bytes) -> bytes:
    return hmac.digest(token, role + talk, "sha256")


def dial(
    address: tuple[str, int],
    purpose: Purpose,
    token: bytes,
    prepare: Callable[[socket.socket], None],
    deadline_s: float,
    health: Health,
) -> socket.socket:
    """A connection for `purpose`, tried again until `deadline_s` (monotonic) or until the run breaks; RunError then."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    context = f"rank {purpose.source} connecting to rank {purpose.target} at {address[0]}:{address[1]}"
    while True:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            prepare(sock)
            sock.settimeout(LIMIT_S)
            sock.connect(address)
            offer(sock, purpose, token)
            return sock
        except (OSError, HandshakeError) as error:
            sock.close()
            if time.monotonic() + _RETRY_S > deadline_s:
                raise RunError(f"{context}: {error}") from None
        health.check(context)
        time.sleep(_RETRY_S)
