import dataclasses

import pytest

from farpipe.core.errors import InputError
from farpipe.core.schedule.library import order
from farpipe.core.simulate import Timeline, simulate
from farpipe.core.simulate.events import OuterArrival
from pipelines import two_sites

PROBLEM = two_sites(2, 2, latency=1.0, size=1.0)
TIMELINE = simulate(PROBLEM, order("1f1b", PROBLEM))
NAMES = {"links": ["x", "y"], "between_sites": [True, False], "copies": [2, 1]}


def file_of(**changes):
    """The timeline as its file has it, its links under other names."""
    data = TIMELINE.to_data()
    names = dict(zip(data["links"], NAMES["links"], strict=True))
    events = [event | {"resource": names.get(event["resource"], event["resource"])} for event in data["events"]]
    return data | {"events": events} | NAMES | changes


def test_a_file_says_of_links_what_their_names_do_not():
    assert not {"between_sites", "copies"} & TIMELINE.to_data().keys()
    told = Timeline.from_data(file_of())
    assert (told.between, told.copies) == ((True, False), (2, 1))
    again = Timeline.from_data(told.to_data())
    assert (again.between, again.copies) == (told.between, told.copies)
    assert {"copies"} & told.to_data().keys()
    named = Timeline.from_data(file_of(between_sites=[False, False], copies=[1, 1])).to_data()
    assert "copies" not in named


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("copies", value) for value in ([1], [1, 0], [1, True], [1, 2.0], [1, "2"])),
        *(("between_sites", value) for value in ([True], [True, 1], [True, None])),
    ],
)
def test_a_wrong_word_on_links_is_named(key, value):
    with pytest.raises(InputError, match=f"not a timeline: {key}: expected .* for each of 2 links"):
        Timeline.from_data(file_of(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("source", "guessed", "source must be 'predicted' or 'measured'"),
        ("num_ranks", 0, "num_ranks a count"),
        ("num_ranks", True, "num_ranks a count"),
        ("events", [5], r"events\[0\] is not an object"),
    ],
)
def test_what_is_no_timeline_is_refused(key, value, words):
    with pytest.raises(InputError, match=f"not a timeline: .*{words}"):
        Timeline.from_data(file_of(**{key: value}))


def test_messages_of_sites_outside_are_kept_with_their_slack_and_change_no_figure():
    outer = (OuterArrival("fragment 0", "lugano", 5e6, -0.25, 0.5), OuterArrival("fragment 1", "lugano", 5e6, 2.0, 1.5))
    timeline = dataclasses.replace(TIMELINE, outer=outer)
    again = Timeline.from_data(timeline.to_data())
    assert again.outer == outer
    assert [came.slack_s for came in again.outer] == [0.75, -0.5]
    assert again.makespan_s == TIMELINE.makespan_s
    assert "outer" not in TIMELINE.to_data()


@pytest.mark.parametrize("wrong", [{"what": 5}, {"source": None}, {"arrival_s": "soon"}, {"needed_s": float("inf")}])
def test_a_message_of_a_site_outside_that_is_none_is_refused(wrong):
    right = OuterArrival("fragment 0", "lugano", 5e6, -0.25, 0.5)._asdict()
    with pytest.raises(InputError, match="not a timeline"):
        Timeline.from_data(TIMELINE.to_data() | {"outer": [right | wrong]})
