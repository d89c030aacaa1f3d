import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import FarpipeError, InputError
from farpipe.core.step import Action, Schedule
from strategies import problems_with_schedules

DATA = {"format": "farpipe/schedule/1", "method": "greedy", "num_microbatches": 1, "ranks": [["0F0", "0I0", "0W0"]]}


@pytest.mark.slow
@given(problems_with_schedules())
@settings(max_examples=100, deadline=None)
def test_json_survives_a_round_trip(pair):
    schedule = pair[1]
    assert Schedule.from_json(json.dumps(schedule.to_data())) == schedule


@given(problems_with_schedules(), st.data())
@settings(max_examples=100, deadline=None)
def test_codes_and_actions_are_two_views_of_one_order(pair, data):
    schedule = pair[1]
    rows = [list(order) for order in schedule.ranks]
    again = Schedule(schedule.num_microbatches, rows, schedule.method)
    assert again == schedule == Schedule.from_codes(again.num_microbatches, again.codes, again.begin, again.method)
    assert hash(again) == hash(schedule)
    assert again.num_actions == sum(map(len, rows))
    rank = data.draw(st.integers(0, len(rows) - 1))
    start, end = (data.draw(st.integers(-9, 9)) for _ in range(2))
    assert [schedule.ranks[rank][i] for i in range(len(rows[rank]))] == rows[rank]
    assert list(schedule.ranks[rank][start:end]) == rows[rank][start:end]
    rows[rank][0] = rows[rank][0]._replace(stage=99)
    assert Schedule(schedule.num_microbatches, rows, schedule.method) != schedule


def test_actions_outside_the_step_are_kept_as_they_are():
    schedule = Schedule.from_text(["0F0 0F7 999999999F999999999", ""], 2)
    assert list(map(str, schedule.ranks[0])) == ["0F0", "0F7", "999999999F999999999"]
    assert not schedule.ranks[1]


@pytest.mark.parametrize(
    "text", ["0F0x", "0f0", "F0", "0F", "-1F0", "00F0", "0R0", "0F0 ", "٣F0", "0F00", 7, None, ["0F0"]]
)
def test_junk_actions_are_refused(text):
    with pytest.raises(InputError):
        Action.parse(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": [["0F0", "0F0x"]]}, "s.json: ranks[0][1]: expected an action such as '0F0' or '3W12', found '0F0x'"),
        ({"ranks": "0F0"}, "ranks: expected a list"),
        ({"ranks": []}, "ranks: expected a list"),
        ({"ranks": [7]}, "ranks[0]: expected a list of actions, found 7"),
        ({"num_microbatches": 0}, "num_microbatches: expected a whole number"),
        ({"num_microbatches": True}, "num_microbatches: expected a whole number"),
        ({"method": 3}, "method: expected a name"),
        ({"metod": "x"}, "metod: unknown key; did you mean 'method'?"),
        ({"format": "farpipe/schedule/2"}, "format: expected 'farpipe/schedule/1'"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(change, message):
    with pytest.raises(InputError) as caught:
        Schedule.from_json(json.dumps(DATA | change), "s.json")
    assert message in str(caught.value)


def test_missing_keys_are_named():
    for key in ("method", "num_microbatches", "ranks"):
        with pytest.raises(InputError, match=f"{key}: missing"):
            Schedule.from_data({k: v for k, v in DATA.items() if k != key})


def test_files_are_written_whole_and_read_back(tmp_path):
    schedule = Schedule.from_data(DATA)
    schedule.save(tmp_path / "schedule.json")
    assert Schedule.load(tmp_path / "schedule.json") == schedule
    assert [path.name for path in tmp_path.iterdir()] == ["schedule.json"]


@pytest.mark.parametrize("cut", range(0, 90, 7))
def test_truncated_files_are_refused(tmp_path, cut):
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(DATA)[:cut])
    with pytest.raises(FarpipeError, match=r"schedule\.json"):
        Schedule.load(path)


def test_repr_draws_the_order():
    assert repr(Schedule.from_data(DATA)).splitlines()[1] == "rank 0: 0F0 0I0 0W0"
