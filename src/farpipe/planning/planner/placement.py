"""Placement of pipeline ranks on sites, each site one unbroken run of ranks."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from farpipe.core.spec import Cluster, Site

MAX_SITES: Final = 6
"""Largest number of sites in one pipeline."""


def slowest_rate(cluster: Cluster, ring: Sequence[Site]) -> float:
    """Bytes per second of the slowest link around; 0 where one is missing, in either direction."""
    links = [
        cluster.link(*ends) for a, b in pairwise((*ring, ring[0])) for ends in ((a.name, b.name), (b.name, a.name))
    ]
    there = [link.bandwidth_bytes_per_s for link in links[::2] if link is not None]
    return min(there) if None not in links else 0.0


def place_ranks(order: Sequence[Site], num_ranks: int, devices_per_rank: int) -> list[Site] | None:
    """The site of every pipeline rank, in proportion to what the sites hold; None when they can't hold them.

    A rank with all its tensor- and data-parallel devices is on one site. Every site of `order` gets at least one rank.
    """
    counts = [0] * len(order)
    if not share_ranks(num_ranks, [site.num_devices // devices_per_rank for site in order], counts):
        return None
    return [site for site, count in zip(order, counts, strict=True) for _ in range(count)]


def share_ranks(num_ranks: int, most: Sequence[int], counts: list[int]) -> bool:
    """Fill `counts`: ranks of every site, in proportion to `most` of them; False where that many don't fit.

    Every site gets one rank at least, and `most` at most. Plain loops, for `lattice_kernel` compiles them.
    """
    total, given = 0, 0
    for number in most:
        if number < 1:
            return False
        total += number
    if total < num_ranks or num_ranks < len(most):
        return False
    for k in range(len(most)):
        counts[k] = max(1, int(num_ranks * most[k] / total))
        given += counts[k]
    while given != num_ranks:
        step = 1 if given < num_ranks else -1
        best, gain = -1, -math.inf
        for k in range(len(most)):
            lack = step * (num_ranks * most[k] / total - counts[k])
            if (counts[k] < most[k] if step > 0 else counts[k] > 1) and lack > gain:
                best, gain = k, lack
        counts[best] += step
        given += step
    return True
