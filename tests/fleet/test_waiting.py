"""Reasons for which a job waits: each change that is named starts the job when it is made."""

from dataclasses import replace

import pytest

from farpipe.core.spec import Cluster, preset_site
from farpipe.fleet.events import JobSubmitted
from farpipe.fleet.job import FleetJob, timed_kind
from farpipe.fleet.policies import policy_of
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.state import FleetState, first_state
from farpipe.fleet.waiting import Waits, why_waiting


def job(name, devices, submit_s=0.0, hours=10):
    return FleetJob(name, timed_kind(devices), submit_s, 3600 * hours, devices, devices)


def fleet(policy, jobs, devices=16) -> FleetState:
    cluster = Cluster(sites=(preset_site("one", "a100-80gb", devices),))
    state = first_state(cluster, policy_of(policy), PlannerQuotes(cluster))
    for one in jobs:
        state, _ = state.handle(JobSubmitted(one.submit_s, one))
    return state


def test_the_running_job_whose_end_would_do_is_named():
    state = fleet("fcfs", [job("short", 4, hours=1), job("long", 12), job("waits", 12, 5.0)])
    assert why_waiting(state, "waits") == (
        "fcfs keeps it waiting for others; were it alone it would start; so it would now with the devices of 'long', "
        "which would end at 36120 s"
    )


@pytest.mark.parametrize(("running", "count"), [([8, 8], 2), ([4, 4, 8], 3)])
def test_several_ends_are_counted_where_one_does_not_do(running, count):
    jobs = [job(f"r{index}", devices, hours=index + 1) for index, devices in enumerate(running)]
    why = why_waiting(fleet("fcfs", [*jobs, job("waits", 16, 5.0)]), "waits")
    assert f"the devices of the next {count} jobs to end, the last of them at {3600 * count + 120} s" in why


def test_a_job_ahead_in_the_queue_is_named_and_really_is_the_reason():
    state = fleet("fcfs", [job("runs", 12), job("wide", 16, 5.0), job("waits", 4, 6.0)])
    assert "it would now with 'wide' out of the queue" in why_waiting(state, "waits")
    without = replace(state, jobs={name: one for name, one in state.jobs.items() if name != "wide"})
    assert without.handle(JobSubmitted(7.0, job("other", 16, 7.0)))[0].jobs["waits"].phase == "starting"


def test_a_smaller_minimum_is_offered_where_devices_are_free():
    elastic = replace(job("waits", 8, 5.0), max_devices=16)
    assert "min_devices 4" in why_waiting(fleet("fcfs", [job("runs", 12), elastic]), "waits")


def test_reasons_are_kept_as_they_change():
    cluster = Cluster(sites=(preset_site("one", "a100-80gb", 16),))
    waits = Waits("waits")
    state = first_state(cluster, policy_of("fcfs"), PlannerQuotes(cluster))
    for one in (job("runs", 12), job("waits", 8, 5.0), job("later", 1, 6.0)):
        state, _ = state.handle(JobSubmitted(one.submit_s, one))
        waits(state, None)
    assert [time_s for time_s, _ in waits.found] == [5.0]
    waits(replace(state, jobs={}, now_s=9.0), None)
    assert waits.found[-1] == (9.0, "")


def test_a_job_that_no_change_would_start_is_told_so():
    state = fleet("fcfs", [job("runs", 16)])
    lost = replace(state, sites={"one": replace(state.sites["one"], is_up=False)})
    state, _ = lost.handle(JobSubmitted(5.0, job("waits", 16, 5.0)))
    assert why_waiting(state, "waits") == "fcfs starts it nowhere, even were it alone; lost: one"
    drained = replace(state, sites={"one": replace(state.sites["one"], num_devices=0, is_up=True)})
    assert "; drained: one" in (why := why_waiting(drained, "waits"))
    assert "wide enough" not in why, "no link would help"
