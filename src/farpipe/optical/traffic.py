"""Traffic: requests for light paths that come and go, from a trace or drawn at random."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError, UsageError
from farpipe.optical.network import Network, number, read_rows
from farpipe.optical.paths import Pair

TRACE_COLUMNS: Final = ("request", "arrival_s", "src", "dst", "gbit_s", "holding_s")
MAX_REQUESTS: Final = 50_000_000
"""Random requests that are drawn at once: 2 GB, and minutes to play."""


def expect_few(num_requests: float, advice: str) -> None:
    """UsageError with `advice` for more random requests than `MAX_REQUESTS`."""
    if not num_requests <= MAX_REQUESTS:
        raise UsageError(
            f"random traffic of {num_requests:.3g} requests is too much, at most {MAX_REQUESTS:,}: {advice}"
        )


@dataclass(frozen=True)
class Traffic:
    """Requests in the order in which they arrive; `pair` is an index into `pairs`."""

    pairs: tuple[Pair, ...]
    arrival_s: NDArray[np.float64]
    pair: NDArray[np.int32]
    gbit_s: NDArray[np.float64]
    """Rate; a number of slots where the modulation carries 1 Gbit/s per slot."""
    holding_s: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def mean_holding_s(self) -> float:
        """Mean holding time."""
        return float(self.holding_s.mean())

    @property
    def load_erlang(self) -> float:
        """Mean number of light paths there would be if none was refused."""
        span = float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) > 1 else 0.0
        return float(self.holding_s.sum() / span) if span > 0 else 0.0


@dataclass(frozen=True)
class PoissonTraffic:
    """Random traffic: Poisson arrivals over uniform pairs, exponential holding times.

    `load_erlang` is arrival rate times `mean_holding_s`. `truncate_at` cuts the holding times off at this many means by
    drawing again, as DeepRMSA's code does (2.0); the load that remains is the given one times 1 - t / (e^t - 1),
    0.687 for t = 2.
    """

    load_erlang: float
    mean_holding_s: float = 25.0
    low: int = 25
    high: int = 100
    """The least and the largest rate, Gbit/s in whole numbers (or slots)."""
    truncate_at: float | None = None

    def __post_init__(self) -> None:
        for name, most in (("load_erlang", MAX_REQUESTS), ("mean_holding_s", 1e12)):
            if not 0 < getattr(self, name) <= most:
                raise UsageError(f"{name} must be more than 0 and at most {most:.3g}, found {getattr(self, name)}")
        if not 1 <= self.low <= self.high:
            raise UsageError(
                f"the rates must be whole numbers of at least 1, the least first, found {self.low}, {self.high}"
            )
        if self.truncate_at is not None and not self.truncate_at > 0:
            raise UsageError(f"truncate_at must be more than 0, found {self.truncate_at}")

    def draw(self, pairs: tuple[Pair, ...], num_requests: int, seed: int) -> Traffic:
        """`num_requests` requests; the same seed draws the same, and of more requests the first ones."""
        expect_few(num_requests, "draw fewer")
        times, ends, rates, holds = (np.random.default_rng((seed, column)) for column in range(4))
        rate = self.load_erlang / self.mean_holding_s
        arrival_s = np.cumsum(times.exponential(1 / rate, num_requests))
        pair = ends.integers(len(pairs), size=num_requests, dtype=np.int32)
        gbit_s = rates.integers(self.low, self.high + 1, size=num_requests).astype(np.float64)
        return Traffic(pairs, arrival_s, pair, gbit_s, self._holding(holds, num_requests))

    def _holding(self, random: np.random.Generator, count: int) -> NDArray[np.float64]:
        if self.truncate_at is None:
            return random.exponential(self.mean_holding_s, count)
        # Drawing again until it is short enough equals drawing from the truncated distribution: invert that one.
        share = -np.expm1(-self.truncate_at)
        return np.asarray(-self.mean_holding_s * np.log1p(-share * random.random(count)), np.float64)


def load_trace(path: Path | str, network: Network) -> Traffic:
    """Read a trace: CSV with the columns request, arrival_s, src, dst, gbit_s, holding_s, in order of arrival."""
    rows = read_rows(path, TRACE_COLUMNS)
    if not rows:
        raise InputError(f"{path}: the trace has no requests")
    known = set(network.nodes)
    pairs: dict[Pair, int] = {}
    lines: dict[str, str] = {}
    columns: tuple[list[float], ...] = ([], [], [], [])
    last_s = 0.0
    for place, row in rows:
        if lines.setdefault(row["request"], place) != place:
            raise InputError(f"{place}: request: {row['request']!r} is there already ({lines[row['request']]})")
        for end in (row["src"], row["dst"]):
            if end not in known:
                network.expect_node(end, place)
        if row["src"] == row["dst"]:
            raise InputError(f"{place}: a request from {row['src']} to itself")
        arrival_s = number(place, "arrival_s", row["arrival_s"])
        if arrival_s < last_s:
            raise InputError(f"{place}: arrival_s: out of order: {arrival_s:g} s after {last_s:g} s; sort the trace")
        last_s = arrival_s
        columns[0].append(arrival_s)
        columns[1].append(pairs.setdefault((row["src"], row["dst"]), len(pairs)))
        columns[2].append(number(place, "gbit_s", row["gbit_s"], exclusive=True))
        columns[3].append(number(place, "holding_s", row["holding_s"], exclusive=True))
    arrival, pair, gbit, holding = (np.array(column, np.float64) for column in columns)
    return Traffic(tuple(pairs), arrival, pair.astype(np.int32), gbit, holding)
