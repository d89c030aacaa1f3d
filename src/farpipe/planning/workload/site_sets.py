"""Sets of sites that a batch is planned on: one pipeline over them in an order, or whole pipelines at each."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations, pairwise, permutations
from typing import Final, Literal, NamedTuple

from farpipe.core.spec import Cluster, Job, Site, differing_keys

_MAX_SITES: Final = 8
"""Sites of which sets are made, those that compute most."""
_MAX_SETS: Final = 24
"""Most sets and orders of several sites that are tried for each use, those that compute most first."""
_MAX_ORDERED: Final = 3
"""Most sites of which every order is tried; of more the job's own, and its reverse."""


class SiteSet(NamedTuple):
    """Sites in pipeline order, and whether one pipeline lies ``inside`` them or whole ones at each (``across``)."""

    names: tuple[str, ...]
    replicas: Literal["inside", "across"]


def site_sets(job: Job) -> list[SiteSet]:
    """The pinned sites in their order; else every set and order of linked sites, of alike ones one.

    Whole pipelines at each need identical sites. What nothing can be planned on is there if the pins leave no more.
    """
    pins, cluster = job.layout, job.cluster
    if pins.sites is not None or len(cluster.sites) == 1:
        every = pins.sites or (cluster.sites[0].name,)
        uses: tuple[Literal["inside", "across"], ...] = ("inside",) if len(every) == 1 else ("inside", "across")
        return [SiteSet(every, use) for use in uses if len(every) == 1 or pins.replicas in (None, use)]
    found = list[SiteSet]()
    if pins.replicas != "across":
        alone = ((site,) for site in cluster.sites)
        found += [
            SiteSet(names, "inside") for orders in (alone, _orders(cluster)) for names in _different(cluster, orders)
        ]
    if pins.replicas != "inside":
        found += [SiteSet(names, "across") for names in _different(cluster, _identical(cluster))]
    return found or [SiteSet(tuple(site.name for site in cluster.sites), pins.replicas or "inside")]


def _orders(cluster: Cluster) -> Iterator[tuple[Site, ...]]:
    """Sites one behind the other, linked both ways: the first holds most activations, the last has the loss."""
    for chosen in _subsets(cluster.sites):
        few = len(chosen) <= _MAX_ORDERED
        for order in permutations(chosen) if few else (chosen, chosen[::-1]):
            if cluster.missing_link(order) is None:
                yield order


def _identical(cluster: Cluster) -> Iterator[tuple[Site, ...]]:
    """Sites of which one stands for all, in a ring of links."""
    for chosen in _subsets(cluster.sites):
        linked = cluster.missing_link((*chosen, chosen[0])) is None
        if linked and not any(differing_keys(chosen[0], site) for site in chosen[1:]):
            yield chosen


def _subsets(sites: Sequence[Site]) -> Iterator[tuple[Site, ...]]:
    """Sets of two or more sites, those that compute most first."""
    able = sorted(sorted(sites, key=lambda site: -_flops(site))[:_MAX_SITES], key=sites.index)
    every = chain.from_iterable(combinations(able, count) for count in range(len(able), 1, -1))
    yield from sorted(every, key=lambda chosen: -sum(map(_flops, chosen)))


def _flops(site: Site) -> float:
    return site.num_devices * max(site.device.peak_flops.values())


def _different(cluster: Cluster, orders: Iterable[tuple[Site, ...]]) -> Iterator[tuple[str, ...]]:
    """Names of the first sets that differ in more than names and prices."""
    seen: list[object] = []
    for order in orders:
        sites = [site.model_copy(update={"name": "", "prices": None}) for site in order]
        hops = [cluster.link(a.name, b.name) for a, b in chain.from_iterable((p, p[::-1]) for p in pairwise(order))]
        bare = [hop and hop.model_copy(update={"source": "", "target": "", "egress_usd_per_gb": None}) for hop in hops]
        if (sites, bare) not in seen:
            seen.append((sites, bare))
            yield tuple(site.name for site in order)
        if len(seen) == _MAX_SETS:
            return
