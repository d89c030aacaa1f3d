"""Discrete events around the core: what a fleet's jobs, prices, links and sites do over weeks, in seconds."""

import heapq
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, TextIO

from farpipe.cost.money import SECONDS_PER_HOUR
from farpipe.fleet.commands import Cancel, Command, Migrate, Preempt, Replan, Resize, Start
from farpipe.fleet.events import Event, JobEnded, JobFailed, JobStarted, JobSubmitted, Tick
from farpipe.fleet.job import FleetJob, JobState, Phase
from farpipe.fleet.meter import JOULES_PER_KWH
from farpipe.fleet.outcome import Change, JobRecord, Outcome
from farpipe.fleet.state import FleetState

NAMES: Final[Mapping[type[Command], str]] = {
    Start: "start",
    Resize: "resize",
    Migrate: "migrate",
    Preempt: "preempt",
    Replan: "replan",
    Cancel: "cancel",
}
MAX_IDLE_S: Final = 60 * 86400.0
"""For so long a fleet that does nothing is watched for somebody to start."""
ENDS: Final = ("finish", "fail", "cancel", "refuse")
STATES: Final = {"start": "starting", "resize": "starting", "migrate": "starting", "preempt": "queued"}


@dataclass(frozen=True)
class Failures:
    """Failures of jobs; none by default."""

    device_hours: float | None = None
    """Mean device-hours between two faults, each of which stops a job; None: there are none."""
    final_share: float = 0.0
    """Of the jobs, those that end themselves at a random point of their work."""
    seed: int = 0


@dataclass
class Simulator:
    """Plays events against a state and keeps what came of it."""

    state: FleetState
    failures: Failures = Failures()
    idle_power: Mapping[str, float] = field(default_factory=dict)
    """Watts of a device that nobody has, by site."""
    log: TextIO | None = None
    after: Callable[[FleetState, Event], None] = lambda state, event: None
    """Told of every state: for checks."""

    def __post_init__(self) -> None:
        self._heap: list[tuple[float, int, int, Event, int]] = []
        self._order = count()
        self._version: dict[str, int] = {}
        self._fatal: dict[str, float] = {}
        self._draws: dict[str, random.Random] = {}
        self.records: dict[str, JobRecord] = {}
        self._idle_kwh = dict.fromkeys(self.state.sites, 0.0)
        self._idle_usd = dict.fromkeys(self.state.sites, 0.0)
        self._idle_until_s = self.state.now_s
        self._free = self.state.space().devices
        self.num_refused = 0
        self.changes: list[Change] = []

    def run(self, jobs: Sequence[FleetJob], events: Iterable[Event] = (), *, tick_s: float = 900.0) -> Outcome:
        """Play `events` and the submissions of `jobs` until every job has ended.

        With `tick_s` between two ticks the policy may think again without an event.
        """
        for job in jobs:
            self._push(JobSubmitted(job.submit_s, job))
        begin_s = jobs[0].submit_s if jobs else self.state.now_s
        feed = _Feed(sorted(events, key=lambda event: event.time_s), begin_s, tick_s)
        to_come, last_s = len(jobs), begin_s
        while to_come or self.state.jobs:
            next_s = self._heap[0][0] if self._heap else feed.next_s()
            if next_s is None or (not self._heap and next_s > last_s + MAX_IDLE_S):
                break  # nothing will ever start the jobs that still wait
            feed.bring_up_to(next_s, self._push)
            time_s, _, _, event, version = heapq.heappop(self._heap)
            name = getattr(event, "name", "")
            if name and version != self._version.get(name, 0):
                continue
            to_come -= isinstance(event, JobSubmitted)
            self._play(event)
            last_s = time_s if self.state.closed else last_s
        return self._outcome(begin_s, last_s)

    def _push(self, event: Event, version: int = 0) -> None:
        rank = 1 if isinstance(event, Tick) else 0
        heapq.heappush(self._heap, (event.time_s, rank, next(self._order), event, version))

    def _play(self, event: Event) -> None:
        before = self.state.jobs
        self._count_idle(event.time_s)
        self.state, commands = self.state.handle(event)
        self._free = self.state.space().devices
        self.num_refused += len(self.state.refusals)
        self._write_fact(event)
        for why in self.state.refusals:
            self._write_line(self.state.now_s, "reject", "", None, why=why)
        for command in commands:
            self._write_command(command)
        for name in dict.fromkeys((getattr(event, "name", ""), *(command.name for command in commands))):
            job = self.state.jobs.get(name)
            if job is not None and job is not before.get(name):
                self._schedule(job)
        self.after(self.state, event)

    def _schedule(self, job: JobState) -> None:
        """The next thing that this job does by itself."""
        version = self._version[job.name] = self._version.get(job.name, 0) + 1
        if job.placement is None:
            return
        if job.phase == "starting":
            self._push(JobStarted(job.since_s + job.placement.startup_s, job.name), version)
            return
        end_s = job.end_s()
        assert end_s is not None
        found = self._fault(job)
        self._push(found if found and found.time_s < end_s else JobEnded(end_s, job.name), version)

    def _fault(self, job: JobState) -> JobFailed | None:
        """The first fault of a job that goes on as it is: its own end, or a device's."""
        assert job.placement is not None
        draw = self._draws.setdefault(job.name, random.Random(f"{self.failures.seed} {job.name}"))
        if job.name not in self._fatal:
            fails = draw.random() < self.failures.final_share
            self._fatal[job.name] = draw.random() * job.job.num_steps if fails else float("inf")
        own_s = job.since_s + max(0.0, self._fatal[job.name] - job.num_done) * job.placement.step_s
        found = JobFailed(own_s, job.name, is_final=True) if own_s < float("inf") else None
        if self.failures.device_hours is None:
            return found
        hours = draw.expovariate(job.placement.num_devices / self.failures.device_hours)
        time_s = job.since_s + hours * SECONDS_PER_HOUR
        lost_s = min(time_s - job.since_s, draw.random() * self.state.world.stops.checkpoint_every_s)
        fault = JobFailed(time_s, job.name, num_lost=lost_s / job.placement.step_s)
        return found if found and found.time_s < time_s else fault

    def _count_idle(self, now_s: float) -> None:
        """Energy of the devices that nobody has had since the last event."""
        seconds, self._idle_until_s = now_s - self._idle_until_s, now_s
        if seconds <= 0:
            return
        for site, watts in self.idle_power.items():
            tariff = self.state.tariffs[site]
            kwh = max(0, self._free[site]) * watts * tariff.pue * seconds / JOULES_PER_KWH
            self._idle_kwh[site] += kwh
            self._idle_usd[site] += kwh / 1e3 * tariff.price.usd_per_mwh

    def _write_fact(self, event: Event) -> None:
        """Write down what the event itself says of a job."""
        if isinstance(event, JobSubmitted):
            record = self.records.setdefault(event.job.name, JobRecord(event.job))
            record.states.append((event.time_s, "queued"))
            self._write(event.time_s, "submit", event.job.name, None)
        elif isinstance(event, JobStarted):
            self._note(event.name, "run", "running")
        for job in self.state.closed:
            record = self.records[job.name]
            record.final = job
            finished = isinstance(event, JobEnded)
            record.finished_s = event.time_s if finished else None
            what = "finish" if finished else "fail" if isinstance(event, JobFailed) else "cancel"
            record.states.append((event.time_s, what))
            self._write(event.time_s, what, job.name, None)
        if isinstance(event, JobFailed) and not event.is_final:
            self._note(event.name, "fail", "queued")

    def _write_command(self, command: Command) -> None:
        what = NAMES[type(command)]
        if command.name in self.records and isinstance(command, Cancel):
            if not self.state.closed:
                self.records[command.name].states.append((self.state.now_s, "refused"))
                self.records[command.name].refused = command.why
                self._write(self.state.now_s, "refuse", command.name, None, why=command.why)
            return
        self._note(command.name, what, STATES.get(what, "running"))

    def _note(self, name: str, what: str, state: str) -> None:
        self.records[name].states.append((self.state.now_s, state))
        self._write(self.state.now_s, what, name, self.state.jobs.get(name))

    def _write(self, time_s: float, what: str, name: str, job: JobState | None, **more: Any) -> None:
        """Keep the state that begins for this job and write it to OUT.jsonl."""
        placement = job.placement if job else None
        phase: Phase = job.phase if job else "queued"
        devices, rates = (dict(placement.devices), placement.links(phase)) if placement else ({}, {})
        known = job or self.records[name].final
        self.changes.append(
            Change(time_s, name, devices, phase == "starting", rates, known.spent.total_usd if known else 0.0)
        )
        self._write_line(time_s, what, name, job, **more)

    def _write_line(self, time_s: float, what: str, name: str, job: JobState | None, **more: Any) -> None:
        if self.log is None:
            return
        placement = job.placement if job else None
        phase: Phase = job.phase if job else "queued"
        line = {
            "time_s": time_s,
            "event": what,
            "job": name,
            "phase": phase if job else "ended" if what in ENDS else "queued",
            "devices": dict(placement.devices) if placement else {},
            "reserved_bytes_per_s": dict(placement.links(phase)) if placement else {},
            "step_s": placement.step_s if placement and phase == "running" else None,
            "power_w": dict(placement.power_w) if placement else {},
        }
        self.log.write(json.dumps(line | more) + "\n")

    def _outcome(self, begin_s: float, end_s: float) -> Outcome:
        for name, job in self.state.jobs.items():
            self.records[name].final = job
        return Outcome(
            policy=self.state.policy.name,
            records=list(self.records.values()),
            begin_s=begin_s,
            end_s=max(end_s, begin_s),
            num_devices={name: site.num_devices for name, site in self.state.sites.items()},
            idle_energy_kwh=self._idle_kwh,
            idle_usd=self._idle_usd,
            changes=self.changes,
            link_bytes_per_s=dict(self.state.rates),
            num_refused=self.num_refused,
        )


class _Feed:
    """Outside events and ticks, handed over no earlier than they are needed: the series of a year are long."""

    def __init__(self, events: Sequence[Event], begin_s: float, tick_s: float) -> None:
        self._events: Iterator[Event] = iter(events)
        self._next = next(self._events, None)
        self._tick_s, self._next_tick_s = tick_s, begin_s + tick_s

    def next_s(self) -> float | None:
        """Time of the next of them; None: there is none any more."""
        ticks = [self._next_tick_s] if self._tick_s else []
        return min([*ticks, *([self._next.time_s] if self._next else [])], default=None)

    def bring_up_to(self, time_s: float, push: Callable[[Event], None]) -> None:
        """All that happens up to `time_s`."""
        while self._next is not None and self._next.time_s <= time_s:
            push(self._next)
            self._next = next(self._events, None)
        if self._tick_s and self._next_tick_s <= time_s:
            push(Tick(self._next_tick_s))
            while self._next_tick_s <= time_s:
                self._next_tick_s += self._tick_s
