"""Steps in groups of processes for the engine: each document once, all processes busy, never behind one degree."""

from itertools import pairwise

import numpy as np
import pytest

from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.simulate import simulate
from farpipe.core.spec import Cluster, Job, Model, Pins, Training, preset_site
from farpipe.planning.workload import BatchOptions, StepPlan, device_groups, group_problem, plan_group_step
from farpipe.planning.workload.device_groups import DeviceGroup, group_layouts, placed_plans
from farpipe.planning.workload.group_steps import degrees_of, makespan_s

MODEL = Model(num_layers=8, hidden=6144, num_heads=48, num_kv_heads=6, ffn_hidden=11008, vocab_size=32000)
SKEWED = np.array([60_000, 24_000, 9_000, 8_000, *[4_000] * 4, *range(500, 2_500, 100)])


@pytest.fixture(scope="module")
def costs():
    job = Job(
        model=MODEL,
        training=Training(sequence_length=65536, global_batch=64, zero=1),
        cluster=Cluster(sites=(preset_site("a", "a100-80gb", 8),)),
        layout=Pins(pipeline=1, data=8, tensor=1, sites=("a",)),
    )
    return [layout.costs for layout in group_layouts(job, int(SKEWED.max()))]


def test_a_step_has_every_document_once_in_groups_of_several_degrees_larger_ones_first(costs):
    assert [one.context for one in costs] == [1, 2, 3, 4, 6], "3 and 6 divide the heads alone"
    placed, plan = plan_group_step(costs, SKEWED, 8, BatchOptions())
    parts = [part for chunk in plan.chunks for part in chunk.slices]
    assert len(degrees_of(placed)) > 1
    assert all(part.is_whole and SKEWED[part.sequence] == part.length for part in parts)
    assert sorted(part.sequence for part in parts) == list(range(SKEWED.size))
    degrees = [degree for _, degree in plan.groups]
    assert all(one >= other for one, other in pairwise(degrees))
    again = StepPlan.from_json(plan.to_json())
    assert (again.groups, again.chunks) == (plan.groups, plan.chunks)


def test_a_step_is_never_slower_than_all_documents_at_one_degree(costs):
    options, of_degree = BatchOptions(), {one.context: one for one in costs}
    for sizes in (SKEWED, np.array([2_000] * 3), np.array([30_000, *[100] * 9])):
        placed, _ = plan_group_step(costs[:4], sizes, 4, options)
        whole = placed_plans(of_degree, [DeviceGroup(0, 4, np.arange(sizes.size))], 4, sizes, options)[0].plan
        assert max(one.end_s for one in placed) <= whole.step_s


def test_a_step_that_is_too_long_is_known_before_other_devices_are_planned(costs, monkeypatch):
    of_degree, planned = {one.context: one for one in costs}, []
    plan_alone = device_groups.plan_sequences

    def noted(of, sizes, options):
        planned.append((of.context, sizes.tolist()))
        return plan_alone(of, sizes, options)

    monkeypatch.setattr(device_groups, "plan_sequences", noted)
    sizes = np.array([8_000, 4_000, 4_100, *range(1_000, 1_004)])
    places = [(0, 4), (0, 2), (2, 2), (0, 1), (1, 1), (2, 1), (3, 1)]
    groups = [DeviceGroup(*place, np.array([index])) for index, place in enumerate(places)]
    found = placed_plans(of_degree, groups, 4, sizes, BatchOptions())
    assert [(one.first_device, one.degree) for one in found] == places, "the largest first"
    begins_s = [one.begin_s for one in found]
    assert begins_s[1:3] == [begins_s[1]] * 2
    assert begins_s[3:] == [*[begins_s[3]] * 2, *[begins_s[5]] * 2]
    assert begins_s[5] > begins_s[3] > begins_s[1] > begins_s[0] == 0
    planned.clear()
    below_s = found[3].end_s
    assert placed_plans(of_degree, groups, 4, sizes, BatchOptions(), below_s) == []
    assert planned == [(4, [8_000]), (2, [4_000]), (1, [1_000])]


def test_a_process_without_documents_has_a_token_that_does_not_count(costs):
    _, plan = plan_group_step(costs[:1], np.array([100, 90]), 4, BatchOptions())
    busy = {p for first, degree in plan.groups for p in range(first, first + degree)}
    assert busy == {0, 1, 2, 3}
    extra = [chunk for chunk in plan.chunks if chunk.slices[0].sequence >= 2]
    assert [chunk.slices for chunk in extra] == [((2, 0, 1, 1),), ((3, 0, 1, 1),)], "stages tell chunks apart by these"


def test_the_problem_is_that_of_the_process_that_is_done_last(costs):
    placed, plan = plan_group_step(costs, SKEWED, 8, BatchOptions())
    problem = group_problem(plan, costs)
    assert simulate(problem, plan.schedule).makespan_s == pytest.approx(makespan_s(placed), rel=0.05)
    assert min(problem.stages[0].forward_s) == 0.0


def test_what_is_no_plan_of_groups_is_refused(costs):
    with pytest.raises(InfeasibleError, match="a document of 4000000 tokens fits whole on no group of up to 6 devices"):
        plan_group_step(costs, np.array([4_000_000]), 4, BatchOptions())
    body = plan_group_step(costs[:1], np.array([100, 90]), 4, BatchOptions())[1].to_data()
    with pytest.raises(InputError, match="4 chunks, but groups are"):
        StepPlan.from_data(body | {"groups": body["groups"][1:]}, "plan")
