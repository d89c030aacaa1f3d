"""Small steps with TCP sockets: options, exact reads, waking a thread that is blocked in one."""

import contextlib
import socket
import struct
import time
from pathlib import Path
from typing import Final

from farpipe.errors import InputError
from farpipe.runtime.transport.config import TransportConfig, resolve

_NOT_SENT_BYTES: Final = 256 << 10
"""What the kernel takes of a connection beyond what TCP may send: little, so that nothing waits where it can't be
overtaken, and stamps are true."""
_BACKLOG: Final = 1024
_SO_MAX_PACING_RATE: Final = 47
"""Of asm-generic/socket.h; Python has no name for it."""
_CONGESTION_CONTROLS: Final = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


class ClosedError(ConnectionError):
    """The other side has closed the connection."""


def prepare(sock: socket.socket, config: TransportConfig) -> None:
    """Set the options of a connection, before it is made or listened for where buffers are to count."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOT_SENT_BYTES)
    if config.socket_buffer_bytes is not None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, config.socket_buffer_bytes)
    if config.congestion_control is not None:
        _set_congestion_control(sock, config.congestion_control)


def _set_congestion_control(sock: socket.socket, name: str) -> None:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        known = _CONGESTION_CONTROLS.read_text().strip()
        raise InputError(f"transport: congestion_control {name!r}: {error.strerror}; available: {known}") from None


def pace(sock: socket.socket, bytes_per_s: int) -> None:
    """Send at most so fast, evenly."""
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
    try:
        prepare(sock, config)
    except BaseException:
        sock.close()
        raise
    return sock


def receive_before(sock: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """The next `num_bytes`, however slowly they drip in, but not after `deadline_s` (monotonic): TimeoutError."""
    data = b""
    while len(data) < num_bytes:
        set_deadline(sock, deadline_s)
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ClosedError("it was closed")
        data += part
    return data


def set_deadline(sock: socket.socket, deadline_s: float) -> None:
    """Limit the next call on `sock`; TimeoutError when it is too late already."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    sock.settimeout(left_s)


def interrupt(sock: socket.socket) -> None:
    """End both directions, which wakes every thread that is blocked in a call on `sock`."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
