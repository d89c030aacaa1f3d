"""What-if answers: how a job would use its sites at other latencies, bandwidths and numbers of devices."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

from farpipe.core.errors import InfeasibleError
from farpipe.core.schedule import peak_memory_bytes
from farpipe.core.simulate import Timeline
from farpipe.core.spec import Cluster, Job
from farpipe.core.units import format_rate, format_seconds
from farpipe.planning.planner.candidates import Candidate
from farpipe.planning.planner.evaluate import Evaluated
from farpipe.planning.planner.find import MeasuredDevices, Planned, find
from farpipe.planning.planner.quote import Quote
from farpipe.planning.planner.quotes import NEAR, Planner, left_of
from farpipe.planning.planner.search import Advance

LATENCIES_S: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
BYTES_PER_S: Final = tuple(gbit * 1.25e8 for gbit in (1, 5, 10, 25, 50, 100, 400))
FACTORS: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0)
"""Settings of links that differ, in multiples of what each has."""
SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Settings of a site, in multiples of its devices."""
GRID_LIMIT_S: Final = 10.0
"""Seconds after which the points of a grid are no longer simulated."""
MAX_SIMULATED: Final = 2
"""Layouts within NEAR of the best estimate that are simulated for an answer."""


@dataclass(frozen=True)
class Dial:
    """One input of a job with the settings that it can be turned to; `at` is the job's own."""

    of: Literal["latency", "bandwidth", "devices"]
    site: str
    values: tuple[float, ...]
    at: int
    in_multiples: bool = False
    """True if `values` multiply what each link has."""

    @property
    def name(self) -> str:
        """Label of the dial."""
        return f"devices at {self.site}" if self.site else f"{self.of} of links"

    @property
    def texts(self) -> tuple[str, ...]:
        """Every setting in words."""
        if self.in_multiples:
            return tuple(f"x {value:g}" for value in self.values)
        write = {"latency": format_seconds, "bandwidth": format_rate, "devices": lambda value: f"{value:g}"}[self.of]
        return tuple(map(write, self.values))


@dataclass(frozen=True)
class Use:
    """One use of the sites; `is_simulated` is False for an estimate by closed forms."""

    name: str
    degrees: str
    step_s: float
    memory_bytes: float
    is_simulated: bool


@dataclass(frozen=True)
class Answer:
    """Uses of the sites, the fastest first, with the step of the first; or the obstacle to all of them."""

    uses: tuple[Use, ...] = ()
    timeline: Timeline | None = None
    sites: tuple[str, ...] = ()
    """Site of every rank in the timeline."""
    obstacle: str = ""


def dials_of(job: Job, *, every_site: bool = False) -> tuple[Dial, ...]:
    """Dials of the links' latency and bandwidth, none without links, and of a third site; or of every site's devices.

    A third site is there with all its devices or not at all.
    """
    links, sites = job.cluster.links, job.cluster.sites
    found = []
    if links:
        found.append(_of_links("latency", [link.latency_s for link in links], LATENCIES_S))
        found.append(_of_links("bandwidth", [link.bandwidth_bytes_per_s for link in links], BYTES_PER_S))
    if every_site:
        return (*found, *(_of_site(site.name, site.num_devices, SHARES) for site in sites))
    return (*found, *(_of_site(site.name, site.num_devices, (0.0, 1.0)) for site in sites[2:3]))


def _of_links(of: Literal["latency", "bandwidth"], own: Sequence[float], usual: Sequence[float]) -> Dial:
    if max(own) - min(own) > 1e-9 * max(own):
        return Dial(of, "", FACTORS, FACTORS.index(1.0), in_multiples=True)
    far = [value for value in usual if abs(value - own[0]) > 0.01 * value]
    values = tuple(sorted([own[0], *far]))
    return Dial(of, "", values, values.index(own[0]))


def _of_site(site: str, num_devices: int, shares: Sequence[float]) -> Dial:
    values = tuple(sorted({float(round(share * num_devices)) for share in shares}))
    return Dial("devices", site, values, values.index(float(num_devices)))


def turned_to(job: Job, dials: Sequence[Dial], at: Sequence[int]) -> Job:
    """The job with every dial at its setting of this index; InfeasibleError where no device is left."""
    cluster = job.cluster
    devices = {dial.site: int(dial.values[i]) for dial, i in zip(dials, at, strict=True) if dial.of == "devices"}
    for dial, index in zip(dials, at, strict=True):
        if dial.of != "devices" and index != dial.at:
            cluster = _relinked(cluster, dial, dial.values[index])
    changed = {name: number for name, number in devices.items() if number != cluster.site(name).num_devices}
    return job.model_copy(update={"cluster": left_of(cluster, changed, {}) if changed else cluster})


def grid_of(
    best: Planned, dials: Sequence[Dial], limit_s: float = GRID_LIMIT_S, progress: Advance | None = None
) -> list[Answer]:
    """The answer at every combination of settings, the last dial changing fastest; at the job's own that of its plan.

    After `limit_s` seconds points are estimates by closed forms alone.
    """
    until_s, own = time.monotonic() + limit_s, tuple(dial.at for dial in dials)
    points = [*product(*(range(len(dial.values)) for dial in dials))]
    answers = []
    for at in points:
        left = MAX_SIMULATED if time.monotonic() < until_s else 0
        point = best.found.job, dials, at, best.profiles
        answers.append(planned(best) if at == own else answer_at(*point, simulated=left))
        if progress is not None:
            progress(len(answers), len(points))
    return answers


def _relinked(cluster: Cluster, dial: Dial, value: float) -> Cluster:
    field = "latency_s" if dial.of == "latency" else "bandwidth_bytes_per_s"
    links = [
        link.model_copy(update={field: value * getattr(link, field) if dial.in_multiples else value})
        for link in cluster.links
    ]
    return cluster.model_copy(update={"links": tuple(links)})


def estimated(job: Job, profiles: MeasuredDevices = (), simulated: int = MAX_SIMULATED) -> Answer:
    """The answer by closed forms, at most `simulated` of the best simulated too: in about 50 ms on two sites.

    InfeasibleError where nothing fits.
    """
    planner = Planner(profiles)
    quotes = planner.quotes(request := job.request, job.cluster)
    if not quotes:
        raise InfeasibleError("no layout of this job fits")
    near = [quote for quote in quotes[:simulated] if quote.step_s <= NEAR * quotes[0].step_s]
    found = {quote.where: one for quote in near if (one := planner.simulated(request, job.cluster, quote)) is not None}
    uses = [
        _use(found[quote.where])
        if quote.where in found
        else Use(quote.where, _degrees(quote), quote.step_s, quote.memory_bytes, is_simulated=False)
        for quote in quotes
    ]
    best = min(found.values(), key=lambda one: one.step_s, default=None)
    # What was simulated comes first: an estimate near it may be off by more than the two differ.
    ranked = sorted(uses, key=lambda use: (best is not None and not use.is_simulated, use.step_s))
    return _answer(ranked, best)


def planned(best: Planned) -> Answer:
    """The answer of a plan that was searched for: the fastest of every set of sites."""
    found = {one.where: one for one in reversed(best.ranked)}
    uses = map(_use, found.values())
    plan = best.plan
    mine = Use(plan.where, plan.degrees, plan.prediction.step_s, max(plan.prediction.peak_memory_bytes), True)
    others = sorted((use for use in uses if use.name != plan.where), key=lambda use: use.step_s)
    return Answer((mine, *others), plan.timeline, plan.sites)


def answer_at(
    job: Job,
    dials: Sequence[Dial],
    at: Sequence[int],
    profiles: MeasuredDevices = (),
    *,
    simulated: int = MAX_SIMULATED,
    is_searched: bool = False,
) -> Answer:
    """The answer of `estimated` with every dial at its setting of this index; or the planner's whole search, in
    seconds."""
    try:
        turned = turned_to(job, dials, at)
        return planned(find(turned, profiles)[0]) if is_searched else estimated(turned, profiles, simulated)
    except InfeasibleError as error:
        return Answer(obstacle=str(error).splitlines()[0])


def _use(one: Evaluated) -> Use:
    peak = max(peak_memory_bytes(one.problem, one.schedule))
    return Use(one.where, one.candidate.degrees, one.step_s, peak, is_simulated=True)


def _degrees(quote: Quote) -> str:
    return Candidate(quote.layout, (), quote.in_v).degrees


def _answer(uses: Sequence[Use], best: Evaluated | None) -> Answer:
    if best is None:
        return Answer(tuple(uses))
    return Answer(tuple(uses), best.timeline, tuple(site.name for site in best.candidate.sites))
