"""Bandwidth that a window leaves of a link: at most so many bytes are in flight unacknowledged in each stream.

TCP with default buffers, and reliable RDMA, can't be faster than window / round trip, however fast the link is. Where a
switch at the source's site acknowledges in place of the far end, the round trip is that inside the site.
"""

from typing import Final

TCP_WINDOW_BYTES: Final = 2.7e6
"""Of one stream with default buffers: hivemind-multi-cloud's measurements between clouds, 0.2 to 300 ms apart."""
RDMA_WINDOW_BYTES: Final = 16e6
"""Of an RDMA queue between sites where nothing else is said: 12.8 Gbit/s at 1000 km of fibre, as MatchRDMA reports."""
SECONDS_PER_KM: Final = 4.9e-6
"""Delay of light in silica fibre: group index 1.468 / c = 4.9 us/km (ITU-T G.652 fibre)."""
SITE_RTT_S: Final = 20e-6
"""Round trip inside a site, from the sender to the switch that acknowledges."""


def windowed_rate(rate: float, window_bytes: float, rtt_s: float, num_streams: int = 1) -> float:
    """Bytes per second that streams with such a window get through, at most the link's `rate`."""
    return min(rate, num_streams * window_bytes / rtt_s) if rtt_s > 0 else rate
