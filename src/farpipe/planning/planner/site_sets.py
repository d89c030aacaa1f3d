"""Sets of sites that a job is planned on, whatever its workload: one pipeline over them in an order, or whole pipelines
at each."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.core.spec import Cluster, Job, Site, SiteLink, differing_keys
from farpipe.planning.cost import memory
from farpipe.planning.planner.candidates import figures
from farpipe.planning.planner.site_paths import best_paths
from farpipe.planning.workload.layout import MAX_SITES

if TYPE_CHECKING:
    from farpipe.planning.planner.evaluate import Evaluated

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_ORDERED: Final = 3
"""Largest number of sites of which every order is tried."""
MAX_IDENTICAL: Final = 2
"""Largest number of site sets that differ in names and links alone."""


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


@dataclass(frozen=True)
class Left:
    """The rest of a cluster: devices per site and bytes per second per directed link, by the sites' numbers."""

    num_devices: Ints
    rate: Floats
    """[S, S]; 0 where there is no link."""


class Sites:
    """The sites that a job may use, by number, and the sets of them that are tried.

    `num_tokens`: tokens of a step, as the workload says.
    """

    def __init__(self, job: Job, num_tokens: int) -> None:
        self.job, self._num_tokens = job, num_tokens
        self.sites = tuple(site for _, site in job.used_sites())
        self.number = {site.name: index for index, site in enumerate(self.sites)}
        self.kind_of_site, self.kinds = _kinds(self.sites)
        self._last: tuple[Left, list[list[int]]] | None = None
        self._identical: dict[tuple[int, int], bool] = {}

    @cached_property
    def latency_s(self) -> Floats:
        """[S, S] of every directed link."""
        latency = np.zeros((len(self.sites), len(self.sites)))
        for link in _links(self.job.cluster, self.number):
            latency[self.number[link.source], self.number[link.target]] = link.latency_s
        return latency

    @cached_property
    def whole(self) -> Left:
        """All of the cluster."""
        rate = np.zeros((len(self.sites), len(self.sites)))
        for link in _links(self.job.cluster, self.number):
            rate[self.number[link.source], self.number[link.target]] = link.bandwidth_bytes_per_s
        return Left(np.array([site.num_devices for site in self.sites]), rate)

    def left(self, devices: Mapping[str, int], bytes_per_s: Mapping[str, float]) -> Left:
        """The rest of a cluster where these figures replace its own; names of sites and of links (``a>b``)."""
        num_devices, rate = self.whole.num_devices.copy(), self.whole.rate.copy()
        for name, number in devices.items():
            if name in self.number:
                num_devices[self.number[name]] = max(0, number)
        for name, value in bytes_per_s.items():
            source, _, target = name.partition(">")
            if source in self.number and target in self.number:
                rate[self.number[source], self.number[target]] = max(0.0, value)
        return Left(num_devices, rate)

    def likeness(self, site: int) -> tuple[int, int]:
        """Equal for sites that differ in name, prices and links alone."""
        return int(self.kind_of_site[site]), self.sites[site].num_devices

    def figures(self, site_set: SiteSet) -> tuple[object, ...]:
        """Equal for pipelines over sites that differ in their names alone."""
        return figures(self.job.cluster, [self.sites[index].name for index in site_set.order])

    def site_sets(self, left: Left, every_order: bool = False) -> list[SiteSet]:
        """The best order of every set of sites for one pipeline, and every set for whole pipelines at each.

        With `every_order` all orders of up to MAX_ORDERED sites, in one direction each, and rings in the job's.
        Pipelines over the most sites come last: estimates that share a best begin there.
        """
        wanted, pinned = self.job.layout.replicas, self.job.layout.sites
        found = self._rings(left, pinned, every_order) if wanted != "inside" else []
        if wanted != "across":
            paths = self._paths(left, pinned)
            if every_order and pinned is None:
                paths = [order for path in paths for order in self._orders(path, left)]
            found += [SiteSet(tuple(path)) for path in paths]
        return found

    def chosen(self, site_sets: Iterable[SiteSet], per_kind: int, *, for_large: bool = True) -> list[SiteSet]:
        """The first `per_kind` of each kind, given the best first; of those that are identical but for their links, and
        of replicas, MAX_IDENTICAL in a large search, and of pipelines the first of those whose links are, too."""
        # Sets of identical sites tie, and without MAX_IDENTICAL one pair of many would use up the budget of its kind.
        # Half of the site sets gave the same thirty frozen plans; the others stay for random clusters of unequal sites,
        # which brute force checks, and for 3 x 1024 devices.
        found, known = list[SiteSet](), set[object]()
        count, identical = Counter[str](), Counter[object]()
        for one in site_sets:
            alike = (one.kind, *sorted(map(self.likeness, one.sites)))
            most = MAX_IDENTICAL if for_large and one.kind == "replicas" else per_kind
            if count[one.kind] >= most or (for_large and identical[alike] >= MAX_IDENTICAL):
                continue
            if for_large and one.kind == "pipelines":
                if (its := self.figures(one)) in known:
                    continue
                known.add(its)
            identical[alike] += 1
            count[one.kind] += 1
            found.append(one)
        return found

    def _paths(self, left: Left, pinned: Sequence[str] | None) -> list[list[int]]:
        if pinned is not None:
            path = [self.number[name] for name in pinned]
            linked = all(left.rate[a, b] > 0 and left.rate[b, a] > 0 for a, b in pairwise(path))
            return [path] if linked else []
        return self._best_paths(left)

    def _orders(self, path: list[int], left: Left) -> Iterator[list[int]]:
        """`path`, and the other linked orders of its sites that are no reverse of one before."""
        yield path
        for order in permutations(path) if 2 < len(path) <= MAX_ORDERED else []:
            linked = all(left.rate[a, b] > 0 and left.rate[b, a] > 0 for a, b in pairwise(order))
            if linked and order[0] > order[-1] and list(order) not in (path, path[::-1]):
                yield list(order)

    def _best_paths(self, left: Left) -> list[list[int]]:
        """The best order of every set of sites; the answer for the last `left` is kept."""
        if self._last is None or self._last[0] is not left:
            self._last = left, best_paths(self.weight(left), left.num_devices, MAX_SITES)
        return self._last[1]

    def weight(self, left: Left) -> Floats:
        """Seconds that a link takes of a step, about: all activations of the batch once, and its latency."""
        sent = self._num_tokens * self.job.model.hidden * memory.element_bytes(self.job.training.precision)
        with np.errstate(divide="ignore"):
            return np.where(left.rate > 0, self.latency_s + sent / left.rate, np.inf)

    def _rings(self, left: Left, pinned: Sequence[str] | None, in_order: bool) -> list[SiteSet]:
        """Sets of identical sites with links around them, the smallest first in each; pinned sites in their order.

        `in_order`: in the direction of their numbers, as far as that can be.
        """
        found = []
        orders = self._best_paths(left) if pinned is None else [[self.number[name] for name in pinned]]
        for order in orders if len(self.sites) > 1 else []:
            path = order[::-1] if pinned is None and in_order and order[0] > order[-1] else order
            ring = list(zip(path, path[1:] + path[:1], strict=True))
            linked = len(path) > 1 and all(left.rate[a, b] > 0 and left.rate[b, a] > 0 for a, b in ring)
            if linked and all(self._are_identical(path[0], other) for other in path[1:]):
                first = min(range(len(path)), key=lambda place: left.num_devices[path[place]])
                found.append(SiteSet((path[first],), tuple(path[first:] + path[:first])))
        return found

    def _are_identical(self, one: int, other: int) -> bool:
        """True if a whole pipeline at one of two sites stands for one at the other."""
        if (one, other) not in self._identical:
            self._identical[one, other] = not differing_keys(self.sites[one], self.sites[other])
        return self._identical[one, other]


def _links(cluster: Cluster, number: Mapping[str, int]) -> Iterator[SiteLink]:
    return (link for link in cluster.links if link.source in number and link.target in number)


def _kinds(sites: Sequence[Site]) -> tuple[Ints, list[Site]]:
    """The kind of every site, and one site of each kind; the same but for name, devices and prices."""
    kinds: list[Site] = []
    bare: list[Site] = []
    numbers = []
    for site in sites:
        same = site.model_copy(update={"name": "", "num_devices": 0, "prices": None})
        if same not in bare:
            bare.append(same)
            kinds.append(site)
        numbers.append(bare.index(same))
    return np.array(numbers), kinds


def alike_at_identical_sites(job: Job, found: "Iterable[Evaluated]") -> "list[Evaluated]":
    """The same, the fastest first, with equal steps at identical sites; a search looks longer at the first of them.

    The best of one site alone holds for all that are identical but for name and prices. Several sites are the same ones
    where they and their links are identical but for names, and only the fastest of these sets stays.
    """
    chosen, alone, wheres = list["Evaluated"](), list["Evaluated"](), dict[object, str]()
    for one in sorted(found, key=lambda one: one.step_s):
        site, where, kind = one.candidate.sites[0], one.candidate.where, one.candidate.kind
        if kind != "alone":
            if wheres.setdefault((kind, *figures(job.cluster, one.candidate.order)), where) == where:
                chosen.append(one)
            continue
        if all(where != other.candidate.where for other in alone):
            like = next((other for other in alone if identical(other.candidate.sites[0], site)), one)
            alone.append(one)
            chosen += [] if like is one else [moved(like, site)]
        chosen.append(one)
    return sorted(chosen, key=lambda one: one.step_s)


def identical(one: Site, other: Site) -> bool:
    """True if two sites differ in name and prices alone."""
    return one.num_devices == other.num_devices and not differing_keys(one, other)


def moved(found: "Evaluated", site: Site) -> "Evaluated":
    """The same at an identical site."""
    candidate = replace(found.candidate, sites=(site,) * len(found.candidate.sites))
    return replace(found, candidate=candidate, placements=tuple(replace(p, site=site.name) for p in found.placements))
