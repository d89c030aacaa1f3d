"""Brings a new connection over a distance up to the rate that its messages will need, before they need it.

TCP finds out how fast it may send by sending. A pipeline's messages are too short for that: on every connection one is
gone before the first acknowledgement is back, and then nothing is left to send. So CUBIC and Reno let the first
messages of a run wait for their windows to grow. And BBR, which takes the rate of acknowledgements for that of the
link, never comes to know it: each message of 4 MB over 1 Gbit/s, 50 ms one way, took 104 ms instead of 84.

Therefore a connection that has nothing to send is filled up with bytes that mean nothing, until TCP has seen the needed
rate arrive. It costs some round trips' worth of the link's rate, once.
"""

from collections.abc import Callable
from typing import Final

_WARM_SHARE: Final = 0.9
"""Of the rate: what TCP measures is a little below what it is allowed."""
_LONGEST_ROUND_TRIPS: Final = 20
"""Windows double in each, from ten packets: ten are the rule. A link that is slower than was said never gets there."""


class TcpRamp:
    """Time to fill up a connection that is to carry `bytes_per_s` over `round_trip_s`."""

    def __init__(self, bytes_per_s: float, round_trip_s: float) -> None:
        self._enough_bytes_per_s = _WARM_SHARE * bytes_per_s
        self._limit_s = _LONGEST_ROUND_TRIPS * round_trip_s
        self._ends_s = 0.0
        self.is_over = False
        """True if TCP has come up to the rate on this connection, or has had its time."""

    def begin(self, now_s: float) -> None:
        """There is a new connection, at `now_s` (monotonic)."""
        self._ends_s, self.is_over = now_s + self._limit_s, False

    def goes_on(self, delivered_bytes_per_s: Callable[[], float], now_s: float) -> bool:
        """True if more is to be sent; once False, never True again on this connection."""
        if now_s < self._ends_s and delivered_bytes_per_s() < self._enough_bytes_per_s:
            return True
        self._ends_s, self.is_over = 0.0, True
        return False
