"""Small steps with TCP sockets: options, exact reads, waking a thread that is blocked in one."""

import contextlib
import socket
import time
from pathlib import Path
from typing import Final

from farpipe.errors import InputError
from farpipe.runtime.transport.config import TransportConfig, resolve

KEEPALIVE_S: Final = 5
"""A peer whose machine is gone without a word is noticed after about four times this."""
_KEEPALIVE_PROBES: Final = 3
_BACKLOG: Final = 1024
_CONGESTION_CONTROLS: Final = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


class ClosedError(ConnectionError):
    """The other side has closed the connection."""


def prepare(sock: socket.socket, config: TransportConfig) -> None:
    """Set the options of a connection, before it is made or listened for where buffers are to count."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
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


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill `view`; ClosedError when the connection ends before."""
    while len(view):
        num_bytes = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if num_bytes == 0:
            raise ClosedError("it was closed")
        view = view[num_bytes:]


def receive_exactly(sock: socket.socket, num_bytes: int) -> bytearray:
    """The next `num_bytes`; ClosedError when the connection ends before."""
    data = bytearray(num_bytes)
    receive_into(sock, memoryview(data))
    return data


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


def send_all(sock: socket.socket, *parts: bytes | memoryview) -> None:
    """Hand all of `parts` to the kernel, in one call where it takes them."""
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        num_bytes = sock.sendmsg(left)
        while left and num_bytes >= len(left[0]):
            num_bytes -= len(left.pop(0))
        if num_bytes:
            left[0] = left[0][num_bytes:]


def interrupt(sock: socket.socket) -> None:
    """End both directions, which wakes every thread that is blocked in a call on `sock`."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
