"""Draft of one decision of farpipe's policy while it is being made: who gets which devices."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from farpipe.cost.money import SECONDS_PER_HOUR
from farpipe.fleet.job import JobPlacement, JobState, Kind, sizes
from farpipe.fleet.policies.places import alone, is_stall_free, wide
from farpipe.fleet.policies.protocol import Decision, View
from farpipe.fleet.policies.worth import Worth
from farpipe.fleet.quotes import Devices
from farpipe.fleet.snapshot import Space


class DecisionDraft:
    """The free space of a decision, what has been decided, and where a job would go best."""

    def __init__(self, view: View, worth: Worth) -> None:
        self._view, self._worth = view, worth
        self.space = view.space()
        self._largest_site = max((site.usable for site in view.state.sites.values()), default=0)
        self._num_free: int | None = None
        self._unplaced: set[tuple[Kind, int, int]] = set()
        self._failed: set[tuple[Kind, int]] = set()
        self._failed_across: set[tuple[Kind, int]] = set()
        self._no_room: dict[Kind, int] = {}
        self._decided: list[Decision] = []
        self.changed: set[str] = set()

    @property
    def num_free(self) -> int:
        """Devices that nobody has."""
        if self._num_free is None:
            self._num_free = self.space.num_devices
        return self._num_free

    def decisions(self) -> Iterator[Decision]:
        """The decisions made so far, in the order in which they are possible."""
        return iter(self._decided)

    def start(self, job: JobState) -> bool:
        """Start a queued job where it is worth most; false if there is no place."""
        alike = job.job.kind, job.job.min_devices, job.job.max_devices
        if alike in self._unplaced and job.stored_at is None:
            return False
        found = self.best(self.space, job, sizes(job.job))
        if found is None:
            self._unplaced.add(alike)
            return False
        self.space.take(found, "starting")
        self.decide(job, found.devices)
        return True

    def decide(self, job: JobState, devices: Devices | None, why: str = "") -> None:
        """Note the decision about `job`."""
        self._decided.append(Decision(job.name, devices, why))
        self.changed.add(job.name)
        self._num_free = None

    def best(self, space: Space, job: JobState, numbers: Sequence[int]) -> JobPlacement | None:
        """The size and place that are worth most; over several sites only sizes for which no site has room now."""
        found = list[JobPlacement]()
        largest = max(space.devices.values(), default=0)
        for number in numbers:
            if number > largest or (space is self.space and self._has_failed(job, number)):
                continue
            placed = [p for devices in alone(space, number) if (p := self._view.start(space, job, devices))]
            found += placed
            if not placed and space is self.space:
                self._failed.add((job.job.kind, number))
        most = max((placement.num_devices for placement in found), default=0)
        if larger := [number for number in numbers if number > most]:
            found += self._across(space, job, larger)
        return self._worth.best(job, found)

    def _across(self, space: Space, job: JobState, numbers: Sequence[int]) -> list[JobPlacement]:
        """Places over several sites, of all sizes."""
        key = job.job.kind, min(numbers)
        if space is self.space and key in self._failed_across and job.stored_at is None:
            return []
        found = [placement for number in numbers for placement in self._wide(space, job, number)]
        if not found and space is self.space:
            self._failed_across.add(key)
        return found

    def _has_failed(self, job: JobState, number: int) -> bool:
        """True if a job of this kind found no place before: the space only gets fuller."""
        return (job.job.kind, number) in self._failed and job.stored_at is None

    def _wide(self, space: Space, job: JobState, number: int) -> Iterator[JobPlacement]:
        """Pipelines over sites; those that links slow only if all would be slowed in an empty fleet, one site too."""
        stalls = not self._view.fits_alone(job.job) and not self._can_flow(job, number)
        for devices in wide(self._view, space, job, number, self._view.usd_per_mwh):
            if stalls or is_stall_free(self._view, space, job, devices):
                placement = self._view.start(space, job, devices)
                if placement is not None:
                    yield placement

    def _can_flow(self, job: JobState, number: int) -> bool:
        """True if there is a pipeline, were the fleet all its own, whose links never slow the job."""
        empty = self._view.empty
        found = wide(self._view, empty, job, number, self._view.usd_per_mwh)
        return any(is_stall_free(self._view, empty, job, devices) for devices in found)

    def make_room(self, job: JobState, victims: Sequence[JobState], *, at_any_cost: bool = False) -> bool:
        """Stop as few of `victims`, from the first on, as let `job` start; each goes on smaller if there is room.

        Nobody is stopped if waiting for the next devices costs less, unless `at_any_cost`.
        """
        least, kind = job.job.min_devices, job.job.kind
        if least >= self._no_room.get(kind, least + 1):
            return False  # it failed for one with more to stop
        trial, stopped = self.space.copy(), list[JobState]()
        for other in victims:
            assert other.placement is not None
            trial.give(other.placement, other.phase)
            stopped.append(other)
            if trial.num_devices < least or max(trial.devices.values()) < min(least, self._largest_site):
                continue
            found = self.best(trial, job, sizes(job.job))
            if found is not None:
                needed = [o for o in stopped if o.placement and set(found.sites) & set(o.placement.sites)]
                swap = self._swapped(found, needed)
                if at_any_cost or self._repays(job, swap):
                    self._accept(job, swap)
                    return True
                return False
        self._no_room[kind] = least
        return False

    def _swapped(self, found: JobPlacement, victims: Sequence[JobState]) -> "_Swap":
        """The space and the victims' places once the placement `found` has taken what they had."""
        space = self.space.copy()
        for victim in victims:
            assert victim.placement is not None
            space.give(victim.placement, victim.phase)
        space.take(found, "starting")
        after = list[tuple[JobState, JobPlacement | None]]()
        for victim in victims:
            smaller = self.best(space, victim, sizes(victim.job))
            if smaller is not None:
                space.take(smaller, "starting")
            after.append((victim, smaller))
        return _Swap(space, found, after)

    def _accept(self, job: JobState, swap: "_Swap") -> None:
        self.space = swap.space
        self._unplaced.clear()
        self._failed.clear()
        self._failed_across.clear()
        for victim, smaller in swap.after:
            self.decide(victim, smaller.devices if smaller else None, f"for {job.name}")
        self.decide(job, swap.found.devices)

    def _repays(self, job: JobState, swap: "_Swap") -> bool:
        """True if the wait that `job` is spared is worth more than the stops of the others cost."""
        usd, worth = 0.0, self._worth
        for victim, after in swap.after:
            here = victim.placement
            assert here is not None
            stop_s = after.startup_s if after else self._view.stop_s(victim, here)
            usd += stop_s / SECONDS_PER_HOUR * (worth.usd_per_h(after or here) + worth.hour_usd)
            usd += worth.transfer_usd(after) if after else 0.0
        return self._wait_s(job) / SECONDS_PER_HOUR * worth.hour_usd > usd

    def _wait_s(self, job: JobState) -> float:
        """Seconds until running jobs have ended whose devices, at one site, are enough for `job`: it waits no less."""
        least = min(job.job.min_devices, self._largest_site)
        free = dict(self.space.devices)
        for end_s, name, devices in self._ends:
            for site, number in devices if name not in self.changed else ():
                free[site] += number
                if free[site] >= least:
                    return end_s - self._view.now_s
        return math.inf

    @cached_property
    def _ends(self) -> list[tuple[float, str, Devices]]:
        """Times at which the devices of running jobs get free, the earliest first."""
        return sorted(
            (job.end_s() or 0.0, job.name, job.placement.devices) for job in self._view.active if job.placement
        )


class _Swap(NamedTuple):
    """A queued job in the place of running ones."""

    space: Space
    found: JobPlacement
    after: Sequence[tuple[JobState, JobPlacement | None]]
    """The jobs that are stopped, and on what they go on; None: in the queue."""
