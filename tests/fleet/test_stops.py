"""Stops that take time: devices are held and billed until nothing runs, and are reserved for who comes next."""

import io
import json
from dataclasses import replace

import pytest

from farpipe.core.spec import Cluster, preset_site
from farpipe.core.spec.cluster import SiteLink
from farpipe.fleet.events import (
    Cancel,
    DevicesChanged,
    Happened,
    JobCancelled,
    JobEnded,
    JobFailed,
    JobStarted,
    JobStopped,
    JobSubmitted,
    LinkChanged,
    Preempt,
    SiteLost,
    Start,
    Tick,
)
from farpipe.fleet.job import FleetJob, Kind
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.policies.protocol import Decision
from farpipe.fleet.quotes import StopCosts
from farpipe.fleet.simulator import Simulator
from farpipe.fleet.state import first_state
from farpipe.fleet.stops import planned
from farpipe.fleet.waiting import why_unstarted
from farpipe.testing.policies import SimpleQuotes
from refusals import refusal

KIND = Kind("llama-3-8b", 512, 64)
WRITE_S = SimpleQuotes().state_bytes(KIND) / (1e9 * 8)
STOPS = StopCosts(stop_s=30.0)


def cluster():
    sites = tuple(preset_site(name, "a100-80gb", 8) for name in "ab")
    both = (("a", "b"), ("b", "a"))
    links = tuple(SiteLink(source=x, target=y, latency_s=0.01, bandwidth_bytes_per_s=1e9) for x, y in both)
    return Cluster(sites=sites, links=links)


def job(name="j", steps=1000, submit_s=0.0):
    return FleetJob(name, KIND, submit_s, steps, 8, 8)


class Scripted:
    """Decisions as they are handed over; each is made once."""

    name = "scripted"

    def __init__(self):
        self.next = []

    def decide(self, view):
        decisions, self.next = self.next, []
        return decisions


def stopping(stops=STOPS):
    """`long` runs at `a` since 120 s, and is stopped at 200 s for `short`."""
    policy = Scripted()
    state = first_state(cluster(), policy, SimpleQuotes(), stops)
    policy.next = [Decision("long", (("a", 8),))]
    state, _ = state.handle(JobSubmitted(0.0, job("long")))
    state, _ = state.handle(JobStarted(120.0, "long", 1))
    policy.next = [Decision("long", None, "for short"), Decision("short", (("a", 8),))]
    state, commands = state.handle(JobSubmitted(200.0, job("short", submit_s=200.0)))
    return policy, state, commands


def test_devices_are_held_until_nothing_runs_and_then_go_to_who_reserved_them():
    _, state, commands = stopping()
    assert commands == [Preempt("long", 1, "for short")]
    assert (state.jobs["long"].phase, state.jobs["long"].stopped_by_s) == ("stopping", 200.0 + 30.0 + WRITE_S)
    assert (state.jobs["short"].phase, state.jobs["short"].reserved.sites) == ("queued", ("a",))
    assert state.space().devices == {"a": 0, "b": 8}
    assert planned(state).space().devices == {"a": 0, "b": 8}
    assert "reserved 8 at a and starts when long have stopped" in why_unstarted(state, "short")
    state, commands = state.handle(Tick(210.0))
    assert commands == []
    state, (start,) = state.handle(JobStopped(250.0, "long", 1, state.jobs["long"].num_done))
    assert (type(start), start.name, start.placement.sites) == (Start, "short", ("a",))
    long = state.jobs["long"]
    assert (long.phase, long.placement, long.stored_at) == ("queued", None, "a")
    assert long.spent.device_s == {"a": 8 * 250.0}, "billed until nothing ran"
    assert long.num_done == pytest.approx(80.0 / SimpleQuotes().placement(KIND, (("a", 8),), {}).step_s)


def test_without_a_time_to_stop_the_devices_are_free_at_once():
    _, state, (stop, start) = stopping(StopCosts())
    assert (type(stop), type(start)) == (Preempt, Start)
    assert state.jobs["long"].phase == "queued"


def test_a_job_that_moves_stops_first_and_then_starts_with_the_next_attempt():
    policy, state, _ = stopping()
    state, _ = state.handle(JobStopped(250.0, "long", 1))
    state, _ = state.handle(JobStarted(400.0, "short", 1))
    policy.next = [Decision("short", (("b", 8),))]
    state, (stop,) = state.handle(Tick(500.0))
    assert (type(stop), stop.attempt, state.jobs["short"].num_moves) == (Preempt, 1, 1)
    assert planned(state).space().devices == {"a": 8, "b": 0}
    state, (start,) = state.handle(JobStopped(540.0, "short", 1))
    assert (start.attempt, start.placement.sites, start.placement.moved_bytes) == (
        2,
        ("b",),
        {"a>b": SimpleQuotes().state_bytes(KIND)},
    )


def test_a_cancelled_job_holds_its_devices_until_it_has_stopped():
    _, state, _ = stopping()
    state, (cancel,) = state.handle(JobCancelled(220.0, "long"))
    assert (type(cancel), state.jobs["long"].leaves, state.space().devices["a"]) == (Cancel, True, 0)
    assert state.handle(JobCancelled(221.0, "long"))[1] == []
    state, (start,) = state.handle(JobStopped(230.0, "long", 1))
    assert ("long" in state.jobs, "long" in state.ended, start.name) == (False, True, "short")


@pytest.mark.parametrize(
    "event", [JobEnded(225.0, "long", 1), JobFailed(225.0, "long", 1, "no"), JobStopped(225.0, "long", 1, 5.0)]
)
def test_however_a_stop_ends_the_devices_get_free(event):
    _, state, _ = stopping()
    state, (start,) = state.handle(event)
    assert start.name == "short"


def test_what_was_not_saved_in_a_stop_is_to_be_done_again():
    _, state, _ = stopping()
    assert state.jobs["long"].num_done > 2.0
    assert state.handle(JobStopped(250.0, "long", 1, 2.0))[0].jobs["long"].num_done == 2.0
    assert state.handle(JobStopped(250.0, "long", 1))[0].jobs["long"].num_done == 0.0, "nobody says that it wrote any"


def test_a_reservation_at_a_lost_site_or_over_a_changed_link_is_dropped():
    _, state, _ = stopping()
    lost, commands = state.handle(SiteLost(210.0, "a"))
    assert (lost.jobs["short"].reserved, lost.jobs["long"].phase, commands) == (None, "queued", [])
    assert lost.done == (Happened("long", "stopped", "queued", why="a is lost"),)
    late, commands = lost.handle(JobStopped(250.0, "long", 1))
    assert (late.done, commands) == ((), []), "the attempt is over"
    fewer, _ = state.handle(DevicesChanged(210.0, "a", 4))
    assert (fewer.jobs["short"].reserved, fewer.jobs["long"].phase) == (None, "stopping")
    held = replace(state.jobs["short"].reserved, startup_bytes_per_s={"a>b": 1.0})
    state = state.with_job(replace(state.jobs["short"], reserved=held))
    assert state.handle(LinkChanged(211.0, "a>b", 0.0))[0].jobs["short"].reserved is None


def test_a_stop_that_nobody_ordered_is_an_error():
    _, state, _ = stopping()
    state, _ = state.handle(JobStopped(250.0, "long", 1))
    assert "without having been told to" in refusal(state, JobStopped(251.0, "short", 1))


def simulated(stop_s):
    """SRTF with a long job and short ones behind it, and its log."""
    log = io.StringIO()
    state = first_state(cluster(), POLICIES["srtf"], SimpleQuotes(), StopCosts(stop_s=stop_s))
    jobs = [job(f"long{k}", 5000) for k in range(2)] + [job(f"short{k}", 20, 9000.0 + k) for k in range(3)]
    outcome = Simulator(state, log=log).run(jobs)
    return outcome, [json.loads(line) for line in log.getvalue().splitlines()]


def test_in_a_simulation_no_device_is_held_twice_while_jobs_stop():
    outcome, lines = simulated(300.0)
    held = {}
    for line in lines:
        held[line["job"]] = line["devices"]
        used = [sum(devices.get(site, 0) for devices in held.values()) for site in "ab"]
        assert max(used) <= 8, line
    stops = [line for line in lines if line["phase"] == "stopping"]
    ends = [line for line in lines if line["event"] == "stopped"]
    assert len(stops) == len(ends) >= 1
    assert ends[0]["time_s"] - stops[0]["time_s"] == pytest.approx(300.0 + WRITE_S)
    assert all(record.finished_s is not None for record in outcome.records)
    assert outcome.to_data()["mean_jct_s"] > simulated(0.0)[0].to_data()["mean_jct_s"]
