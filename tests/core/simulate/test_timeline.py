import pytest

from farpipe.core.errors import InputError
from farpipe.core.schedule.library import order
from farpipe.core.simulate import Timeline, simulate
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
