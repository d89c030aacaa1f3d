"""Lateness of messages by lost packets and jitter, and what these leave of a link's rate.

TCP as farpipe's transport uses it, in as many connections as `num_connections` says; each packet is lost with the same
chance:

1. The sender learns of a loss one round trip later, from what is acknowledged behind it (RACK, RFC 8985), and sends the
   packet again. So the message is late by the round trip less what was still to be sent of it; each further loss of
   the same packet costs a round trip more.
2. Nothing is acknowledged behind the last packet of a connection's part of the message. It is sent again when the next
   message shows its loss, or after the timeout of Linux: 200 ms and the round trip (`tcp_rearm_rto`, TCP_RTO_MIN).
3. In the first round trip of a recovery BBR sends only as much as is acknowledged (`packet_conservation` in tcp_bbr.c).
   A message that follows then waits for its end on this connection with the share of the window that was acknowledged
   before the loss was noticed.
4. BBR keeps its rate up to a loss of some per cent, less the packets that are lost (Cardwell et al., CACM 60(2), 2017,
   figure 8). Reno's rate is the law of Mathis et al. (CCR 27(3), 1997), CUBIC's that of RFC 9438, section 5.1, and
   Reno's where that is more; each connection has it.

Lost acknowledgements do no harm, as the next says the same. Nothing here was fitted;
docs/reference/benchmarks/transport.md has the model beside measured messages.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.spec import Cluster, CongestionControl, SiteLink
from farpipe.core.step import occupied_s

Floats = NDArray[np.float64]

SEGMENT_BYTES: Final = 1448
"""Data in a packet of 1500 bytes, with IPv4, TCP and time stamps."""
LEAST_TIMEOUT_S: Final = 0.2
MAX_RETRANSMISSIONS: Final = 16
"""Largest number of losses of one packet that are computed; at a loss of one half that is one packet in 65,536."""
_BURSTS_PER_S: Final = 1024
"""Linux hands over what a connection may send in about a millisecond at once (`tcp_tso_autosize`)."""
_MAX_BURSTS: Final = 32
_WINDOW_BYTES: Final = 1 << 20
_SMALLEST_CHUNK_BYTES, _LARGEST_CHUNK_BYTES = 32 << 10, 1 << 20
_MEAN_SHAPE: Final = (64, 32)
_MAX_MESSAGES: Final = 256
"""Drawn in a row; longer rows repeat them."""


@dataclass(frozen=True)
class LossyLink:
    """One direction between two sites as TCP meets it."""

    latency_s: float
    bandwidth_bytes_per_s: float
    round_trip_s: float
    """Seconds there and back, with half of the jitter of both directions."""
    loss: float = 0.0
    jitter_s: float = 0.0
    congestion_control: CongestionControl = "bbr"

    @property
    def is_disturbed(self) -> bool:
        """True if messages are late at all."""
        return self.loss > 0 or self.jitter_s > 0

    @property
    def num_connections(self) -> int:
        """TCP connections of a channel: the rule of the transport's `choose_streams` on a host as Linux comes."""
        needed = 1.5 * self.bandwidth_bytes_per_s * self.round_trip_s / _WINDOW_BYTES
        return min(max(2, math.ceil(needed)), 64)

    @property
    def goodput_bytes_per_s(self) -> float:
        """Rate at which it carries messages."""
        rate = self.bandwidth_bytes_per_s * (1 - self.loss)
        if self.congestion_control == "bbr" or not self.loss:
            return rate
        window = window_packets(self.congestion_control, self.loss, self.round_trip_s)
        return min(rate, self.num_connections * window * SEGMENT_BYTES / max(self.round_trip_s, 1e-9))

    def connections_of(self, num_bytes: float) -> int:
        """The number of connections that carry a message: it is cut into chunks, neither too small nor too large."""
        share = math.ceil(num_bytes / self.num_connections)
        chunk_bytes = min(max(share, _SMALLEST_CHUNK_BYTES), _LARGEST_CHUNK_BYTES)
        return min(self.num_connections, max(1, math.ceil(num_bytes / chunk_bytes)))

    def packets_of(self, num_bytes: float) -> int:
        """Packets of a message."""
        return max(1, math.ceil(num_bytes / SEGMENT_BYTES))


def window_packets(congestion_control: CongestionControl, loss: float, round_trip_s: float) -> float:
    """Mean window of a connection under Reno or CUBIC: packets on their way."""
    reno = math.sqrt(1.5 / loss)
    if congestion_control == "reno":
        return reno
    return max(reno, 1.054 * math.pow(round_trip_s / loss, 0.75))  # C = 0.4, beta = 0.7


def lossy_link(cluster: Cluster, link: SiteLink) -> LossyLink:
    """`link` as TCP meets it; the path back is as long where no link leads back."""
    back = cluster.link(link.target, link.source) or link
    return LossyLink(
        latency_s=link.latency_s,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        round_trip_s=link.latency_s + back.latency_s + (link.jitter_s + back.jitter_s) / 2,
        loss=link.loss,
        jitter_s=link.jitter_s,
        congestion_control=link.congestion_control,
    )


def lateness_s(link: LossyLink, num_bytes: float, gap_s: float, shape: tuple[int, int], seed: int = 0) -> Floats:
    """Lateness of messages beyond latency and bytes/goodput: `shape` is samples, messages in a row.

    The messages of a row follow each other on one channel, one every `gap_s`; infinity: each is alone. The same seed
    gives the same draws, whatever the gap.
    """
    rows, row = shape
    drawn = (rows, min(row, _MAX_MESSAGES))
    rng = np.random.default_rng(seed)
    late_s = _by_losses(link, num_bytes, gap_s, drawn, rng)
    late_s += _by_jitter(link, num_bytes, drawn, rng)
    return late_s if drawn == shape else np.tile(late_s, -(-row // drawn[1]))[:, :row]


@lru_cache(maxsize=4096)
def mean_lateness_s(link: LossyLink, num_bytes: float, gap_s: float) -> float:
    """The mean of `lateness_s`, of 2048 draws; gaps within a tenth of each other count as one."""
    if not link.is_disturbed:
        return 0.0
    if math.isfinite(gap_s) and gap_s > 0:
        rounded_s = 1.1 ** round(math.log(gap_s, 1.1))
        if rounded_s != gap_s:
            return mean_lateness_s(link, num_bytes, rounded_s)
    return float(lateness_s(link, num_bytes, gap_s, _MEAN_SHAPE).mean())


def _by_losses(
    link: LossyLink, num_bytes: float, gap_s: float, shape: tuple[int, int], rng: np.random.Generator
) -> Floats:
    """Lateness by the module's rules 1 to 3. The last axis inside is that of the connections."""
    if not link.loss:
        return np.zeros(shape)
    count = link.connections_of(num_bytes)
    num_packets = max(1, round(link.packets_of(num_bytes) / count))
    send_s, round_s = num_bytes / link.goodput_bytes_per_s, link.round_trip_s
    lost = rng.binomial(num_packets, link.loss, (*shape, count))
    is_tail = rng.random(lost.shape) * num_packets < lost
    place = np.where(is_tail, 1.0, rng.random(lost.shape) ** (1 / np.maximum(lost, 1)))
    noticed_s = np.where(is_tail, min(2 * round_s + LEAST_TIMEOUT_S, gap_s + round_s), round_s)
    there_s = place * send_s + noticed_s
    again = lost
    for _ in range(MAX_RETRANSMISSIONS):
        if not (again := rng.binomial(again, link.loss)).any():
            break
        there_s += np.where(again, min(max(gap_s, round_s), round_s + LEAST_TIMEOUT_S), 0.0)
    own_s = np.where(lost, np.maximum(there_s - send_s, 0.0), 0.0)
    kept_s = np.where(lost, np.clip(there_s + round_s - gap_s, 0.0, round_s) * place, 0.0)
    own_s[:, 1:] += kept_s[:, :-1]
    return np.asarray(own_s.max(axis=2))


def _by_jitter(link: LossyLink, num_bytes: float, shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """Each burst is delayed by a random part of the jitter, and none overtakes another (`engine.links.Pipe`)."""
    if not link.jitter_s:
        return np.zeros(shape)
    burst_bytes = max(2 * SEGMENT_BYTES, link.bandwidth_bytes_per_s / link.num_connections / _BURSTS_PER_S)
    apart_s = occupied_s(link, burst_bytes)
    that_matter = min(math.ceil(link.jitter_s / apart_s), math.ceil(num_bytes / burst_bytes))
    count = min(max(1, that_matter), _MAX_BURSTS)
    earlier_s = np.arange(count) * (apart_s * max(1.0, that_matter / count))
    late_s = rng.random((*shape, count)) * link.jitter_s - earlier_s
    return np.asarray(late_s.max(axis=2))
