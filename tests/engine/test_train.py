import json

import pytest
import torch

from attempts import assert_most_of_five
from farpipe.core.errors import InputError, RunError
from farpipe.core.schedule.library import order
from farpipe.core.simulate.timeline import Timeline
from farpipe.core.spec import Data, Training
from farpipe.core.step import Exchange, Link, Problem
from farpipe.engine.agreement import agree
from farpipe.engine.executor.executor import Executor
from farpipe.engine.executor.work import Trainer
from farpipe.engine.figures.metrics import Summary
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.train import run_step, train_rank
from in_process import run_ranks
from small_models import LLAMA, TIED, even_partition, placed_problem, relative_error
from trainings import train_in_one_process

TRAINING = Training(
    sequence_length=6, global_batch=8, microbatch_size=2, precision="fp32", clip_norm=0.5, learning_rate=1e-2, seed=7
)

pytestmark = pytest.mark.slow  # starts processes


def make_run(text_file, *, model=TIED, placement=(0, 1), num_steps=4, **options):
    problem = placed_problem(placement, 4)
    return RunSpec.bare(
        problem=problem,
        schedule=order("1f1b", problem),
        sites=tuple(f"site{rank}" for rank in range(problem.num_ranks)),
        num_steps=num_steps,
        model=model.model_copy(update={"vocab_size": 256}),
        training=TRAINING,
        data=Data(source=str(text_file)),
        partition=even_partition(model, len(placement)),
        **options,
    )


@pytest.mark.parametrize("placement", [(0,), (0, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("model", [LLAMA, TIED], ids=["untied", "tied"])
def test_training_for_several_steps_equals_training_in_one_process(model, placement, text_file):
    run = make_run(text_file, model=model, placement=placement)

    def work(peers):
        learning = Trainer(run, peers, parameters=torch.float64)
        executor = Executor(run.plan.schedule, learning.stages, peers, learning.stage_done)
        reports = [run_step(step, 0, learning, executor, peers) for step in range(4)]
        return reports, learning

    results = run_ranks(len(placement), work)
    losses, norms, whole = train_in_one_process(run, torch.float64)
    reports, _ = results[-1]
    assert [report.loss for report in reports] == pytest.approx(losses, rel=1e-12)
    assert [report.grad_norm for report in reports] == pytest.approx(norms, rel=1e-12)
    assert min(norms) > TRAINING.clip_norm, "clipping is what is tested"
    stages = {number: stage for _, learning in results for number, stage in learning.torch_stages.items()}
    trained = {name: p for stage in stages.values() for name, p in stage.module.named_parameters()}
    for name, parameter in whole.named_parameters():
        assert relative_error(trained[name], parameter) < 1e-10, name
    if model.tied_embeddings and len(placement) > 1:
        assert torch.equal(trained["embedding.weight"], trained["head.weight"])


def test_a_run_leaves_metrics_a_timeline_and_a_summary(text_file, tmp_path):
    run = make_run(text_file, num_steps=5)
    summary = run_ranks(2, lambda peers: train_rank(run, peers, tmp_path))[0]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(0 < line["makespan_s"] <= line["step_s"] for line in lines)
    assert all(0 < line["bubble"] < 1 for line in lines)
    assert lines[0]["loss"] == pytest.approx(5.5, abs=0.2), "an untrained model knows nothing about 256 bytes"
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert Summary.load(tmp_path / "summary.json") == summary
    assert (summary.num_steps, summary.num_skipped_steps) == (5, 2)
    timeline = Timeline.load(tmp_path / "timeline.json")
    assert timeline.source == "measured"
    assert len(timeline.actions) == run.plan.schedule.num_actions
    assert timeline.makespan_s == pytest.approx(lines[summary.timeline_step]["makespan_s"])


def test_bf16_trains_with_float32_parameters(text_file, tmp_path):
    training = TRAINING.model_copy(update={"precision": "bf16", "recompute": "full"})
    run = make_run(text_file, num_steps=6).with_plan(training=training)
    summary = run_ranks(2, lambda peers: train_rank(run, peers, tmp_path))[0]
    exact = make_run(text_file, num_steps=6)
    (tmp_path / "exact").mkdir()
    expected = run_ranks(2, lambda peers: train_rank(exact, peers, tmp_path / "exact"))[0]
    assert summary.last_loss < summary.first_loss
    assert summary.last_loss == pytest.approx(expected.last_loss, rel=0.05)


def test_half_precision_without_loss_scaling_is_refused(text_file, tmp_path):
    training = TRAINING.model_copy(update={"precision": "fp16"})
    run = make_run(text_file).with_plan(training=training)
    with pytest.raises(InputError, match=r"training.precision: 'fp16' needs loss scaling"):
        run_ranks(2, lambda peers: train_rank(run, peers, tmp_path))


def test_different_texts_on_two_sites_are_found_before_the_first_step(text_file, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text().replace("fox", "cat"))
    run = make_run(text_file)

    def work(peers):
        learning = Trainer(make_run(other) if peers.rank == 1 else run, peers)
        agree(run, learning, peers)

    with pytest.raises(InputError, match="ranks 0 and 1 have different training texts"):
        run_ranks(2, work)


def test_different_plans_on_two_sites_are_found(text_file, tmp_path):
    runs = [make_run(text_file), make_run(text_file, num_steps=7)]
    with pytest.raises(InputError, match=r"ranks 0 and 1 have different run\.json files"):
        run_ranks(2, lambda peers: train_rank(runs[peers.rank], peers, tmp_path))


def test_neighbours_that_disagree_on_what_goes_between_them_end_at_once(text_file, tmp_path):
    run = make_run(text_file)

    def work(peers):
        learning = Trainer(run, peers)
        learning._part = f", tensor {peers.rank} of 2"  # as if process 1 were its neighbour's twin
        agree(run, learning, peers)

    message = r"rank 0 gives \[2, 6, 16\] torch\.float32, tensor 0 of 2 after stage 0, but rank 1 takes .* 1 of 2"
    with pytest.raises(InputError, match=message):
        run_ranks(2, work)


def test_divergence_ends_the_run(text_file, tmp_path):
    training = TRAINING.model_copy(update={"learning_rate": 1e30, "clip_norm": None})
    run = make_run(text_file, num_steps=20).with_plan(training=training)
    with pytest.raises(RunError, match=r"step \d+: the loss or gradient on rank .* is not finite.*checkpoint"):
        run_ranks(2, lambda peers: train_rank(run, peers, tmp_path))
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.alone
def test_a_rehearsal_needs_no_model(tmp_path):
    problem = placed_problem((0, 1), 3)
    stages = tuple(stage.model_copy(update=dict.fromkeys(_FIGURES, 0.01)) for stage in problem.stages)
    problem = problem.model_copy(update={"stages": stages})
    run = RunSpec.bare(problem=problem, schedule=order("1f1b", problem), sites=("a", "b"), num_steps=3, device="sleep")

    def rehearse(index):
        folder = tmp_path / str(index)
        folder.mkdir()
        return run_ranks(2, lambda peers: train_rank(run, peers, folder))[0]

    summary = assert_most_of_five(rehearse, lambda summary: 0.12 < summary.makespan_s < 0.14)
    assert summary.last_loss is None


def test_the_exchange_of_tied_weights_is_part_of_the_measured_step(text_file, tmp_path):
    run = make_run(text_file, model=TIED, num_steps=2)
    run_ranks(2, lambda peers: train_rank(run, peers, tmp_path))
    messages = Timeline.load(tmp_path / "timeline.json").messages
    exchanges = messages[messages["microbatch"] < 0]
    assert exchanges["stage"].tolist() == exchanges["source"].tolist() == [1, 0]
    assert exchanges["target"].tolist() == [0, 1]
    assert exchanges["bytes"].tolist() == [256 * 16 * 4] * 2


def test_a_rehearsal_exchanges_what_a_training_would(tmp_path):
    links = {name: Link(latency_s=0, bandwidth_bytes_per_s=1e9) for name in ("a>b", "b>a")}
    problem = placed_problem((0, 1), 2)
    stages = tuple(stage.model_copy(update=dict.fromkeys(_FIGURES, 0.001)) for stage in problem.stages)
    pairs = (("a>b", 0, 1), ("b>a", 1, 0))
    exchanges = [Exchange(link=n, bytes=5000, source_stage=a, target_stage=b) for n, a, b in pairs]
    problem = Problem.model_validate(dict(problem) | {"stages": stages, "links": links, "exchanges": exchanges})
    run = RunSpec.bare(problem=problem, schedule=order("gpipe", problem), sites=("a", "b"), num_steps=2, device="sleep")
    run_ranks(2, lambda peers: train_rank(run, peers, tmp_path))
    assert Timeline.load(tmp_path / "timeline.json").link_bytes() == {"a>b": 5000, "b>a": 5000}


_FIGURES = ("forward_s", "input_grad_s", "weight_grad_s")
