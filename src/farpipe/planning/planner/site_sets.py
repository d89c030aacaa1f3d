"""Sets of sites that a job is planned on: one pipeline over them in an order, or whole pipelines at each."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations, pairwise, permutations
from typing import Final, NamedTuple

from farpipe.core.spec import Cluster, Job, Site, differing_keys
from farpipe.planning.planner.candidates import power, strongest

MAX_ORDERED: Final = 3
"""Largest number of sites of which every order is tried."""
_MAX_SITES: Final = 8
"""Sites of which sets for a batch of documents are made, those that compute most."""
_MAX_SETS: Final = 24
"""Most sets and orders of several sites that are tried for each use, those that compute most first."""


class SiteSet(NamedTuple):
    """Sites by number and their use: a pipeline over `order`, or whole pipelines at each of `homes`, one of which is
    `order`."""

    order: tuple[int, ...]
    homes: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """``alone``, ``pipelines`` over several sites, or ``replicas`` at several."""
        return "replicas" if self.homes else "alone" if len(self.order) == 1 else "pipelines"

    @property
    def sites(self) -> tuple[int, ...]:
        """All sites in use."""
        return self.homes or self.order


def site_sets_of_batch(job: Job) -> list[SiteSet]:
    """Site sets for a batch of documents, whose sites are counted as in the job's cluster.

    The pinned sites in their order; else every set and order of linked sites, of alike ones one. Whole pipelines at
    each need identical sites. What nothing can be planned on is there if the pins leave no more.
    """
    pins, cluster, found = job.layout, job.cluster, list[tuple[Sequence[Site], bool]]()
    inside, across = pins.replicas != "across", pins.replicas != "inside"
    if pins.sites is not None or len(cluster.sites) == 1:
        every = [cluster.site(name) for name in pins.sites] if pins.sites else cluster.sites
        found += [(every, False)] * (inside or len(every) == 1) + [(every, True)] * (across and len(every) > 1)
    else:
        alone = ((site,) for site in cluster.sites)
        orders = (alone, _orders(cluster)) if inside else ()
        found += [(one, False) for some in orders for one in _different(cluster, some)]
        found += [(one, True) for one in _different(cluster, _identical(cluster))] if across else []
    number = {site.name: index for index, site in enumerate(cluster.sites)}
    numbered = [
        (tuple(number[site.name] for site in sites), each) for sites, each in found or [(cluster.sites, not inside)]
    ]
    return [SiteSet(sites[:1], sites) if each else SiteSet(sites) for sites, each in numbered]


def _orders(cluster: Cluster) -> Iterator[tuple[Site, ...]]:
    """Sites one behind the other, linked both ways: the first holds most activations, the last has the loss."""
    # Sets of a batch are few because their layouts are planned to the end: every order of three sites, both directions
    # of more. A lattice estimates hundreds of sets within 0.1 s, and goes over the best path of each instead.
    for chosen in _subsets(cluster.sites):
        few = len(chosen) <= MAX_ORDERED
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
    able = sorted(strongest(sites, _MAX_SITES), key=sites.index)
    every = chain.from_iterable(combinations(able, count) for count in range(len(able), 1, -1))
    yield from sorted(every, key=lambda chosen: -sum(map(power, chosen)))


def _different(cluster: Cluster, orders: Iterable[tuple[Site, ...]]) -> Iterator[tuple[Site, ...]]:
    """The first sets that differ in more than names and prices."""
    seen: list[object] = []
    for order in orders:
        sites = [site.model_copy(update={"name": "", "prices": None}) for site in order]
        hops = [cluster.link(a.name, b.name) for a, b in chain.from_iterable((p, p[::-1]) for p in pairwise(order))]
        bare = [hop and hop.model_copy(update={"source": "", "target": "", "egress_usd_per_gb": None}) for hop in hops]
        if (sites, bare) not in seen:
            seen.append((sites, bare))
            yield order
        if len(seen) == _MAX_SETS:
            return
