"""farpipe's own policy: order, size, place and time together, for all money or for the kinds that are asked for.

Least time left first, wide jobs a little later, with preemption; of all sizes and places the one whose money and time
are worth most; running jobs move, grow and shrink when that repays the stop. Nobody's total time in the queue goes
beyond a bound as long as others can be stopped.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from farpipe.fleet.job import JobPlacement, JobState, sizes
from farpipe.fleet.policies.draft import DecisionDraft
from farpipe.fleet.policies.orders import by_arrival, by_work_left, tenants_excess
from farpipe.fleet.policies.protocol import Decision, View
from farpipe.fleet.policies.queueing import LOOKED_AT
from farpipe.fleet.policies.worth import Objective, Worth
from farpipe.fleet.snapshot import Space
from farpipe.planning.cost.money import SECONDS_PER_HOUR

URGENT = -1e18
"""Added to the key of a job that has waited too long: it goes first, the longest wait before the others."""
DEADLINE_S, DEADLINE_SHARE = 3600.0, 0.25
"""A job goes first when its deadline leaves no more than so long, and this share of its rest, to spare. One that can't
be met any more changes nothing."""
WIDTH_POWER = 0.25
"""Power of its devices by which the seconds that a job has left are multiplied for its place in the queue: 0 is the
order of SRTF, 1 that of work, under which wide jobs wait for long where no links carry them over several sites."""
STOP_SHARE = 10.0
"""Restarts by which the rest of a stopped job has to exceed that of the other."""
REVIEW_S = 900.0
"""Seconds of the clock in the first decision of which moves and growth are looked for."""
MIN_RUN_S = 1800.0
"""A job that has just begun stays where it is."""


@dataclass(frozen=True)
class FarpipePolicy:
    """The default policy; every ingredient can be switched off by its parameter."""

    name: str = "farpipe"
    electricity_only: bool = False
    """The objective of BACE-Pipe: completion time and electricity, whatever rent and egress cost."""
    carbon_usd_per_t: float = 0.0
    """Price of carbon, as part of the money."""
    hour_value: float = 128.0
    """Device-hours that an hour of a job's completion time is worth."""
    order: Literal["rest", "work", "arrival"] = "rest"
    """Order of the queue: least time left first, wide jobs a little later; least work left; or first come first."""
    sees_prices: bool = True
    """True if places are chosen by their prices; else by time alone."""
    preempts: bool = True
    factor: float = 1.5
    """A running job is stopped for one whose rest is less work by this factor."""
    moves_per_event: int = 8
    grows: bool = True
    moves: bool = True
    fairness: float = 0.0
    """Weight by which jobs of a tenant with more than its share of devices in use come later; 0: not at all."""
    tenant_shares: tuple[tuple[str, float], ...] = ()
    """Weights of the tenants' shares; those that are not named have 1."""
    max_queued_s: float = 30 * 24 * 3600.0
    """Bound on the total time in the queue: a job that has waited longer goes first."""

    @property
    def objective(self) -> Objective:
        """The objective to be minimised."""
        hour_value = self.hour_value if self.sees_prices else 1e9
        return Objective(
            rent=not self.electricity_only,
            egress=not self.electricity_only,
            carbon_usd_per_t=self.carbon_usd_per_t,
            hour_value=hour_value,
        )

    @property
    def _width_power(self) -> float:
        return WIDTH_POWER if self.order == "rest" else 1.0

    def decide(self, view: View) -> Iterator[Decision]:
        is_due = view.now_s // REVIEW_S > view.state.decided_s // REVIEW_S
        if not view.queue and not is_due:
            return
        worth = Worth(view, self.objective)
        draft = DecisionDraft(view, worth)
        waiting = self._start_queued(view, draft)
        yield from draft.decisions()
        if is_due and not waiting:
            yield from improved(view, worth, draft, AllowedChanges(self.moves_per_event, self.grows, self.moves))

    def _start_queued(self, view: View, draft: DecisionDraft) -> int:
        """Start who can be started, and stop who has to make room; how many still want to start."""
        if not view.queue:
            return 0
        queue = sorted(zip(self.keys(view, view.queue), range(len(view.queue)), view.queue, strict=True))
        settled, num_left = _settled(view), 0
        victims: list[_Victim] | None = None if self.preempts else []
        for place, (key, _, job) in enumerate(queue):
            if draft.start(job):
                continue
            if place < LOOKED_AT and self.moves and draft.gather(job, settled):
                continue
            num_left += 1
            least = max(key, self.factor * key)
            victims = self._victims(view, settled, least) if victims is None else victims
            if place < LOOKED_AT and victims:
                late = [
                    victim.job
                    for victim in victims
                    if victim.key > least + victim.stop_key and victim.job.name not in draft.changed
                ]
                draft.make_room(job, late, at_any_cost=key < 0)
            elif place >= LOOKED_AT and draft.num_free <= 0:
                break
        return num_left

    def _victims(self, view: View, settled: Sequence[JobState], least: float) -> "list[_Victim]":
        """Running jobs with keys above `least` that may be stopped, the largest first; never one that was urgent."""
        keyed, least = zip(self.keys(view, settled), settled, strict=True), max(least, 0.0)
        found = [_Victim(key, job, _stop_key(view, job, self._width_power)) for key, job in keyed if key > least]
        return sorted(found, key=lambda victim: -victim.key)

    def keys(self, view: View, jobs: Sequence[JobState]) -> list[float]:
        """Keys of `jobs`: the work left, the least first; jobs that have waited for too long come before all others."""
        keys = by_arrival(view, jobs) if self.order == "arrival" else by_work_left(view, jobs, self._width_power)
        if self.fairness > 0:
            excess = tenants_excess(view, dict(self.tenant_shares))
            keys = [
                key * (1 + self.fairness * excess.get(job.job.tenant, 0.0)) for key, job in zip(keys, jobs, strict=True)
            ]
        return [
            (self._urgency(view, job) or key) if self._may_be_urgent(view, job) else key
            for key, job in zip(keys, jobs, strict=True)
        ]

    def _may_be_urgent(self, view: View, job: JobState) -> bool:
        """False for most jobs; the queue is long."""
        return job.job.deadline_s is not None or view.now_s - job.since_s + job.queued_s > self.max_queued_s

    def _urgency(self, view: View, job: JobState) -> float | None:
        """The key of a job that goes before others: it has waited for too long, or its deadline is near."""
        if (wait := job.total_queued_s(view.now_s)) > self.max_queued_s:
            return URGENT - wait
        if job.job.deadline_s is None:
            return None
        left_s = job.left_at(view.now_s) * view.best_step_s(job.job)
        slack_s = job.job.deadline_s - view.now_s - left_s
        return URGENT / 2 + slack_s if 0 <= slack_s <= DEADLINE_SHARE * left_s + DEADLINE_S else None


class _Victim(NamedTuple):
    """A running job that may be stopped for another."""

    key: float
    job: JobState
    stop_key: float


def _stop_key(view: View, job: JobState, power: float) -> float:
    """Least gain, in the unit of keys, for which a job is stopped for another."""
    number = job.placement.num_devices if job.placement else 0
    return STOP_SHARE * view.state.world.stops.restart_s * float(number**power)


class AllowedChanges(NamedTuple):
    """Changes that running jobs may be put through."""

    moves_per_event: int
    grows: bool
    moves: bool

    def sizes(self, job: JobState) -> Sequence[int]:
        """Numbers of devices that a running job may get."""
        return sizes(job.job) if self.grows or not job.placement else [job.placement.num_devices]


def _settled(view: View) -> list[JobState]:
    """Running jobs that have not just begun."""
    return [job for job in view.active if job.phase == "running" and view.now_s - job.since_s >= MIN_RUN_S]


def improved(view: View, worth: Worth, draft: DecisionDraft, limits: AllowedChanges) -> Iterator[Decision]:
    """Moves and growth that repay their stops, the jobs with least work left first."""
    running = [job for job in _settled(view) if job.name not in draft.changed]
    before, fuller, rejected = worth.rejected(draft.space, limits)
    for job in running:
        is_known = before.get(job.name) is job
        is_same = is_known and fuller is None
        if is_same or not _may_repay(view, worth, draft, limits, job, fuller if is_known else None):
            rejected[job.name] = job
    if all(rejected.get(job.name) is job for job in running):
        return
    left = limits.moves_per_event
    for _, _, job in sorted(zip(by_work_left(view, running), range(len(running)), running, strict=True)):
        if left <= 0:
            return
        if left == limits.moves_per_event:  # the space is that of above
            may_repay = rejected.get(job.name) is not job
        else:
            may_repay = _may_repay(view, worth, draft, limits, job)
        if not may_repay:
            continue
        better = _better(view, worth, draft, limits, job)
        if better is not None:
            left -= 1
            yield Decision(job.name, better.devices, "worth more there")


def _better(
    view: View, worth: Worth, draft: DecisionDraft, limits: AllowedChanges, job: JobState
) -> JobPlacement | None:
    """The best other placement if it repays the stop, taken out of the space."""
    here = job.placement
    assert here is not None
    trial = _without(draft.space, job)
    there = draft.best(trial, job, limits.sizes(job))
    if there is None or there.devices == here.devices:
        return None
    if not _repays(view, worth, job, here, there, there.startup_s or view.stop_s(job, there.num_devices)):
        return None
    if not limits.moves and set(there.sites) != set(here.sites):
        return None
    trial.take(there, "starting")
    draft.become(trial)
    return there


def _without(space: Space, job: JobState) -> Space:
    """The space once `job` has left it."""
    assert job.placement is not None
    trial = space.copy()
    trial.give(job.placement, job.phase)
    return trial


def _may_repay(
    view: View,
    worth: Worth,
    draft: DecisionDraft,
    limits: AllowedChanges,
    job: JobState,
    fuller: Sequence[str] | None = None,
) -> bool:
    """False only if no place repays the least that a stop for it takes; looking at all of them in full is dear.

    Of sites only those of `fuller` are looked at, if that is given. Sizes that the job can have where it is are not
    looked for over several.
    """
    here, free, numbers = job.placement, draft.space.devices, limits.sizes(job)
    assert here is not None
    sites = {*draft.room, *here.sites} if fuller is None else fuller
    if sites and _may_repay_alone(view, worth, draft, job, numbers, sites):
        return True
    home, held = here.devices[0]
    fit = (n for n in numbers if n <= free[home] + held and home in view.at_one_site(job.job.kind, n))
    most = next(fit, 0)
    able = [number for number in numbers if number > most and draft.has_links(job, number)]
    return bool(able) and any(map(partial(draft.may_cross, _without(draft.space, job), job), able))


def _may_repay_alone(
    view: View, worth: Worth, draft: DecisionDraft, job: JobState, numbers: Sequence[int], sites: Collection[str]
) -> bool:
    """False only if no place at one of `sites` repays the least that a stop for it takes.

    What is saved is counted a little too high, for `_repays` rounds in another order.
    """
    here, free = job.placement, draft.space.devices
    assert here is not None
    now = worth.hour_at(here) * here.step_s if len(here.devices) == 1 else worth.of_step(here)
    held = dict(here.devices)
    for number in numbers:
        for of_step, site, there in worth.ranked(job.job.kind, number):
            saved = now * (1 + 1e-9) - of_step
            if saved <= 0 <= of_step:
                break
            has_room = site in sites and number <= free[site] + held.get(site, 0)
            if has_room and _may_repay_at(view, worth, job, saved, there):
                return True
    return False


def _may_repay_at(view: View, worth: Worth, job: JobState, saved: float, there: JobPlacement) -> bool:
    """False only if what a step saves does not repay a stop for a place at one site, were the widest link free."""
    assert job.placement is not None
    usd_per_h, step_s, moves = worth.hour_at(there), job.placement.step_s, there.sites[0] != job.stop_site
    hours = min(job.left_at(view.now_s) * step_s, worth.objective.horizon_s) / SECONDS_PER_HOUR / step_s
    stop_h = view.stop_s(job, there.num_devices, moves=moves) / SECONDS_PER_HOUR
    return usd_per_h < 0 or saved * hours > 2 * stop_h * usd_per_h


def _repays(view: View, worth: Worth, job: JobState, here: JobPlacement, there: JobPlacement, stop_s: float) -> bool:
    """True if what the rest saves within the horizon is at least twice what a stop of `stop_s` seconds costs."""
    seconds = min(job.left_at(view.now_s) * here.step_s, worth.objective.horizon_s)
    saved = (worth.of_step(here) - worth.of_step(there)) / here.step_s * seconds
    stop_usd = stop_s / SECONDS_PER_HOUR * (worth.usd_per_h(there) + worth.hour_usd) + worth.transfer_usd(there)
    return saved / SECONDS_PER_HOUR > 2 * stop_usd
