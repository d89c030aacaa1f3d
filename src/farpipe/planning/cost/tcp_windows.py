"""Seconds of messages over TCP connections that are not kept warm, as those of NCCL and gloo are.

CUBIC, or Reno, as Linux has them, without loss:

1. A connection sends a window in each round trip, and its window doubles in each round trip in which all of it was
   sent (slow start, RFC 5681), from ten packets (RFC 6928) up to what its buffer holds. From where the windows of all
   connections fill the round trip at the link's rate, they send at that rate. Of a message that is larger than the
   buffer the rest waits for acknowledgements, a window at a time.
2. After a pause its window is halved for every retransmission timeout that passed, down to ten packets (RFC 2861,
   `tcp_cwnd_restart`; on unless net.ipv4.tcp_slow_start_after_idle is 0). The timeout is 200 ms and the round trip.

So a message that follows within the timeout gets the link's rate, unless windows are too small for the way; the first
ones of a step, and all where the pauses are longer, wait for windows to grow. Nothing here was fitted;
docs/reference/benchmarks/transport.md (single_messages) has it beside measured messages.
"""

import math
from dataclasses import dataclass
from typing import Final

from farpipe.core.spec import Cluster, SiteLink
from farpipe.core.spec.cluster import windowed_rate
from farpipe.planning.cost.lossy_links import LEAST_TIMEOUT_S

FIRST_WINDOW: Final = 10
"""Packets."""
MAX_HALVINGS: Final = 64
HEADER_BYTES: Final = 52
"""IPv4, TCP and time stamps."""
BUFFER_WINDOWS: Final = 1.5
"""What a connection's buffer holds, in windows: a sender that waits for room is woken when a third of it is free
(`sk_stream_write_space`), so its first burst is half as large again as those after it."""


@dataclass(frozen=True)
class ColdLink:
    """One direction between two sites, over `num_streams` connections that share each message."""

    bandwidth_bytes_per_s: float
    round_trip_s: float
    num_streams: int
    window_bytes: float
    """The most that each sends in a round trip, for long."""
    mtu_bytes: int = 1500

    @property
    def first_window_bytes(self) -> float:
        """Window of a new connection, and of one after a long pause."""
        return float(FIRST_WINDOW * (self.mtu_bytes - HEADER_BYTES))

    def after_pause(self, window_bytes: float, pause_s: float) -> float:
        """The window of a connection that sent nothing for `pause_s`."""
        halvings = math.ceil(min(pause_s / (LEAST_TIMEOUT_S + self.round_trip_s), MAX_HALVINGS)) - 1
        return max(self.first_window_bytes, window_bytes / 2.0 ** max(0, halvings))

    def sent(self, num_bytes: float, window_bytes: float) -> tuple[float, float]:
        """Seconds from the first byte of a message to its last one's leaving, and the window after it."""
        left, seconds, round_s = num_bytes / self.num_streams, 0.0, self.round_trip_s
        rate, buffer = self.bandwidth_bytes_per_s / self.num_streams, BUFFER_WINDOWS * self.window_bytes
        while window_bytes < min(left, rate * round_s, buffer):
            seconds, left, window_bytes = seconds + round_s, left - window_bytes, min(2 * window_bytes, buffer)
        waits = max(0, math.ceil((left - max(window_bytes, 1.0)) / self.window_bytes))
        seconds += waits * max(0.0, round_s - self.window_bytes / rate)
        return seconds + left / rate, min(max(window_bytes, left), buffer)

    def messages_s(self, num_bytes: float, count: int, period_s: float, pause_s: float) -> tuple[float, ...]:
        """Seconds of each of `count` messages, one every `period_s`, the first after `pause_s` without any."""
        window, found = self.first_window_bytes, [0.0]
        for _ in range(3):  # the window that a step ends with begins the next one
            window, found = self.after_pause(window, pause_s), []
            while len(found) < count:
                seconds, grown = self.sent(num_bytes, window)
                grown = self.after_pause(grown, period_s - seconds)
                found += [seconds] * (1 if grown != window else count - len(found))
                window = grown
        return tuple(found)

    def occupied_s(self, num_bytes: float, sent_s: float) -> float:
        """Time for which a message that is sent in `sent_s` keeps the connections from the next one."""
        rates = (self.bandwidth_bytes_per_s, self.window_bytes, self.round_trip_s, self.num_streams)
        return max(sent_s, num_bytes / windowed_rate(*rates))


def cold_link(cluster: Cluster, link: SiteLink, num_pipelines: int) -> ColdLink | None:
    """`link` over connections that are not kept warm, of each of `num_pipelines`; None where they are."""
    if link.plain_tcp is None:
        return None
    back = cluster.link(link.target, link.source) or link
    plain = link.plain_tcp
    return ColdLink(
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        round_trip_s=link.latency_s + back.latency_s,
        num_streams=plain.num_streams * num_pipelines,
        window_bytes=plain.window_bytes,
        mtu_bytes=plain.mtu_bytes,
    )
