"""Mutual proof of a secret between the sides of a connection, without sending it, before a deadline.

Needs no torch. Each side draws a nonce; a proof is a MAC (HMAC-SHA256 under the secret) over the role of the side that
makes it and all that was said so far, nonces included, so nobody can use it in another conversation or the other role.
"""

import hmac
import secrets
import socket
import time
from typing import Final

NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32


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
