"""What single events do to the core: attempts, losses, checkpoints, and events that can't be."""

import dataclasses
import io
import json
import math
import re

import pytest

from benchmarks.fleet.baselines import ATLAS
from farpipe.core.spec import Cluster, preset_site
from farpipe.core.spec.cluster import SiteLink
from farpipe.fleet.events import (
    CheckpointStored,
    JobCancelled,
    JobEnded,
    JobFailed,
    JobStarted,
    JobStopped,
    JobSubmitted,
    LinkChanged,
    Price,
    PriceChanged,
    Replan,
    SiteBack,
    SiteLost,
    StepReported,
    Tick,
)
from farpipe.fleet.job import FleetJob, JobPlacement, JobState, Kind
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.policies.protocol import Decision
from farpipe.fleet.quotes import StopCosts
from farpipe.fleet.replacing import replace
from farpipe.fleet.simulator import Simulator
from farpipe.fleet.snapshot import KEPT, Ended
from farpipe.fleet.state import first_state
from farpipe.fleet.waiting import why_waiting
from farpipe.testing.policies import SimpleQuotes
from refusals import refusal

KIND = Kind("llama-3-8b", 512, 64)


def cluster(egress=0.0):
    sites = tuple(preset_site(name, "a100-80gb", 8) for name in "ab")
    both = (("a", "b"), ("b", "a"))
    links = tuple(
        SiteLink(source=x, target=y, latency_s=0.01, bandwidth_bytes_per_s=1e9, egress_usd_per_gb=egress)
        for x, y in both
    )
    return Cluster(sites=sites, links=links)


def job(name="j", steps=1000, least=8, most=8):
    return FleetJob(name, KIND, 0.0, steps, least, most)


def running(steps=1000):
    """A job on its first attempt, running since 120 s at `a`."""
    state, (start,) = first_state(cluster(), POLICIES["fcfs"], SimpleQuotes()).handle(
        JobSubmitted(0.0, job("j", steps))
    )
    assert start.placement.sites == ("a",)
    return state.handle(JobStarted(120.0, "j", start.attempt))[0]


def test_a_late_word_of_an_attempt_that_is_over_changes_nothing():
    """Its site was lost, the job goes on at another: the first attempt's failure, end and steps are history."""
    state, commands = running().handle(SiteLost(200.0, "a"))
    assert [(command.name, command.attempt) for command in commands] == [("j", 1)]
    late = (JobFailed(201.0, "j", 1, is_final=True), JobEnded(201.0, "j", 1), StepReported(201.0, "j", 1, 5.0, 9.0))
    for event in late:
        after, commands = state.handle(event)
        assert (after.jobs, commands) == (state.jobs, [])
    state, (again,) = state.handle(SiteBack(300.0, "a"))
    assert again.attempt == 2
    assert state.handle(JobStarted(301.0, "j", 1))[0].jobs["j"].phase == "starting"
    assert state.handle(JobStarted(301.0, "j", 2))[0].jobs["j"].phase == "running"


def test_a_job_can_t_end_before_it_runs_and_an_attempt_can_t_come_early():
    state, _ = first_state(cluster(), POLICIES["fcfs"], SimpleQuotes()).handle(JobSubmitted(0.0, job()))
    assert refusal(state, JobEnded(1.0, "j", 1)) == "job 'j' has ended before its attempt 1 has started"
    assert refusal(state, JobStarted(1.0, "j", 7)) == "attempt 7 of job 'j' has not begun; the newest is 1"
    assert "reports steps before" in refusal(state, StepReported(1.0, "j", 1, 5.0, 1.0))


def test_a_name_is_taken_until_its_job_ends_and_attempts_are_counted_on():
    assert "there is another job of that name" in refusal(running(), JobSubmitted(130.0, job(steps=5)))
    state = running().handle(JobEnded(500.0, "j", 1))[0]
    assert state.handle(JobSubmitted(500.0, job()))[1] == [], "the same submission, late"
    state, (start,) = state.handle(JobSubmitted(500.0, job(steps=5)))
    assert (start.attempt, "j" in state.ended) == (2, False)
    for late in (JobEnded(501.0, "j", 1), JobFailed(501.0, "j", 1, "its disk was full")):
        assert state.handle(late)[0].jobs == state.jobs, "of the job that had the name before"
    state = state.handle(JobStarted(600.0, "j", 2), JobEnded(601.0, "j", 2))[0]
    assert [one.job.num_steps for one in state.closed] == [5]
    assert state.handle(JobEnded(601.0, "j", 2))[0].closed == (), "said twice"


def test_one_wrong_event_of_several_is_refused_and_the_others_count():
    state = first_state(cluster(), POLICIES["fcfs"], SimpleQuotes())
    events = [JobSubmitted(5.0, job("good")), JobEnded(5.0, "nobody", 1), Tick(3.0), JobSubmitted(6.0, job("also"))]
    state, commands = state.handle(*events)
    assert [command.name for command in commands] == ["good", "also"]
    accepted, unknown, early, also = state.verdicts
    assert (accepted, also, state.now_s) == ("", "", 6.0)
    assert unknown.startswith("there is no job 'nobody' in the fleet")
    assert early == "event Tick at 3 s: the fleet's clock is at 5 s already"


def test_a_run_is_believed_whether_it_is_faster_or_slower_than_its_quote():
    state = running()
    step_s = state.jobs["j"].placement.step_s
    believed = state.jobs["j"].done_at(320.0)
    fast, _ = state.handle(StepReported(320.0, "j", 1, 2 * believed, step_s / 2))
    assert fast.jobs["j"].done_at(320.0 + step_s) == pytest.approx(2 * believed + 2)
    slow, _ = state.handle(StepReported(320.0, "j", 1, believed / 2, 2 * step_s))
    assert slow.jobs["j"].done_at(320.0 + step_s) == pytest.approx(believed / 2 + 0.5)
    late, _ = fast.handle(StepReported(321.0, "j", 1, believed, step_s))
    assert late.jobs == fast.jobs, "an earlier report that comes late"
    ahead, _ = fast.handle(CheckpointStored(321.0, "j", 1, "a", 3 * believed))
    assert (ahead.jobs["j"].num_done, ahead.jobs["j"].num_stored) == (3 * believed, 3 * believed)
    assert "num_steps: expected from 0 to 1000" in refusal(fast, StepReported(330.0, "j", 1, 1001.0, step_s))


def test_a_silent_run_is_not_complete():
    state = running().handle(Tick(1e9))[0]
    job = state.jobs["j"]
    assert (job.phase, 999 < job.done_at(1e9) < 1000, job.left_at(1e9) > 0) == ("running", True, True)
    failed = state.handle(JobFailed(1e9, "j", 1, "silence"))[0].jobs["j"]
    assert (failed.num_done, failed.last_failure) == (0.0, "silence"), "it never said that it has a checkpoint"


def test_a_failed_job_goes_on_from_the_checkpoint_that_it_names_or_from_the_last_that_it_reported():
    state = running().handle(CheckpointStored(400.0, "j", 1, "a", 30.0), StepReported(401.0, "j", 1, 35.0, 1.0))[0]
    assert state.handle(JobFailed(402.0, "j", 1))[0].jobs["j"].num_done == 30.0
    assert state.handle(JobFailed(402.0, "j", 1, num_steps=34.0))[0].jobs["j"].num_done == 34.0
    older = state.handle(JobFailed(402.0, "j", 1, "step 30 is not readable", num_steps=20.0))[0].jobs["j"]
    assert (older.num_done, older.num_stored) == (20.0, 20.0)


@pytest.mark.parametrize("stop_s", [0.0, 60.0])
def test_a_start_that_nobody_confirms_has_failed_and_ends(stop_s):
    stops = StopCosts(stop_s=stop_s, start_limit_s=100.0, stop_limit_s=50.0, max_failures=2, first_pause_s=0.0)
    state, (start,) = first_state(cluster(), POLICIES["fcfs"], SimpleQuotes(), stops).handle(JobSubmitted(0.0, job()))
    due_s = start.placement.startup_s + 100.0
    assert state.handle(Tick(due_s))[1] == []
    state, (stop, *others) = state.handle(Tick(due_s + 1))
    assert (stop.attempt, stop.why) == (1, "its start was not confirmed within 100 s of its expected end")
    if stop_s:
        assert (state.jobs["j"].phase, others, state.space().devices["a"]) == ("stopping", [], 0)
        state, others = state.handle(JobStopped(state.now_s + 5, "j", 1))
    assert [(type(one).__name__, one.attempt) for one in others] == [("Start", 2)]
    assert state.handle(JobStarted(state.now_s, "j", 1))[0].jobs["j"].phase == "starting", "the first comes too late"
    state, commands = state.handle(Tick(state.now_s + due_s + 1))
    if stop_s:
        state, commands = state.handle(JobStopped(state.now_s + 5, "j", 2))
    assert commands[-1].why == f"given up at 0% of its steps after 2 failures in a row: {stop.why}"
    assert [one.name for one in state.closed] == ["j"]


def test_a_stop_that_nobody_confirms_counts_as_over():
    stops = StopCosts(stop_s=60.0, stop_limit_s=50.0)
    state = first_state(cluster(), POLICIES["fcfs"], SimpleQuotes(), stops)
    state, _ = state.handle(JobSubmitted(0.0, job()))
    state, _ = state.handle(JobStarted(120.0, "j", 1), JobCancelled(200.0, "j"))
    due_s = state.jobs["j"].stopped_by_s + 50.0
    assert state.handle(Tick(due_s))[0].jobs["j"].phase == "stopping"
    after, _ = state.handle(Tick(due_s + 1))
    (ended,) = after.done
    assert (ended.what, ended.why) == (
        "cancel",
        "cancelled by its owner; its stop was not confirmed within 50 s of its expected end",
    )
    assert (after.jobs, after.space().devices["a"]) == ({}, 8)
    assert after.handle(JobStopped(due_s + 9, "j", 1))[0].verdicts == ("",), "late, and of no effect"


def test_a_job_keeps_sending_copies_when_another_link_of_its_pipeline_changes():
    sites = tuple(preset_site(name, "a100-80gb", 8) for name in "abc")
    links = tuple(
        SiteLink(source=x, target=y, latency_s=0.01, bandwidth_bytes_per_s=1e9, egress_usd_per_gb=0.1)
        for x in "abc"
        for y in "abc"
        if x != y
    )
    stops = StopCosts(copy_every_s=3600.0)
    state = first_state(Cluster(sites=sites, links=links), ATLAS, SimpleQuotes(), stops)
    state, (start,) = state.handle(JobSubmitted(0.0, FleetJob("wide", KIND, 0.0, 1000, 16, 16)))
    assert start.placement.sites == ("a", "b")
    state = state.handle(JobStarted(200.0, "wide", 1))[0]
    before = state.jobs["wide"].placement.copied_bytes_per_s
    assert list(before) == ["a>c"]
    state, (replan,) = state.handle(LinkChanged(300.0, "b>a", 100.0))
    assert (type(replan), replan.placement.copied_bytes_per_s) == (Replan, before)
    assert state.jobs["wide"].placement.copied_bytes_per_s == before
    assert state.space().overdrawn() == ""


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Tick(math.inf), "clock"),
        (Tick(math.nan), "clock"),
        (PriceChanged(1e3, {"a": Price(math.nan, 0.0)}), "site a: USD/MWh: .*found nan"),
        (PriceChanged(1e3, {"a": Price(0.0, -1.0)}), "site a: g/kWh"),
        (LinkChanged(1e3, "a>b", math.inf), "link a>b: bytes/s: .*found inf"),
        (StepReported(1e3, "j", 1, 5.0, 1e-300), "job 'j': step_s: .*found 1e-300"),
        (StepReported(1e3, "j", 1, -1.0, 1.0), "job 'j': num_steps"),
        (JobFailed(1e3, "j", 1, "", math.nan), "num_steps"),
        (CheckpointStored(1e3, "j", 1, "a", 1001.0), "num_steps"),
        (JobSubmitted(1e3, job("new", steps=0)), "job 'new': num_steps"),
        (JobSubmitted(1e3, job("new", least=8, most=4)), "job 'new': min_devices 8 is more than max_devices 4"),
    ],
)
def test_figures_that_can_t_be_are_refused(event, message):
    assert re.search(message, refusal(running(), event))


def test_ended_jobs_are_remembered_for_a_while_and_then_forgotten():
    ended, kept = Ended(), []
    for index in range(5 * KEPT):
        ended = ended.plus(job(f"j{index}"), index)
        kept += [ended] if index % KEPT == 0 else []
        assert len(ended.newest) + len(ended.older) <= 2 * KEPT
    assert all(ended.get(f"j{index}").attempt == index for index in range(4 * KEPT, 5 * KEPT))
    assert "j0" not in ended
    assert "j1" not in kept[0], "an earlier state does not change"
    assert "j4999" not in ended.without("j4999")


def test_a_lost_site_serves_no_checkpoint_until_it_is_back():
    """Neither to a job that ran there nor to one that is loading from there."""
    state, commands = running().handle(SiteLost(1000.0, "a"))
    assert [type(command).__name__ for command in commands] == ["Preempt"]
    assert state.handle(Tick(5000.0))[1] == []
    assert [type(command).__name__ for command in state.handle(SiteBack(5000.0, "a"))[1]] == ["Start"]

    class Mover:
        name = "mover"

        def decide(self, view):
            if view.now_s == 300.0:
                yield Decision("j", (("b", 8),))

    moving = running()
    moving = type(moving)(**vars(moving) | {"policy": Mover()}).handle(Tick(300.0))[0]
    assert moving.jobs["j"].placement.moved_bytes == {"a>b": SimpleQuotes().state_bytes(KIND)}
    lost, (stop,) = moving.handle(SiteLost(301.0, "a"))
    assert (stop.why, lost.jobs["j"].phase, lost.jobs["j"].stored_at) == ("a is lost", "queued", "a")


@pytest.mark.parametrize("policy", ["fcfs", "easy", "sjf"])
def test_a_job_whose_checkpoint_is_at_a_lost_site_says_so_and_holds_up_nobody(policy):
    state = replace(running(), policy=POLICIES[policy]).handle(SiteLost(1000.0, "a"))[0]
    assert (
        why_waiting(state, "j") == "its checkpoint is at a, which is lost: it waits until that is back, or is cancelled"
    )
    state, (start,) = state.handle(JobSubmitted(1001.0, job("next")))
    assert (start.name, start.placement.sites) == ("next", ("b",))
    state, (start,) = state.handle(SiteBack(2000.0, "a"))
    assert (start.name, start.placement.sites) == ("j", ("a",))


def test_a_fault_takes_nothing_of_the_checkpoint_that_the_attempt_began_with():
    """An outage every quarter of an hour, each of which takes half an hour's work: the job does not go backwards."""
    state, done = running(10**6), []
    for turn in range(1, 6):
        state = state.handle(SiteLost(900.0 * turn, "a"))[0]
        done.append(state.jobs["j"].num_done)
        state, (start,) = state.handle(SiteBack(900.0 * turn + 1, "a"))
        state = state.handle(JobStarted(900.0 * turn + 500, "j", start.attempt))[0]
    assert done == [0.0] * 5
    state, _ = state.handle(CheckpointStored(5900.0, "j", start.attempt, "a", 77.0), SiteLost(6000.0, "a"))
    assert state.jobs["j"].num_done == 77.0
    state, (start,) = state.handle(SiteBack(6001.0, "a"))
    state = state.handle(JobStarted(6500.0, "j", start.attempt))[0]
    assert state.handle(JobFailed(6510.0, "j", start.attempt))[0].jobs["j"].num_done == 77.0


def moved(stops, events=()):
    """A job that moves once from `a` to `b`, with its log."""

    class Once:
        name = "once"

        def decide(self, view):
            for one in view.queue:
                yield Decision(one.name, (("a", 8),))
            for one in view.active:
                if one.attempt == 1 and one.phase == "running":
                    yield Decision(one.name, (("b", 8),))

    log = io.StringIO()
    state = first_state(cluster(egress=1.0), Once(), SimpleQuotes(), stops)
    outcome = Simulator(state, log=log).run([job()], events)
    return outcome, [json.loads(line) for line in log.getvalue().splitlines()]


@pytest.mark.parametrize("restart_s", [0.0, 1e4])
def test_a_move_is_billed_for_the_checkpoint_alone(restart_s):
    outcome, lines = moved(StopCosts(restart_s=restart_s))
    state_bytes = SimpleQuotes().state_bytes(KIND)
    assert outcome.spent.sent_bytes == pytest.approx({"a>b": state_bytes})
    assert outcome.spent.egress_usd == pytest.approx({"a>b": state_bytes / 1e9})
    (start,) = [line for line in lines if line["event"] == "migrate"]
    assert start["reserved_bytes_per_s"]["a>b"] >= start["sent_bytes_per_s"]["a>b"] > 0


def move_times(events=()):
    """When the move begins and when the job runs again."""
    outcome, lines = moved(StopCosts(), events)
    (begin,) = [line["time_s"] for line in lines if line["event"] == "migrate"]
    assert outcome.spent.sent_bytes == pytest.approx({"a>b": SimpleQuotes().state_bytes(KIND)})
    assert outcome.records[0].final.num_preemptions == 0
    return begin, [line["time_s"] for line in lines if line["event"] == "run"][1]


def test_a_start_goes_on_when_the_link_of_its_checkpoint_changes():
    """What is left of it takes longer by the checkpoint's rest at half of the rate, however often the rate changes."""
    begin, end = move_times()
    rate = StopCosts().transfer_share * cluster().links[0].bandwidth_bytes_per_s
    longer_s = SimpleQuotes().state_bytes(KIND) / rate
    change_s = begin + 0.25 * (end - begin)
    thin = LinkChanged(change_s, "a>b", rate)
    assert move_times([thin]) == (begin, pytest.approx(end + 0.75 * longer_s))
    back = LinkChanged(change_s + 1.0, "a>b", 2 * rate)
    left = 1.0 - 1.0 / (0.75 * (end - begin + longer_s))
    assert move_times([thin, back]) == (begin, pytest.approx(change_s + 1.0 + 0.75 * left * (end - begin)))
    often = [LinkChanged(begin + 10.0 * k, "a>b", (1 + k % 2) * rate) for k in range(1, 200)]
    assert end < move_times(often)[1] < end + longer_s


def test_a_start_whose_checkpoint_moves_over_a_link_that_breaks_is_stopped():
    begin, _ = move_times()
    _, lines = moved(StopCosts(), [LinkChanged(begin + 10.0, "a>b", 0.0), LinkChanged(begin + 99.0, "a>b", 1e9)])
    assert [line["event"] for line in lines][:5] == ["submit", "start", "run", "migrate", "preempt"]


def test_a_start_over_a_link_that_its_steps_need_goes_on_at_their_new_speed():
    wide, sites = FleetJob("wide", KIND, 0.0, 100, 16, 16), (("a", 8), ("b", 8))
    state, (start,) = first_state(cluster(), ATLAS, SimpleQuotes()).handle(JobSubmitted(0.0, wide))
    assert start.placement.devices == sites
    state, (replan,) = state.handle(LinkChanged(30.0, "b>a", 100.0))
    assert (type(replan), state.jobs["wide"].phase, replan.attempt) == (Replan, "starting", 1)
    assert replan.placement.step_s == SimpleQuotes().placement(KIND, sites, {"a>b": 1e9, "b>a": 100.0}).step_s
    assert replan.placement.startup_s == pytest.approx(start.placement.startup_s - 30.0)
    assert state.space().overdrawn() == ""


def test_a_job_that_stops_and_starts_in_one_moment_has_a_line_for_each():
    """A site is lost and the policy starts the job elsewhere at once: it never ran at the new place while stopped."""
    log = io.StringIO()
    state = first_state(cluster(), POLICIES["fcfs"], SimpleQuotes())
    Simulator(state, log=log).run([job()], [SiteLost(50.0, "a"), SiteBack(60.0, "a")])
    lines = [json.loads(line) for line in log.getvalue().splitlines() if json.loads(line)["time_s"] == 50.0]
    found = [(line["event"], line["phase"], line["devices"]) for line in lines]
    assert found == [("preempt", "queued", {}), ("start", "starting", {"b": 8})]


def test_what_was_found_out_of_the_old_fields_is_not_taken_along():
    here = JobPlacement((("amber", 4),), 1.0)
    assert (here.num_devices, here.sites) == (4, ("amber",))
    there = replace(here, devices=(("birch", 2), ("cedar", 1)))
    assert (there.num_devices, there.sites) == (3, ("birch", "cedar"))


def test_replacing_is_that_of_dataclasses():
    job = JobState(FleetJob("a", Kind("llama-3-8b", 512, 64), 0.0, 10, 1, 1), num_done=2.0)
    before = vars(job).copy()
    other = replace(job, phase="running", since_s=5.0)
    assert other == dataclasses.replace(job, phase="running", since_s=5.0)
    assert vars(job) == before
