"""A step's plan as ranks receive it: unchanged, with every token once, and as fast as it was planned."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.schedule import check, peak_memory_bytes
from farpipe.core.simulate import simulate
from farpipe.planning.workload import (
    BatchOptions,
    StepPlan,
    options_of,
    plan_sequences,
    plan_with_cut,
    step_plan,
)
from planning.workload.batches import costs, mixed
from sound_chunks import check_chunks

GIB = 2.0**30


@pytest.fixture(scope="module")
def tight():
    return costs(memory_bytes=30 * GIB)


def sound(costs, told, lengths):
    """Every token once, in an order that can be played."""
    check_chunks(told.chunks, lengths)
    problem = told.problem(costs)
    check(problem, told.schedule, memory=False)
    return problem


def ranks_of(plan):
    """By how much what pipelines need for a while differs, on every rank."""
    static = [[rank.static_bytes for rank in pipeline.problem.ranks] for pipeline in plan.pipelines]
    return [max(column) - min(column) + 1 for column in zip(*static, strict=True)]


@settings(deadline=None, max_examples=10)
@given(st.lists(st.integers(1, 65_536), min_size=1, max_size=24), st.sampled_from(["elastic", "fixed"]))
def test_a_step_is_the_plan_s_pipelines_one_after_the_other(tight, lengths, packing):
    plan = plan_sequences(tight, lengths, options_of(packing, 0.2))
    told = StepPlan.from_json(step_plan(plan).to_json())
    assert told.keeps_attention == plan.keeps_attention
    problem = sound(tight, told, lengths)
    assert told.num_tokens == sum(lengths)
    assert simulate(problem, told.schedule).makespan_s <= sum(p.makespan_s for p in plan.pipelines) * (1 + 1e-9)
    for peak, planned, rank in zip(
        peak_memory_bytes(problem, told.schedule), plan.peak_memory_bytes, ranks_of(plan), strict=True
    ):
        assert planned * (1 - 1e-9) <= peak <= planned + rank, "what is needed for a while is that of the whole step"


def test_without_packing_every_sequence_is_a_chunk(tight):
    lengths = mixed(20, 16_384)
    plan = plan_sequences(tight, lengths, options_of("none"))
    assert [len(chunk.slices) for chunk in plan.chunks] == [1] * 20
    assert all(chunk.slices[0].is_whole for chunk in plan.chunks)
    with pytest.raises(InfeasibleError, match="slices"):
        plan_sequences(costs(memory_bytes=17 * GIB), [65_536], options_of("none"))


@pytest.mark.parametrize("packing", ["elastic", "fixed", "none"])
def test_a_cut_that_was_good_serves_the_next_batch(tight, packing):
    options = options_of(packing)
    cut = plan_sequences(tight, mixed(40, 16_384, seed=1), options).cut
    for seed in (2, 3):
        lengths = mixed(40, 16_384, seed=seed)
        sound(tight, step_plan(plan_with_cut(tight, lengths, cut, options)), lengths)
    sound(tight, step_plan(plan_with_cut(tight, [1], cut, options)), [1])


def test_a_cut_that_does_not_fit_is_told(tight):
    cut = plan_sequences(tight, [100, 200]).cut
    with pytest.raises(InfeasibleError, match="does not fit in any number of slices"):
        plan_with_cut(tight, [10**9], cut)


def test_sequences_keep_their_numbers_where_replicas_share_a_batch(tight):
    plan = plan_sequences(tight, [5, 70_000 // 2, 9], BatchOptions(num_slices=2))
    told = step_plan(plan, np.array([7, 3, 1]))
    assert {part.sequence for chunk in told.chunks for part in chunk.slices} == {1, 3, 7}
    problem = told.problem(tight)
    assert problem.to_data() == step_plan(plan).problem(tight).to_data()


def test_damaged_plans_are_refused(tight):
    data = json.loads(step_plan(plan_sequences(tight, [30, 40])).to_json())
    for change in (
        {"recomputed": [[0]]},
        {"chunks": [[[0, 0, 30]]]},
        {"chunks": []},
        {"schedule": 3},
        {"keeps_attention": "yes"},
    ):
        with pytest.raises(InputError):
            StepPlan.from_data(data | change, "plan")
