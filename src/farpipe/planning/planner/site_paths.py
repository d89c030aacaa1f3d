"""The best order of every set of sites: the shortest path through all of them, by dynamic programming over sets.

A path weighs what its links take there and back. Held and Karp's recursion (1962) finds the best path of every set at
once, in O(2^n n^2); of more than MAX_EXACT sites the most promising are kept.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_EXACT: Final = 12
"""Largest number of sites whose sets are all tried: 4,095 of them."""


def best_paths(weight: Floats, num_devices: Ints, max_size: int) -> list[list[int]]:
    """The order with the least sum of `weight` [S, S] of every set of up to `max_size` sites, fewer sites first.

    Infinite weights are missing links; sets that no path joins are left out, as are sites without devices. Of more than
    MAX_EXACT sites those with the most devices are kept.
    """
    from farpipe.planning.planner import site_paths_kernel  # here, for numba takes a third of a second to import

    chosen = promising_sites(num_devices)
    compiled: Any = site_paths_kernel.shortest_paths
    both_ways = weight[np.ix_(chosen, chosen)]
    _, last, previous = compiled(both_ways + both_ways.T)
    masks = [mask for mask in range(1, 1 << chosen.size) if mask.bit_count() <= max_size and last[mask] >= 0]
    paths = [[int(chosen[site]) for site in _unwound(mask, last, previous)] for mask in masks]
    return sorted(paths, key=len)


def promising_sites(num_devices: Ints) -> Ints:
    """The sites that are looked at, in their own order."""
    able = np.flatnonzero(num_devices > 0)
    most = able[np.argsort(-num_devices[able], kind="stable")][:MAX_EXACT]
    return np.sort(most)


def _unwound(mask: int, last: Ints, previous: Ints) -> list[int]:
    path, site = [], int(last[mask])
    while True:
        path.append(site)
        before = int(previous[mask, site])
        mask ^= 1 << site
        if before < 0:
            return path[::-1]
        site = before
