"""Training on chunks of whole documents, every step planned for itself, learns what plain training learns."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from chunk_runs import PlanningHere, make_run, train_whole, write_documents
from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.simulate import Timeline
from farpipe.core.spec import Data
from farpipe.core.strict import validate
from farpipe.engine.executor.executor import Executor
from farpipe.engine.executor.step_plans import StepPlans
from farpipe.engine.figures.metrics import STEP_PLAN_NAME
from farpipe.engine.replicas.replicas import PipelinePeers
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.stages.chunk_work import ChunkTrainer
from farpipe.engine.train import run_step, train_rank
from farpipe.planning.documents.batches import load_document_batches
from farpipe.planning.workload import StepPlan
from in_process import run_ranks
from small_models import TIED, relative_error
from trainings import checkpoints, metrics


@pytest.fixture
def documents(tmp_path):
    return write_documents(tmp_path / "text")


def trained(run, parameters=torch.float64):
    """Steps as `train_rank` does them, in double precision: every process's reports and its stages."""

    def work(peers):
        learning = ChunkTrainer(run, peers, parameters=parameters)
        plans = StepPlans(run, peers, learning.lengths, PlanningHere(run) if peers.rank == 0 else None)
        plan, reports = plans.first(0), []
        for step in range(run.num_steps):
            learning.take_plan(plan)
            executor = Executor(
                plan.schedule,
                learning.stages,
                PipelinePeers(peers, run.places),
                learning.stage_done,
                learning.stage_begins,
            )
            reports.append(run_step(step, 0, learning, executor, peers, plans.before_exchange))
            if step + 1 < run.num_steps:
                plan = plans.after_exchange(step + 1)
        learning.complete_weights(run.num_steps - 1)
        return reports, learning

    return run_ranks(run.num_processes, work)


def assert_learns_the_same(run):
    results = trained(run)
    losses, norms, whole = train_whole(run, torch.float64)
    found = [0.0] * run.num_steps
    for reports, learning in results:
        if any(stage.module.part.has_head for stage in learning.torch_stages.values()):
            found = [total + report.loss for total, report in zip(found, reports, strict=True)]
    assert found == pytest.approx(losses, rel=1e-10)
    assert [report.grad_norm for report in results[0][0]] == pytest.approx(norms, rel=1e-9)
    stages = [stage for _, learning in results for stage in learning.torch_stages.values()]
    weights = {name: p for stage in stages for name, p in stage.module.named_parameters()}
    for name, parameter in whole.named_parameters():
        assert relative_error(weights[name], parameter) < 1e-8, name


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["elastic", "fixed", "none"])
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_packing_learns_what_whole_documents_teach(documents, packing, ranks):
    assert_learns_the_same(make_run(documents, packing=packing, ranks=ranks))


def test_tied_weights(documents):
    tied = TIED.model_copy(update={"num_layers": 4, "vocab_size": 256})
    assert_learns_the_same(make_run(documents, model=tied))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_share_a_batch_by_time(documents, zero):
    run = make_run(documents, replicas=2, training={"zero": zero})
    assert_learns_the_same(run)


@pytest.mark.parametrize("packing", ["elastic", pytest.param("none", marks=pytest.mark.slow)])
def test_two_stages_on_each_rank(documents, packing):
    assert_learns_the_same(make_run(documents, packing=packing, virtual=2))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"ranks": 1}, {"virtual": 2, "training": {"zero": 1}}])
def test_replicas_across_sites(documents, options):
    run = make_run(documents, **{"ranks": 2, "replicas": 2, "across": True, "latency_s": 1e-3} | options)
    assert len({sites[0] for sites in run.plan.replicas}) == 2
    assert_learns_the_same(run)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"virtual": 2}, {"ranks": 1, "replicas": 2}])
def test_evaluation_gives_the_loss_of_whole_held_out_documents(documents, tmp_path, options):
    """After the last step: that of the plain model with the weights of the checkpoint."""
    evaluated = {"evaluate_every_steps": 2, "evaluation_batches": 3}
    run = make_run(documents, held_out=0.4, training=evaluated, **options)
    run_ranks(run.num_processes, lambda peers: train_rank(run, peers, tmp_path, make_planner=PlanningHere))
    lines, whole = metrics(tmp_path), train_whole(run, torch.float32)[-1]
    assert [line["evaluation_loss"] is not None for line in lines] == [False, True, False, True]
    held_out = load_document_batches(run.plan.data, run.plan.model, run.plan.training)
    batches = [held_out.held_out_batch(index).tokens for index in range(3)]
    assert {tuple(map(len, batch)) for batch in batches} >= {tuple(map(len, batches[0]))}
    total = count = 0
    for one in (torch.from_numpy(one) for batch in batches for one in batch if len(one) > 1):
        total += functional.cross_entropy(whole(one[None, :-1])[0], one[1:], reduction="sum").item()
        count += len(one) - 1
    assert lines[-1]["evaluation_loss"] == pytest.approx(total / count, rel=1e-4)


def test_held_out_documents_are_never_trained_on(documents):
    run = make_run(documents, held_out=0.4, training={"evaluate_every_steps": 1, "global_batch": 2})
    batches = load_document_batches(run.plan.data, run.plan.model, run.plan.training)
    trained_on = {one.tobytes() for step in range(8) for one in batches.batch(step).tokens}
    assert {one.tobytes() for index in range(3) for one in batches.held_out_batch(index).tokens}.isdisjoint(trained_on)
    assert batches.held_out_lengths(1).tolist() == [len(one) for one in batches.held_out_batch(1).tokens]


def test_a_run_leaves_its_figures_and_the_plan_of_the_step_that_it_shows(documents, tmp_path):
    run = make_run(documents, num_steps=6)
    place = tmp_path / "run"
    place.mkdir()
    run_ranks(2, lambda peers: train_rank(run, peers, place, make_planner=PlanningHere))
    lines = metrics(place)
    assert [line["step"] for line in lines] == list(range(6))
    for line in lines:
        assert line["chunks"]["num_chunks"] >= 1
        assert line["chunks"]["origin"] == "searched"
        assert line["chunks"]["predicted_makespan_s"] > 0
        assert line["tokens_per_s"] == pytest.approx(line["chunks"]["num_tokens"] / line["step_s"])
    assert lines[-1]["loss"] < lines[0]["loss"]
    plan, timeline = StepPlan.load(place / STEP_PLAN_NAME), Timeline.load(place / "timeline.json")
    assert len(timeline.actions) == plan.schedule.num_actions
    assert RunSpec.from_json(run.to_json()).to_json() == run.to_json()


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_with_the_documents_that_come_next(documents, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for place, steps in ((whole, (6,)), (parts, (3, 6))):
        place.mkdir()
        for num_steps in steps:
            run = make_run(documents, num_steps=num_steps)
            (place / "summary.json").unlink(missing_ok=True)
            run_ranks(2, lambda peers, run=run, place=place: train_rank(run, peers, place, make_planner=PlanningHere))
    one, other = ([line["loss"] for line in metrics(place)] for place in (whole, parts))
    assert other == pytest.approx(one, rel=1e-4)
    assert checkpoints(parts)[0] == 6


def test_a_batch_that_fits_in_no_way_ends_the_run_on_all_ranks(documents, tmp_path):
    class Hopeless(PlanningHere):
        def answer(self, step, *, patient):
            if step == 2:
                raise InfeasibleError("a sequence of 9 tokens does not fit in any number of slices")
            return super().answer(step, patient=patient)

    run = make_run(documents)
    with pytest.raises(InfeasibleError, match="step 2: a sequence of 9 tokens"):
        run_ranks(2, lambda peers: train_rank(run, peers, tmp_path, make_planner=Hopeless))


def test_one_giant_document_is_cut_and_trained_on(tmp_path):
    assert_learns_the_same(make_run(write_documents(tmp_path / "text", [700]), num_steps=2))


def test_documents_of_one_token_have_nothing_to_learn_from_and_break_nothing(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    np.save(folder / "a.npy", np.arange(5, dtype=np.uint8))
    np.save(folder / "a.ends.npy", np.arange(1, 6))
    run = make_run(folder, num_steps=1)
    (reports, _), _ = trained(run)
    assert reports[0].grad_norm == 0.0


def test_what_a_run_on_chunks_can_not_have(documents):
    run = make_run(documents)
    for change, words in (
        ({"data": Data(source=str(documents))}, "it is for data.packing"),
        ({"partition": ((0, 4),)}, "one entry per stage"),
    ):
        with pytest.raises(InputError, match=words):
            validate(RunSpec, dict(run.with_plan(**change)), "run")
