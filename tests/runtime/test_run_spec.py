import json

import pytest

from farpipe.emulate import LinkShape
from farpipe.errors import InputError, ScheduleError
from farpipe.problem import Hop, Link, Problem, Sync, Transfer
from farpipe.runtime.run_spec import RunSpec
from farpipe.schedule import Schedule
from farpipe.schedule.library import order
from farpipe.spec import Training
from small_models import LLAMA, TIED, even_partition, placed_problem

TRAINING = Training(sequence_length=6, global_batch=8, microbatch_size=2, precision="fp32")

LINKS = {
    "a>b": Link(latency_s=0.02, bandwidth_bytes_per_s=25e6),
    "b>a": Link(latency_s=0.03, bandwidth_bytes_per_s=5e6),
    "a:0>a:1": Link(latency_s=0, bandwidth_bytes_per_s=1e9),
    "a:1>a:0": Link(latency_s=0, bandwidth_bytes_per_s=1e9),
}


def make_problem(**options):
    """Three ranks: two at site a, one at site b."""
    inside = Hop(forward=Transfer(link="a:0>a:1", bytes=8), backward=Transfer(link="a:1>a:0", bytes=8))
    across = Hop(forward=Transfer(link="a>b", bytes=8), backward=Transfer(link="b>a", bytes=8))
    problem = placed_problem((0, 1, 2), 4)
    body = dict(problem) | {"links": LINKS, "hops": (inside, across)} | options
    return Problem.model_validate(body)


def make_run(problem=None, **options):
    problem = make_problem() if problem is None else problem
    body = {
        "problem": problem,
        "schedule": order("1f1b", problem),
        "sites": ("a", "a", "b"),
        "num_steps": 3,
        "model": LLAMA,
        "training": TRAINING,
        "partition": even_partition(LLAMA, 3),
    }
    return RunSpec.model_validate(body | options)


def read_changed(**changes):
    """What reading the file of a run gives after `changes` to it."""
    data = json.loads(make_run().to_json())
    return RunSpec.from_json(json.dumps({key: v for key, v in (data | changes).items() if v is not None}), "run.json")


def test_a_run_survives_its_file(tmp_path):
    run = make_run()
    run.save(tmp_path / "run.json")
    assert RunSpec.load(tmp_path / "run.json") == run
    assert RunSpec.load(tmp_path / "run.json").to_json() == run.to_json()


def test_links_between_sites_are_emulated_and_links_inside_are_not():
    wan, back = LinkShape(0.02, 25e6), LinkShape(0.03, 5e6)
    assert make_run().links() == {
        (0, 1): ("a:0>a:1", None),
        (1, 0): ("a:1>a:0", None),
        (1, 2): ("a>b", wan),
        (2, 1): ("b>a", back),
        (0, 2): ("a>b", wan),
        (2, 0): ("b>a", back),
    }


def test_real_links_are_not_delayed():
    assert all(shape is None for _, shape in make_run(emulate_links=False).links().values())


def test_two_links_for_one_pair_of_ranks_are_refused():
    hop = Hop(forward=Transfer(link=("a>b", "b>a", "a>b", "a>b"), bytes=8))
    with pytest.raises(ValueError, match="'b>a' and 'a>b' both join ranks 1 and 2"):
        make_run(make_problem(hops=(Hop(), hop))).links()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sites": ["a", "b"]}, r"run\.json: sites: expected one site per rank, 3, found 2"),
        ({"devcie": "cpu"}, r"run\.json: devcie: unknown key; did you mean 'device'\?"),
        ({"device": "tpu"}, r"run\.json: device: .*'cpu', 'cuda' or 'sleep'"),
        ({"num_steps": 0}, r"run\.json: num_steps: .*greater than or equal to 1"),
        ({"model": None}, r"run\.json: model: needed to train on device 'cpu'"),
        ({"training": None}, r"run\.json: training: needed to train on device 'cpu'"),
        ({"partition": [[0, 3], [3, 8]]}, r"partition: expected one entry per stage, 3, found 2"),
        (
            {"partition": [[0, 3], [4, 5], [5, 8]]},
            r"partition: stage 1 has layers 4 to 5, but the one before ends at 3",
        ),
        ({"partition": [[0, 3], [3, 5], [5, 7]]}, r"partition: the last stage ends at layer 7, the model has 8"),
        ({"problem": {"format": "farpipe/problem/1"}}, r"run\.json: problem\.num_microbatches: missing"),
        ({"schedule": {"format": "farpipe/schedule/1"}}, r"run\.json: schedule: method: missing"),
        ({"format": "farpipe/run/2"}, r"run\.json: format: expected 'farpipe/run/1'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(changes, message):
    with pytest.raises(InputError, match=message):
        read_changed(**changes)


def test_an_order_that_breaks_a_rule_is_refused():
    with pytest.raises(ScheduleError, match="rule 3"):
        read_changed(schedule=Schedule.from_text(["0F0", "1F0", "2F0"], 4).to_data())


def test_a_batch_that_is_not_the_microbatches_is_refused():
    with pytest.raises(ValueError, match="microbatch_size 2 x 4 microbatches is not global_batch 6"):
        make_run(training=TRAINING.model_copy(update={"global_batch": 6}))


def test_tied_weights_are_exchanged_between_the_ends():
    ends = make_run(model=TIED).ends
    assert ends == (0, 2, "a>b", "b>a")
    assert make_run(model=LLAMA).ends is None


def test_data_parallel_collectives_are_refused():
    reduce = Sync(reduce=Transfer(link="a>b", bytes=8))
    tied = make_problem(sync=(reduce, None, reduce))
    assert make_run(tied, model=TIED).ends is not None
    with pytest.raises(ValueError, match="data-parallel collectives can't be run yet"):
        make_run(tied, model=LLAMA)
    with pytest.raises(ValueError, match="data-parallel collectives can't be run yet"):
        make_run(make_problem(sync=(reduce, reduce, reduce)), model=TIED)


def test_a_rehearsal_needs_no_model():
    run = make_run(device="sleep", model=None, training=None, partition=())
    assert run.tokens_per_step == 0
    assert RunSpec.from_json(run.to_json()) == run
