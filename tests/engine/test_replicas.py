"""Replicas of the pipeline train as the plain model does on the whole batch, and stay equal bit by bit."""

import json
import shutil

import pytest
import torch

from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.simulate.timeline import Timeline
from farpipe.core.spec import Data, Training
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Sync, Transfer, stagger
from farpipe.engine.data.batches import load_batches
from farpipe.engine.executor.executor import Executor
from farpipe.engine.executor.work import Trainer
from farpipe.engine.replicas.replicas import PipelinePeers, collective_bytes
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.train import run_step, train_rank
from farpipe.planning.cost.layout import Layout
from farpipe.planning.cost.memory import state_bytes
from in_process import run_ranks
from small_models import (
    GPT,
    LLAMA,
    TIED,
    even_partition,
    placed_problem,
    reference_step,
    relative_error,
    split_backward,
    whole_model,
)
from trainings import train_in_one_process

TRAINING = Training(
    sequence_length=6, global_batch=12, microbatch_size=1, precision="fp32", clip_norm=0.5, learning_rate=1e-2, seed=7
)
SMALL = {"num_layers": 4, "vocab_size": 256}
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6}
NUM_STEPS = 2


def make_run(text_file, placement, replicas, *, model=LLAMA, split=False, method="gpipe", training=None, **options):
    """A training whose replicas are at these sites, each with its share of a batch of 12."""
    changed = dict(options)
    zero1 = changed.pop("zero1", False)
    training = (training or TRAINING).model_copy(update={"zero": int(zero1)})
    problem = placed_problem(placement, training.global_batch // len(replicas))
    schedule = order(method, problem)
    model = model.model_copy(update=SMALL)
    return RunSpec.bare(
        problem=problem,
        schedule=split_backward(schedule) if split else schedule,
        sites=replicas[0],
        replicas=replicas,
        num_steps=NUM_STEPS,
        model=model,
        training=training,
        data=Data(source=str(text_file)),
        partition=even_partition(model, len(placement)),
        **changed,
    )


def train(run, dtype, num_steps=NUM_STEPS, late_s=()):
    """Every process's reports and Trainer after the steps, by process; weights complete. `late_s`: see `run_ranks`."""

    def work(peers):
        learning = Trainer(run, peers, parameters=dtype)
        view = PipelinePeers(peers, run.places)
        executor = Executor(run.plan.schedule, learning.stages, view, learning.stage_done, learning.stage_begins)
        reports = [run_step(step, 0, learning, executor, peers) for step in range(num_steps)]
        learning.complete_weights(num_steps - 1)
        return reports, learning

    return run_ranks(run.num_processes, work, late_s=late_s)


def weights_of(run, results, replica):
    """The whole model's weights as one replica has them."""
    found = {}
    for learning in works_of(run, results, replica):
        for stage in learning.torch_stages.values():
            found |= {name: p.detach() for name, p in stage.module.named_parameters()}
    return found


def works_of(run, results, replica):
    """What the processes of one replica have learnt."""
    return [results[run.places.process(rank, replica)][1] for rank in range(run.plan.problem.num_ranks)]


def assert_equals_whole(run, dtype, late_s=()):
    """Losses, norms and weights after several steps are the plain model's; replicas have the same bits."""
    results, training = train(run, dtype, late_s=late_s), run.plan.training
    losses, norms, whole = train_in_one_process(run, dtype)
    limit = LIMITS[dtype]
    for step in range(NUM_STEPS):
        reports = [reports[step] for reports, _ in results]
        shares = [report.loss for report in reports if report.loss == report.loss]
        assert len(shares) == run.num_replicas
        assert sum(shares) == pytest.approx(losses[step], rel=limit)
        assert {report.grad_norm for report in reports} == {reports[0].grad_norm}
        assert reports[0].grad_norm == pytest.approx(norms[step], rel=10 * limit)
    assert min(norms) > training.clip_norm, "clipping is what is tested"
    first = weights_of(run, results, 0)
    for name, parameter in whole.named_parameters():
        size = max(float(parameter.detach().abs().max()), training.learning_rate)  # a bias of keys stays at nothing
        assert float((first[name] - parameter.detach()).abs().max()) < 100 * limit * size, name
    for replica in range(1, run.num_replicas):
        for name, weight in weights_of(run, results, replica).items():
            assert torch.equal(weight, first[name]), name
    if run.plan.model.tied_embeddings and "head.weight" in first:
        assert torch.equal(first["embedding.weight"], first["head.weight"])
    return results


SAME_SITE = {1: ("a",), 2: ("a", "b")}
V_SHAPE = (0, 1, 1, 0)


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("split", [pytest.param(False, marks=pytest.mark.slow), True], ids=["B", "IW"])
@pytest.mark.parametrize("zero1", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "zero1"])
@pytest.mark.parametrize("placement", [(0,), (0, 1), V_SHAPE, (0, 1, 0, 1)])
def test_two_replicas_train_as_one_model(placement, zero1, split, dtype, text_file):
    sites = SAME_SITE[max(placement) + 1]
    assert_equals_whole(make_run(text_file, placement, (sites,) * 2, zero1=zero1, split=split), dtype)


REPLICAS = {
    "three at one site": (("a",),) * 3,
    "one at each of three sites": (("a",), ("b",), ("c",)),
    "two at each of two sites": (("a",), ("a",), ("b",), ("b",)),
    "two here, one there": (("a",), ("a",), ("b",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("zero1", [False, True], ids=["whole", "zero1"])
@pytest.mark.parametrize("replicas", REPLICAS.values(), ids=REPLICAS)
def test_replicas_inside_and_across_sites(replicas, zero1, text_file):
    assert_equals_whole(make_run(text_file, (0,), replicas, zero1=zero1), torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("zero1", [False, True], ids=["whole", "zero1"])
@pytest.mark.parametrize("model", [TIED, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("placement", [(0, 1), V_SHAPE])
def test_tied_matrices_of_replicas(placement, model, zero1, text_file):
    run = make_run(text_file, placement, (("a", "a"), ("b", "b")), model=model, zero1=zero1, split=True)
    assert_equals_whole(run, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("zero1", [False, True], ids=["whole", "zero1"])
@pytest.mark.parametrize("late", [0, 2])
def test_what_is_late_to_one_replica_is_what_was_summed(late, zero1, text_file):
    """With three replicas one may be done with the sum, and with the ends' exchange, before another has heard of it."""
    run = make_run(text_file, (0, 1), (("a", "a"), ("b", "b"), ("c", "c")), model=TIED, zero1=zero1)
    assert_equals_whole(run, torch.float64, late_s={late: 0.03})


def gradients_of(run, dtype):
    """The summed gradients of the first step; all replicas have the same bits."""

    def work(peers):
        learning = Trainer(run, peers, parameters=dtype)
        view = PipelinePeers(peers, run.places)
        executor = Executor(run.plan.schedule, learning.stages, view, learning.stage_done, learning.stage_begins)
        learning.begin_step(0)
        executor.run(0)
        learning.sum_gradients(0)
        return {n: p.grad.clone() for s in learning.torch_stages.values() for n, p in s.module.named_parameters()}

    results = run_ranks(run.num_processes, work)
    for name in {name for gradients in results for name in gradients}:
        first, *others = [gradients[name] for gradients in results if name in gradients]
        assert len(others) == run.num_replicas - 1
        assert all(torch.equal(first, other) for other in others), name
    return {name: gradient for gradients in results for name, gradient in gradients.items()}


@pytest.mark.parametrize("dtype", LIMITS)
def test_gradients_are_those_of_the_whole_batch(dtype, text_file):
    run = make_run(text_file, (0, 1), (("a", "b"),) * 2, method="1f1b", split=True)
    whole = whole_model(run.plan.model, dtype)
    reference_step(whole, load_batches(run.plan.data, run.plan.model, (12, 1, 6), TRAINING.seed).batch(0))
    found = gradients_of(run, dtype)
    for name, parameter in whole.named_parameters():
        assert relative_error(found[name], parameter.grad) < LIMITS[dtype], name


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(("a", "b"),) * 2, (("a", "a"), ("b", "b"))], ids=["inside", "across"])
def test_a_divided_optimizer_makes_the_same_bits(replicas, text_file):
    """Shares here are whole vectors of the processor; others' last elements may be rounded otherwise."""
    whole, divided = (make_run(text_file, (0, 1), replicas, model=TIED, zero1=zero1) for zero1 in (False, True))
    of_whole, of_divided = (weights_of(run, train(run, torch.float32), 0) for run in (whole, divided))
    for name, weight in of_whole.items():
        assert torch.equal(weight, of_divided[name]), name


def test_a_divided_optimizer_keeps_its_share_only(text_file):
    run = make_run(text_file, (0,), (("a",),) * 3, zero1=True)
    results = train(run, torch.float32, num_steps=1)
    num_all = sum(p.numel() for p in results[0][1].torch_stages[0].module.parameters())
    shares = [sum(shard.parameter.numel() for shard in learning.shards) for _, learning in results]
    assert sum(shares) == num_all
    assert max(shares) <= num_all / 3 + 3 * 64
    pieces = [(piece.name, piece.start, piece.values.numel()) for _, learning in results for piece in learning.state()]
    assert sum(size for name, _, size in pieces if name.startswith("exp_avg/")) == num_all
    assert len(set(pieces)) == len(pieces)


BF16 = TRAINING.model_copy(update={"precision": "bf16"})


@pytest.mark.slow
@pytest.mark.parametrize("model", [LLAMA, TIED, GPT], ids=["llama", "tied", "gpt"])
def test_bf16_with_float32_master_weights(model, text_file):
    """The same bits with ZeRO-1, where a replica has all weights in bf16 and its share of them in float32."""
    runs = [
        make_run(text_file, (0, 1), (("a", "b"),) * 2, model=model, training=BF16, zero1=zero1)
        for zero1 in (False, True)
    ]
    whole, divided = (train(run, torch.float32) for run in runs)
    assert [[r.loss for r in reports if r.loss == r.loss] for reports, _ in whole] == [
        [r.loss for r in reports if r.loss == r.loss] for reports, _ in divided
    ]
    masters = [shard for work in works_of(runs[0], whole, 0) for shard in work.shards]
    expected = {one.name: one.parameter.detach().view(one.whole.shape) for one in masters}
    assert any((weight != weight.bfloat16()).any() for weight in expected.values()), "master weights are not rounded"
    for replica in range(2):
        for name, weight in weights_of(runs[1], divided, replica).items():
            assert weight.dtype == torch.bfloat16
            assert torch.equal(weight, expected[name].bfloat16()), name
    covered = dict.fromkeys(expected, 0)
    for _, learning in divided:
        for shard in learning.shards:
            assert torch.equal(shard.parameter.flatten(), expected[shard.name].flatten()[shard.start : shard.end])
            covered[shard.name] += shard.end - shard.start
    assert covered == {name: weight.numel() for name, weight in expected.items()}


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_replica_has_the_bytes_of_the_cost_model(precision, num_replicas, text_file):
    training = TRAINING.model_copy(update={"precision": precision})
    run = make_run(text_file, (0,), (("a",),) * num_replicas, training=training, zero1=True)
    for _, learning in train(run, torch.float32, num_steps=1):
        module = learning.torch_stages[0].module
        held = [t for p in module.parameters() for t in (p.data, p.grad)]
        held += [piece.values for piece in learning.state()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        layout = Layout(1, num_replicas, tensor=1, virtual=1, microbatch_size=1, num_microbatches=12 // num_replicas)
        estimated = state_bytes(run.plan.model.num_params, run.plan.training, layout)
        padding = 64 * num_replicas * 16
        assert estimated - padding <= sum(storages.values()) <= estimated + padding


def test_bf16_gradients_are_near_those_of_float32(text_file):
    run = make_run(text_file, (0, 1), (("a", "b"),) * 2, training=BF16)
    whole = whole_model(run.plan.model, torch.float32)
    reference_step(whole, load_batches(run.plan.data, run.plan.model, (12, 1, 6), TRAINING.seed).batch(0))
    found = gradients_of(run, torch.float32)
    for name, parameter in whole.named_parameters():
        assert found[name].dtype == torch.float32
        assert relative_error(found[name], parameter.grad) < 0.05, name


FIGURES = {"forward_s": 0.01, "input_grad_s": 0.01, "weight_grad_s": 0.01}


def two_regions(gather_bytes=0):
    """A replica in each of two regions, two ranks each; what they sum crosses the ocean."""
    links = {name: Link(latency_s=0.01, bandwidth_bytes_per_s=1e7) for name in ("a>b", "b>a")}
    sync = Sync(
        reduce=Transfer(link="a>b", bytes=1e5),
        gather=Transfer(link="a>b", bytes=gather_bytes) if gather_bytes else None,
    )
    problem = Problem(
        num_microbatches=4,
        ranks=(Rank(), Rank()),
        stages=tuple(Stage(rank=rank, **FIGURES) for rank in range(2)),
        links=links,
        hops=(Hop(),),
        sync=(sync, sync),
    )
    replicas = (("a", "a"), ("b", "b"))
    schedule = order("1f1b", problem)
    body = {"problem": problem, "schedule": schedule, "sites": ("a", "a"), "replicas": replicas, "device": "sleep"}
    return RunSpec.bare(num_steps=4, **body)


@pytest.mark.slow
@pytest.mark.parametrize("gather_bytes", [0, 50_000])
def test_a_rehearsal_has_the_collectives_in_its_timeline(gather_bytes, tmp_path):
    run = two_regions(gather_bytes)
    run_ranks(4, lambda peers: train_rank(run, peers, tmp_path))
    predicted, measured = simulate(run.plan.problem, run.plan.schedule), Timeline.load(tmp_path / "timeline.json")
    key = ["kind", "stage", "microbatch", "link", "source", "target"]
    assert sorted(measured.messages[key].tolist()) == sorted(predicted.messages[key].tolist())
    collectives = measured.messages[measured.messages["microbatch"] < 0]
    assert len(collectives) == (4 if gather_bytes else 2)
    for name in ("ready_s", "start_s", "end_s"):
        later = {"ready_s": "start_s", "start_s": "end_s", "end_s": "arrival_s"}[name]
        assert (collectives[name] <= collectives[later]).all()
    assert measured.link_bytes()["a>b"] == pytest.approx(predicted.link_bytes()["a>b"], rel=0.01)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        found = json.loads(line)["link_bytes"]
        assert found["a>b"] == found["b>a"] == measured.link_bytes()["a>b"], "though the Problem names one way only"


@pytest.mark.parametrize("name", ["a>b", "a:0>a:1", "fibre 7"])
def test_a_rehearsed_collective_has_the_ring_of_its_links_kind_whatever_the_name(name):
    reduce, levels = Transfer(link=name, bytes=600.0), ((0, 1), (0, 2, 4, 6))
    assert collective_bytes(reduce, levels, {name: False}, rounds=2) == 600 * 2 / (2 * 1)
    assert collective_bytes(reduce, levels, {name: True}, rounds=2) == 600 * 4 / (2 * 3)


def test_a_stage_is_summed_while_its_rank_works_on(tmp_path):
    """In a V the last stage of a rank ends long before the first one, and its sum does not wait for that."""
    links = {"a>b": Link(latency_s=0, bandwidth_bytes_per_s=1e9)}
    sync = Sync(reduce=Transfer(link="a>b", bytes=1000))
    stages = tuple(Stage(rank=0, **FIGURES) for _ in range(2))
    problem = Problem(num_microbatches=2, ranks=(Rank(),), stages=stages, links=links, hops=(None,), sync=(sync, sync))
    body = {"problem": problem, "schedule": order("gpipe", problem), "replicas": (("a",), ("b",)), "device": "sleep"}
    run = RunSpec.bare(num_steps=2, sites=("a",), **body)
    run_ranks(2, lambda peers: train_rank(run, peers, tmp_path))
    timeline = Timeline.load(tmp_path / "timeline.json")
    arrivals = {int(m["stage"]): m["arrival_s"] for m in timeline.messages}
    assert arrivals[1] < timeline.actions["end_s"].max() < arrivals[0]


def test_replicas_take_turns_where_the_problem_says_so(tmp_path):
    links = {"a>b": Link(latency_s=0, bandwidth_bytes_per_s=1e6), "b>a": Link(latency_s=0, bandwidth_bytes_per_s=1e9)}
    hop = Hop(forward=Transfer(link="a>b", bytes=100_000), backward=Transfer(link="b>a", bytes=0))
    together = Problem.model_validate(dict(placed_problem((0, 1), 2)) | {"links": links, "hops": (hop,)})
    quick = tuple(stage.model_copy(update=FIGURES) for stage in together.stages)
    problem = stagger(together.model_copy(update={"stages": quick}), 2)
    assert problem.traffic.opens_s.max() == pytest.approx(0.05)
    body = {"problem": problem, "schedule": order("gpipe", problem), "replicas": (("a", "b"),) * 2, "device": "sleep"}
    run = RunSpec.bare(num_steps=2, sites=("a", "b"), **body)
    run_ranks(4, lambda peers: train_rank(run, peers, tmp_path))
    timeline = Timeline.load(tmp_path / "timeline.json")
    opens_s = problem.traffic.opens_s.max()
    assert timeline.actions["start_s"].min() > 0.8 * opens_s  # clocks of the ranks agree to a millisecond or two
    assert timeline.link_bytes()["a>b"] == simulate(problem, run.plan.schedule).link_bytes()["a>b"] == 2 * 100_000


GO_ON = {
    "the same": ((0, 1), (("a", "b"),) * 2, True),
    "undivided": ((0, 1), (("a", "b"),) * 2, False),
    "one replica": ((0,), (("a",),), False),
    "three replicas": ((0,), (("a",),) * 3, True),
    "a V across sites": (V_SHAPE, (("a", "a"), ("b", "b")), True),
}


@pytest.fixture(scope="module")
def stopped(text_file, tmp_path_factory):
    """The losses of four steps with ZeRO-1 and where its checkpoints are."""
    folder = tmp_path_factory.mktemp("run")
    run = four_steps(text_file, *GO_ON["the same"])
    run_ranks(4, lambda peers: train_rank(run, peers, folder))
    return losses_of(folder), folder / "checkpoints" / "step-2"


def four_steps(text_file, placement, replicas, zero1, precision="fp32"):
    options = {"checkpoint_every_steps": 2, "num_steps": 4, "precision": precision}
    training = TRAINING.model_copy(update=options)
    run = make_run(text_file, placement, replicas, training=training, model=TIED, zero1=zero1)
    return run.model_copy(update={"num_steps": 4})


def losses_of(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("how", GO_ON.values(), ids=GO_ON)
def test_a_checkpoint_of_shares_is_good_for_any_replicas(how, stopped, text_file, tmp_path):
    losses, checkpoint = stopped
    shutil.copytree(checkpoint, tmp_path / "checkpoints" / "step-2")
    run = four_steps(text_file, *how)
    run_ranks(run.num_processes, lambda peers: train_rank(run, peers, tmp_path))
    found = losses_of(tmp_path)[-2:]
    assert found == losses[2:] if run.num_replicas == 2 else found == pytest.approx(losses[2:], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["divided", "whole"])
def test_a_bf16_checkpoint_has_all_digits_whoever_holds_them(first, text_file, tmp_path):
    """Going on divided or not, the losses have the same bits as those of a run that did not stop."""
    placement, replicas, _ = GO_ON["the same"]
    run = four_steps(text_file, placement, replicas, first, "bf16")
    (tmp_path / "first").mkdir()
    run_ranks(4, lambda peers: train_rank(run, peers, tmp_path / "first"))
    losses = losses_of(tmp_path / "first")
    for then in (True, False):
        folder = tmp_path / f"then {then}"
        shutil.copytree(tmp_path / "first" / "checkpoints" / "step-2", folder / "checkpoints" / "step-2")
        later = four_steps(text_file, placement, replicas, then, "bf16")
        run_ranks(4, lambda peers, later=later, folder=folder: train_rank(later, peers, folder))
        assert losses_of(folder)[-2:] == losses[2:]
