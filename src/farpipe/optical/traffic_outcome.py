"""Blocking: how much of some traffic a network refuses under a policy."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError, UsageError
from farpipe.optical.confidence import Interval, mean_interval
from farpipe.optical.modulation import Modulation
from farpipe.optical.paths import PathTable
from farpipe.optical.policies import AssignmentPolicy
from farpipe.optical.spectrum import Grid, empty_heap, expect_narrow, expect_narrow_rates, expect_reach, free_masks
from farpipe.optical.traffic import PoissonTraffic, Traffic, expect_few


@dataclass(frozen=True)
class Fragmentation:
    """Means over the fibres that have free slots, but for `used_share`, which is over all."""

    used_share: float
    """Taken slots over all slots."""
    external: float
    """1 - largest free block / free slots: 0 when all free slots lie together."""
    entropy: float
    """Sum over free blocks of b/N ln(N/b) (Wright, Parker, Lord, OFC 2015), in nats; 0 when the fibre is empty."""
    num_blocks: float
    """Number of free blocks."""


def fragmentation(free: NDArray[np.uint64], grid: Grid) -> Fragmentation:
    """The metrics of a spectrum given as masks of free slots."""
    blocks = [free_blocks(mask) for mask in free_masks(free)]
    some = [there for there in blocks if there]
    total = sum(map(sum, blocks))
    mean = max(1, len(some))
    return Fragmentation(
        used_share=1 - total / (len(blocks) * grid.num_slots),
        external=sum(1 - max(there) / sum(there) for there in some) / mean,
        entropy=sum(b / grid.num_slots * log(grid.num_slots / b) for there in some for b in there) / mean,
        num_blocks=sum(map(len, some)) / mean,
    )


def free_blocks(mask: int) -> list[int]:
    """The lengths of the runs of ones, lowest first."""
    return [len(run) for run in f"{mask:b}"[::-1].split("0") if run]


@dataclass(frozen=True, repr=False)
class TrafficOutcome:
    """Outcome of every request of some traffic."""

    traffic: Traffic
    path: NDArray[np.int32]
    """The candidate that each request took, or -1: refused."""
    start: NDArray[np.int32]
    slots: NDArray[np.int32]
    warm_up: int
    """Number of requests at the beginning that are played but not counted."""
    num_moved: int
    """Light paths that defragmentation moved."""
    grid: Grid
    free: NDArray[np.uint64]
    """Masks of the slots that are free after the last request: [fibres, words]."""

    @cached_property
    def fragmentation(self) -> Fragmentation:
        """Metrics of the spectrum after the last request."""
        return fragmentation(self.free, self.grid)

    @cached_property
    def _refused(self) -> NDArray[np.bool_]:
        return self.path[self.warm_up :] < 0

    @property
    def requests(self) -> int:
        """Requests that are counted."""
        return len(self._refused)

    @property
    def blocked(self) -> int:
        """Requests that were refused."""
        return int(self._refused.sum())

    @property
    def accepted(self) -> int:
        """Requests that were carried."""
        return self.requests - self.blocked

    @property
    def blocking_ratio(self) -> float:
        """Share of the requests that was refused."""
        return self.blocked / self.requests if self.requests else 0.0

    @property
    def bandwidth_blocking_ratio(self) -> float:
        """Share of the asked-for Gbit/s that was refused."""
        asked = self.traffic.gbit_s[self.warm_up :]
        return float(asked[self._refused].sum() / asked.sum()) if self.requests else 0.0

    def to_data(self) -> dict[str, Any]:
        """The counts as JSON data."""
        return {
            "requests": self.requests,
            "accepted": self.accepted,
            "blocked": self.blocked,
            "blocking_ratio": self.blocking_ratio,
            "bandwidth_blocking_ratio": self.bandwidth_blocking_ratio,
        }


def play_traffic(
    traffic: Traffic,
    paths: PathTable,
    policy: AssignmentPolicy,
    grid: Grid,
    modulation: Modulation,
    *,
    warm_up: int = 0,
    defragment: bool = False,
) -> TrafficOutcome:
    """Every request of `traffic` carried or refused, one after the other.

    A light path needs the same slots on every fibre of its path, side by side, and `grid.guard` more. With
    `defragment` a request that does not fit has all light paths moved to the lowest slots of their own paths first.
    InputError for pairs without a path, requests that are wider than the spectrum, and pairs out of reach.
    """
    from farpipe.optical import assign_kernel  # here, for numba takes a third of a second to import

    if not 0 <= warm_up < max(1, len(traffic)):
        raise UsageError(f"the warm-up must leave requests of the {len(traffic)}, found {warm_up}")
    places = np.array([paths.pair(source, target, "traffic") for source, target in traffic.pairs], np.int32)
    per_slot = modulation.gbit_per_slot(paths.km, grid.slot_ghz)
    expect_reach(paths, modulation, per_slot, traffic.pairs)
    pair = places[traffic.pair]
    expect_narrow(paths, per_slot, pair, traffic.gbit_s, grid)
    count = len(traffic)
    out = (np.full(count, -1, np.int32), np.zeros(count, np.int32), np.zeros(count, np.int32))
    spectrum = grid.empty(paths.network.num_fibres)
    heap = empty_heap(min(count, paths.network.num_fibres * grid.num_slots) + 1)
    play: Any = assign_kernel.play_requests
    moved = play(
        (traffic.arrival_s, pair, traffic.gbit_s, traffic.holding_s),
        paths.arrays,
        (paths.first, per_slot),
        policy.codes,
        (spectrum, heap),
        (np.zeros(int(np.diff(paths.first).max()), np.int64), np.zeros(spectrum[0].shape[1], np.uint64)),
        out,
        (0, count),
        grid.guard,
        defragment,
    )
    return TrafficOutcome(traffic, *out, warm_up, int(moved), grid, spectrum[0])


def request_rows(outcome: TrafficOutcome, paths: PathTable) -> Iterator[str]:
    """Lines of a CSV of all requests, those of the warm-up too: the light path that each got, with its guard."""
    yield "request,arrival_s,src,dst,gbit_s,accepted,nodes,first_slot,slots"
    traffic = outcome.traffic
    columns = (traffic.arrival_s, traffic.pair, traffic.gbit_s, outcome.path, outcome.start, outcome.slots)
    for index, (arrival_s, pair, gbit_s, path, start, slots) in enumerate(zip(*columns, strict=True)):
        lit = f"1,{'-'.join(paths.paths[path][0])},{start},{slots}" if path >= 0 else "0,,,"
        yield f"{index},{arrival_s:.9g},{','.join(traffic.pairs[pair])},{gbit_s:.9g},{lit}"


@dataclass(frozen=True)
class Blocking:
    """Share that several runs of random traffic refused: means with 95 % intervals."""

    outcomes: tuple[TrafficOutcome, ...]

    @property
    def blocking_ratio(self) -> Interval:
        """Share of the requests."""
        return self._interval("blocking_ratio")

    @property
    def bandwidth_blocking_ratio(self) -> Interval:
        """Share of the asked-for Gbit/s."""
        return self._interval("bandwidth_blocking_ratio")

    def _interval(self, figure: str) -> Interval:
        if len(self.outcomes) > 1:
            return mean_interval([float(getattr(outcome, figure)) for outcome in self.outcomes])
        return _batch_means(self.outcomes[0], figure == "blocking_ratio")


def poisson_blocking(
    how: PoissonTraffic,
    paths: PathTable,
    policy: AssignmentPolicy,
    grid: Grid,
    modulation: Modulation,
    *,
    num_requests: int = 10_000,
    warm_up: int = 3_000,
    seeds: Sequence[int] = (0,),
    defragment: bool = False,
) -> Blocking:
    """`num_requests` counted requests after `warm_up` more, for each of `seeds`; these run side by side."""
    if num_requests < 1 or not seeds:
        raise InputError(f"expected at least one request and one seed, found {num_requests} and {len(seeds)}")
    expect_few((warm_up + num_requests) * len(seeds), "lower requests, warm_up or seeds")
    pairs, per_slot = tuple(paths.of_pair), modulation.gbit_per_slot(paths.km, grid.slot_ghz)
    expect_reach(paths, modulation, per_slot, pairs)
    expect_narrow_rates(paths, per_slot, how.high, grid)

    def run(seed: int) -> TrafficOutcome:
        traffic = how.draw(pairs, warm_up + num_requests, seed)
        return play_traffic(traffic, paths, policy, grid, modulation, warm_up=warm_up, defragment=defragment)

    first = run(seeds[0])  # alone: it also compiles
    with ThreadPoolExecutor() as pool:  # the kernels run without Python's lock
        return Blocking((first, *pool.map(run, seeds[1:])))


def _batch_means(outcome: TrafficOutcome, by_request: bool, num_batches: int = 20) -> Interval:
    """The interval of one run from the means of its batches, which are taken as independent."""
    refused = outcome.path[outcome.warm_up :] < 0
    weight = np.ones(len(refused)) if by_request else outcome.traffic.gbit_s[outcome.warm_up :]
    batches = np.array_split(np.arange(len(refused)), min(num_batches, len(refused)))
    shares = [float((weight[b] * refused[b]).sum() / weight[b].sum()) for b in batches]
    interval = mean_interval(shares)
    mean = float((weight * refused).sum() / weight.sum())
    return Interval(mean, mean - interval.half_width, mean + interval.half_width)
