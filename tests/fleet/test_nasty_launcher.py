"""The core against a launcher whose word comes late, twice, out of order, wrong or never.

The test keeps the truth: which attempts live, what they have done and stored. Bugs that are seeded into the core have
to be found by the same machine.
"""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from farpipe.fleet import event_effects, failures, job, state, stops
from farpipe.fleet.events import (
    Cancel,
    CheckpointStored,
    JobCancelled,
    JobEnded,
    JobFailed,
    JobStarted,
    JobStopped,
    JobSubmitted,
    Preempt,
    SiteBack,
    SiteLost,
    Start,
    StepReported,
    Tick,
)
from farpipe.fleet.job import FleetJob, Kind
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import StopCosts
from farpipe.fleet.replacing import replace
from farpipe.fleet.snapshot import Ended, EndedJob
from farpipe.fleet.state import first_state
from farpipe.testing.policies import SITES, SimpleQuotes, broken, random_cluster

STOPS = StopCosts(restart_s=10.0, stop_s=30.0, start_limit_s=600.0, stop_limit_s=300.0, copy_every_s=600.0)
NUM_STEPS = 400
NAMES = [f"j{k}" for k in range(4)]


@dataclass
class Attempt:
    """One attempt as it really is."""

    name: str
    number: int
    devices: dict[str, int]
    num_steps: float
    stored: float
    is_alive: bool = True
    has_begun: bool = False
    is_told: bool = False
    """It was told to stop, or its site was lost: the fleet counts on it no longer."""


class Nasty(RuleBasedStateMachine):
    """A fleet, its true attempts, and a mailbox from which reports are taken in any order, or never."""

    @initialize(seed=st.integers(0, 9), policy=st.sampled_from(["easy", "srtf", "farpipe"]))
    def begin(self, seed, policy):
        self.state = first_state(random_cluster(random.Random(seed)), POLICIES[policy], SimpleQuotes(), STOPS)
        self.attempts, self.mailbox, self.lost = {}, [], set()
        self.stored = {name: {(site, 0.0) for site in SITES} for name in NAMES}
        self.submitted, self.ended = Counter(), Counter()
        for name in NAMES[:3]:
            self.submit_one(name, 8)

    def give(self, *events):
        self.state, commands = self.state.handle(*events)
        for one in self.state.closed:
            self.ended[one.name] += 1
        for one in self.state.done:
            self.ended[one.name] += one.what == "refuse"
            if one.what == "finish":
                assert any(true.num_steps == NUM_STEPS for true in self.of(one.name)), "finished, though nobody did"
            if one.what == "stopped" or one.what == "cancel":
                self.forget(one.name)
        for command in commands:
            self.carry_out(command)

    def of(self, name):
        return [true for true in self.attempts.values() if true.name == name]

    def forget(self, name):
        """The fleet counts on no attempt of this job any more."""
        for true in self.of(name):
            true.is_told = True

    def carry_out(self, command):
        if isinstance(command, Start):
            now = self.state.jobs[command.name]
            assert (command.name, command.attempt) not in self.attempts, "an attempt is started twice"
            others = [true.number for true in self.of(command.name) if true.is_alive and not true.is_told]
            assert not others, f"attempt {command.attempt} starts beside {others}"
            assert now.stored_at is None or (now.stored_at, now.num_done) in self.stored[command.name], (
                f"it goes on from {now.num_done} steps at {now.stored_at}, which nobody has stored"
            )
            devices = dict(command.placement.devices)
            for site, number in devices.items():
                used = sum(true.devices.get(site, 0) for true in self.counted())
                assert used + number <= self.state.sites[site].num_devices, f"devices of {site} are still in use"
            true = Attempt(command.name, command.attempt, devices, now.num_done, now.num_done)
            self.attempts[command.name, command.attempt] = true
        else:
            assert isinstance(command, (Preempt, Cancel)), command
            if (true := self.attempts.get((command.name, command.attempt))) is not None:
                true.is_told = True

    def counted(self):
        """Attempts that live and hold devices as far as the fleet can know."""
        jobs = self.state.jobs
        return [true for true in self.attempts.values() if true.is_alive and self.holds(true, jobs.get(true.name))]

    def holds(self, true, known):
        return known is None or not true.is_told or (known.attempt == true.number and known.placement is not None)

    def living(self, index):
        found = [true for true in self.attempts.values() if true.is_alive]
        return found[index % len(found)] if found else None

    def post(self, kind, true, *rest):
        self.mailbox.append((kind, (true.name, true.number, *rest)))

    @precondition(lambda self: len(self.state.jobs) < len(NAMES))
    @rule(name=st.sampled_from(NAMES), devices=st.sampled_from([8, 16]))
    def submit(self, name, devices):
        self.submit_one(name, devices)

    def submit_one(self, name, devices):
        if name not in self.state.jobs:
            self.stored[name] = {(site, 0.0) for site in SITES}
            self.submitted[name] += 1
            kind, now_s = Kind("llama-3-8b", 512, 64), self.state.now_s
            self.give(JobSubmitted(now_s + 1e-3, FleetJob(name, kind, now_s, NUM_STEPS, devices, devices)))

    @precondition(lambda self: self.living(0))
    @rule(index=st.integers(0, 99), share=st.floats(0.01, 0.9), stores=st.booleans(), prompt=st.booleans())
    def work(self, index, share, stores, prompt):
        """An attempt begins, or does some of its steps, faster or slower than quoted, and may store a checkpoint."""
        true = self.living(index)
        if not true.has_begun:
            true.has_begun = True
            self.post(JobStarted, true)
            self.deliver_all(1.0 if prompt else None)
            return
        true.num_steps = float(int(true.num_steps + share * (NUM_STEPS - true.num_steps)))
        self.post(StepReported, true, true.num_steps, 1.0)
        if stores:
            self.store(true, next(iter(true.devices)))
        self.deliver_all(1.0 if prompt else None)

    def store(self, true, site):
        true.stored = true.num_steps
        self.stored[true.name].add((site, true.num_steps))
        self.post(CheckpointStored, true, site, true.num_steps)

    @precondition(lambda self: self.living(0))
    @rule(index=st.integers(0, 99), site=st.sampled_from(SITES))
    def copy(self, index, site):
        true = self.living(index)
        if true.has_begun:
            self.store(true, site)

    @precondition(lambda self: self.living(0))
    @rule(index=st.integers(0, 99), how=st.sampled_from(["ends", "fails", "vanishes"]), names=st.booleans())
    def end(self, index, how, names):
        true = self.living(index)
        if not true.has_begun:
            return
        true.is_alive = False
        if how == "ends":
            true.num_steps = NUM_STEPS
            self.post(JobEnded, true)
        elif how == "fails":
            home = next(iter(true.devices))
            self.stored[true.name].add((home, true.stored))
            self.post(JobFailed, true, "its disk is full", true.stored if names else None)

    @precondition(lambda self: any(true.is_told and true.is_alive for true in self.attempts.values()))
    @rule(index=st.integers(0, 99))
    def stop(self, index):
        told = [true for true in self.attempts.values() if true.is_told and true.is_alive]
        true = told[index % len(told)]
        true.is_alive = False
        home = next(iter(true.devices))
        self.stored[true.name].add((home, true.num_steps))
        self.post(JobStopped, true, true.num_steps)

    @precondition(lambda self: self.mailbox)
    @rule(index=st.integers(0, 99), again=st.booleans(), after_s=st.floats(0, 100))
    def deliver(self, index, again, after_s):
        place = index % len(self.mailbox)
        kind, rest = self.mailbox[place] if again else self.mailbox.pop(place)
        self.give(kind(self.state.now_s + after_s, *rest))

    @precondition(lambda self: self.mailbox)
    @rule(after_s=st.floats(0, 100))
    def deliver_all(self, after_s):
        """Reports that come in time, in order, and together."""
        if after_s is None:
            return
        now_s = self.state.now_s + after_s
        events = [kind(now_s, *rest) for kind, rest in self.mailbox]
        self.mailbox.clear()
        self.give(*events)

    @rule(index=st.integers(0, 99))
    def lie(self, index):
        """Attempts that never began, steps that can't be: refused, each for itself."""
        jobs = list(self.state.jobs.values())
        if jobs:
            one = jobs[index % len(jobs)]
            now_s = self.state.now_s
            lies = [
                JobEnded(now_s, one.name, one.attempt + 1),
                StepReported(now_s, one.name, one.attempt + 3, 1.0, 1.0),
                CheckpointStored(now_s, "nobody", 1, SITES[0], 1.0),
                JobFailed(now_s - 1.0, one.name, one.attempt),
            ]
            before = self.state.jobs
            self.give(*lies)
            assert all(self.state.verdicts)
            assert self.state.jobs == before

    @rule()
    def confirm(self):
        """All starts are confirmed in time."""
        for one in list(self.state.jobs.values()):
            if one.phase == "starting" and self.attempts[one.name, one.attempt].is_alive:
                self.serve(one.name)

    @rule(name=st.sampled_from(NAMES), is_meant=st.integers(0, 3))
    def cancel(self, name, is_meant):
        if name in self.state.jobs and is_meant == 0:
            self.give(JobCancelled(self.state.now_s, name))

    @precondition(lambda self: not self.lost)
    @rule(site=st.sampled_from(SITES), lives_on=st.booleans())
    def lose(self, site, lives_on):
        """Attempts at a site that is cut off may go on without it: their word comes later, and counts no more."""
        for true in self.attempts.values():
            if site in true.devices:
                true.is_told, true.is_alive = True, true.is_alive and lives_on
        self.lost.add(site)
        self.give(SiteLost(self.state.now_s, site))

    @precondition(lambda self: self.lost)
    @rule()
    def find_lost(self):
        for site in sorted(self.lost):
            self.find(site)

    def find(self, site):
        """Old attempts are ended before anything starts at a site that is back."""
        for true in self.attempts.values():
            if site in true.devices and true.is_told:
                true.is_alive = False
        self.lost.discard(site)
        self.give(SiteBack(self.state.now_s, site))

    @rule(after_s=st.sampled_from([1.0, 10.0, 60.0, 300.0, 3000.0]))
    def wait(self, after_s):
        self.tick(after_s)

    def tick(self, after_s):
        self.kill_overdue(self.state.now_s + after_s)
        self.give(Tick(self.state.now_s + after_s))

    def kill_overdue(self, now_s):
        """What has not stopped within its limit is killed."""
        for one in self.state.jobs.values():
            if one.phase == "stopping" and now_s > one.stopped_by_s + STOPS.stop_limit_s:
                for true in self.of(one.name):
                    true.is_alive = False

    @invariant()
    def sound(self):
        if not hasattr(self, "state"):
            return
        assert broken(self.state) == []
        assert self.submitted == self.ended + Counter(self.state.jobs.keys()), "a job is lost, or ended twice"
        for one in self.state.jobs.values():
            most = max((true.num_steps for true in self.of(one.name)), default=0.0)
            believed = one.done_at(self.state.now_s)
            assert believed < NUM_STEPS or most == NUM_STEPS, f"{one.name} counts as complete, having done {most}"

    def teardown(self):
        """Once the launcher is fair every job ends."""
        if not hasattr(self, "state"):
            return
        self.mailbox.clear()
        for site in SITES:
            self.find(site)
        for _ in range(60):
            for name in list(self.state.jobs):
                self.serve(name)
            self.tick(1200.0)
            self.sound()
        assert not self.state.jobs, [(one.name, one.phase) for one in self.state.jobs.values()]

    def serve(self, name):
        one = self.state.jobs.get(name)
        true = None if one is None else self.attempts.get((name, one.attempt))
        if true is None or one.placement is None:
            return
        event = (self.state.now_s, name, one.attempt)
        if not true.is_alive:  # nobody is left who could say anything; only that a running one is gone is seen
            self.give(*([JobFailed(*event, "it is gone")] if one.phase == "running" else []))
        elif one.phase == "starting":
            true.has_begun = True
            self.give(JobStarted(*event))
        elif one.phase == "running":
            true.num_steps, true.is_alive = NUM_STEPS, False
            self.give(JobEnded(*event))
        else:
            true.is_alive = False
            self.give(JobStopped(*event))


def machine(examples):
    run_state_machine_as_test(
        Nasty,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            report_multiple_bugs=False,
            phases=(Phase.generate,),
        ),
    )


def test_whatever_a_launcher_says_no_job_is_lost_doubled_or_invented():
    machine(60)


def attempts_ignored(monkeypatch):
    def attempt(fleet, event):
        known = None if event.name in fleet.ended else event_effects.settled(fleet, event.name)
        return known if known is not None and known.placement is not None else None

    monkeypatch.setattr(event_effects, "_attempt", attempt)


def devices_free_at_once(monkeypatch):
    def stopped(fleet, one):
        return stops.queued(one)

    for module in (state, event_effects, failures):
        monkeypatch.setattr(module, "stopped", stopped)


def without_limits(monkeypatch):
    monkeypatch.setattr(event_effects, "end_overdue", lambda fleet: (fleet, []))


def silence_completes(monkeypatch):
    monkeypatch.setattr(job, "UNSAID", 0.0)


def belief_is_a_checkpoint(monkeypatch):
    monkeypatch.setattr(failures, "queued", lambda one, num_steps=None: stops.queued(one))


def copies_never_void(monkeypatch):
    real = stops.started

    def started(one, placement):
        return replace(real(one, placement), copies=one.copies)

    for module in (state, stops):
        monkeypatch.setattr(module, "started", started)


def attempts_counted_anew(monkeypatch):
    real = Ended.get

    def get(self, name):
        found = real(self, name)
        return None if found is None else EndedJob(found.job, 0)

    monkeypatch.setattr(Ended, "get", get)


BUGS = [
    attempts_ignored,
    devices_free_at_once,
    without_limits,
    silence_completes,
    belief_is_a_checkpoint,
    copies_never_void,
    attempts_counted_anew,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_machine_finds_a_bug_that_is_seeded_into_the_core(monkeypatch, bug):
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        machine(1000)  # it ends at the first that fails; which do depends on the modules that hypothesis has seen
