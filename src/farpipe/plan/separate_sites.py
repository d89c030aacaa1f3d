"""Sites that each train a share of the batch in a layout of their own, and exchange gradients or parameters.

Exchanged every step it is data parallelism over unlike sites: training is as with one site. Exchanged after many local
steps it is DiLoCo (Douillard et al., arXiv 2311.08105): each site trains by itself for so many steps, then the
differences of parameters are averaged and an outer optimizer applies them. Closed forms on top of simulated sites; the
exchange is a ring over the sites and is not hidden.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import ceil
from typing import Final, Literal

from farpipe.cost import JobCosts, memory
from farpipe.cost.links import ring_links
from farpipe.cost.transfer import ring_bytes
from farpipe.errors import FarpipeError
from farpipe.plan.evaluate import Evaluated
from farpipe.plan.placement import differing_keys, slowest_rate
from farpipe.plan.quick import quick_search
from farpipe.spec import Cluster, Job, Site

MAX_SITES: Final = 4
"""Those with the most compute are looked at."""
NUM_PARTS: Final = 16
"""A batch is divided over the sites in about so many equal parts."""
OUTER_BYTES: Final = 4
"""Of a parameter's difference, exchanged in 32 bit."""


@dataclass(frozen=True)
class SideBySide:
    """Sites, or groups of sites, that each train a share of the batch in a layout of their own, and exchange."""

    found: tuple[Evaluated, ...]
    """The best of each for its share."""
    shares: tuple[int, ...]
    """Sequences of a step of each."""
    links: tuple[str, ...]
    """Those of the exchange."""
    exchange_s: float
    """Of one step, on average."""

    @property
    def where(self) -> str:
        """``a + b``; where groups of sites train, ``a > b + c > d``."""
        return " + ".join(one.candidate.where for one in self.found)

    @property
    def step_s(self) -> float:
        """From one step's start to the next one's: the slowest one's, and the exchange."""
        return max(one.step_s for one in self.found) + self.exchange_s

    @property
    def devices(self) -> dict[str, int]:
        """Devices in use by site."""
        return {name: number for one in self.found for name, number in one.candidate.devices.items()}

    @property
    def limited_by(self) -> str:
        """The exchange where it takes more than a tenth of the step, else the slowest one."""
        if self.exchange_s > self.step_s / 10:
            return f"the exchange over {', '.join(self.links)}"
        return f"computing at {max(self.found, key=lambda one: one.step_s).candidate.where}"

    def describe(self) -> str:
        """Each one's layout and its share of the batch."""
        return "; ".join(_describe_share(one, share) for one, share in zip(self.found, self.shares, strict=True))


@dataclass(frozen=True)
class SeparateSites(SideBySide):
    """Single sites side by side, one step of the whole batch on average; the links are a ring over them."""

    exchanged_bytes: float
    """Of one exchange, over each of the links."""
    alike: bool
    """True if the sites are alike and have equal shares."""

    @property
    def sites(self) -> tuple[str, ...]:
        """Names, in the order of the ring."""
        return tuple(one.candidate.order[0] for one in self.found)


def _describe_share(one: Evaluated, share: int) -> str:
    """Sites, layout and share of the batch of one of several that train side by side."""
    at = one.candidate.layout
    return f"{one.candidate.where}: p{at.pipeline} d{at.data} t{at.tensor}, {share} sequences"


def separate_sites(
    job: Job, costs: JobCosts, steps_between: int, outer_bytes: int = OUTER_BYTES
) -> SeparateSites | None:
    """The best set of sites for it; None where no two sites can: no memory, no ring of links, or pins in the way.

    `outer_bytes`: of a parameter's difference as it is exchanged after several local steps.
    """
    if pins_one_layout(job):
        return None
    alone = {site.name: best for site in strongest(job.cluster.sites) if (best := _alone(job, costs, site)) is not None}
    ranked = sorted(alone, key=lambda name: alone[name].step_s)
    sets = [ranked[:size] for size in range(2, len(ranked) + 1)]
    found = [_joined(job, costs, {n: alone[n] for n in names}, steps_between, outer_bytes) for names in sets]
    return min((one for one in found if one is not None), key=lambda one: one.step_s, default=None)


def pins_one_layout(job: Job) -> bool:
    """True if the job pins what would differ between those that train side by side."""
    pins = job.layout
    return any((pins.pipeline, pins.data, pins.layers, pins.num_microbatches, (pins.context or 1) > 1, pins.sites))


def strongest(sites: Sequence[Site]) -> list[Site]:
    """The MAX_SITES sites that compute most."""
    return sorted(sites, key=lambda site: -site.num_devices * max(site.device.peak_flops.values()))[:MAX_SITES]


def _alone(job: Job, costs: JobCosts, site: Site, batch: int | None = None) -> Evaluated | None:
    """The best of one site alone for so many sequences of a step; None: it does not fit."""
    return next(iter(best_for_share(job, costs, [site.name], batch or job.training.global_batch, None, 1)), None)


def best_for_share(
    job: Job, costs: JobCosts, names: Collection[str], batch: int, replicas: Literal["inside"] | None, most: int
) -> list[Evaluated]:
    """The best `most` layouts on these sites alone for so many sequences of a step; empty where none fits."""
    training = job.training.model_copy(update={"global_batch": batch})
    pins = job.layout.model_copy(update={"replicas": replicas})
    part = job.model_copy(update={"training": training, "cluster": job.cluster.within(names), "layout": pins})
    try:
        return quick_search(part, JobCosts(job.model, training, costs.profiles), most)
    except FarpipeError:
        return []


def _joined(
    job: Job, costs: JobCosts, alone: dict[str, Evaluated], steps_between: int, outer_bytes: int
) -> SeparateSites | None:
    ring = _fastest_ring(job.cluster, list(alone))
    if ring is None:
        return None
    shares = dict(
        zip(alone, shares_of_batch(job.training.global_batch, [one.step_s for one in alone.values()]), strict=True)
    )
    if min(shares.values()) == 0:
        return None
    found = [_alone(job, costs, site, shares[site.name]) for site in ring]
    if any(one is None for one in found):
        return None
    links = ring_links(job.cluster, [site.name for site in ring])
    width = outer_bytes if steps_between > 1 else memory.gradient_bytes(job.training.precision)
    sent = ring_bytes("all-reduce", job.model.num_params * width, len(ring))
    once = sent / min(link.bandwidth_bytes_per_s for link in links)
    once += 2 * (len(ring) - 1) * max(link.latency_s for link in links)
    return SeparateSites(
        found=tuple(one for one in found if one is not None),
        shares=tuple(shares[site.name] for site in ring),
        links=tuple(link.name for link in links),
        exchanged_bytes=sent,
        exchange_s=once / steps_between,
        alike=len(set(shares.values())) == 1 and not any(differing_keys(ring[0], site) for site in ring[1:]),
    )


def _fastest_ring(cluster: Cluster, names: Sequence[str]) -> tuple[Site, ...] | None:
    sites = [cluster.site(name) for name in names]
    rings = [(sites[0], *rest) for rest in permutations(sites[1:])]
    best = max(rings, key=lambda ring: slowest_rate(cluster, ring))
    return best if slowest_rate(cluster, best) else None


def shares_of_batch(batch: int, times: Sequence[float]) -> list[int]:
    """`batch` divided in proportion to speed, in parts that are a divisor of it, so that layouts find replicas."""
    part = max(d for d in range(1, ceil(batch / NUM_PARTS) + 1) if batch % d == 0)
    speeds = [1 / seconds for seconds in times]
    ideal = [batch / part * speed / sum(speeds) for speed in speeds]
    counts = [int(number) for number in ideal]
    for index in sorted(range(len(ideal)), key=lambda i: counts[i] - ideal[i])[: batch // part - sum(counts)]:
        counts[index] += 1
    return [count * part for count in counts]
