"""TCP sockets: their options, how many connections a link needs, and the rate at which each may send.

A connection carries at most one window per round trip, and the sender's window is bounded by the kernel's buffer
(tcp_wmem), of which about two thirds hold data (2.7 MB of 4 MiB were seen). Streams beyond what rate and
round trip ask for only cost memory and start-up; too few leave the link idle.

Where the link's rate is known, its connections share it out among them (SO_MAX_PACING_RATE, which the kernel's TCP
keeps by itself since Linux 4.13): together they stay a little below the rate. So they never fill the queue before the
link: they lose no packets there, slow start is not cut short by a queue that grows, and small messages of other
channels are not held up in it. Measured over 1 Gbit/s, 50 ms: docs/status.md.
"""

import contextlib
import math
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from farpipe.core.errors import InputError
from farpipe.engine.transport.config import TransportConfig, resolve

LOCAL_STREAMS: Final = 2
"""Connections within a machine or a room, where the round trip is no matter."""
UNKNOWN_BYTES_PER_S: Final = 625e6
"""Rate that is assumed for a link of unknown rate: 5 Gbit/s, as between cloud regions."""
MAX_CHOSEN: Final = 64
_SPARE: Final = 1.5
"""A stream that lost a packet is slow for a while; the others must be able to fill in."""
_USED_SHARE: Final = 2 / 3
_RAMP_BYTES: Final = 3 << 19
"""Even where the kernel allows more: each connection starts with ten packets and doubles them every round trip, so from
a cold start several come up to the rate sooner than one."""
PACED_SHARE: Final = 0.95
"""Share of a real link's rate that messages get. The rest is for headers (3.5 % of full packets), and keeps the
queue empty."""
_FAR_S: Final = 1e-3
"""Round trip of a path that is long: nearer by, the plan's rate is a guess and the queue is nothing."""
BBR_RENEWED_S = 0.5
"""Least time between two renewals of BBR, see `renew_bbr`: at every tick of the loop, about once a second. With
every 4 s single steps were 20 % late, as it had found the link full in between."""
_WMEM: Final = Path("/proc/sys/net/ipv4/tcp_wmem")
_RTT_OFFSET: Final = 68
"""Offset of tcpi_rtt, microseconds, in struct tcp_info (linux/tcp.h)."""
_RETRANSMITTED_OFFSET: Final = 100
"""Offset of tcpi_total_retrans, packets."""
_SENT_OFFSET: Final = 156
"""Offset of tcpi_data_segs_out, packets with data (since Linux 4.6)."""
_DELIVERY_RATE_OFFSET: Final = 160
"""Offset of tcpi_delivery_rate, bytes/s (since Linux 4.9)."""
_NOT_SENT_BYTES: Final = 256 << 10
"""Bytes that the kernel takes of a connection beyond what TCP may send: few, so that nothing waits where it can't be
overtaken, and stamps are true."""
_NOT_SENT_S: Final = 0.02
"""Seconds of sending that the kernel takes instead where the rate is known: a busy machine is as late with more."""
_LEAST_NOT_SENT_BYTES: Final = 16 << 10
_NEAR_NOT_SENT_BYTES: Final = 2 << 20
"""The same where the round trip is no matter: with fewer the thread that sends wakes up for each 128 KiB, a sixth of
the CPU of a GB; more saves nothing."""
REACH_LIMIT_S: Final = 5.0
_BACKLOG: Final = 1024
_SO_MAX_PACING_RATE: Final = 47
"""Option of asm-generic/socket.h; Python has no name for it."""
_WARM_SHARE: Final = 0.9
"""Share of the rate at which a ramp is over: what TCP measures is a little below what it is allowed."""
_LONGEST_ROUND_TRIPS: Final = 20
"""Windows double in each, from ten packets: ten are the rule. A link that is slower than was said never gets there."""


def choose_streams(round_trip_s: float, bytes_per_s: float | None) -> int:
    """Connections for a link."""
    window_bytes = min(send_buffer_limit_bytes(), _RAMP_BYTES) * _USED_SHARE
    in_flight_bytes = (bytes_per_s or UNKNOWN_BYTES_PER_S) * round_trip_s
    return min(max(LOCAL_STREAMS, math.ceil(_SPARE * in_flight_bytes / window_bytes)), MAX_CHOSEN)


def pacing_rate(round_trip_s: float, bytes_per_s: float | None, num_streams: int) -> int | None:
    """Bytes/s that each of a link's connections may send at most; None: as fast as TCP finds right."""
    if bytes_per_s is None or not is_far(round_trip_s):
        return None
    return max(1, round(PACED_SHARE * bytes_per_s / num_streams))


def is_far(round_trip_s: float) -> bool:
    """True if it matters how TCP finds its rate."""
    return round_trip_s >= _FAR_S


def suit_to_pauses(sock: socket.socket) -> None:
    """Choose a congestion control under which a connection goes on after a pause at the rate that it had: BBR.

    It never starts slowly again after a pause, whatever the system's settings; `renew_bbr` keeps it from its own
    interruptions. Where it is not allowed: CUBIC, which keeps its window where tcp_slow_start_after_idle is 0, but
    takes some steps to grow to it. What each costs: docs/how-to/measure-links-and-devices.md.
    """
    for name in (b"bbr", b"cubic"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


def renew_bbr(sock: socket.socket) -> None:
    """Have BBR start over with the window that it has; nothing under another congestion control.

    BBR as Linux has it (version 1) stops almost all sending for 200 ms every 10 s, to measure the round trip, and
    sends a quarter slower for one round trip in eight. A new one does neither: it begins by looking for the rate, in
    which it never lowers window and pace before it has seen the link full for three round trips, and the pace that
    farpipe allows (see `pacing_rate`) keeps it below that.
    """
    with contextlib.suppress(OSError):
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"bbr":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # the same again would change nothing
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")


def send_buffer_limit_bytes() -> int:
    """Largest send buffer that the kernel gives a connection."""
    try:
        return int(_WMEM.read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return 4 << 20


def round_trip_s(sock: socket.socket) -> float:
    """The kernel's estimate of a connection's round trip."""
    return float(_tcp_info(sock, "=I", _RTT_OFFSET)) * 1e-6


def delivery_rate(sock: socket.socket) -> float:
    """The bytes/s at which a connection's data arrived lately, by the kernel's count of acknowledgements."""
    return float(_tcp_info(sock, "=Q", _DELIVERY_RATE_OFFSET))


def packet_counts(sock: socket.socket) -> tuple[int, int]:
    """Packets that a connection has sent again, and all with data that it has sent."""
    return int(_tcp_info(sock, "=I", _RETRANSMITTED_OFFSET)), int(_tcp_info(sock, "=I", _SENT_OFFSET))


def _tcp_info(sock: socket.socket, form: str, offset: int) -> int:
    """A field of the kernel's figures of a connection; 0 where the kernel is too old to have it."""
    num_bytes = offset + struct.calcsize(form)
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, num_bytes).ljust(num_bytes, b"\0")
    (value,) = struct.unpack_from(form, info, offset)
    assert isinstance(value, int)
    return value


def num_threads() -> int:
    """Threads to move data with: most of the machine's cores are for computing. One moves about 5 Gbit/s within TLS."""
    return min(4, max(1, len(os.sched_getaffinity(0)) // 4))


def prepare(sock: socket.socket) -> None:
    """Set the options of a connection, or of a listening socket for all that it accepts."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOT_SENT_BYTES)


def fill_up(sock: socket.socket) -> None:
    """Have the kernel take more of a connection that is near, whatever its rate."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NEAR_NOT_SENT_BYTES)


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
    """A connection to `address` that shows whether a process listens and how far away; OSError where none does."""
    return socket.create_connection(address, timeout=REACH_LIMIT_S)


def interrupt(sock: socket.socket) -> None:
    """End both directions, which wakes every thread that is blocked in a call on `sock`."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class TcpRamp:
    """Time to fill up a new connection that is to carry `bytes_per_s` over `round_trip_s`, before its first message.

    TCP finds out how fast it may send by sending. A pipeline's messages are too short for that: on every connection one
    is gone before the first acknowledgement is back, and then nothing is left to send. So CUBIC and Reno let the first
    messages of a run wait for their windows to grow. And BBR, which takes the rate of acknowledgements for that of the
    link, never comes to know it: each message of 4 MB over 1 Gbit/s, 50 ms one way, took 104 ms instead of 84.

    Therefore idle connections are warmed up with dummy data until TCP has seen the needed rate arrive. It costs some
    round trips' worth of the link's rate, once.
    """

    def __init__(self, bytes_per_s: float, round_trip_s: float) -> None:
        self._enough_bytes_per_s = _WARM_SHARE * bytes_per_s
        self._limit_s = _LONGEST_ROUND_TRIPS * round_trip_s
        self._ends_s = 0.0
        self.is_over = False
        """True if TCP has come up to the rate on this connection, or has had its time."""

    def begin(self, now_s: float) -> None:
        """Begin with a new connection, at `now_s` (monotonic)."""
        self._ends_s, self.is_over = now_s + self._limit_s, False

    def goes_on(self, delivered_bytes_per_s: Callable[[], float], now_s: float) -> bool:
        """True if more is to be sent; once False, never True again on this connection."""
        if now_s < self._ends_s and delivered_bytes_per_s() < self._enough_bytes_per_s:
            return True
        self._ends_s, self.is_over = 0.0, True
        return False
