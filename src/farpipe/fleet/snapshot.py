"""State of a fleet as plain values, never changed in place: sites, free space, jobs and their accounts, starts.

`state.py` moves it on.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self, TypeVar

from farpipe.core.errors import InputError
from farpipe.core.strict import nearest
from farpipe.fleet.events import Happened
from farpipe.fleet.job import FleetJob, JobPlacement, JobState, Kind, Phase
from farpipe.fleet.meter import Reading, SiteTariff, bill
from farpipe.fleet.quotes import Devices, Quotes, StopCosts
from farpipe.fleet.replacing import replace

ROUNDING: Final = 1e-6
"""Bytes/s that a sum of reservations may be off."""
KEPT: Final = 1000
"""Ended jobs that are remembered; up to twice as many at times."""


@dataclass
class Space:
    """Free devices by site and free bytes/s by directed link; `copy` it to try something."""

    devices: dict[str, int]
    rates: dict[str, float]

    @property
    def num_devices(self) -> int:
        """Free devices at all sites; a site that has fewer than it gave away counts as empty."""
        return sum(max(0, number) for number in self.devices.values())

    def copy(self) -> "Space":
        """Another one, the same."""
        return Space(dict(self.devices), dict(self.rates))

    def take(self, placement: JobPlacement, phase: Phase) -> None:
        """Less what `placement` holds in `phase`."""
        self._add(placement, phase, -1)

    def give(self, placement: JobPlacement, phase: Phase) -> None:
        """More by what `placement` holds in `phase`."""
        self._add(placement, phase, 1)

    def _add(self, placement: JobPlacement, phase: Phase, sign: int) -> None:
        for site, number in placement.devices:
            self.devices[site] += sign * number
        for link, rate in placement.links(phase).items():
            self.rates[link] += sign * rate

    def has(self, devices: Devices) -> bool:
        """True if so many devices are free at every site."""
        return all(0 < number <= self.devices.get(site, 0) for site, number in devices)

    def overdrawn(self) -> str:
        """The site or link that has given away more than it has; empty if there is none."""
        for site, number in self.devices.items():
            if number < 0:
                return f"site {site}: {-number} devices too many"
        for link, rate in self.rates.items():
            if rate < -ROUNDING * max(1.0, -rate) - 1.0:
                return f"link {link}: {-rate:.6g} bytes/s too many"
        return ""


class EndedJob(NamedTuple):
    """A job that has ended, or was not taken."""

    job: FleetJob
    attempt: int
    """Number of its last attempt: the next job of its name goes on counting from there."""


@dataclass(frozen=True)
class Ended:
    """The `KEPT` jobs that ended last, or more, so that none is done twice and late reports find theirs."""

    newest: Mapping[str, EndedJob] = field(default_factory=dict)
    older: Mapping[str, EndedJob] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.newest or name in self.older

    def get(self, name: str) -> EndedJob | None:
        """The job that had this name; None if none had, or so long ago that it is forgotten."""
        return self.newest.get(name) or self.older.get(name)

    def plus(self, job: FleetJob, attempt: int) -> "Ended":
        """Add one; with `KEPT` newest ones, those before them are forgotten."""
        newest, older = (self.newest, self.older) if len(self.newest) < KEPT else ({}, self.newest)
        return Ended({**newest, job.name: EndedJob(job, attempt)}, older)

    def without(self, name: str) -> "Ended":
        """The same without a job whose name another one takes."""
        if name not in self:
            return self
        newest, older = ({one: job for one, job in part.items() if one != name} for part in (self.newest, self.older))
        return Ended(newest, older)


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
    """Facts that do not change: egress prices, quotes and costs of stopping."""

    quotes: Quotes
    stops: StopCosts
    egress_usd_per_gb: Mapping[str, float]


@dataclass(frozen=True)
class Cache:
    """Figures that decisions would compute again and again; without it every decision is the same, and slower."""

    at_one_site: dict[tuple[Kind, int], Mapping[str, JobPlacement]] = field(default_factory=dict)
    """Results of `View.at_one_site`: quotes inside a site never change."""
    priced: dict[object, Any] = field(default_factory=dict)
    """Figures of `Worth` by objective, which hold until prices change."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Sites, links, prices and jobs at one moment."""

    world: World
    cache: Cache = field(default_factory=Cache, compare=False, repr=False)
    now_s: float
    decided_s: float = 0.0
    """Time of the last decision."""
    sites: Mapping[str, SiteState]
    rates: Mapping[str, float]
    """Bytes/s of every directed link, jobs' reservations included."""
    tariffs: Mapping[str, SiteTariff]
    jobs: Mapping[str, JobState] = field(default_factory=dict)
    """Jobs that have not ended, in order of submission."""
    meters: Mapping[str, Mapping[str, Reading]] = field(default_factory=dict)
    """Readings of the sites of every running job, taken when it came into its phase."""
    ended: Ended = field(default_factory=Ended)
    """Jobs that have ended lately."""
    closed: tuple[JobState, ...] = ()
    """Jobs that the last events have ended, with all that they have used."""
    verdicts: tuple[str, ...] = ()
    """For each of the last events the reason for which it was refused; empty: it counts."""
    refusals: tuple[str, ...] = ()
    """Requests of the last decision that were refused, with the reason."""
    done: tuple[Happened, ...] = ()
    """What the last events and the decision after them did, in this order; state documents leave it out."""

    def job(self, name: str) -> JobState:
        """The job of that name; InputError if there is none, or not any more."""
        if name not in self.jobs:
            gone = "; it has ended" if name in self.ended else nearest(name, self.jobs)
            raise InputError(f"there is no job {name!r} in the fleet{gone}")
        return self.jobs[name]

    def has_lost_checkpoint(self, job: JobState) -> bool:
        """True if the job's newest checkpoint is at a lost site: it starts nowhere before that is back."""
        return job.stored_at is not None and not self.sites[job.stored_at].is_up

    def space(self) -> Space:
        """Devices and rates that no job holds; the links of a lost site carry nothing."""
        lost = {name for name, site in self.sites.items() if not site.is_up}
        rates = dict(self.rates)
        if lost:
            rates.update({link: 0.0 for link in rates if not lost.isdisjoint(link.split(">"))})
        space = Space({name: site.usable for name, site in self.sites.items()}, rates)
        devices, rates = space.devices, space.rates
        for job in self.jobs.values():
            if (placement := job.placement) is None:
                continue
            for site, number in placement.devices:
                devices[site] -= number
            for link, rate in placement.links(job.phase).items():
                rates[link] -= rate
        return space

    def with_job(self, job: JobState, what: str = "", why: str = "") -> Self:
        """Replace the job of that name; its meters are read now. `what`: what has happened to it, for `done`."""
        jobs = {**self.jobs, job.name: job}
        meters = dict(self.meters)
        meters.pop(job.name, None)
        if job.placement is not None:
            meters[job.name] = {site: self.tariffs[site].read(self.now_s) for site in job.placement.sites}
        done = (*self.done, Happened(job.name, what, job.phase, job.placement, why)) if what else self.done
        return replace(self, jobs=jobs, meters=meters, done=done)

    def noted(self, *happened: Happened) -> Self:
        """The same with these at the end of `done`."""
        return replace(self, done=(*self.done, *happened))

    def refusing(self, refusals: Iterable[str], place: int) -> Self:
        """The same with `refusals`, in `done` at `place`: before what else the decision did."""
        rejects = [Happened("", "reject", "queued", why=why) for why in refusals]
        done = (*self.done[:place], *rejects, *self.done[place:])
        return replace(self, refusals=tuple(one.why for one in rejects), done=done)

    def without_job(self, job: JobState, what: str, why: str = "") -> Self:
        """Remove a settled job, which has ended."""
        jobs, meters = dict(self.jobs), dict(self.meters)
        del jobs[job.name]
        meters.pop(job.name, None)
        ended, done = self.ended.plus(job.job, job.attempt), (*self.done, Happened(job.name, what, why=why))
        return replace(self, jobs=jobs, meters=meters, ended=ended, closed=(*self.closed, job), done=done)


State = TypeVar("State", bound=Snapshot)
"""A snapshot, or what is made of one: functions give back the kind that they got."""


def settled(state: Snapshot, name: str) -> JobState:
    """The job as of now: steps done, time queued and money spent up to this moment."""
    job, now_s = state.job(name), state.now_s
    if job.placement is None:
        return replace(job, queued_s=job.total_queued_s(now_s), since_s=now_s)
    spent = bill(
        state.tariffs,
        state.world.egress_usd_per_gb,
        job.placement,
        job.phase,
        state.meters[name],
        job.since_s,
        now_s,
    )
    return replace(job, num_done=job.done_at(now_s), since_s=now_s, spent=job.spent.plus(spent))


def queued(job: JobState, num_steps: float | None = None) -> JobState:
    """A settled job without devices, which goes on from `num_steps`; None: from all that it has done."""
    num_done = job.num_done if num_steps is None else num_steps
    num_stored = min(job.num_stored, num_done)
    return replace(
        job, phase="queued", placement=None, num_done=num_done, num_stored=num_stored, stored_at=job.stop_site
    )


def placed(job: JobState, placement: JobPlacement, phase: Phase) -> JobState:
    """A settled job on `placement`."""
    first = job.since_s if job.first_start_s is None else job.first_start_s
    return replace(job, phase=phase, placement=placement, first_start_s=first)


def start_on(world: World, space: Space, job: JobState, devices: Devices) -> JobPlacement | None:
    """The job starting on `devices` out of `space`, with what its start takes; None if it can't."""
    if not space.has(devices):
        return None
    stored_at, state_bytes = job.stop_site, world.quotes.state_bytes(job.job.kind)
    rates, sent = space.rates, dict[str, float]()
    seconds = 0.0
    if stored_at is not None and all(stored_at != site for site, _ in devices):
        link = f"{stored_at}>{devices[0][0]}"
        rate = world.stops.transfer_share * rates.get(link, 0.0)
        if rate <= 0:
            return None
        sent[link], rates = rate, {**rates, link: rates[link] - rate}
        seconds = state_bytes / rate
    placement = world.quotes.placement(job.job.kind, devices, rates)
    if placement is None:
        return None
    seconds += startup_s(world.stops, state_bytes, job, placement.num_devices)
    steps = placement.link_bytes_per_s
    both = {link: steps.get(link, 0.0) + sent.get(link, 0.0) for link in {**steps, **sent}} if sent else steps
    moved = dict.fromkeys(sent, state_bytes)
    return replace(placement, startup_s=seconds, startup_bytes_per_s=both, moved_bytes=moved)


def startup_s(stops: StopCosts, state_bytes: float, job: JobState, num_devices: int) -> float:
    """Seconds until the first step: restart; its checkpoint is read, and written before if the job is running."""
    seconds = stops.restart_s
    if job.stored_at is not None or job.phase == "running":
        seconds += stops.checkpoint_s(state_bytes, num_devices)
    if job.phase == "running" and job.placement is not None:
        seconds += stops.stop_s + stops.checkpoint_s(state_bytes, job.placement.num_devices)
    return seconds
