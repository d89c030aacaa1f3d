import json

import pytest

from farpipe.core.errors import InputError
from farpipe.core.schedule.library import order
from farpipe.core.simulate import Timeline, simulate
from farpipe.core.step import Link, Problem
from two_sites import two_sites


@pytest.mark.parametrize(
    ("name", "fields", "between"),
    [
        ("a>b", {}, True),
        ("a:0>a:1", {}, False),
        ("a:0>b:1", {}, True),
        ("wan", {}, True),
        ("wan", {"source": "a:0", "target": "a:1"}, False),
        ("x>x", {"source": "a", "target": "b"}, True),
        ("a>b", {"kind": "intra-site"}, False),
        ("a:0>a:1", {"kind": "inter-site"}, True),
    ],
)
def test_what_a_link_does_not_say_follows_from_its_name(name, fields, between):
    link = Link(latency_s=0, bandwidth_bytes_per_s=1, **fields)
    assert link.is_between_sites(name) == between


def test_ends_are_those_given_else_those_of_the_name():
    plain = {"latency_s": 0, "bandwidth_bytes_per_s": 1}
    assert Link(**plain).ends("a>b") == ("a", "b")
    assert Link(**plain).ends("wan") == ("", "")
    assert Link(**plain, source="c", target="d").ends("a>b") == ("c", "d")


def test_links_with_fields_survive_round_trips_and_old_files_stay_as_they_are():
    problem = two_sites((1, 1, 0), (5, 6), num_ranks=2, num_microbatches=2)
    assert "kind" not in problem.to_json()
    data = problem.to_data()
    data["links"]["a>b"] |= {"kind": "intra-site"}
    changed = Problem.from_data(json.loads(json.dumps(data)))
    assert Problem.from_json(changed.to_json()) == changed
    assert changed.between_sites == {"a>b": False, "b>a": True}
    timeline = simulate(changed, order("1f1b", changed))
    again = Timeline.from_data(json.loads(json.dumps(timeline.to_data())))
    assert [again.is_between_sites(name) for name in again.links] == [False, True]
    assert timeline.exposed_s[:, 1].sum() > 0
    assert (again.exposed_s == timeline.exposed_s).all()
    assert "between_sites" not in simulate(problem, order("1f1b", problem)).to_data()


def test_a_kind_that_does_not_exist_is_refused():
    data = two_sites((1, 1, 0), (5, 6), num_ranks=2, num_microbatches=2).to_data()
    data["links"]["a>b"]["kind"] = "satellite"
    with pytest.raises(InputError, match="kind"):
        Problem.from_data(data)
