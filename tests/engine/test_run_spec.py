import json

import pytest

from farpipe.core.errors import InputError, ScheduleError
from farpipe.core.schedule.library import order
from farpipe.core.spec import Training
from farpipe.core.step import Exchange, Hop, Link, Problem, Schedule, Sync, Transfer
from farpipe.engine.bare_plan import BarePlan
from farpipe.engine.links import LinkShape
from farpipe.engine.run_spec import RunSpec
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
    return RunSpec.bare(**body | options)


def read_changed(**changes):
    """The RunSpec read from a run's file after `changes` to it."""
    data = json.loads(make_run().to_json())
    for key, value in changes.items():
        table = data["plan"] if key in BarePlan.model_fields else data
        table.pop(key, None)
        table |= {} if value is None else {key: value}
    return RunSpec.from_json(json.dumps(data), "run.json")


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
        ({"sites": ["a", "b"]}, r"run\.json: plan\.sites: expected one site per rank, 3, found 2"),
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
        ({"problem": {"format": "farpipe/problem/1"}}, r"run\.json: plan\.problem\.num_microbatches: missing"),
        ({"schedule": {"format": "farpipe/schedule/1"}}, r"run\.json: plan\.schedule: method: missing"),
        ({"format": "farpipe/run/1"}, r"run\.json: format: expected 'farpipe/run/2'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(changes, message):
    with pytest.raises(InputError, match=message):
        read_changed(**changes)


def test_an_order_that_breaks_a_rule_is_refused():
    with pytest.raises(ScheduleError, match="is not valid: "):
        read_changed(schedule=Schedule.from_text(["0F0", "1F0", "2F0"], 4).to_data())


def test_a_batch_that_is_not_the_microbatches_is_refused():
    with pytest.raises(ValueError, match="microbatch_size 2 x 4 microbatches is not global_batch 6"):
        make_run(training=TRAINING.model_copy(update={"global_batch": 6}))


def test_tied_weights_are_exchanged_between_the_ends():
    ends = make_run(model=TIED).ends
    assert ends == (0, 2, "a>b", "b>a")
    assert make_run(model=LLAMA).ends is None


def test_data_parallel_collectives_need_replicas():
    reduce = Sync(reduce=Transfer(link="a>b", bytes=8))
    with pytest.raises(ValueError, match="it has data-parallel collectives, but there is one replica"):
        make_run(make_problem(sync=(reduce,) * 3), model=TIED)


def exchange(source_stage, target_stage):
    return Exchange(link="a>b", bytes=8, source_stage=source_stage, target_stage=target_stage)


def test_only_what_is_tied_is_exchanged():
    tied, other = (make_problem(exchanges=(exchange(0, s), exchange(s, 0))) for s in (2, 1))
    assert make_run(tied, model=TIED).ends is not None
    for problem, model in ((tied, LLAMA), (other, TIED)):
        with pytest.raises(ValueError, match="exchanges that are not those of a matrix tied between the ends"):
            make_run(problem, model=model)


SITES = ("a", "a", "b")
HALF = TRAINING.model_copy(update={"global_batch": 16})


def test_replicas_divide_the_batch_and_are_processes_of_their_own():
    run = make_run(training=HALF, replicas=(SITES,) * 2)
    assert (run.num_replicas, run.num_processes) == (2, 6)
    with pytest.raises(ValueError, match="microbatch_size 2 x 4 microbatches x 2 replicas is not global_batch 8"):
        make_run(replicas=(SITES,) * 2)


def test_replicas_share_the_links_between_sites():
    wan, back = LinkShape(0.02, 25e6), LinkShape(0.03, 5e6)
    links = make_run(training=HALF, replicas=(SITES,) * 2).links()
    assert {pair for pair, link in links.items() if link == ("a>b", wan)} == {(s, t) for s in range(4) for t in (4, 5)}
    assert {pair for pair, link in links.items() if link == ("b>a", back)} == {(s, t) for s in (4, 5) for t in range(4)}
    inside = {pair: link for pair, link in links.items() if pair[0] < 4 and pair[1] < 4}
    assert inside == {
        (0, 2): ("a:0>a:1", None),
        (1, 3): ("a:0>a:1", None),
        (2, 0): ("a:1>a:0", None),
        (3, 1): ("a:1>a:0", None),
    }


def test_replicas_at_other_sites_are_joined_by_the_sites_links():
    links = make_run(training=HALF, replicas=(SITES, ("b", "b", "b"))).links()
    assert links[0, 3][0] == links[1, 4][0] == "a>b"
    assert links[3, 0][0] == "b>a"
    assert (3, 4) not in links, "inside a site nothing is delayed"


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ((SITES, ("a", "b")), "replicas.*expected one site per rank, 3, for every replica"),
        ((("b", "a", "a"), SITES), "the first replica is at .*, but sites are"),
    ],
)
def test_replicas_have_the_same_ranks(replicas, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        make_run(training=HALF, replicas=replicas)


def test_collectives_of_replicas_are_those_that_the_training_needs():
    ring = Transfer(link="a:0>a:1", bytes=8)
    whole, divided = (Sync(reduce=ring),) * 3, (Sync(reduce=ring, gather=ring),) * 3
    zero1 = HALF.model_copy(update={"zero": 1})
    options = {"replicas": (SITES,) * 2}
    assert make_run(make_problem(sync=divided), training=zero1, **options).has_gather(1)
    assert not make_run(make_problem(sync=whole), training=HALF, **options).has_gather(1)
    with pytest.raises(ValueError, match="zero = 1: every stage needs a reduce and a gather"):
        make_run(make_problem(sync=whole), training=zero1, **options)
    with pytest.raises(ValueError, match="zero = auto: every stage needs a reduce and no gather"):
        make_run(make_problem(sync=divided), training=HALF, **options)


AWAY = ("c", "c", "d")


@pytest.mark.parametrize(
    ("replicas", "num_sharing", "reduced"),
    [((SITES,) * 2, 2, False), ((SITES, SITES, AWAY, AWAY), 2, True), ((SITES, AWAY), 1, True)],
)
def test_replicas_at_a_site_share_weights_with_zero_3_and_sum_over_sites(replicas, num_sharing, reduced):
    batch = 8 * len(replicas)
    training = TRAINING.model_copy(update={"zero": 3, "global_batch": batch})
    own = LLAMA.model_copy(update={"module": "package:build"})
    run = make_run(training=training, replicas=replicas, model=own)
    assert (run.num_sharing, run.has_reduce(0), run.has_gather(0)) == (num_sharing, reduced, False)


@pytest.mark.parametrize(
    ("replicas", "model", "message"),
    [
        ((SITES, SITES, AWAY), {"module": "package:build"}, "as many at every site"),
        (
            (SITES, ("a", "c", "d")),
            {"module": "package:build"},
            "the same ones at all sites that they have; say zero = 1",
        ),
    ],
)
def test_replicas_that_can_t_share_weights_are_refused(replicas, model, message):
    training = TRAINING.model_copy(update={"zero": 3, "global_batch": 8 * len(replicas)})
    with pytest.raises(ValueError, match=message):
        make_run(training=training, replicas=replicas, model=LLAMA.model_copy(update=model))


def test_recomputation_is_said_per_stage():
    assert make_run(recompute=("none", "full", "selective")).plan.recompute[1] == "full"
    with pytest.raises(ValueError, match="expected one per stage, 3, found 1"):
        make_run(recompute=("full",))


def test_a_rehearsal_needs_no_model():
    run = make_run(device="sleep", model=None, training=None, partition=())
    assert run.tokens_per_step == 0
    assert RunSpec.from_json(run.to_json()) == run
