"""How many TCP connections a link needs.

A connection carries at most one window per round trip, and the sender's window is bounded by the kernel's buffer
(tcp_wmem, or SO_SNDBUF), of which about two thirds hold data (2.7 MB of 4 MiB were seen). Streams beyond what rate and
round trip ask for only cost memory and start-up; too few leave the link idle.
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
_RAMP_BYTES: Final = 4 << 20
"""Even where the kernel allows more: from a cold start several connections come up to the rate sooner than one."""
_WMEM: Final = Path("/proc/sys/net/ipv4/tcp_wmem")
_RTT_OFFSET: Final = 68
"""Of tcpi_rtt, microseconds, in struct tcp_info (linux/tcp.h)."""


def choose_streams(round_trip_s: float, bytes_per_s: float | None, buffer_bytes: int | None = None) -> int:
    """Connections for a link; `buffer_bytes` as in TransportConfig.socket_buffer_bytes."""
    window_bytes = min(buffer_bytes or send_buffer_limit_bytes(), _RAMP_BYTES) * _USED_SHARE
    in_flight_bytes = (bytes_per_s or UNKNOWN_BYTES_PER_S) * round_trip_s
    return min(max(LOCAL_STREAMS, math.ceil(_SPARE * in_flight_bytes / window_bytes)), MAX_CHOSEN)


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
