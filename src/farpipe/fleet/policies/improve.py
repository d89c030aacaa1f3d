"""Running jobs that had better run elsewhere, on other numbers of devices, or not at this hour."""

from collections.abc import Iterator
from typing import NamedTuple

from farpipe.cost.money import SECONDS_PER_HOUR
from farpipe.fleet.job import JobState, Placement
from farpipe.fleet.policies.orders import by_work_left
from farpipe.fleet.policies.protocol import Decision, View
from farpipe.fleet.policies.seats import Seats
from farpipe.fleet.policies.sizes import sizes
from farpipe.fleet.policies.worth import Worth

MIN_RUN_S = 1800.0
"""A job that has just begun stays where it is."""


class Limits(NamedTuple):
    """Changes that running jobs may be put through."""

    moves_per_event: int
    grows: bool
    moves: bool


def improved(view: View, worth: Worth, seats: Seats, limits: Limits) -> Iterator[Decision]:
    """Moves, growth and pauses that repay their stops, the jobs with least work left first."""
    running = [job for job in view.active if job.phase == "running" and view.now_s - job.since_s >= MIN_RUN_S]
    left = limits.moves_per_event
    for _, _, job in sorted(zip(by_work_left(view, running), range(len(running)), running, strict=True)):
        if left <= 0:
            return
        here = job.placement
        assert here is not None
        better = _better(view, worth, seats, limits, job, here)
        if better is not None:
            left -= 1
            yield Decision(job.name, better.devices, "worth more there")
        elif seats.may_wait(job) and worth.is_dear(here, 0.1) and _pays_pause(view, job, here):
            left -= 1
            seats.space.give(here, job.phase)
            yield Decision(job.name, None, "a dear hour")


def _better(view: View, worth: Worth, seats: Seats, limits: Limits, job: JobState, here: Placement) -> Placement | None:
    """The best other placement if it repays the stop, taken out of the space."""
    trial = seats.space.copy()
    trial.give(here, job.phase)
    numbers = sizes(job.job) if limits.grows else [here.num_devices]
    there = seats.best(trial, job, numbers)
    if there is None or there.devices == here.devices or not _repays(view, worth, job, here, there):
        return None
    if not limits.moves and set(there.sites) != set(here.sites):
        return None
    trial.take(there, "starting")
    seats.space.devices, seats.space.rates = trial.devices, trial.rates
    return there


def _repays(view: View, worth: Worth, job: JobState, here: Placement, there: Placement) -> bool:
    """True if what the rest saves within the horizon is at least twice what the stop costs."""
    left_s = job.left_at(view.now_s) * here.step_s
    seconds = min(left_s, worth.objective.horizon_s)
    saved = (worth.of_step(here) - worth.of_step(there)) / here.step_s * seconds
    stop_s = there.startup_s or view.stop_s(job, there)
    stop_usd = stop_s / SECONDS_PER_HOUR * (worth.usd_per_h(there) + worth.hour_usd) + worth.transfer_usd(there)
    return saved / SECONDS_PER_HOUR > 2 * stop_usd


def _pays_pause(view: View, job: JobState, here: Placement) -> bool:
    """True if the job has more than two hours left: what is done in a moment is not worth stopping."""
    return job.left_at(view.now_s) * here.step_s > 2 * SECONDS_PER_HOUR
