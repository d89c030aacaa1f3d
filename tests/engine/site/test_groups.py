"""Documents on groups of processes of several context degrees: gradients of the whole, training, resuming, faults."""

import json
from dataclasses import replace

import pytest

from benchmarks.shared.jobs import site_table
from chosen import chosen
from chunk_runs import write_documents
from farpipe.core.errors import InputError
from farpipe.core.spec import load_job
from farpipe.engine.launch.run import run
from farpipe.engine.launch.runs import run_spec_of
from farpipe.planning import find
from farpipe.planning.cost.chunk_laws import Laws
from farpipe.planning.planner.engine import plan_obstacle
from rank_processes import FAULTY_RANK
from site_processes import run_processes
from trainings import metrics

pytestmark = pytest.mark.slow  # starts processes

ON_FOUR = [
    [[[40], 0, 4], [[21], 0, 2], [[16, 3], 2, 2], [[9], 0, 1], [[5, 1], 1, 1], [[7], 2, 1], [[12], 3, 1]],
    [[[40], 0, 3], [[33, 2], 3, 1], [[17], 0, 2], [[8], 2, 1]],  # degrees of no power of two: key heads 2, 1, 1
    [[[25], 0, 2], [[6], 0, 2], [[13], 2, 1], [[1], 3, 1]],  # a process without documents
]
"""(lengths of a chunk, first process, degree) of every chunk, in three steps."""


@pytest.mark.parametrize(
    ("name", "heads", "key_heads"), chosen([("llama", 8, 4), ("qwen3", 6, 6), ("qwen3_moe", 8, 4)], 0)
)
def test_groups_of_several_degrees_have_the_gradients_of_the_whole(name, heads, key_heads):
    ((*found,),) = run_processes(4, [("in_groups", name, ON_FOUR, {"heads": heads, "key_heads": key_heads})])
    assert [row["chunks_here"] for row in found] == [3, 2, 2], "process 0 has computed others' chunks"
    for row in found:
        assert row["error"] <= 1e-10, row


def test_a_group_whose_process_does_not_come_is_named_within_the_limit():
    (found,) = run_processes(3, [("stuck", 0, 3, {})])
    assert "processes 0 to 2 of the stage share chunk 0 (documents 0 of the step)" in found["said"]
    assert "Timed out waiting 3000ms" in found["said"]
    assert "gloo" in found["said"], "by this word the run looks for the reason"


JOB = (
    """\
[model]
hugging_face = "{model}"
[data]
source = "{text}"
packing = "elastic"
held_out = 0.2
[training]
sequence_length = 1024
global_batch = {batch}
num_steps = {steps}
precision = "fp32"
learning_rate = 1e-2
checkpoint_every_steps = 1
evaluate_every_steps = 2
[layout]
pipeline = 1
{pins}
"""
    + site_table("zurich", "cpu", 4)
    + "devices_per_machine = 4\n"
)
LENGTHS = (*[1026] * 4, *range(30, 62), 3, 9)


def favouring_both(alone, two, four):
    """Costs with which documents of 1,024 tokens fit on four processes only, which are slow."""
    room = 70 * alone.stages[0].activation_bytes
    ranks = tuple(rank.model_copy(update={"memory_bytes": rank.static_bytes + room}) for rank in alone.base.ranks)
    tight = [replace(one, base=one.base.changed(ranks=ranks)) for one in (alone, two)]
    stage = four.stages[0]
    slow = replace(stage, laws=Laws(*(law.times(10) for law in stage.laws)))
    return *tight, replace(four, stages=(slow,))


@pytest.fixture
def spec_of(model, tmp_path):
    """`spec_of(num_steps, pins)`: the RunSpec of the job with these pins."""
    text = write_documents(tmp_path / "text", LENGTHS)

    def make(num_steps, pins="", batch=6, **settings):
        path = tmp_path / "job.toml"
        path.write_text(JOB.format(model=model.hugging_face, text=text, steps=num_steps, pins=pins, batch=batch))
        (found,) = find(load_job(path))
        plan, costs = found.plan, found.batch.costs
        assert not plan_obstacle(plan)[0]
        group_costs = () if pins else favouring_both(*costs)
        fields = {"chunk_costs": costs[-1], "group_costs": group_costs, "emulate_links": False}
        return run_spec_of(plan, num_steps=num_steps, **fields, **settings)

    return make


def figures(lines):
    return [(line["step"], line["loss"], line["grad_norm"], line["evaluation_loss"] or 0.0) for line in lines]


def test_groups_train_as_one_process_does_also_after_a_kill_and_leave_it_their_checkpoint(
    spec_of, tmp_path, monkeypatch
):
    alone, groups = spec_of(7, "context = 1"), spec_of(6)
    assert (alone.num_processes, groups.num_processes) == (1, 4)
    run(alone, tmp_path / "alone")
    monkeypatch.setenv("FARPIPE_TEST_FAULT", json.dumps([[3, "optimizer"]]))
    run(groups, tmp_path / "groups", max_restarts=1, rank_program=FAULTY_RANK)
    run(alone.model_copy(update={"resume": str(tmp_path / "groups")}), tmp_path / "rest")
    in_groups, rest = metrics(tmp_path / "groups"), metrics(tmp_path / "rest")
    assert {line["attempt"] for line in in_groups} == {0, 1}
    degrees = [line["chunks"]["groups"] for line in in_groups]
    assert max(map(len, degrees)) > 1, "a step has groups of several degrees"
    assert len({json.dumps(one) for one in degrees}) > 1, "steps have other groups"
    expected = figures(metrics(tmp_path / "alone"))
    assert figures(in_groups + rest) == [pytest.approx(row, rel=1e-5) for row in expected]


def test_more_than_one_process_may_have_no_documents(spec_of, tmp_path):
    alone, groups = (spec_of(3, pins, batch=2) for pins in ("context = 1", ""))
    for name, spec in (("alone", alone), ("groups", groups)):
        run(spec, tmp_path / name)
    lines = metrics(tmp_path / "groups")
    assert {"1": 2} in [line["chunks"]["groups"] for line in lines], "two of four processes have a document"
    assert figures(lines) == [pytest.approx(row, rel=1e-5) for row in figures(metrics(tmp_path / "alone"))]


def test_a_rehearsal_has_no_groups(spec_of):
    with pytest.raises(InputError, match="one process for all of a stage"):
        spec_of(2, device="sleep")
