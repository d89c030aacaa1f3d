"""Small steps with TCP sockets: options, waking a thread that is blocked in one."""

import contextlib
import socket
import struct
from typing import Final

from farpipe.errors import InputError
from farpipe.transport.config import TransportConfig, resolve

_NOT_SENT_BYTES: Final = 256 << 10
"""Bytes that the kernel takes of a connection beyond what TCP may send: few, so that nothing waits where it can't be
overtaken, and stamps are true."""
_NOT_SENT_S: Final = 0.02
"""The same for a connection whose rate is known: what lasts until a busy machine has brought the next piece."""
_LEAST_NOT_SENT_BYTES: Final = 16 << 10
REACH_LIMIT_S: Final = 5.0
_BACKLOG: Final = 1024
_SO_MAX_PACING_RATE: Final = 47
"""Of asm-generic/socket.h; Python has no name for it."""


def prepare(sock: socket.socket) -> None:
    """Set the options of a connection, or of a listening socket for all that it accepts."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOT_SENT_BYTES)


def pace(sock: socket.socket, bytes_per_s: int) -> None:
    """Send at most so fast, evenly."""
    not_sent_bytes = min(max(int(_NOT_SENT_S * bytes_per_s), _LEAST_NOT_SENT_BYTES), _NOT_SENT_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, not_sent_bytes)
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("@L", bytes_per_s))


def listen(config: TransportConfig) -> socket.socket:
    """The socket on which a rank listens; what it accepts has the same options. InputError when the port is taken."""
    family, address = resolve(config.host, config.port)
    try:
        sock = socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise InputError(
            f"transport: can't listen on {config.host} port {config.port}: {error.strerror}; "
            "stop what uses the port, choose another, or 0 for any"
        ) from None
    prepare(sock)
    return sock


def reach(address: tuple[str, int]) -> socket.socket:
    """A connection to `address` for finding out whether anybody is there and how far away; OSError when nobody is."""
    return socket.create_connection(address, timeout=REACH_LIMIT_S)


def interrupt(sock: socket.socket) -> None:
    """End both directions, which wakes every thread that is blocked in a call on `sock`."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
