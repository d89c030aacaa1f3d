"""Random events thrown at the core: no device twice, no link overdrawn, no job lost or doubled, money adds up."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from farpipe.fleet.events import (
    CheckpointStored,
    DevicesChanged,
    JobCancelled,
    JobEnded,
    JobFailed,
    JobStarted,
    JobStopped,
    JobSubmitted,
    LinkChanged,
    Price,
    PriceChanged,
    SiteBack,
    SiteLost,
    StepReported,
    Tick,
)
from farpipe.fleet.job import FleetJob, Kind
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import StopCosts
from farpipe.fleet.state import first_state
from farpipe.testing.policies import SITES, SimpleQuotes, broken, random_cluster
from refusals import refusal

LINKS = [f"{a}>{b}" for a in SITES for b in SITES if a != b]


class Fleet(RuleBasedStateMachine):
    """A fleet to which anything may happen."""

    names = Bundle("names")

    @initialize(seed=st.integers(0, 99), policy=st.sampled_from(sorted(POLICIES)), stop_s=st.sampled_from([0.0, 60.0]))
    def begin(self, seed, policy, stop_s):
        self.cluster = random_cluster(random.Random(seed))
        self.state = first_state(self.cluster, POLICIES[policy], SimpleQuotes(), StopCosts(stop_s=stop_s))
        self.submitted, self.gone = set(), {}

    def give(self, event):
        before = self.state
        self.state, commands = before.handle(event)
        assert self.state.verdicts == ("",)
        known = {name: job.phase for name, job in before.jobs.items()}
        known |= {one.name: one.phase for one in self.state.done}
        phases = {name: job.phase for name, job in self.state.jobs.items()}
        assert {name: phase for name, phase in known.items() if phase} == phases, "done says all that has happened"
        assert before.jobs is not self.state.jobs or before.jobs == self.state.jobs, "states are never changed in place"
        assert not self.state.refusals, self.state.refusals
        for job in self.state.closed:
            self.gone[job.name] = job
            self.submitted.discard(job.name)
        self.submitted -= {one.name for one in self.state.done if one.what == "refuse"}
        return commands

    @rule(
        target=names,
        name=st.integers(0, 20).map("j{}".format),
        after_s=st.floats(0, 5000),
        least=st.sampled_from([1, 8, 16, 500]),
        times=st.sampled_from([1, 2, 4]),
        steps=st.integers(1, 500),
    )
    def submit(self, name, after_s, least, times, steps):
        now_s = self.state.now_s + after_s
        job = FleetJob(name, Kind("llama-3-8b", 512, 64), now_s, steps, least, least * times)
        if name in self.state.jobs:
            assert "another job of that name" in refusal(self.state, JobSubmitted(now_s, job))
        else:
            again = (ended := self.state.ended.get(name)) is not None and ended.job == job
            self.submitted |= set() if again else {name}
            self.give(JobSubmitted(now_s, job))
        return name

    @rule(name=names, after_s=st.floats(0, 5000))
    def start_or_end(self, name, after_s):
        job = self.state.jobs.get(name)
        if job is None or job.phase == "queued":
            return
        kind = {"starting": JobStarted, "stopping": JobStopped}.get(job.phase, JobEnded)
        self.give(kind(self.state.now_s + after_s, name, job.attempt))

    @rule(name=names, after_s=st.floats(0, 5000), share=st.none() | st.floats(0, 1), final=st.booleans())
    def fail(self, name, after_s, share, final):
        job = self.state.jobs.get(name)
        if job is not None and job.phase in ("starting", "running", "stopping"):
            num_steps = None if share is None else share * job.job.num_steps
            self.give(JobFailed(self.state.now_s + after_s, name, job.attempt, "broken", num_steps, final))

    @rule(name=names, site=st.sampled_from(SITES), share=st.floats(0, 1))
    def store(self, name, site, share):
        job = self.state.jobs.get(name)
        if job is not None and job.phase in ("running", "stopping"):
            self.give(CheckpointStored(self.state.now_s, name, job.attempt, site, share * job.job.num_steps))

    @rule(name=names)
    def cancel(self, name):
        if name in self.state.jobs or name in self.state.ended:
            self.give(JobCancelled(self.state.now_s, name))

    @rule(name=names, step_s=st.floats(0.01, 1000), share=st.floats(0, 1))
    def report(self, name, step_s, share):
        job = self.state.jobs.get(name)
        if job is not None and job.phase == "running":
            self.give(StepReported(self.state.now_s, name, job.attempt, share * job.job.num_steps, step_s))

    @rule(link=st.sampled_from(LINKS), rate=st.sampled_from([0.0, 1.0, 1e5, 1e8]))
    def change_link(self, link, rate):
        self.give(LinkChanged(self.state.now_s, link, rate))

    @rule(site=st.sampled_from(SITES), up=st.booleans())
    def lose_or_find(self, site, up):
        self.give(SiteBack(self.state.now_s, site) if up else SiteLost(self.state.now_s, site))

    @rule(site=st.sampled_from(SITES), number=st.integers(0, 80))
    def change_devices(self, site, number):
        self.give(DevicesChanged(self.state.now_s, site, number))

    @rule(usd=st.floats(-100, 1000), after_s=st.floats(0, 5000))
    def change_price(self, usd, after_s):
        self.give(PriceChanged(self.state.now_s + after_s, {SITES[0]: Price(usd, 100.0)}))

    @rule(after_s=st.floats(0, 1e5))
    def tick(self, after_s):
        self.give(Tick(self.state.now_s + after_s))

    @rule(back_s=st.floats(1, 1e5))
    def clock_backwards(self, back_s):
        assert "clock" in refusal(self.state, Tick(self.state.now_s - back_s))

    @invariant()
    def sound(self):
        if hasattr(self, "state"):
            assert broken(self.state) == []
            assert self.submitted == set(self.state.jobs), "nobody lost"

    @invariant()
    def money_adds_up(self):
        """A job's electricity is never more than its energy at the dearest price that there was."""
        for job in getattr(self, "gone", {}).values():
            energy, paid = sum(job.spent.energy_kwh.values()), sum(job.spent.electricity_usd.values())
            assert abs(paid) <= energy * 1000 / 1000 + 1e-9
            assert set(job.spent.device_s) <= set(SITES)


Fleet.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestFleet = Fleet.TestCase
