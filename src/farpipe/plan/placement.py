"""Placement of pipeline ranks on sites, each site one unbroken run of ranks; sites that one pipeline stands for."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from farpipe.spec import Cluster, LocalLink, Site
from farpipe.units import format_bytes, format_rate, format_seconds

MAX_SITES: Final = 6
"""Largest number of sites in one pipeline."""


def differing_keys(one: Site, other: Site) -> list[str]:
    """The keys in which two sites differ, each with both values, as far as one pipeline can't stand for both.

    Name and number of devices do not count, nor machines larger than all that the smaller site has.
    """
    smaller = min(one.num_devices, other.num_devices)
    pairs = {
        "device": (one.device.name, other.device.name),
        "devices_per_machine": tuple(min(site.devices_per_machine, smaller) for site in (one, other)),
        "machine_link": (_speed(one.machine_link), _speed(other.machine_link)),
        "site_link": (_speed(one.site_link), _speed(other.site_link)),
        "memory_reserve": tuple(format_bytes(site.memory_reserve_bytes) for site in (one, other)),
    }
    found = [f"{key} ({a}, {b})" for key, (a, b) in pairs.items() if a != b]
    return found or ([] if one.device == other.device else [f"the figures of device {one.device.name}"])


def _speed(link: LocalLink) -> str:
    return f"{format_rate(link.bandwidth_bytes_per_s)} after {format_seconds(link.latency_s)}"


def slowest_rate(cluster: Cluster, ring: Sequence[Site]) -> float:
    """Bytes per second of the slowest link around; 0 where one is missing, in either direction."""
    links = [
        cluster.link(*ends) for a, b in pairwise((*ring, ring[0])) for ends in ((a.name, b.name), (b.name, a.name))
    ]
    there = [link.bandwidth_bytes_per_s for link in links[::2] if link is not None]
    return min(there) if None not in links else 0.0


def missing_link(cluster: Cluster, order: Sequence[Site]) -> tuple[str, str] | None:
    """The first neighbours in `order` that can't talk in one direction, as (source, target)."""
    for one, other in pairwise(order):
        for source, target in ((one.name, other.name), (other.name, one.name)):
            if cluster.link(source, target) is None:
                return source, target
    return None


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
