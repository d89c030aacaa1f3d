"""Policies that stop running jobs for the sake of queued ones."""

from collections.abc import Iterator
from dataclasses import dataclass

from farpipe.fleet.job import JobState
from farpipe.fleet.policies.orders import Keys
from farpipe.fleet.policies.places import Place
from farpipe.fleet.policies.protocol import Decision, View
from farpipe.fleet.policies.queueing import Finder, Sizes, in_order, take
from farpipe.fleet.policies.sizes import sizes
from farpipe.fleet.quotes import Devices
from farpipe.fleet.space import Space

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
        """As in `Policy`."""
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
