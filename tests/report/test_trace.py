import dataclasses
import json
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings

from farpipe.core.simulate import simulate
from farpipe.core.simulate.events import OuterArrival
from farpipe.report.charts import memory_over_time
from farpipe.report.trace import trace, write_trace
from report.steps import as_measured, play, two_sites
from strategies import problems_with_schedules

SOME = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
KEYS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"ph", "name", "pid", "ts", "args"},
    "s": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "t": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "f": {"ph", "name", "cat", "id", "pid", "tid", "ts", "bp"},
}


def nanoseconds(event):
    start = round(event["ts"] * 1000)
    return start, start + round(event.get("dur", 0) * 1000)


def check_strictly(data):
    """Everything that a viewer relies on."""
    assert set(data) == {"traceEvents", "displayTimeUnit"}
    events = json.loads(json.dumps(data, allow_nan=False))["traceEvents"]
    tracks, arrows = defaultdict(list), defaultdict(list)
    names = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    groups = {e["pid"] for e in events if e["name"] == "process_name"}
    for event in events:
        assert set(event) == KEYS[event["ph"]]
        assert event["pid"] in groups
        if event["ph"] in "MC":
            continue
        assert (event["pid"], event["tid"]) in names
        assert isinstance(event["ts"], float)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append(nanoseconds(event))
        else:
            arrows[event["id"]].append(event)
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    for spans in tracks.values():
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    for arrow in arrows.values():
        assert [event["ph"] for event in arrow] in (["s", "f"], ["s", "t", "f"])
        assert arrow[-1]["bp"] == "e"
        assert len({(event["cat"], event["name"], event["pid"]) for event in arrow}) == 1
        for event in arrow:
            at, _ = nanoseconds(event)
            assert any(start <= at < max(end, start + 1) for start, end in tracks[event["pid"], event["tid"]])
    return events, arrows


@pytest.mark.slow
@SOME
@given(problems_with_schedules())
def test_the_trace_of_any_step_keeps_the_rules_of_its_format(step):
    timeline = simulate(*step)
    events, arrows = check_strictly(trace({"predicted": timeline, "measured": as_measured(timeline)}))
    assert len(arrows) == 2 * len(timeline.messages)
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    actions = [event for event in slices if event["tid"] <= timeline.num_ranks and not event["cat"].startswith("wait")]
    assert len(actions) == len(timeline.actions)


def test_an_arrow_goes_from_the_action_over_the_link_to_the_action():
    data = trace({"predicted": play(two_sites(2, 1))})
    _, arrows = check_strictly(data)
    tracks = {e["tid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    forward, backward = arrows.values()
    assert [tracks[event["tid"]] for event in forward] == ["rank 0", "east>west", "rank 1"]
    assert [tracks[event["tid"]] for event in backward] == ["rank 1", "west>east", "rank 0"]
    assert [event["ts"] for event in forward] == [999999.999, 1e6, 1.75e6]


def test_memory_and_links_are_counted():
    problem = two_sites(2, 2)
    data = trace({"predicted": play(problem)}, problem)
    check_strictly(data)
    counters = defaultdict(list)
    for event in data["traceEvents"]:
        if event["ph"] == "C":
            counters[event["name"]].append(next(iter(event["args"].items())))
    assert {*counters} == {"memory of rank 0", "memory of rank 1", "east>west", "west>east"}
    peak = max(memory_over_time(problem, play(problem), 0)[1]) / 2**20
    assert max(value for _, value in counters["memory of rank 0"]) == pytest.approx(peak, rel=1e-5)
    assert {unit for unit, _ in counters["east>west"]} == {"Mbit/s"}
    assert counters["east>west"][0][1] > counters["east>west"][-1][1] == 0


def test_collectives_are_tied_to_the_first_and_last_action_of_their_stage():
    data = trace({"predicted": play(two_sites(2, 2, sync=True))})
    _, arrows = check_strictly(data)
    assert len(arrows) == 4 + 4  # two messages each way, a gather and a reduce per stage


def test_waits_between_sites_can_be_told_from_those_inside():
    waits = {e["cat"] for e in trace({"p": play(two_sites(4, 4))})["traceEvents"] if e["name"].startswith("wait")}
    assert waits == {"wait between sites", "wait inside a site"}


def test_messages_that_share_a_link_get_tracks_of_their_own():
    timeline = play(two_sites(2, 3))
    messages = timeline.messages.copy()
    messages["end_s"] += 3.0
    data = trace({"measured": dataclasses.replace(as_measured(timeline), messages=messages)})
    check_strictly(data)
    names = [event["args"]["name"] for event in data["traceEvents"] if event["name"] == "thread_name"]
    assert "east>west (2)" in names


def test_an_arrow_that_would_point_into_the_past_is_left_out():
    timeline = play(two_sites(2, 1))
    messages = timeline.messages.copy()
    messages["start_s"][0] += 100.0
    messages["end_s"][0] += 100.0
    _, arrows = check_strictly(trace({"measured": dataclasses.replace(as_measured(timeline), messages=messages)}))
    assert len(arrows) == 1


def test_messages_of_sites_outside_have_a_track_of_their_own_with_their_slack():
    outer = (OuterArrival("fragment 0", "lugano", 2e6, -1.0, 0.5), OuterArrival("fragment 1", "lugano", 2e6, 0.5, 0.25))
    events = trace({"measured": dataclasses.replace(play(two_sites(2, 3)), outer=outer)})["traceEvents"]
    slices = [event for event in events if event.get("cat") == "outer message"]
    assert [(one["name"], one["ts"], one["dur"], one["args"]["slack_us"]) for one in slices] == [
        ("fragment 0: slack", -1e6, 1.5e6, 1.5e6),
        ("fragment 1: waited", 0.25e6, 0.25e6, -0.25e6),
    ]
    (track,) = {one["tid"] for one in slices}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[track] == "from lugano"
    assert not [
        event for event in events if event.get("tid") == track and event.get("cat") not in ("outer message", None)
    ]


def test_the_file_is_json_with_a_group_per_timeline(tmp_path):
    timeline = play(two_sites(2, 2))
    write_trace({"predicted": timeline, "measured": as_measured(timeline)}, tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    groups = [event["args"]["name"] for event in data["traceEvents"] if event["name"] == "process_name"]
    assert groups == ["predicted", "measured"]


@pytest.mark.parametrize("field", ["actions", "messages"])
def test_a_timeline_without_actions_or_messages_has_a_trace(field):
    timeline = play(two_sites(2, 1))
    bare = dataclasses.replace(timeline, **{field: getattr(timeline, field)[:0]})
    events = trace({"p": bare})["traceEvents"]
    assert not [event for event in events if event["ph"] in "stf"]


def group_names(data):
    return [event["args"]["name"] for event in data["traceEvents"] if event["name"] == "process_name"]


@pytest.mark.parametrize(
    ("most", "names", "has_arrows"),
    [
        (48, ["predicted", "measured"], True),
        (47, ["predicted (too many messages for arrows)", "measured (too many messages for arrows)"], False),
        (19, ["predicted (only what begins in the first 5.25 s, without arrows)"], False),
    ],
)
def test_a_large_step_is_thinned_and_says_so(monkeypatch, most, names, has_arrows):
    timeline = play(two_sites(2, 2))
    assert (len(timeline.actions), len(timeline.messages)) == (8, 4)
    monkeypatch.setattr("farpipe.report.trace.MAX_EVENTS", most)
    data = trace({"predicted": timeline, "measured": as_measured(timeline)})
    events, arrows = check_strictly(data)
    assert group_names(data)[: len(names)] == names
    assert bool(arrows) == has_arrows
    slices = [event for event in events if event["ph"] == "X" and not event["cat"].startswith("wait")]
    assert len(slices) + len([event for event in events if event["ph"] in "stf"]) <= most
    if most < 24:
        assert max(event["ts"] for event in slices) < 5.25e6
