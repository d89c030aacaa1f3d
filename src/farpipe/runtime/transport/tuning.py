"""How many TCP connections a link needs, and how fast each of them may send.

A connection carries at most one window per round trip, and the sender's window is bounded by the kernel's buffer
(tcp_wmem, or SO_SNDBUF), of which about two thirds hold data (2.7 MB of 4 MiB were seen). Streams beyond what rate and
round trip ask for only cost memory and start-up; too few leave the link idle.

Where the link's rate is known, its connections share it out among them (SO_MAX_PACING_RATE, which the kernel's TCP
keeps by itself since Linux 4.13): together they stay a little below the rate. So they never fill the queue before the
link: they lose no packets there, slow start is not cut short by a queue that grows, and small messages of other
channels are not held up in it. Measured over 1 Gbit/s, 50 ms: docs/status.md.
"""

import math
import os
import socket
import struct
from pathlib import Path
from typing import Final

LOCAL_STREAMS: Final = 2
"""Within a machine or a room, where the round trip is no matter."""
UNKNOWN_BYTES_PER_S: Final = 625e6
"""Taken for a link whose rate nobody has told: 5 Gbit/s, as between cloud regions."""
MAX_CHOSEN: Final = 64
_SPARE: Final = 1.5
"""A stream that lost a packet is slow for a while; the others must be able to fill in."""
_USED_SHARE: Final = 2 / 3
_RAMP_BYTES: Final = 3 << 19
"""Even where the kernel allows more: each connection starts with ten packets and doubles them every round trip, so from
a cold start several come up to the rate sooner than one."""
_PACED_SHARE: Final = 0.95
"""Of the rate, for headers (3.5 % of full packets) and to keep the queue empty."""
_PACED_FROM_S: Final = 1e-3
"""Round trip of a way that is long enough: nearer by, the plan's rate is a guess and the queue is nothing."""
_WMEM: Final = Path("/proc/sys/net/ipv4/tcp_wmem")
_RTT_OFFSET: Final = 68
"""Of tcpi_rtt, microseconds, in struct tcp_info (linux/tcp.h)."""


def choose_streams(round_trip_s: float, bytes_per_s: float | None, buffer_bytes: int | None = None) -> int:
    """Connections for a link; `buffer_bytes` as in TransportConfig.socket_buffer_bytes."""
    window_bytes = min(buffer_bytes or send_buffer_limit_bytes(), _RAMP_BYTES) * _USED_SHARE
    in_flight_bytes = (bytes_per_s or UNKNOWN_BYTES_PER_S) * round_trip_s
    return min(max(LOCAL_STREAMS, math.ceil(_SPARE * in_flight_bytes / window_bytes)), MAX_CHOSEN)


def pacing_rate(round_trip_s: float, bytes_per_s: float | None, num_streams: int) -> int | None:
    """Bytes/s that each of a link's connections may send at most; None: as fast as TCP finds right."""
    if bytes_per_s is None or round_trip_s < _PACED_FROM_S:
        return None
    return max(1, round(_PACED_SHARE * bytes_per_s / num_streams))


def send_buffer_limit_bytes() -> int:
    """Up to where the kernel lets a connection's send buffer grow."""
    try:
        return int(_WMEM.read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return 4 << 20


def round_trip_s(sock: socket.socket) -> float:
    """The kernel's estimate of a connection's round trip."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_OFFSET + 4)
    return float(struct.unpack_from("=I", info, _RTT_OFFSET)[0]) * 1e-6


def default_num_threads() -> int:
    """Threads to move data with: most of the machine's cores are for computing."""
    return min(4, max(1, len(os.sched_getaffinity(0)) // 4))
