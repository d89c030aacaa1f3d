"""Discrete events around the core: what a fleet's jobs, prices, links and sites do over weeks, in seconds."""

import heapq
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, TextIO

from farpipe.core.errors import InputError
from farpipe.fleet.events import (
    CheckpointStored,
    Event,
    Happened,
    JobEnded,
    JobFailed,
    JobStarted,
    JobStopped,
    JobSubmitted,
    PriceChanged,
    SiteLost,
    Tick,
)
from farpipe.fleet.job import FleetJob, JobState
from farpipe.fleet.meter import JOULES_PER_KWH
from farpipe.fleet.outcome import Allocation, FleetOutcome, JobRecord
from farpipe.fleet.replacing import replace
from farpipe.fleet.snapshot import settled
from farpipe.fleet.state import FleetState
from farpipe.fleet.waiting import why_unstarted
from farpipe.planning.cost.money import SECONDS_PER_HOUR

MAX_IDLE_S: Final = 60 * 86400.0
"""Longest time in seconds that an idle fleet is simulated while jobs still wait."""
ENDS: Final = {"finish": "finish", "fail": "fail", "cancel": "cancel", "refuse": "refused"}
"""States of jobs that have ended, by what happened."""


@dataclass(frozen=True)
class Failures:
    """Failures of jobs; none by default."""

    device_hours: float | None = None
    """Mean device-hours between two faults, each of which stops a job; None: there are none."""
    final_share: float = 0.0
    """Fraction of jobs that fail permanently, at a uniformly random point of their work."""
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
    """Called with every state and the event before it: for checks, and for reasons why jobs wait."""

    def __post_init__(self) -> None:
        self._heap: list[tuple[float, int, int, Event, int]] = []
        self._order = count()
        self._version: dict[str, int] = {}
        self._fatal: dict[str, float] = {}
        self._draws: dict[str, random.Random] = {}
        self._copies: dict[str, CheckpointStored] = {}
        self.records: dict[str, JobRecord] = {}
        self._idle = self._idle_at_end = dict.fromkeys(self.state.sites, (0.0, 0.0))
        self._idle_until_s = self.state.now_s
        self.num_refused = 0
        self.changes: list[Allocation] = []
        self.prices = {site: [(self.state.now_s, t.price.usd_per_mwh)] for site, t in self.state.tariffs.items()}
        for job in self.state.jobs.values():  # a fleet that is under way goes on
            self.records[job.name] = JobRecord(job.job)
            self._schedule(job)

    def run(self, jobs: Sequence[FleetJob], events: Iterable[Event] = (), *, tick_s: float = 900.0) -> FleetOutcome:
        """Play `events` and the submissions of `jobs` until every job has ended.

        With `tick_s` between two ticks the policy may think again without an event.
        """
        for job in jobs:
            self._push(JobSubmitted(job.submit_s, job))
        begin_s = self._idle_until_s = min((job.submit_s for job in jobs), default=self.state.now_s)
        feed = _Feed(sorted(events, key=lambda event: event.time_s), begin_s, tick_s)
        to_come, last_s, busy_s = len(jobs), begin_s, begin_s
        while to_come or self.state.jobs:
            next_s = self._heap[0][0] if self._heap else feed.next_s()
            if next_s is None or (not self._heap and next_s > busy_s + MAX_IDLE_S):
                break  # nothing will ever start the jobs that still wait
            feed.bring_up_to(next_s, self._push)
            time_s, _, _, event, version = heapq.heappop(self._heap)
            name = getattr(event, "name", "")
            if name and version != self._version.get(name, 0):
                continue
            to_come -= isinstance(event, JobSubmitted)
            self._play(event)
            busy_s = time_s if name or isinstance(event, JobSubmitted) else busy_s
            if self.state.closed:
                last_s, self._idle_at_end = time_s, self._idle
        return self._outcome(begin_s, last_s)

    def _push_own(self, event: Event, version: int) -> None:
        """What a job does by itself; at once if that is overdue."""
        self._push(replace(event, time_s=max(event.time_s, self.state.now_s)), version)

    def _push(self, event: Event, version: int = 0) -> None:
        rank = 1 if isinstance(event, Tick) else 0
        heapq.heappush(self._heap, (event.time_s, rank, next(self._order), event, version))

    def _play(self, event: Event) -> None:
        before = self.state.jobs
        self._count_idle(event.time_s)
        stored = self._checkpoints_at(event) if isinstance(event, SiteLost) else []
        self.state, commands = self.state.handle(*stored, event)
        if why := next(filter(None, self.state.verdicts), ""):
            raise InputError(f"event of the simulation at {event.time_s:g} s: {why}")
        self.num_refused += len(self.state.refusals)
        if isinstance(event, PriceChanged):
            for site, price in event.prices.items():
                if self.prices[site][-1][0] == event.time_s:
                    self.prices[site].pop()
                self.prices[site].append((event.time_s, price.usd_per_mwh))
        if isinstance(event, JobSubmitted):
            self.records.setdefault(event.job.name, JobRecord(event.job))
        for ended in self.state.closed:
            self.records[ended.name].final = ended
        for one in self.state.done:
            self._record(one)
        for name in dict.fromkeys((getattr(event, "name", ""), *(command.name for command in commands))):
            job = self.state.jobs.get(name)
            if job is not None and job is not before.get(name):
                self._schedule(job)
        self.after(self.state, event)

    def _schedule(self, job: JobState) -> None:
        """The next thing that this job does by itself."""
        version = self._version[job.name] = self._version.get(job.name, 0) + 1
        if job.placement is None:
            if job.not_before_s > self.state.now_s:
                self._push(Tick(job.not_before_s))
            return
        if job.phase == "starting":
            self._push_own(JobStarted(job.since_s + job.placement.startup_s, job.name, job.attempt), version)
            return
        if job.phase == "stopping":
            self._push_own(JobStopped(job.stopped_by_s, job.name, job.attempt, job.num_done), version)
            return
        end_s = job.end_s()
        assert end_s is not None
        coming = [JobEnded(end_s, job.name, job.attempt), self._fault(job), self._next_copy(job)]
        self._push_own(min(filter(None, coming), key=lambda event: event.time_s), version)

    def _next_copy(self, job: JobState) -> CheckpointStored | None:
        """The copy that is under way, or one that begins now; None where the job makes none."""
        assert job.placement is not None
        site, now_s = job.placement.copy_site, self.state.now_s
        if site is None:
            return None
        copy = self._copies.get(job.name)
        if copy is None or (copy.attempt, copy.site) != (job.attempt, site) or copy.time_s <= now_s:
            due_s = now_s + self.state.world.stops.copy_every_s
            copy = self._copies[job.name] = CheckpointStored(due_s, job.name, job.attempt, site, job.done_at(now_s))
        return copy

    def _fault(self, job: JobState) -> JobFailed | None:
        """The first fault of a job that goes on as it is: its own end, or a device's."""
        assert job.placement is not None
        draw = self._draws.setdefault(job.name, random.Random(f"{self.failures.seed} {job.name}"))
        if job.name not in self._fatal:
            fails = draw.random() < self.failures.final_share
            self._fatal[job.name] = draw.random() * job.job.num_steps if fails else float("inf")
        own_s = job.since_s + max(0.0, self._fatal[job.name] - job.num_done) * job.placement.step_s
        found = JobFailed(own_s, job.name, job.attempt, is_final=True) if own_s < float("inf") else None
        if self.failures.device_hours is None:
            return found
        hours = draw.expovariate(job.placement.num_devices / self.failures.device_hours)
        time_s = job.since_s + hours * SECONDS_PER_HOUR
        lost_s = draw.random() * self.state.world.stops.checkpoint_every_s
        num_steps = max(job.num_stored, job.done_at(time_s) - lost_s / job.placement.step_s)
        fault = JobFailed(time_s, job.name, job.attempt, num_steps=num_steps)
        return found if found and found.time_s < time_s else fault

    def _checkpoints_at(self, lost: SiteLost) -> list[CheckpointStored]:
        """The last checkpoints of the jobs at a site that is lost: half of the time between two of them is lost."""
        lost_s, found = self.state.world.stops.checkpoint_every_s / 2, []
        for job in self.state.jobs.values():
            here = job.placement
            if here is not None and lost.site in here.sites and job.phase in ("running", "stopping"):
                steps = max(job.num_stored, job.done_at(lost.time_s) - lost_s / here.step_s)
                found.append(CheckpointStored(lost.time_s, job.name, job.attempt, here.sites[0], steps))
        return found

    def _count_idle(self, now_s: float) -> None:
        """Energy (kWh) and its price of the devices that nobody has had since the last event."""
        seconds = now_s - self._idle_until_s
        if seconds <= 0 or not self.idle_power:
            return
        self._idle, self._idle_until_s, free = dict(self._idle), now_s, self.state.space().devices
        for site, watts in self.idle_power.items():
            tariff, (kwh, usd) = self.state.tariffs[site], self._idle[site]
            more = max(0, free[site]) * watts * tariff.pue * seconds / JOULES_PER_KWH
            self._idle[site] = kwh + more, usd + more / 1e3 * tariff.price.usd_per_mwh

    def _record(self, one: Happened) -> None:
        """Keep and log what has happened; something else may follow in the same moment."""
        now_s, here, phase, record = self.state.now_s, one.placement, one.phase, self.records.get(one.name)
        devices, rates = (dict(here.devices), here.links(phase)) if here and phase else ({}, {})
        if record is not None:
            if one.what != "copy":
                record.states.append((now_s, phase or ENDS[one.what]))
            if one.what == "refuse":
                record.refused = one.why
            elif phase is None:
                record.unfinished, record.finished_s = one.why, now_s if one.what == "finish" else None
            job = self.state.jobs.get(one.name) or record.final
            usd = job.spent.total_usd if job else 0.0
            self.changes.append(Allocation(now_s, one.name, devices, phase == "starting", rates, usd, one.what))
        if self.log is None:
            return
        line = {
            "time_s": now_s,
            "event": one.what,
            "job": one.name,
            "phase": phase or "ended",
            "devices": devices,
            "reserved_bytes_per_s": dict(rates),
            "sent_bytes_per_s": dict(here.sent(phase)) if here and phase else {},
            "step_s": here.step_s if here and phase == "running" else None,
            "power_w": dict(here.power_w) if here else {},
        }
        self.log.write(json.dumps(line | ({"why": one.why} if one.what in ("refuse", "reject") else {})) + "\n")

    def _outcome(self, begin_s: float, end_s: float) -> FleetOutcome:
        for name in self.state.jobs:
            self.records[name].final = settled(self.state, name)
            self.records[name].unfinished = why_unstarted(self.state, name)
        return FleetOutcome(
            policy=self.state.policy.name,
            records=list(self.records.values()),
            begin_s=begin_s,
            end_s=max(end_s, begin_s),
            num_devices={name: site.num_devices for name, site in self.state.sites.items()},
            idle_energy_kwh={site: kwh for site, (kwh, _) in self._idle_at_end.items()},
            idle_usd={site: usd for site, (_, usd) in self._idle_at_end.items()},
            changes=self.changes,
            link_bytes_per_s=dict(self.state.rates),
            num_refused=self.num_refused,
            prices=self.prices,
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
