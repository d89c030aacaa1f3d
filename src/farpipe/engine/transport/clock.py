"""The clock that stamps actions and messages: monotonic, in whole nanoseconds, one per process.

Clocks of different machines have nothing in common but their speed. `offset_ns` estimates by how much two of them
differ, from the four stamps of a question and its answer.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from farpipe.core.errors import InputError

SKEW_VARIABLE: Final = "FARPIPE_TEST_CLOCK_SKEW_NS"


@dataclass(frozen=True)
class Clock:
    """CLOCK_MONOTONIC plus `skew_ns`, which tests use to play machines with different clocks."""

    skew_ns: int = 0

    def now_ns(self) -> int:
        """Nanoseconds since a moment that only this process (and this machine, without skew) knows."""
        return time.monotonic_ns() + self.skew_ns

    def from_machine_ns(self, machine_ns: int) -> int:
        """A stamp of the machine's CLOCK_MONOTONIC on this clock."""
        return machine_ns + self.skew_ns

    @classmethod
    def from_environment(cls) -> Self:
        """The process's clock, with the skew in FARPIPE_TEST_CLOCK_SKEW_NS if that is set."""
        text = os.environ.get(SKEW_VARIABLE, "0")
        try:
            return cls(int(text))
        except ValueError:
            raise InputError(f"{SKEW_VARIABLE}: expected whole nanoseconds, found {text!r}") from None


class PingTimes(NamedTuple):
    """A question and its answer: sent and answered on our clock, received and replied to on the peer's."""

    sent_ns: int
    received_ns: int
    replied_ns: int
    answered_ns: int

    @property
    def round_trip_ns(self) -> int:
        """Round-trip time, without the time that the peer took to reply."""
        return (self.answered_ns - self.sent_ns) - (self.replied_ns - self.received_ns)


def offset_ns(pings: Sequence[PingTimes]) -> int:
    """The peer's clock minus ours, from the ping with the shortest round trip.

    The estimate is wrong by half the difference between the two one-way times, at most half the round trip. The
    same four stamps and the same choice of sample as in NTP (RFC 5905, sections 8 and 10).
    """
    best = min(pings, key=lambda ping: ping.round_trip_ns)
    return ((best.received_ns - best.sent_ns) + (best.replied_ns - best.answered_ns)) // 2
