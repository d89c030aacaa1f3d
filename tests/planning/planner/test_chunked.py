"""Plans of trainings on chunks: what they can't do is refused, not left out, and the reason for chunks is given."""

import re

import numpy as np
import pytest

from farpipe.core.spec import Cluster, Data, Job, Model, Pins, SiteLink, Training, parse_job, preset_site
from farpipe.planning import Explanation, PlanDocument
from farpipe.planning.explain.first_batch import better_layout, on_batch, trust_of_batch
from farpipe.planning.explain.limits import how_sure
from farpipe.planning.planner.chunked import plan_lengths
from farpipe.planning.planner.engine import plan_obstacle
from farpipe.report.plan_tables import trust_note
from job_files import added
from planning.planner.jobs import measured_chunks


def test_a_context_degree_is_planned_and_train_refuses_it_for_the_own_decoder():
    job = parse_job('[data]\npacking = "elastic"\n' + added("layout", "context = 2"))
    plan, batch = plan_lengths(job, np.array([100, 200]), 200)
    (costs,) = batch.costs
    assert (plan.layout.context, plan.layout.context_exchange, costs.context) == (2, "ulysses", 2)
    assert plan_obstacle(plan) == ("context = 2", "layout.context = 1")


LENGTHS = np.array([512, 500, 480, *[200, 120, 90] * 7])


def test_a_context_degree_need_not_divide_the_length_at_which_documents_are_cut():
    assert parse_job('[data]\npacking = "elastic"\n' + added("layout", "context = 3")).layout.context == 3


def far_apart(**pins):
    """A small model over two sites with a long, wide link."""
    ends = (("a", "b"), ("b", "a"))
    links = tuple(SiteLink(source=a, target=b, latency_s=0.08, bandwidth_bytes_per_s=1e10) for a, b in ends)
    return Job(
        model=Model(num_layers=8, hidden=256, num_heads=4, ffn_hidden=1024, vocab_size=256),
        training=Training(sequence_length=512, global_batch=LENGTHS.size, precision="fp32"),
        data=Data(packing="elastic"),
        layout=Pins(**pins),
        cluster=Cluster(sites=tuple(preset_site(name, "cpu", 4) for name in "ab"), links=links),
    )


def advice_on(job):
    return list(on_batch(job, plan_lengths(job, LENGTHS, 512)[1]))


def test_a_plan_says_why_documents_are_cut_or_not():
    cut = advice_on(far_apart())
    assert re.search(r"^Chunks, the longest sequence in \d+ slices: .* takes 1\.\d+ times as long\.$", cut[-1])
    whole = advice_on(far_apart(pipeline=1, data=8, replicas="across"))
    assert whole[-1].startswith("No chunks: every sequence stays whole")


def test_a_plan_says_how_many_devices_its_pins_leave_without_work():
    alone = advice_on(far_apart(pipeline=1, data=1))
    assert alone[-1] == "In use: 1 of 8 devices; [layout] asks for no more (pipeline 1, data 1, context 1)."


@pytest.mark.slow
@pytest.mark.parametrize("profiles", [(), (measured_chunks(far_apart()),)], ids=["cost model", "measured"])
def test_the_pins_of_a_better_layout_give_the_step_that_is_told(profiles):
    plan, batch = plan_lengths(far_apart(), LENGTHS, 512, profiles)
    (told,) = better_layout(plan, batch)
    found = re.search(r"takes (\S+) times .* pipeline = (\d+), data = (\d+)(.*), sites = \[(.*)\]\.", told)
    pins = {"pipeline": int(found[2]), "data": int(found[3]), "sites": tuple(re.findall(r'"(\w+)"', found[5]))}
    asked = far_apart(**pins, replicas="across" if found[4] else None)
    pinned, batch = plan_lengths(asked, LENGTHS, 512, profiles)
    assert pinned.prediction.step_s / plan.prediction.step_s == pytest.approx(float(found[1]), abs=0.006)
    assert better_layout(pinned, batch) == ()


@pytest.mark.parametrize("packing", ["elastic", "fixed"])
def test_a_plan_on_chunks_says_how_far_it_can_be_trusted(packing):
    job = far_apart(pipeline=2).model_copy(update={"data": Data(packing=packing)})
    told, measured = trusted(job, ()), trusted(job, [measured_chunks(job)])
    assert told.explanation.residual > 0
    assert told.explanation.unmeasured == ("cpu",)
    low, high = told.step_range_s
    assert low < told.plan.prediction.step_s < high
    assert (measured.explanation.residual, measured.explanation.unmeasured) == (0.0, ())
    assert "All times were measured" in trust_note(measured)


def trusted(job, profiles):
    plan, batch = plan_lengths(job, LENGTHS, 512, profiles)
    sure = how_sure(trust_of_batch(job, batch), plan.problem, 0.0, plan.prediction.step_s)
    return PlanDocument(plan=plan, explanation=Explanation(**sure))
