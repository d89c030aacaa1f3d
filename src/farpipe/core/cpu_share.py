"""Share of its time for which a computation had the CPU; other work on the machine had it for the rest."""

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

LEAST_SHARE: Final = 0.9
"""Share of the CPU below which a measured time says more about other work than about the computation."""


class Timed(NamedTuple):
    """Seconds that a computation took in this thread, by the clock and of the CPU."""

    wall_s: float
    cpu_s: float

    @property
    def cpu_share(self) -> float:
        """Share of its time for which it had the CPU."""
        return min(1.0, self.cpu_s / self.wall_s) if self.wall_s else 1.0


def timed(call: Callable[[], object]) -> Timed:
    """The seconds of a call."""
    start_s, start_cpu_s = time.perf_counter(), time.thread_time()
    call()
    return Timed(time.perf_counter() - start_s, time.thread_time() - start_cpu_s)


def undisturbed(samples: Sequence[Timed], least: int) -> list[Timed]:
    """The samples that had the CPU for nearly all of their time, or else the `least` samples that had it longest."""
    by_share = sorted(samples, key=lambda sample: sample.cpu_share, reverse=True)
    return by_share[: max(least, sum(sample.cpu_share >= LEAST_SHARE for sample in samples))]


def other_work(cpu_share: float | None) -> str:
    """Sentence about the other work beside a measurement; empty where that was little, or not measured (None)."""
    if cpu_share is None or cpu_share >= LEAST_SHARE:
        return ""
    return (
        f"Other work, or ranks that share a core, had the CPU for {100 * (1 - cpu_share):.0f} % of the time: don't "
        "rely on these times."
    )
