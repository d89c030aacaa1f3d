"""Draft of one decision of farpipe's policy while it is being made: who gets which devices."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from farpipe.fleet.job import JobPlacement, JobState, Kind, sizes
from farpipe.fleet.policies.places import alone, has_room, is_stall_free, max_sites, wide
from farpipe.fleet.policies.protocol import Decision, View
from farpipe.fleet.policies.worth import Worth
from farpipe.fleet.quotes import Devices
from farpipe.fleet.snapshot import Space
from farpipe.planning.cost.money import SECONDS_PER_HOUR


class DecisionDraft:
    """The free space of a decision, what has been decided, and where a job would go best."""

    def __init__(self, view: View, worth: Worth) -> None:
        self._view, self._worth = view, worth
        self.space = view.space()
        self._largest_site = max((site.usable for site in view.state.sites.values()), default=0)
        self._num_free: int | None = None
        self._room: dict[str, int] | None = None
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

    @property
    def room(self) -> dict[str, int]:
        """Sites with free devices, and their number."""
        if self._room is None:
            self._room = {site: number for site, number in self.space.devices.items() if number > 0}
        return self._room

    def decisions(self) -> Iterator[Decision]:
        """The decisions made so far, in the order in which they are possible."""
        return iter(self._decided)

    def start(self, job: JobState) -> bool:
        """Start a queued job where it is worth most; false if there is no place."""
        alike = job.job.kind, job.job.min_devices, job.job.max_devices
        if alike in self._unplaced or job.job.min_devices > self.num_free:
            return False
        found = self.best(self.space, job, sizes(job.job))
        if found is None:
            if job.stored_at is None:  # where a checkpoint lies is the job's own affair
                self._unplaced.add(alike)
            return False
        if found.moved_bytes and self._home_s(job) < found.startup_s:
            return False
        self.space.take(found, "starting")
        self.decide(job, found.devices)
        return True

    def decide(self, job: JobState, devices: Devices | None, why: str = "") -> None:
        """Note the decision about `job`."""
        self._decided.append(Decision(job.name, devices, why))
        self.changed.add(job.name)
        self._num_free = self._room = None

    def best(self, space: Space, job: JobState, numbers: Sequence[int]) -> JobPlacement | None:
        """The size and place that are worth most; over several sites only sizes for which no site has room now."""
        found = self._alone(space, job, numbers)
        most = found[0].num_devices if found else 0
        if larger := [number for number in numbers if number > most]:
            found += self._across(space, job, larger)
        best = self._worth.best(job, found)
        return best if best is None or job.placement else self._tightest(space, job, best)

    def _alone(self, space: Space, job: JobState, numbers: Sequence[int]) -> list[JobPlacement]:
        """Places at one site, the largest size first, without some that are worth less than another of them."""
        found, least = list[JobPlacement](), math.inf
        hours_left = job.left_at(self._view.now_s) / SECONDS_PER_HOUR
        largest = max(space.devices.values(), default=0)
        for number in numbers:
            if number > largest or (space is self.space and (job.job.kind, number) in self._failed):
                continue
            for of_step, site, _ in self._worth.ranked(job.job.kind, number):
                if of_step * hours_left > least:
                    break
                if number <= space.devices[site] and (there := self._view.start(space, job, ((site, number),))):
                    found.append(there)
                    rest = of_step * hours_left + self._worth.transfer_usd(there)
                    least = min(least, rest + 1e-9 * abs(rest))  # of_step is exact but for its last bits
            if not found and space is self.space and job.stored_at is None:
                self._failed.add((job.job.kind, number))
        return found

    @cached_property
    def _are_wide(self) -> bool:
        """True if the widest job needs more than half of the largest site: devices in pieces are of no use to it."""
        return 2 * max(job.job.min_devices for job in self._view.state.jobs.values()) > self._largest_site

    def _tightest(self, space: Space, job: JobState, best: JobPlacement) -> JobPlacement | None:
        """Best fit where jobs are wide: of the sites that are as fast as `best` one with least to spare.

        Cheaper sites come later, when nobody waits: jobs move there.
        """
        if len(best.devices) > 1 or not self._are_wide:
            return best
        found = (self._view.start(space, job, devices) for devices in alone(space, best.num_devices))
        alike = [p for p in found if p and (p.step_s, p.startup_s) == (best.step_s, best.startup_s)]
        least = min(space.devices[p.sites[0]] for p in alike)
        return self._worth.best(job, [p for p in alike if space.devices[p.sites[0]] == least])

    def become(self, space: Space) -> None:
        """Go on in another space, in which something may be possible that failed before."""
        self.space = space
        self._unplaced.clear()
        self._failed.clear()
        self._failed_across.clear()
        self._num_free = self._room = None

    def _across(self, space: Space, job: JobState, numbers: Sequence[int]) -> list[JobPlacement]:
        """Places over several sites, of all sizes."""
        key = job.job.kind, min(numbers)
        if space is self.space and key in self._failed_across:
            return []
        able = [number for number in numbers if self.may_cross(space, job, number)]
        found = [placement for number in able for placement in self._wide(space, job, number)]
        if not found and space is self.space and job.stored_at is None:
            self._failed_across.add(key)
        return found

    def may_cross(self, space: Space, job: JobState, number: int) -> bool:
        """False only if no place over several sites can be found: too little room for any, or all links too narrow."""
        return (
            self.has_links(job, number)
            and has_room(space, number, max_sites(self._view.empty.devices.values(), job.job.min_devices))
            and self.has_links(job, number, space)
        )

    def has_links(self, job: JobState, number: int, space: Space | None = None) -> bool:
        """True if some link is wide enough in `space`, or in an empty fleet, or slow ones will do for such a job."""
        needed = self._view.quotes.needed_rate(job.job.kind, number)
        widest = max(space.rates.values(), default=0.0) if space else self._view.widest
        return (needed is not None and needed <= widest) or not self._view.fits_alone(job.job)

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
        if not victims or least >= self._no_room.get(kind, least + 1):
            return False  # nobody to stop, or it failed for one with more
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
                if at_any_cost or self._repays(swap):
                    self._accept(job, swap)
                    return True
                return False
        if job.stored_at is None:
            self._no_room[kind] = least
        return False

    def gather(self, job: JobState, settled: Sequence[JobState]) -> bool:
        """Start `job` at a site from which jobs of `settled` move elsewhere and go on as fast, where jobs are wide.

        No others need to be later in the queue: they lose the time of a stop, `job` is spared its wait.
        """
        if not self._are_wide:
            return False
        here = [
            one for one in settled if one.name not in self.changed and one.placement and len(one.placement.sites) == 1
        ]
        for number in sizes(job.job) if here else ():
            if number <= self.num_free:
                swaps = [swap for site in self.space.devices for swap in self._gathered(job, ((site, number),), here)]
                if swaps:
                    best = min(swaps, key=self._stops_usd)
                    if useful := self._repays(best):
                        self._accept(job, best)
                    return useful
        return False

    def _gathered(self, job: JobState, devices: Devices, settled: Sequence[JobState]) -> "Iterator[_Swap]":
        """Swaps by which the narrowest jobs, or just the one that is wide enough, leave the site of `devices`."""
        ((site, number),) = devices
        needed, there = number - self.space.devices[site], list[tuple[int, JobState]]()
        for other in settled:
            if other.placement and other.placement.sites == (site,):
                there.append((other.placement.num_devices, other))
        there.sort(key=lambda pair: pair[0])
        sums = list(accumulate(width for width, _ in there))
        count = bisect_left(sums, needed) + 1
        alone = next((other for width, other in there if width >= needed), None)
        for movers in ([other for _, other in there[:count]], [alone] if alone else []):
            swap = self._moved(job, devices, movers) if movers and count <= len(there) else None
            if swap is not None:
                yield swap

    def _moved(self, job: JobState, devices: Devices, movers: Sequence[JobState]) -> "_Swap | None":
        """`job` on `devices`, and `movers` on as many others on which they are as fast; None if there are none."""
        space, after = self.space.copy(), list[tuple[JobState, JobPlacement | None]]()
        for mover in movers:
            assert mover.placement is not None
            space.give(mover.placement, mover.phase)
        found = self._view.start(space, job, devices)
        if found is None:
            return None
        space.take(found, "starting")
        for mover in reversed(movers):
            assert mover.placement is not None
            there = self.best(space, mover, [mover.placement.num_devices])
            if there is None or there.step_s > mover.placement.step_s:
                return None
            space.take(there, "starting")
            after.append((mover, there))
        return _Swap(space, found, after)

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
        self.become(swap.space)
        for victim, smaller in swap.after:
            self.decide(victim, smaller.devices if smaller else None, f"for {job.name}")
        self.decide(job, swap.found.devices)

    def _repays(self, swap: "_Swap") -> bool:
        """True if the wait that `job` is spared is worth more than what the stops cost the others."""
        return self._wait_s(swap.found.num_devices) / SECONDS_PER_HOUR * self._worth.hour_usd > self._stops_usd(swap)

    def _stops_usd(self, swap: "_Swap") -> float:
        """Cost of the stops of the others: restarts and transfers."""
        usd, worth = 0.0, self._worth
        for victim, after in swap.after:
            here = victim.placement
            assert here is not None
            stop_s = after.startup_s if after else self._stop_s(victim)
            usd += stop_s / SECONDS_PER_HOUR * (worth.usd_per_h(after or here) + worth.hour_usd)
            usd += worth.transfer_usd(after) if after else 0.0
        return usd

    def _stop_s(self, victim: JobState) -> float:
        """Seconds that going back to the queue takes a running job.

        Where another site could have it, the move of its checkpoint counts: those that wait go wherever devices get
        free first, it is moved there or waits for its own site.
        """
        assert victim.placement is not None
        home, sites = victim.stop_site, self._view.state.sites
        places = self._view.at_one_site(victim.job.kind, victim.job.min_devices)
        moves = any(site != home and victim.job.min_devices <= sites[site].usable for site in places)
        return self._view.stop_s(victim, victim.placement.num_devices, moves=moves)

    def _home_s(self, job: JobState) -> float:
        """Seconds until running jobs have ended whose devices are enough for `job` at the site of its checkpoint."""
        free = self.space.devices.get(job.stored_at or "", 0)
        for end_s, name, devices in self._ends:
            free += dict(devices).get(job.stored_at or "", 0) if name not in self.changed else 0
            if free >= job.job.min_devices:
                return end_s - self._view.now_s
        return math.inf

    def _wait_s(self, num_devices: int) -> float:
        """Seconds until running jobs have ended who have so many devices at one site: a job waits no less for them."""
        least = min(num_devices, self._largest_site)
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
