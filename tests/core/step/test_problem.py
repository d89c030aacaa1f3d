import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import FarpipeError, InputError
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Sync, Transfer, is_inter_site
from farpipe.core.step.arrays import step_arrays
from strategies import problems

EXAMPLE = {
    "format": "farpipe/problem/1",
    "num_microbatches": 3,
    "ranks": [{"memory_bytes": 8, "static_bytes": 0}, {"memory_bytes": None, "static_bytes": 0}],
    "stages": [
        {
            "rank": rank,
            "forward_s": 1,
            "input_grad_s": [1, 2, 3],
            "weight_grad_s": 1,
            "activation_bytes": 1,
            "weight_stash_bytes": 1,
        }
        for rank in range(2)
    ],
    "links": {
        "zurich>lugano": {"latency_s": 0.006, "bandwidth_bytes_per_s": 1.25e10},
        "lugano>zurich": {"latency_s": 0.006, "bandwidth_bytes_per_s": 1.25e10},
    },
    "hops": [
        {
            "forward": {"link": "zurich>lugano", "bytes": 67108864},
            "backward": {"link": "lugano>zurich", "bytes": 67108864},
        }
    ],
    "sync": [None, {"gather": None, "reduce": {"link": "zurich>lugano", "bytes": 5}}],
}


def changed(path, value):
    data = json.loads(json.dumps(EXAMPLE))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.slow
@given(problems())
@settings(max_examples=100, deadline=None)
def test_json_survives_a_round_trip(problem):
    again = Problem.from_json(problem.to_json())
    assert again == problem
    assert again.to_json() == problem.to_json()


def test_json_keeps_zeros_that_were_written_per_microbatch():
    problem = Problem.from_json(json.dumps(EXAMPLE))
    zeros = tuple(stage.model_copy(update={"chain_bytes": (0.0,) * 3}) for stage in problem.stages)
    listed = problem.model_copy(update={"stages": zeros})
    assert Problem.from_json(listed.to_json()) == listed


def test_a_changed_copy_forgets_what_was_computed_from_the_old_values():
    problem = Problem.from_json(json.dumps(EXAMPLE))
    assert problem.table("forward_s").max() == 1
    slower = tuple(stage.model_copy(update={"forward_s": 2.0}) for stage in problem.stages)
    assert step_arrays(problem) is step_arrays(problem)
    copy = problem.model_copy(update={"stages": slower})
    assert copy.table("forward_s").tolist() == step_arrays(copy).duration_s[0].tolist() == [[2, 2, 2], [2, 2, 2]]


def test_the_documented_example_is_read():
    problem = Problem.from_json(json.dumps(EXAMPLE))
    assert problem.num_stages == 2
    assert problem.table("input_grad_s").tolist() == [[1, 2, 3], [1, 2, 3]]
    assert problem.ranks[1].memory_bytes is None
    assert [place for place, _ in problem.transfers()] == ["hops[0].forward", "hops[0].backward", "sync[1].reduce"]


def test_exchanges_are_optional_and_read_as_documented():
    exchange = {"link": "zurich>lugano", "bytes": 3, "source_stage": 0, "target_stage": 1}
    problem = Problem.from_json(changed(["exchanges"], [exchange]))
    assert Problem.from_json(problem.to_json()) == problem
    found = [(one.kind, one.place, one.after, one.before, one.target) for one in problem.collectives]
    assert found == [("exchange", "exchanges[0]", 0, None, 1), ("reduce", "sync[1].reduce", 1, None, 1)]
    assert "exchanges" not in Problem.from_json(json.dumps(EXAMPLE)).to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_stage": 2}, "exchanges[0].target_stage: there is no stage 2; stages: 2"),
        ({"target_stage": 0}, "exchanges[0].target_stage: must be another stage than source_stage"),
        ({"link": "a>b"}, "exchanges[0].link: there is no link 'a>b'"),
        ({"bytes": [1, 2, 3]}, "exchanges[0]: a collective has no microbatches"),
        ({"occupies_s": [1, 2, 3]}, "exchanges[0]: a collective has no microbatches"),
    ],
)
def test_wrong_exchanges_are_named(changes, message):
    exchange = {"link": "zurich>lugano", "bytes": 3, "source_stage": 0, "target_stage": 1}
    with pytest.raises(InputError, match=re.escape(message)):
        Problem.from_json(changed(["exchanges"], [exchange | changes]))


def test_chains_are_optional_and_read_as_documented():
    problem = Problem.from_json(changed(["follows"], [None, 0, None]))
    assert problem.chains.previous.tolist() == [-1, 0, -1]
    assert problem.chains.next.tolist() == [1, -1, -1]
    assert problem.chains.backwards.tolist() == [1, 0, 2]
    assert problem.chains.forwards_needed().tolist() == [2, 2, 3]
    assert '"follows":[null,0,null]' in problem.to_json()
    without = Problem.from_json(json.dumps(EXAMPLE))
    assert without.chains.backwards.tolist() == [0, 1, 2]
    assert not without.chains.any
    assert "follows" not in without.to_json()
    assert "chain_bytes" not in without.to_json()


def test_chains_in_each_other_end_in_the_order_of_their_last_slices():
    problem = Problem.from_json(changed(["follows"], [None, None, 0]))
    assert problem.chains.backwards.tolist() == [1, 2, 0]
    four = problem.model_copy(update={"num_microbatches": 4, "follows": (None, None, 0, 1)})
    assert four.chains.backwards.tolist() == [2, 0, 3, 1]


def test_repr_tells_stages_memory_and_links():
    text = repr(Problem.from_json(json.dumps(EXAMPLE)))
    assert "2 stages on 2 ranks, 3 microbatches" in text
    assert "stage 1: rank 1, F 1.00 s, I 1.00 s..3.00 s, W 1.00 s" in text
    assert "zurich>lugano: 6.00 ms, 100 Gbit/s" in text


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["stages", 0, "foward_s"], 1, "stages[0].foward_s: unknown key; did you mean 'forward_s'?"),
        (["stages", 1, "rank"], 7, "stages[1].rank: there is no rank 7; ranks: 2"),
        (["stages", 1, "rank"], True, "stages[1].rank: input should be a valid integer"),
        (["stages", 1, "rank"], -1, "stages[1].rank: input should be greater than or equal to 0, found -1"),
        (["stages", 0, "forward_s"], -1, "stages[0].forward_s: must be at least 0, found -1"),
        (["stages", 0, "forward_s"], "1 ms", "stages[0].forward_s: expected a number, found '1 ms'"),
        (["stages", 0, "forward_s"], 10**400, "stages[0].forward_s: too large for a number"),
        (
            ["stages", 0, "input_grad_s"],
            [1, 2],
            "stages[0].input_grad_s: expected one entry per microbatch, 3, found 2",
        ),
        (["stages", 0, "forward_s"], 1e300, "stages[0].forward_s: must be at most 1e+15 s, found 1e+300"),
        (["hops", 0, "forward", "bytes"], 1e300, "hops[0].forward.bytes: would take more than 1e+15 s on link"),
        (
            ["links", "zurich>lugano", "num_staggered"],
            0,
            "num_staggered: input should be greater than or equal to 1, found 0",
        ),
        (
            ["links", "lugano>zurich", "num_staggered"],
            3,
            "links.zurich>lugano.num_staggered: where replicas are staggered on any",
        ),
        (["links", "zurich>lugano", "bandwidth_bytes_per_s"], 0, "bandwidth_bytes_per_s: must be more than 0, found 0"),
        (
            ["hops", 0, "forward", "link"],
            "zurich>lugan",
            "there is no link 'zurich>lugan'; did you mean 'zurich>lugano'?",
        ),
        (["hops", 0, "forward", "link"], ["zurich>lugano"], "expected one entry per microbatch, 3, found 1"),
        (["hops"], [], "hops: expected one entry per adjacent stage pair, 1, found 0"),
        (["sync"], [None], "sync: expected one entry per stage, 2, found 1"),
        (["sync", 1, "reduce", "bytes"], [1, 1, 1], "sync[1].reduce: a collective has no microbatches"),
        (["follows"], [None, 0], "follows: expected one entry per microbatch, 3, found 2"),
        (["follows"], [None, 1, None], "follows[1]: expected null or an earlier microbatch, 0 to 0, found 1"),
        (["follows"], [0, None, None], "follows[0]: expected null or an earlier microbatch"),
        (["follows"], [None, 0, 0], "follows[2]: microbatch 0 is followed by 1 already"),
        (["follows"], [None, -1, None], "follows[1]: expected null or an earlier microbatch"),
        (["follows"], [None, 0.0, None], "follows[1]: input should be a valid integer"),
        (["stages", 0, "chain_bytes"], [1, 2], "stages[0].chain_bytes: expected one entry per microbatch, 3, found 2"),
        (["num_microbatches"], 0, "num_microbatches: input should be greater than or equal to 1"),
        (["num_microbatches"], 2.5, "num_microbatches: input should be a valid integer"),
        (["ranks"], [], "ranks: expected 1 or more entries"),
        (["ranks"], 5, "ranks: expected a list, found 5"),
        (["format"], "farpipe/schedule/1", "format: expected 'farpipe/problem/1', found 'farpipe/schedule/1'"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(path, value, message):
    with pytest.raises(InputError) as caught:
        Problem.from_json(changed(path, value), "p.json")
    assert str(caught.value).startswith("p.json: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"format": NaN}', '{"a": 1, "a": 2}', "[" * 100000, "1e999"])
def test_junk_is_refused(text):
    with pytest.raises(InputError):
        Problem.from_json(text)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_damage_gives_a_clear_error_or_a_problem(data):
    text = json.dumps(EXAMPLE)
    at = data.draw(st.integers(0, len(text) - 1))
    length = data.draw(st.integers(0, 20))
    damaged = text[:at] + data.draw(st.text(max_size=5)) + text[at + length :]
    try:
        Problem.from_json(damaged)
    except FarpipeError as error:
        assert str(error)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"   \n"])
def test_unreadable_files_are_refused(tmp_path, content):
    path = tmp_path / "problem.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"problem\.json"):
        Problem.load(path)
    with pytest.raises(InputError, match="can't be read"):
        Problem.load(tmp_path)
    with pytest.raises(InputError, match="No such file"):
        Problem.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("link", "inter"),
    [("a>b", True), ("a>a", False), ("a:0>a:1", False), ("a:0>b:1", True), ("wan", True)],
)
def test_links_between_sites_are_told_by_their_names(link, inter):
    assert is_inter_site(link) is inter


def test_a_step_over_other_links_keeps_its_bytes_and_its_collectives():
    slow, fast = (Link(latency_s=0.0, bandwidth_bytes_per_s=rate) for rate in (1.0, 2.0))
    hop = Hop(forward=Transfer(link="a>b", bytes=4.0))
    problem = Problem(
        num_microbatches=2,
        ranks=(Rank(),) * 3,
        stages=tuple(Stage(rank=rank, forward_s=1, input_grad_s=1, weight_grad_s=1) for rank in range(3)),
        links={"a>b": slow, "b>a": slow, "c": slow},
        hops=(hop, hop),
        sync=(Sync(reduce=Transfer(link="c", bytes=1.0)), None, None),
    )
    moved = problem.over({"x": fast, "y": fast, "unused": fast}, [(("x", "y"), "y"), None])
    assert moved.hops == (Hop(forward=Transfer(link=("x", "y"), bytes=4.0)), None)
    assert moved.links == {"c": slow, "x": fast, "y": fast}
    assert moved.sync == problem.sync
    assert Problem.from_json(moved.to_json()) == moved
