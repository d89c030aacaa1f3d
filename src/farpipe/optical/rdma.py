"""RDMA over long distances: what a window, an acknowledgement at the source and a rate budget leave of a link.

Reliable RDMA keeps at most a window of bytes unacknowledged, so its rate is at most window / round trip. Where a switch
at the source's site acknowledges in place of the far end (MatchRDMA, arXiv 2604.23932; GeoPipe's lossless network,
arXiv 2510.12064) the round trip is that inside the site, and the destination bounds the rate by a budget instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from farpipe.errors import InputError
from farpipe.spec.windows import SECONDS_PER_KM, SITE_RTT_S, windowed_rate
from farpipe.step import Problem, retimed


@dataclass(frozen=True)
class LongHaul:
    """A link of `km` kilometres of fibre between two sites that carries RDMA; rates in bytes/s."""

    km: float
    rate_bytes_per_s: float
    window_bytes: float
    site_rtt_s: float = SITE_RTT_S
    """Round trip inside a site, from the sender to the switch that acknowledges."""
    fixed_s: float = 0.0
    """Delay of equipment in one direction, added to that of the fibre."""

    def __post_init__(self) -> None:
        for name in ("rate_bytes_per_s", "window_bytes", "site_rtt_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name}: must be more than 0, found {getattr(self, name)}")
        for name in ("km", "fixed_s"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name}: must be at least 0, found {getattr(self, name)}")

    @property
    def latency_s(self) -> float:
        """Delay in one direction."""
        return self.km * SECONDS_PER_KM + self.fixed_s

    @property
    def rtt_s(self) -> float:
        """Round trip from sender to receiver and back."""
        return 2 * self.latency_s + self.site_rtt_s

    @property
    def plain_rate(self) -> float:
        """bytes/s with acknowledgements from the far end: window / round trip, at most the link's rate."""
        return windowed_rate(self.rate_bytes_per_s, self.window_bytes, self.rtt_s)

    def acknowledged_at_source(self, budget_bytes_per_s: float | None = None) -> float:
        """bytes/s with acknowledgements at the source, at most the destination's budget if there is one."""
        rate = windowed_rate(self.rate_bytes_per_s, self.window_bytes, self.site_rtt_s)
        return rate if budget_bytes_per_s is None else min(rate, budget_bytes_per_s)

    @property
    def pause_buffer_bytes(self) -> float:
        """Buffer without loss behind a link with pause frames: what arrives in the round trip after a pause."""
        return self.rate_bytes_per_s * 2 * self.latency_s

    def budget_buffer_bytes(self, burst_s: float) -> float:
        """Buffer where the destination grants rates: what arrives within `burst_s`, the period of its budgets."""
        return min(self.pause_buffer_bytes, self.rate_bytes_per_s * burst_s)


def over_long_hauls(problem: Problem, hauls: Mapping[str, LongHaul], *, at_source: bool = False) -> Problem:
    """The step whose messages between stages take the links named in `hauls` as RDMA: at its rate, after its delay.

    `at_source`: acknowledged by the switch at the source's site. Elsewhere nothing changes.
    """
    messages = problem.traffic.messages
    occupies_s, arrives_after_s = messages.occupies_s.copy(), messages.arrives_after_s.copy()
    for place, (name, link) in enumerate(problem.links.items()):
        if haul := hauls.get(name):
            there = messages.link == place
            rate = haul.acknowledged_at_source() if at_source else haul.plain_rate
            occupies_s[there] = messages.bytes[there] / min(rate, link.bandwidth_bytes_per_s)
            arrives_after_s[there] = occupies_s[there] + haul.latency_s
    return retimed(problem, occupies_s, arrives_after_s)


def window_for(rate_bytes_per_s: float, rtt_s: float) -> float:
    """The window that fills a link: rate times round trip."""
    return rate_bytes_per_s * rtt_s
