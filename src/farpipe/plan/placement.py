"""Placement of pipeline ranks on sites: every order of every set of sites, each site one unbroken run of ranks.

Or which sites have whole replicas of the pipeline, and exchange gradients.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations
from typing import Final

from farpipe.errors import InfeasibleError
from farpipe.spec import Cluster, LocalLink, Site
from farpipe.units import format_bytes, format_rate, format_seconds

MAX_SITES: Final = 6
"""In one pipeline."""


def site_orders(cluster: Cluster, pinned: Sequence[str] | None) -> Iterator[tuple[Site, ...]]:
    """Every order of every set of up to MAX_SITES sites with neighbours linked in both directions; fewer first."""
    if pinned is not None:
        order = tuple(cluster.site(name) for name in pinned)
        _require_links(cluster, order)
        yield order
        return
    for size in range(1, min(len(cluster.sites), MAX_SITES) + 1):
        for chosen in combinations(cluster.sites, size):
            for order in permutations(chosen):
                if missing_link(cluster, order) is None:
                    yield order


def replica_sites(cluster: Cluster, pinned: Sequence[str] | None) -> Iterator[tuple[Site, ...]]:
    """Every set of two and more sites that can each have whole replicas, as the ring with the fastest slowest link.

    They are alike in all but name and number of devices, so that one pipeline stands for all. With `pinned` all of
    those and no others.
    """
    sites = cluster.sites if pinned is None else tuple(cluster.site(name) for name in pinned)
    sizes = range(2, min(len(sites), MAX_SITES) + 1) if pinned is None else [len(sites)]
    for chosen in (chosen for size in sizes if size > 1 for chosen in combinations(sites, size)):
        if not any(differing_keys(chosen[0], site) for site in chosen[1:]):
            rings = [(chosen[0], *rest) for rest in permutations(chosen[1:])]
            best = max(rings, key=lambda ring: slowest_rate(cluster, ring))
            if slowest_rate(cluster, best):
                yield best


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


def _require_links(cluster: Cluster, order: Sequence[Site]) -> None:
    missing = missing_link(cluster, order)
    if missing is not None:
        source, target = missing
        raise InfeasibleError(
            f"layout.sites: {' > '.join(site.name for site in order)} needs a link from {source} to {target}; "
            "add it to cluster.links or choose another order"
        )


def place_ranks(order: Sequence[Site], num_ranks: int, devices_per_rank: int) -> list[Site] | None:
    """The site of every pipeline rank, in proportion to what the sites hold; None when they can't hold them.

    A rank with all its tensor- and data-parallel devices is on one site. Every site of `order` gets at least one rank.
    """
    most = [site.num_devices // devices_per_rank for site in order]
    if sum(most) < num_ranks or num_ranks < len(order) or min(most) < 1:
        return None
    share = [num_ranks * number / sum(most) for number in most]
    counts = [max(1, math.floor(s)) for s in share]
    while sum(counts) != num_ranks:
        step = 1 if sum(counts) < num_ranks else -1
        able = [i for i in range(len(order)) if (counts[i] < most[i] if step > 0 else counts[i] > 1)]
        counts[max(able, key=lambda i: step * (share[i] - counts[i]))] += step
    return [site for site, count in zip(order, counts, strict=True) for _ in range(count)]
