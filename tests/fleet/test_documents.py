"""Documents of a fleet: round trips, wrong input, and a log that restores a state without policy or planner."""

import copy
import json
import random
import time

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import Cluster, preset_site
from farpipe.fleet.documents import (
    Entry,
    command_data,
    command_of,
    event_data,
    event_of,
    restored,
    state_data,
    state_line,
    state_of,
)
from farpipe.fleet.events import Happened, JobFailed, JobSubmitted, Price, PriceChanged, SiteLost, Tick
from farpipe.fleet.job import FleetJob, Kind
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import PlannerQuotes, StopCosts
from farpipe.fleet.simulator import Failures, Simulator
from farpipe.fleet.state import FleetState, first_state
from farpipe.fleet.waiting import why_unstarted
from farpipe.testing.policies import SimpleQuotes, random_cluster, random_events, random_jobs


class Silent:
    """Quotes and a policy that nobody may ask."""

    name = "silent"

    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked")


def through_json(data):
    return json.loads(json.dumps(data, allow_nan=False))


def played(monkeypatch, policy="farpipe", seed=3, stops=None):
    """The first state of a random fleet, the entry of every call until all jobs have ended, and every state."""
    draw, entries, states = random.Random(seed), [], []
    first = first_state(random_cluster(draw), POLICIES[policy], SimpleQuotes(), stops)
    handle = FleetState.handle

    def noted(self, *events):
        after, commands = handle(self, *events)
        entries.append(Entry.of(self, events, after, commands))
        states.append(after)
        return after, commands

    monkeypatch.setattr(FleetState, "handle", noted)
    Simulator(first, Failures(device_hours=100.0, final_share=0.1, seed=1)).run(
        random_jobs(20, draw), random_events(draw)
    )
    monkeypatch.undo()
    return first, entries, states


@pytest.mark.parametrize("stop_s", [0.0, 900.0])
def test_a_log_restores_every_state_and_asks_neither_policy_nor_planner(monkeypatch, stop_s):
    first, entries, states = played(monkeypatch, seed=12 if stop_s else 3, stops=StopCosts(stop_s=stop_s))
    assert any(job.reserved for state in states for job in state.jobs.values()) == (stop_s > 0)
    kinds = {type(event).__name__ for entry in entries for event in entry.events}
    expected = {"JobStopped"} if stop_s else {"JobSubmitted", "JobStarted", "JobEnded", "JobFailed"}
    assert expected | {"SiteLost", "LinkChanged", "DevicesChanged"} <= kinds
    silent = Silent()
    state = state_of(through_json(state_data(first)), silent, silent)
    for entry, true in zip(entries, states, strict=True):
        state = Entry.from_line(entry.to_line()).applied(state)
        assert list(state.jobs) == list(true.jobs), "the order is that of submission"
        assert state_data(state) == state_data(true)


def test_a_restored_fleet_decides_as_the_one_that_went_on(monkeypatch):
    first, entries, states = played(monkeypatch)
    half = len(entries) // 2
    state = restored(first, [entry.to_line() for entry in entries[:half]])
    for entry, true in zip(entries[half:], states[half:], strict=True):
        state, commands = state.handle(*entry.events)
        assert (tuple(commands), state.jobs) == (entry.commands, true.jobs)


def test_a_line_that_was_not_written_whole_is_left_out_and_one_in_the_middle_is_an_error(monkeypatch):
    first, entries, states = played(monkeypatch)
    lines = [entry.to_line() for entry in entries]
    assert restored(first, [*lines[:9], lines[9][:-20]]).jobs == states[8].jobs
    with pytest.raises(InputError, match=r"^log: line 4: "):
        restored(first, [*lines[:3], lines[3][:-20] + "\n", lines[4]])


def test_a_log_is_read_from_its_last_snapshot_on(monkeypatch):
    """Snapshots save what comes before them: a log of 100,000 lines is restored in the time that reading it takes."""
    first, entries, states = played(monkeypatch)
    lines, half = [entry.to_line() for entry in entries], len(entries) // 2
    whole = [*lines[:half], state_line(states[half - 1]), *lines[half:]]
    assert state_data(restored(first, whole)) == state_data(states[-1])
    assert state_data(restored(first, [*whole, state_line(states[-1])[:-20]])) == state_data(states[-1])
    unread = ["not looked at\n"] * 100_000
    begin = time.process_time()
    assert state_data(restored(first, [*unread, *whole[half:]])) == state_data(states[-1])
    assert time.process_time() - begin < 5.0


def test_a_refused_event_is_not_in_the_log(monkeypatch):
    first, _, _ = played(monkeypatch)
    events = [Tick(5.0), Tick(3.0), SiteLost(6.0, "nowhere")]
    after, commands = first.handle(*events)
    entry = Entry.of(first, events, after, commands)
    assert entry.events == (Tick(5.0),)
    assert state_data(restored(first, [entry.to_line()])) == state_data(after)


def test_events_and_commands_go_through_json_and_back(monkeypatch):
    _, entries, _ = played(monkeypatch)
    for entry in entries:
        for event in entry.events:
            assert event_of(through_json(event_data(event))) == event
        for command in entry.commands:
            assert command_of(through_json(command_data(command))) == command
    data = event_data(PriceChanged(1.0, {"a": Price(2.0, 3.0)}))
    assert data["prices"] == {"a": {"usd_per_mwh": 2.0, "carbon_g_per_kwh": 3.0}}
    assert event_of(data).prices["a"] == Price(2.0, 3.0)


SUBMITTED = event_data(JobSubmitted(5.0, FleetJob("j", Kind("llama-3-8b", 512, 64), 5.0, 10, 8, 16)))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "farpipe/hat/1", "event: format: expected 'farpipe/fleet-event/2'"),
        (("event",), "JobSubmited", "event: event: unknown event 'JobSubmited'.*JobSubmitted"),
        (("event",), "AttemptEvent", "event: event: unknown event 'AttemptEvent'"),
        (("hat",), 1, "event: unknown key 'hat'"),
        (("job", "kind", "hat"), 1, "event: job.kind"),
        (("job", "hat"), 1, "event: job: unknown key 'hat'"),
        (("job", "num_steps"), "10", "event: job: num_steps: expected int, found '10'"),
        (("job", "num_steps"), True, "event: job: num_steps: expected int, found True"),
        (("job",), None, "event: job: "),
    ],
)
def test_wrong_documents_are_refused_with_the_place(path, value, message):
    data = copy.deepcopy(SUBMITTED)
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InputError, match=message):
        event_of(data)


def test_a_state_without_a_key_is_refused():
    data = state_data(first_state(random_cluster(random.Random(0)), POLICIES["fcfs"], SimpleQuotes()))
    for key in set(data) - {"format"}:
        with pytest.raises(InputError, match=f"state: key '{key}' is missing"):
            state_of({name: value for name, value in data.items() if name != key}, Silent(), Silent())


def test_several_events_are_one_decision():
    """Two submissions at once: the shorter job goes first, although it was handed in second."""

    def job(name, steps):
        return FleetJob(name, Kind("llama-3-8b", 512, 64), 0.0, steps, 8, 8)

    cluster = Cluster(sites=(preset_site("a", "a100-80gb", 8),))
    first = first_state(cluster, POLICIES["sjf"], SimpleQuotes())
    both = [JobSubmitted(0.0, job("long", 900)), JobSubmitted(0.0, job("short", 9))]
    assert [command.name for command in first.handle(*both)[1]] == ["short"]
    assert [command.name for command in first.handle(both[0])[1]] == ["long"]


def test_a_failing_job_pauses_for_longer_each_time_and_is_given_up():
    state = first_state(Cluster(sites=(preset_site("a", "a100-80gb", 8),)), POLICIES["fcfs"], SimpleQuotes())
    stops = state.world.stops.__class__(first_pause_s=60.0, longest_pause_s=200.0, max_failures=5)
    state = FleetState(**vars(state) | {"world": state.world.__class__(SimpleQuotes(), stops, {})})
    state, _ = state.handle(JobSubmitted(0.0, FleetJob("j", Kind("llama-3-8b", 512, 64), 0.0, 1000, 8, 8)))
    pauses, commands = [], []
    for number in range(1, 5):
        state, commands = state.handle(JobFailed(state.now_s + 1, "j", number, f"fault {number}"))
        paused = state.jobs["j"]
        pauses.append(max(0.0, paused.not_before_s - state.now_s))
        if pauses[-1]:
            assert not commands
            assert why_unstarted(state, "j").endswith(f"failure: fault {number}")
            assert not state.handle(Tick(paused.not_before_s - 1))[1]
            state, commands = state.handle(Tick(paused.not_before_s))
        assert [type(command).__name__ for command in commands] == ["Start"]
    assert pauses == [0.0, 60.0, 120.0, 200.0]
    state, (cancel,) = state.handle(JobFailed(state.now_s + 1, "j", 5, "rank 1 of site a: no space left on its disk"))
    told = "rank 1 of site a: no space left on its disk"
    assert cancel.why == f"given up at 0% of its steps after 5 failures in a row: {told}"
    assert not state.jobs
    assert [job.name for job in state.closed] == ["j"]
    assert state.done == (Happened("j", "fail", why=cancel.why),)


def test_what_is_started_carries_the_layout_that_was_quoted():
    cluster = Cluster(sites=(preset_site("a", "a100-80gb", 8),))
    state = first_state(cluster, POLICIES["fcfs"], PlannerQuotes(cluster))
    _, (start,) = state.handle(JobSubmitted(0.0, FleetJob("j", Kind("llama-3-8b", 2048, 64), 0.0, 10, 8, 8)))
    layout = start.placement.layout
    assert layout.pipeline * layout.devices_per_rank <= 8
    assert command_of(through_json(command_data(start))).placement.layout == layout
