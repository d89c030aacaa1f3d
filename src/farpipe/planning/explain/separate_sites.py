"""Sites that each train a share of the batch in a layout of their own, and exchange gradients or parameters.

Exchanged every step it is data parallelism over heterogeneous sites: training is as with one site. Exchanged after many
local steps it is DiLoCo (Douillard et al., arXiv 2311.08105): each site trains by itself for so many steps, then the
differences of parameters are averaged and an outer optimizer applies them. Closed forms on top of simulated sites.
Gradients go round a ring of sites and are not hidden; differences go from each site to every other, beside
`delay_steps` steps of computing.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import ceil, inf
from typing import Final

from farpipe.core.errors import FarpipeError
from farpipe.core.spec import Cluster, Job, LocalSteps, Site, SiteLink, differing_keys
from farpipe.core.step import occupied_s
from farpipe.planning.cost import JobCosts, memory
from farpipe.planning.cost.adapters import trained_model_params
from farpipe.planning.cost.links import ring_links
from farpipe.planning.cost.outer_exchange import exposed_exchange_s
from farpipe.planning.cost.transfer import ring_bytes
from farpipe.planning.planner.candidates import strongest
from farpipe.planning.planner.evaluate import Evaluated
from farpipe.planning.planner.search import BEST_ONLY, search
from farpipe.planning.planner.site_sets import identical, moved
from farpipe.planning.workload.layout import slowest_rate

MAX_SITES: Final = 4
"""Largest number of sites in one exchange; those that compute most are tried."""
NUM_PARTS: Final = 16
"""Number of equal parts, about, in which a batch is divided over the sites."""
UNEVEN: Final = 0.02
"""Relative time of the slowest site above the ideal up to which shares are even."""


@dataclass(frozen=True)
class SeparateSites:
    """Sites that each train a share of the batch in a layout of their own, and exchange over a ring of links."""

    found: tuple[Evaluated, ...]
    """The best of each for its share, in the order of the ring."""
    shares: tuple[int, ...]
    """Sequences of a step of each."""
    links: tuple[SiteLink, ...]
    """Links of the exchange: those of the ring, or with local steps from each site to every other."""
    num_params: int
    bytes_per_param: float
    """Bytes of a parameter's gradient in the exchange."""
    identical: bool
    """True if one pipeline stands for all sites and their shares are equal."""
    local: LocalSteps | None = None
    """The exchange of parameters' differences; None: of gradients, every step."""

    @property
    def sites(self) -> tuple[str, ...]:
        """Names, in the order of the ring."""
        return tuple(one.candidate.order[0] for one in self.found)

    @property
    def where(self) -> str:
        """``a + b``; with sequences of a step where these differ: ``a (86) + b (85)``."""
        if len(set(self.shares)) == 1:
            return " + ".join(self.sites)
        return " + ".join(f"{name} ({share})" for name, share in zip(self.sites, self.shares, strict=True))

    @property
    def exchanged_bytes(self) -> float:
        """Bytes of one exchange of all parameters over each of the links."""
        if self.local is not None:
            return self.num_params * self.local.bytes_per_param
        return ring_bytes("all-reduce", self.num_params * self.bytes_per_param, len(self.found))

    @property
    def exchange_s(self) -> float:
        """Seconds of exchange in one step that nothing hides, on average.

        Gradients: a ring has 2 (n - 1) latencies, and two sites swap theirs in one.
        """
        if self.local is not None:
            return exposed_exchange_s(self.local, self.num_params, self.links, self.compute_s)
        num_latencies = 1 if len(self.found) == 2 else 2 * (len(self.found) - 1)
        through_s = max(occupied_s(link, self.exchanged_bytes) for link in self.links)
        return through_s + num_latencies * max(link.latency_s for link in self.links)

    @property
    def inter_site_bytes(self) -> dict[str, float]:
        """Bytes of a step over every link of the exchange, on average."""
        steps_between = 1 if self.local is None else self.local.every
        return dict.fromkeys((link.name for link in self.links), self.exchanged_bytes / steps_between)

    @property
    def compute_s(self) -> float:
        """Seconds of the slowest site's step."""
        return max(one.step_s for one in self.found)

    @property
    def step_s(self) -> float:
        """Seconds from one step's start to the next one's: the slowest site's, and the exchange."""
        return self.compute_s + self.exchange_s

    @property
    def devices(self) -> dict[str, int]:
        """Devices in use by site."""
        return {name: number for one in self.found for name, number in one.candidate.devices.items()}

    @property
    def limited_by(self) -> str:
        """The exchange where it takes more than a tenth of the step, else the slowest site."""
        if self.exchange_s > self.step_s / 10:
            return f"the exchange over {', '.join(link.name for link in self.links)}"
        return f"computing at {max(self.found, key=lambda one: one.step_s).candidate.where}"

    def __str__(self) -> str:
        return "; ".join(_share_in_words(one, share) for one, share in zip(self.found, self.shares, strict=True))

    def exchanging(self, local: LocalSteps, cluster: Cluster) -> "SeparateSites | None":
        """The same with an exchange of parameters' differences; None where two of the sites have no link."""
        links = [cluster.link(*pair) for pair in permutations(self.sites, 2)]
        known = tuple(link for link in links if link is not None)
        return None if len(known) < len(links) else replace(self, local=local, links=known)


def _share_in_words(one: Evaluated, share: int) -> str:
    at = one.candidate.layout
    return f"{one.candidate.where}: p{at.pipeline} d{at.data} t{at.tensor}, {share} sequences"


def separate_sites(job: Job, costs: JobCosts, until_s: float = inf) -> Iterator[SeparateSites]:
    """Every set of the fastest sites with shares of the batch, exchanging gradients every step.

    None where no two sites can exchange: no memory, or no ring of links. Stops when `time.monotonic` is past `until_s`.
    """
    batch, best_of = job.training.global_batch, _Alone(job, costs)
    every = {site.name: best_of(site, batch) for site in strongest(job.cluster.sites, MAX_SITES)}
    alone = {name: best for name, best in every.items() if best is not None}
    ranked = sorted(alone, key=lambda name: alone[name].step_s)
    for names in (ranked[:size] for size in range(2, len(ranked) + 1)):
        ring = _fastest_ring(job.cluster, names)
        for shares in _divisions(batch, [alone[n].step_s for n in names]) if ring else ():
            if time.monotonic() > until_s:
                return
            share_of = dict(zip(names, shares, strict=True))
            one = _joined(job, best_of, ring, [share_of[site.name] for site in ring])
            if one is not None:
                yield one


def fastest_exchange(every: Iterable[SeparateSites], local: LocalSteps, cluster: Cluster) -> SeparateSites | None:
    """Of the sets of sites that can exchange after local steps the one with the shortest step."""
    found = (one.exchanging(local, cluster) for one in every)
    return min((one for one in found if one is not None), key=lambda one: one.step_s, default=None)


def planned_in_full(job: Job, costs: JobCosts, one: SeparateSites, until_s: float = inf) -> SeparateSites:
    """The same sites and shares, each planned by a search of its own; identical sites with equal shares once."""
    found: list[Evaluated] = []
    for site, part, share in zip(map(job.cluster.site, one.sites), one.found, one.shares, strict=True):
        known = (
            other
            for other, size in zip(found, one.shares, strict=False)
            if size == share and not differing_keys(other.candidate.sites[0], site)
        )
        like = next(known, None)
        found.append(_searched(job, costs, site, part, share, until_s) if like is None else moved(like, site))
    return replace(one, found=tuple(found))


def _searched(job: Job, costs: JobCosts, site: Site, part: Evaluated, share: int, until_s: float) -> Evaluated:
    """The faster of `part` and what the planner's search finds for so many sequences of a step at this site alone."""
    alone = share_of(job, site.name, share)
    found = search(alone, costs.trained(alone.training), until_s=until_s).evaluated
    return min([part, *found], key=lambda each: each.step_s)


def pins_one_layout(job: Job) -> bool:
    """True if the job pins what would differ between those that train separately."""
    pins = job.layout
    return any((pins.pipeline, pins.data, pins.layers, pins.num_microbatches, (pins.context or 1) > 1, pins.sites))


class _Alone:
    """The best of one site alone for so many sequences of a step; equal sites are searched once."""

    def __init__(self, job: Job, costs: JobCosts) -> None:
        self._job, self._costs = job, costs
        self._known: list[tuple[Site, int, Evaluated | None]] = []

    def __call__(self, site: Site, batch: int) -> Evaluated | None:
        """The best at `site`; None: it does not fit."""
        for like, size, found in self._known:
            if size == batch and identical(like, site):
                return None if found is None else moved(found, site)
        self._known.append((site, batch, self._searched(site, batch)))
        return self._known[-1][2]

    def _searched(self, site: Site, batch: int) -> Evaluated | None:
        part = share_of(self._job, site.name, batch)
        try:
            return search(part, self._costs.trained(part.training), BEST_ONLY).best
        except FarpipeError:
            return None


def share_of(job: Job, name: str, batch: int) -> Job:
    """The job of one site alone with so many sequences of a step."""
    training = job.training.model_copy(update={"global_batch": batch})
    pins = job.layout.model_copy(update={"replicas": None})
    return job.model_copy(update={"training": training, "cluster": job.cluster.within([name]), "layout": pins})


def _joined(job: Job, best_of: "_Alone", ring: Sequence[Site], shares: Sequence[int]) -> SeparateSites | None:
    """None where a site gets nothing, or can't train its share."""
    if min(shares) == 0:
        return None
    found = list(map(best_of, ring, shares))
    known = tuple(one for one in found if one is not None)
    if len(known) < len(found):
        return None
    return SeparateSites(
        found=known,
        shares=tuple(shares),
        links=tuple(ring_links(job.cluster, [site.name for site in ring])),
        num_params=round(trained_model_params(job.model, job.training)),
        bytes_per_param=memory.gradient_bytes(job.training),
        identical=len(set(shares)) == 1 and not any(differing_keys(ring[0], site) for site in ring[1:]),
    )


def _fastest_ring(cluster: Cluster, names: Sequence[str]) -> tuple[Site, ...]:
    """The ring over the sites whose slowest link is fastest; () where there is none."""
    sites = [cluster.site(name) for name in names]
    rings = [(sites[0], *rest) for rest in permutations(sites[1:])]
    best = max(rings, key=lambda ring: slowest_rate(cluster, ring))
    return best if slowest_rate(cluster, best) else ()


def _divisions(batch: int, times: Sequence[float]) -> list[list[int]]:
    """`shares_of_batch`, and where they are uneven also those of the largest part that makes them even."""
    limit_s = batch / sum(1 / seconds for seconds in times) * (1 + UNEVEN)
    coarse = shares_of_batch(batch, times)
    parts = (part for part in range(batch // NUM_PARTS, 0, -1) if batch % part == 0)
    for shares in (coarse, *(shares_of_batch(batch, times, part) for part in parts)):
        if max(share * seconds for share, seconds in zip(shares, times, strict=True)) <= limit_s:
            return [coarse] if shares == coarse else [coarse, shares]
    return [coarse]


def shares_of_batch(batch: int, times: Sequence[float], part: int | None = None) -> list[int]:
    """`batch` divided in proportion to speed, in parts that are a divisor of it, so that layouts find replicas."""
    part = part or max(d for d in range(1, ceil(batch / NUM_PARTS) + 1) if batch % d == 0)
    speeds = [1 / seconds for seconds in times]
    ideal = [batch / part * speed / sum(speeds) for speed in speeds]
    counts = [int(number) for number in ideal]
    for index in sorted(range(len(ideal)), key=lambda i: counts[i] - ideal[i])[: batch // part - sum(counts)]:
        counts[index] += 1
    return [count * part for count in counts]
