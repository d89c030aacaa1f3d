"""farpipe's own policy: order, size, place and time together, for all money or for the kinds that are asked for.

Least remaining time first, with preemption; each job where a step is cheapest; running jobs move to cheaper sites when
that repays the stop; they grow when nobody waits and it costs no more a step; a job may wait for cheap hours within a
share of its run time. Nobody's total time in the queue goes beyond a bound as long as others can be stopped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from farpipe.cost.money import SECONDS_PER_HOUR
from farpipe.fleet.job import JobState, Placement
from farpipe.fleet.policies.orders import by_what_is_left
from farpipe.fleet.policies.paths import across, alone, is_stall_free
from farpipe.fleet.policies.places import MAX_SITES, electricity_usd_per_h, money_usd_per_h
from farpipe.fleet.policies.preemptive import PreemptivePolicy
from farpipe.fleet.policies.protocol import Decision, View
from farpipe.fleet.policies.sizes import sizes
from farpipe.fleet.quotes import Devices
from farpipe.fleet.space import Space

URGENT = -1e18
"""Added to the key of a job that has waited too long: it goes first, the longest wait before the others."""


@dataclass(frozen=True)
class OwnPolicy:
    """The default policy; every ingredient can be switched off by its parameter."""

    name: str = "farpipe"
    electricity_only: bool = False
    """The objective of BACE-Pipe: completion time and electricity, whatever rent and egress cost."""
    preempts: bool = True
    factor: float = 2.0
    """A running job is stopped for one whose rest is shorter by this factor."""
    move_saving: float = 0.1
    """Share of the cost of a job's rest that a move has to save; 1: none moves."""
    moves_per_event: int = 2
    grows: bool = True
    wait_share: float = 0.05
    """Of its run time a job may wait for cheap hours; 0: it never does."""
    max_queued_s: float = 7 * 24 * 3600.0
    """Who has waited for so long in all goes first."""

    def decide(self, view: View) -> Iterator[Decision]:
        """As in `Policy`."""
        started = PreemptivePolicy(
            self.name, self._keys, self._place, sizes, self.factor if self.preempts else float("inf")
        )
        touched = set()
        for decision in started.decide(_Patient(view, self)):
            touched.add(decision.name)
            yield decision
        if not touched and not view.queue:
            yield from self._improved(view)

    def _keys(self, view: View, jobs: Sequence[JobState]) -> list[float]:
        keys = by_what_is_left(view, jobs)
        waits = [job.total_queued_s(view.now_s) for job in jobs]
        late = [wait > self.max_queued_s for wait in waits]
        return [URGENT - wait if is_late else key for key, wait, is_late in zip(keys, waits, late, strict=True)]

    def _place(self, view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
        best = self._cheapest(view, space, job, num_devices)
        return best.devices if best else None

    def _cheapest(self, view: View, space: Space, job: JobState, num_devices: int) -> Placement | None:
        """The place where a step costs least; over several sites only where none can hold the job alone."""
        found = [p for devices in alone(space, num_devices) if (p := view.start(space, job, devices))]
        if not found:
            wide = across(view, space, num_devices, MAX_SITES, view.usd_per_mwh)
            free = (devices for devices in wide if is_stall_free(view, space, job, devices))
            found = [p for devices in free if (p := view.start(space, job, devices))]
        return min(found, key=lambda p: (self.usd_per_step(view, p), p.step_s, p.devices), default=None)

    def usd_per_step(self, view: View, placement: Placement) -> float:
        """What a step costs at the present prices."""
        hourly = electricity_usd_per_h if self.electricity_only else money_usd_per_h
        return hourly(view, placement) * placement.step_s / SECONDS_PER_HOUR

    def _improved(self, view: View) -> Iterator[Decision]:
        """Moves and growth of running jobs, the largest first; only where the stop is repaid."""
        space, left = view.space(), self.moves_per_event
        running = [job for job in view.active if job.phase == "running"]
        for job in sorted(running, key=lambda job: -(job.placement.num_devices if job.placement else 0)):
            if left <= 0:
                return
            better = self._better(view, space, job)
            if better is not None:
                left -= 1
                yield Decision(job.name, better.devices, "cheaper or faster there")

    def _better(self, view: View, space: Space, job: JobState) -> Placement | None:
        """A place that is worth a stop, taken out of `space`."""
        here = job.placement
        assert here is not None
        trial = space.copy()
        trial.give(here, job.phase)
        numbers = [n for n in sizes(job.job) if n >= here.num_devices] if self.grows else [here.num_devices]
        for number in numbers:
            there = self._cheapest(view, trial, job, number)
            if there is not None and there.devices != here.devices and self._repays(view, job, here, there):
                trial.take(there, "starting")
                space.devices, space.rates = trial.devices, trial.rates
                return there
        return None

    def _repays(self, view: View, job: JobState, here: Placement, there: Placement) -> bool:
        """Whether the rest is cheaper by a margin there, or no dearer and sooner done, the stop included."""
        stop_s = view.stop_s(job, there)
        steps = job.left_at(view.now_s)
        now = self.usd_per_step(view, here) * steps
        then = self.usd_per_step(view, there) * (steps + stop_s / there.step_s)
        sooner = stop_s + steps * there.step_s < 0.9 * steps * here.step_s
        cheaper = then < now - self.move_saving * abs(now)
        return (cheaper and stop_s < 0.05 * steps * there.step_s) or (sooner and self.grows and then <= now)


class _Patient(View):
    """A view whose queue lacks the jobs that had better wait for a cheaper hour."""

    def __init__(self, view: View, policy: OwnPolicy) -> None:
        super().__init__(view.state)
        self._policy = policy
        self.__dict__["queue"] = [job for job in view.queue if not self._waits(job)]

    def _waits(self, job: JobState) -> bool:
        share = self._policy.wait_share
        if share <= 0 or job.num_starts:
            return False
        run_s = job.job.num_steps * self.best_step_s(job.job)
        budget_s = share * run_s - job.total_queued_s(self.now_s)
        if budget_s < SECONDS_PER_HOUR:
            return False
        now = min(self.usd_per_mwh(site) for site in self.state.sites)
        hours = int(budget_s // SECONDS_PER_HOUR)
        coming = min((self.forecast(site, hours) for site in self.state.sites), default=now)
        return coming < 0.7 * now
