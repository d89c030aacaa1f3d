"""Grid and Spectrum: the slots of a network's fibres, and what is taken of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError, UsageError
from farpipe.optical.modulation import Modulation
from farpipe.optical.paths import Pair, PathTable

MAX_SLOTS: Final = 4096

Arrays = tuple[NDArray[np.uint64], NDArray[np.int32], int]
Heap = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class Grid:
    """A flexible grid: `num_slots` slots of `slot_ghz` per fibre, `guard` slots beside every light path."""

    num_slots: int = 100
    slot_ghz: float = 12.5
    guard: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_slots <= MAX_SLOTS:
            raise UsageError(f"the number of slots must be from 1 to {MAX_SLOTS}, found {self.num_slots}")
        if not 0 < self.slot_ghz < float("inf"):
            raise UsageError(f"the width of a slot must be more than 0 GHz, found {self.slot_ghz}")
        if not 0 <= self.guard < self.num_slots:
            raise UsageError(f"the guard band must leave slots of the {self.num_slots}, found {self.guard}")

    def empty(self, num_fibres: int) -> Arrays:
        """Free masks [fibres, words], slots used per fibre, number of slots: nothing taken."""
        words = (self.num_slots + 63) // 64
        full = [(1 << min(64, self.num_slots - 64 * word)) - 1 for word in range(words)]
        free = np.tile(np.array(full, np.uint64), (num_fibres, 1))
        return free, np.zeros(num_fibres, np.int32), self.num_slots


def free_masks(free: NDArray[np.uint64]) -> list[int]:
    """The free slots of every fibre as one whole number each, lowest slot in the lowest bit."""
    return [sum(int(word) << (64 * index) for index, word in enumerate(row)) for row in free]


def empty_heap(capacity: int) -> Heap:
    """Space for this many events."""
    return np.zeros(capacity), np.zeros(capacity, np.int64), np.zeros(capacity, np.int64), np.zeros(1, np.int64)


def expect_reach(
    paths: PathTable, modulation: Modulation, per_slot: NDArray[np.float64], pairs: Iterable[Pair]
) -> None:
    """InputError when one of `pairs` has no candidate within the reach of the modulation table."""
    best = _best_of_pair(paths, per_slot)
    for pair in pairs:
        source, target, index = pair[0], pair[1], paths.pairs[pair]
        if not best[index]:
            low, high = paths.first[index], paths.first[index + 1]
            raise InputError(
                f"modulation {modulation.name}: no path from {source} to {target} is within its reach of "
                f"{modulation.rows[-1][0]:g} km: the shortest candidate has {paths.km[low:high].min():g} km"
            )


def expect_narrow(
    paths: PathTable, per_slot: NDArray[np.float64], pair: NDArray[np.int32], gbit_s: NDArray[np.float64], grid: Grid
) -> None:
    """InputError for the first request that is wider than the spectrum on every candidate of its pair."""
    slots = np.ceil(gbit_s / _best_of_pair(paths, per_slot)[pair] - 1e-9) + grid.guard
    if (slots > grid.num_slots).any():
        at = int(np.argmax(slots > grid.num_slots))
        request = f"request {at + 1} of {len(slots)}, {_need(paths, pair[at], gbit_s[at], slots[at], grid)}"
        raise InputError(f"{request}; split the request or give more slots")


def expect_narrow_rates(paths: PathTable, per_slot: NDArray[np.float64], most_gbit_s: float, grid: Grid) -> None:
    """UsageError unless random requests of the largest rate fit on a candidate of every pair."""
    slots = np.ceil(most_gbit_s / _best_of_pair(paths, per_slot) - 1e-9) + grid.guard
    if slots.max() > grid.num_slots:
        widest = int(np.argmax(slots))
        request = f"the largest random request, {_need(paths, widest, most_gbit_s, slots[widest], grid)}"
        raise UsageError(f"{request}; lower the largest rate (rates) or raise `slots`")


def _need(paths: PathTable, pair: int, gbit_s: float, slots: float, grid: Grid) -> str:
    source, target, *_ = list(paths.pairs)[pair]
    return (
        f"from {source} to {target}: {gbit_s:g} Gbit/s need {slots:g} slots with the guard band, and the spectrum has "
        f"{grid.num_slots}"
    )


def _best_of_pair(paths: PathTable, per_slot: NDArray[np.float64]) -> NDArray[np.float64]:
    """Gbit/s that a slot carries on the best candidate of every pair: [pairs]; each pair has one at least."""
    return np.maximum.reduceat(per_slot, paths.first[:-1])
