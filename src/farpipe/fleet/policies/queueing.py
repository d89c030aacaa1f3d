"""Policies that go through the queue in an order: start what fits, or stop running jobs for queued ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from farpipe.fleet.job import FleetJob, JobState, Kind, sizes
from farpipe.fleet.policies.orders import Keys
from farpipe.fleet.policies.places import Place
from farpipe.fleet.policies.protocol import Decision, View
from farpipe.fleet.quotes import Devices
from farpipe.fleet.snapshot import Space

Sizes = Callable[[FleetJob], Sequence[int]]


@dataclass(frozen=True)
class QueuePolicy:
    """`order` says who is looked at first, `place` where it goes, `sizes` on how many devices; no job is stopped.

    A job gets the largest of its sizes that finds a place, or with `fastest` the one with the shortest step.
    """

    name: str
    order: Keys
    place: Place
    sizes: Sizes = sizes
    fastest: bool = False
    when_blocked: Literal["wait", "skip", "backfill"] = "skip"
    """The first job that does not fit: all behind it wait; or are tried as well; or only if that does not delay it.

    One for which there would be no place in an empty fleet either delays nobody; nor does one whose checkpoint is at a
    lost site, for nobody knows how long."""

    def decide(self, view: View) -> Iterator[Decision]:
        if not view.queue:
            return
        space, finder = view.space(), Finder(view, self.place, self.fastest)
        if space.num_devices < min(job.job.min_devices for job in view.queue):
            return
        shadow: _Shadow | None = None
        num_free = space.num_devices
        for job in in_order(view, view.queue, self.order):
            if num_free <= 0:
                return
            devices = finder.find(space, job, self.sizes(job.job))
            if devices is not None and (shadow is None or shadow.allows(view, job, devices)):
                take(view, space, job, devices)
                num_free = space.num_devices
                yield Decision(job.name, devices)
            elif shadow is not None or self.when_blocked == "skip" or not self._delays(view, job):
                continue
            elif self.when_blocked == "wait":
                return
            else:
                shadow = _Shadow.of(self, view, space, job)

    def _delays(self, view: View, job: JobState) -> bool:
        return not view.state.has_lost_checkpoint(job) and self.find(view, view.empty, job) is not None

    def find(self, view: View, space: Space, job: JobState) -> Devices | None:
        """The largest size that finds a place, and the place."""
        return Finder(view, self.place, self.fastest).find(space, job, self.sizes(job.job))


def in_order(view: View, jobs: list[JobState], order: Keys) -> list[JobState]:
    """The jobs, the least key first; of equals the earlier one."""
    keys = order(view, jobs)
    return [job for _, _, job in sorted(zip(keys, range(len(jobs)), jobs, strict=True))]


class Finder:
    """Finds places for one job after another in a space that only gets fuller: what failed once is not tried again."""

    def __init__(self, view: View, place: Place, fastest: bool = False) -> None:
        self._view, self._place, self._fastest = view, place, fastest
        self._failed: set[tuple[Kind, int]] = set()
        self._unplaced: set[tuple[Kind, tuple[int, ...]]] = set()

    def find(self, space: Space, job: JobState, numbers: Sequence[int]) -> Devices | None:
        """The place on the first of `numbers` of devices for which there is one, or on the fastest of all of them."""
        alike = job.job.kind, tuple(numbers)
        if alike in self._unplaced and job.stored_at is None:
            return None
        places = self._places(space, job, numbers)
        if self._fastest:
            found = min(places, key=lambda devices: self._step_s(space, job, devices), default=None)
        else:
            found = next(places, None)
        if found is None and job.stored_at is None:
            self._unplaced.add(alike)
        return found

    def _step_s(self, space: Space, job: JobState, devices: Devices) -> float:
        placement = self._view.start(space, job, devices)
        return placement.step_s if placement else float("inf")

    def _places(self, space: Space, job: JobState, numbers: Sequence[int]) -> Iterator[Devices]:
        free = space.num_devices
        for number in numbers:
            if number > free or (job.job.kind, number) in self._failed:
                continue
            if devices := self._place(self._view, space, job, number):
                yield devices
            elif job.stored_at is None:  # where a checkpoint lies is the job's own affair
                self._failed.add((job.job.kind, number))


def take(view: View, space: Space, job: JobState, devices: Devices) -> None:
    """Count what the job will hold on `devices` as no longer free."""
    placement = view.start(space, job, devices)
    if placement is not None:
        space.take(placement, "starting")


@dataclass
class _Shadow:
    """EASY backfilling (Lifka, 1995): the first blocked job has a date, and nobody who is let past may move it."""

    policy: QueuePolicy
    head: JobState
    date_s: float
    space: Space
    """Free devices and rates at that date."""

    @classmethod
    def of(cls, policy: QueuePolicy, view: View, space: Space, head: JobState) -> "_Shadow":
        """The date at which enough running jobs have ended for `head`."""
        then = space.copy()
        date_s = view.now_s
        for job in sorted(view.active, key=lambda job: job.end_s() or 0.0):
            assert job.placement is not None
            then.give(job.placement, job.phase)
            date_s = job.end_s() or view.now_s
            if policy.find(view, then, head):
                break
        return cls(policy, head, date_s, then)

    def allows(self, view: View, job: JobState, devices: Devices) -> bool:
        """True if `job` is over by the date, or leaves enough for the blocked one."""
        placement = view.quotes.placement(job.job.kind, devices, view.rates)
        if placement is None:
            return False
        if view.now_s + job.left_at(view.now_s) * placement.step_s <= self.date_s:
            return True
        less = self.space.copy()
        less.take(placement, "running")
        if less.overdrawn() or not self.policy.find(view, less, self.head):
            return False
        self.space = less
        return True


LOOKED_AT = 16
"""Queued jobs for which running ones may be stopped at one event; those behind them come later."""


@dataclass(frozen=True)
class PreemptivePolicy:
    """The least key runs: a queued job takes the devices of running ones whose key is larger by `factor`."""

    name: str
    order: Keys
    place: Place
    sizes: Sizes = sizes
    factor: float = 2.0
    """Stopping costs time: a job is not stopped for one that is only a little before it."""
    min_run_s: float = 1800.0
    """Nor is one that has just begun."""

    def decide(self, view: View) -> Iterator[Decision]:
        space, finder = view.space(), Finder(view, self.place)
        victims = self._victims(view)
        for place, job in enumerate(in_order(view, view.queue, self.order)):
            devices = finder.find(space, job, self.sizes(job.job))
            if devices is None and place < LOOKED_AT and victims:
                stopped, devices = self._make_room(view, space, job, victims)
                finder = Finder(view, self.place) if stopped else finder
                yield from (Decision(name, None, f"for {job.name}") for name in stopped)
                victims = [(key, other) for key, other in victims if other.name not in stopped]
            if devices is not None:
                take(view, space, job, devices)
                yield Decision(job.name, devices)
            elif space.num_devices <= 0 and (place >= LOOKED_AT or not victims):
                return

    def _victims(self, view: View) -> list[tuple[float, JobState]]:
        """Running jobs that may be stopped, with their keys, the largest first; never one whose key is negative."""
        settled = [job for job in view.active if view.now_s - job.since_s >= self.min_run_s and job.phase == "running"]
        keyed = zip(self.order(view, settled), settled, strict=True)
        return sorted(((key, job) for key, job in keyed if key > 0), key=lambda pair: -pair[0])

    def _make_room(
        self, view: View, space: Space, job: JobState, victims: list[tuple[float, JobState]]
    ) -> tuple[list[str], Devices | None]:
        """Jobs to be stopped for `job`, taken out of `space`, and its place then; none if that is no use."""
        (mine,) = self.order(view, [job])
        trial, stopped = space.copy(), list[JobState]()
        for key, other in victims:
            if key <= self.factor * mine:
                break
            assert other.placement is not None
            trial.give(other.placement, other.phase)
            stopped.append(other)
            if trial.num_devices < job.job.min_devices:
                continue
            if devices := Finder(view, self.place).find(trial, job, self.sizes(job.job)):
                needed = [o for o in stopped if {s for s, _ in devices} & set(o.placement.sites if o.placement else ())]
                for victim in needed:
                    assert victim.placement is not None
                    space.give(victim.placement, victim.phase)
                return [victim.name for victim in needed], devices
        return [], None
