"""The state of a fleet as plain values, never changed in place; what moves it on is in `state.py`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from farpipe.errors import InputError
from farpipe.fleet.job import FleetJob, JobState, Kind
from farpipe.fleet.meter import Reading, SiteTariff
from farpipe.fleet.quotes import Quotes, StopCosts
from farpipe.fleet.space import Space
from farpipe.strict import nearest


@dataclass(frozen=True)
class SiteState:
    """One site as it is now."""

    num_devices: int
    is_up: bool = True

    @property
    def usable(self) -> int:
        """Devices that jobs may have."""
        return self.num_devices if self.is_up else 0


@dataclass(frozen=True)
class World:
    """Facts that do not change: latencies, egress prices, quotes and costs of stopping."""

    quotes: Quotes
    stops: StopCosts
    latency_s: Mapping[str, float]
    egress_usd_per_gb: Mapping[str, float]
    best_steps: dict[tuple[Kind, int], float] = field(default_factory=dict, compare=False, repr=False)
    """Results of `View.best_step_s`: quotes inside a site never change."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Sites, links, prices and jobs at one moment."""

    world: World
    now_s: float
    sites: Mapping[str, SiteState]
    rates: Mapping[str, float]
    """Bytes/s of every directed link, jobs' reservations included."""
    tariffs: Mapping[str, SiteTariff]
    jobs: Mapping[str, JobState] = field(default_factory=dict)
    """Those that have not ended, in the order in which they came."""
    meters: Mapping[str, Mapping[str, Reading]] = field(default_factory=dict)
    """Of every job with devices: the readings of its sites when it came into its phase."""
    ended: frozenset[str] = frozenset()
    """Names of jobs that have ended, so that none comes twice."""
    closed: tuple[JobState, ...] = ()
    """Jobs that the last event has ended, with all that they have used."""
    refusals: tuple[str, ...] = ()
    """Requests of the last decision that were refused, with the reason."""

    def job(self, name: str) -> JobState:
        """The job of that name; InputError if there is none, or not any more."""
        if name not in self.jobs:
            gone = "; it has ended" if name in self.ended else nearest(name, self.jobs)
            raise InputError(f"there is no job {name!r} in the fleet{gone}")
        return self.jobs[name]

    def space(self) -> Space:
        """Devices and rates that no job holds."""
        space = Space({name: site.usable for name, site in self.sites.items()}, dict(self.rates))
        devices, rates = space.devices, space.rates
        for job in self.jobs.values():
            if (placement := job.placement) is None:
                continue
            for site, number in placement.devices:
                devices[site] -= number
            for link, rate in placement.links(job.phase).items():
                rates[link] -= rate
        return space

    def with_job(self, job: JobState) -> Self:
        """With `job` in the place of the one of its name; its meters are read now."""
        jobs = {**self.jobs, job.name: job}
        meters = {name: readings for name, readings in self.meters.items() if name != job.name}
        if job.placement is not None:
            meters[job.name] = {site: self.tariffs[site].read(self.now_s) for site in job.placement.sites}
        return replace(self, jobs=jobs, meters=meters)

    def without_job(self, job: JobState) -> Self:
        """Without a settled job, which has ended."""
        jobs = {name: other for name, other in self.jobs.items() if name != job.name}
        meters = {name: readings for name, readings in self.meters.items() if name != job.name}
        return replace(self, jobs=jobs, meters=meters, ended=self.ended | {job.name}, closed=(*self.closed, job))


def smallest_change(state: Snapshot, job: FleetJob) -> str:
    """Reason for which `job` can never run in this fleet, and what would help; empty if it can."""
    total = sum(site.num_devices for site in state.sites.values())
    together = _most_linked(state)
    if job.min_devices > together:
        ask = f"ask for {together} at most"
        if job.min_devices > total:
            return f"min_devices {job.min_devices} is more than the {total} devices of all sites; {ask}"
        return f"min_devices {job.min_devices} is more than linked sites have together; {ask}, or link the others"
    fits = state.world.quotes.needed_rate
    if fits(job.kind, job.max_devices) is None and fits(job.kind, job.min_devices) is None:
        enough = next((n for n in _doubled(job.max_devices, together) if fits(job.kind, n) is not None), None)
        helps = f"max_devices {enough} would do" if enough else "it needs devices with more memory"
        return (
            f"{job.kind.model} with global_batch {job.kind.global_batch} does not fit {job.max_devices} devices of any "
            f"site; {helps}"
        )
    return ""


def _most_linked(state: Snapshot) -> int:
    """Devices of the largest group of sites that links join in both directions."""
    groups = [{site} for site in state.sites]
    for link in state.rates:
        a, _, b = link.partition(">")
        if f"{b}>{a}" in state.rates:
            joined = [group for group in groups if a in group or b in group]
            groups = [*(group for group in groups if group not in joined), set[str]().union(*joined)]
    return max(sum(state.sites[site].num_devices for site in group) for group in groups)


def _doubled(number: int, most: int) -> Iterator[int]:
    """Twice `number`, and on, up to `most`."""
    while (number := 2 * number) <= most:
        yield number


State = TypeVar("State", bound=Snapshot)
"""A snapshot, or what is made of one: functions give back the kind that they got."""
