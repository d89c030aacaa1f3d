"""Several stages on each rank: plans keep chains and memory, and recompute what the plan for ranks says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.schedule import check
from farpipe.planning.workload import BatchOptions, plan_sequences, plan_with_cut, shares
from farpipe.planning.workload.checkpointing import token_limit
from farpipe.planning.workload.chunk import load_of
from farpipe.planning.workload.layout import chunk_layout
from farpipe.planning.workload.virtual_stages import layers_of_stages
from planning.workload.batches import costs, job, mixed
from sound_chunks import check_chunks

GIB = 2.0**30
TWO = {"virtual": 2}
PATIENT = BatchOptions()


@pytest.fixture(scope="module")
def roomy():
    return costs(pipeline=2, layout=TWO)


def sound(plan, lengths):
    """Chunks hold every token once; orders keep to chains and memory."""
    check_chunks(plan.chunks, lengths)
    for pipeline in plan.pipelines:
        check(pipeline.problem, pipeline.schedule)
        assert [stage.rank for stage in pipeline.problem.stages] == [0, 1, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("memory_bytes", [80 * GIB, 26 * GIB, 22 * GIB])
def test_plans_are_sound_with_and_without_recomputation(memory_bytes):
    lengths = mixed(24, 16384)
    of = costs(pipeline=2, layout=TWO, memory_bytes=memory_bytes)
    plan = plan_sequences(of, lengths)
    sound(plan, lengths)
    sound(plan_with_cut(of, lengths, plan.cut), lengths)
    assert any(pipeline.recomputed.any() for pipeline in plan.pipelines) == (memory_bytes < 80 * GIB)


def test_folded_costs_are_those_of_as_many_stages_as_ranks(roomy):
    folded, one = roomy.folded, costs(pipeline=2)
    assert one.folded is one
    load = load_of(plan_sequences(one, mixed(8)).chunks)
    layers = np.zeros((2, load.tokens.size), np.int64)
    overheads = 1e-3  # of an action, of which a rank with two stages has twice as many
    for mine, its in zip(folded.seconds(load), one.seconds(load), strict=True):
        assert np.allclose(mine, its, rtol=1e-6, atol=overheads)
    for mine, its in zip(folded.stages, one.stages, strict=True):
        assert np.allclose(mine.held_bytes(load, 0), its.held_bytes(load, 0), rtol=1e-12)
        assert np.allclose(mine.chain_of(load), its.chain_of(load), rtol=1e-12)
    assert np.allclose(folded.headroom_bytes(load, layers), one.headroom_bytes(load, layers), rtol=1e-6)
    assert token_limit(roomy, 1000) == token_limit(folded, 1000)


def test_two_stages_on_each_rank_shorten_the_bubble(roomy):
    lengths = mixed(12)
    assert plan_sequences(roomy, lengths).step_s < plan_sequences(costs(pipeline=2), lengths).step_s


@pytest.mark.slow
@pytest.mark.parametrize("memory_bytes", [30 * GIB, 24 * GIB, 22 * GIB])
def test_where_memory_is_short_more_is_recomputed_rather_than_one_sequence_run_after_the_other(memory_bytes):
    lengths = mixed(24, 16384)
    found = plan_sequences(costs(pipeline=2, layout=TWO, memory_bytes=memory_bytes), lengths, PATIENT)
    assert all(pipeline.schedule.method != "one by one" for pipeline in found.pipelines)
    assert found.step_s < 1.1 * plan_sequences(costs(pipeline=2, memory_bytes=memory_bytes), lengths, PATIENT).step_s


@given(st.lists(st.integers(1, 5), min_size=4, max_size=4), st.integers(0, 10), st.integers(0, 10))
def test_every_stage_recomputes_its_part_and_the_first_ones_first(layers, first, second):
    wanted = np.array([[min(first, layers[0] + layers[2])], [min(second, layers[1] + layers[3])]])
    found = layers_of_stages(wanted, layers)[:, 0]
    assert (found[:2] + found[2:] == wanted[:, 0]).all()
    assert (found <= layers).all()
    assert all(found[2 + rank] == 0 or found[rank] == layers[rank] for rank in range(2))


def test_sequences_are_shared_out_by_the_time_of_ranks(roomy):
    lengths = mixed(16)
    parts, same = shares(roomy, lengths, 2), shares(costs(pipeline=2), lengths, 2)
    assert [part.tolist() for part in parts] == [part.tolist() for part in same]


def test_replicas_across_sites_have_a_whole_pipeline_at_each():
    across = {"data": 2, "replicas": "across"}
    found = chunk_layout(job(pipeline=4, latency_s=0.01, layout=across), 4096)
    assert found.layout.replica_sites == ("a", "b")
    assert {placement.site for placement in found.placements} == {"a"}
    assert all(one.reduce is not None for one in found.costs.base.sync)
    with pytest.raises(InputError, match="3 replicas can't be shared out evenly over 2 sites"):
        chunk_layout(job(pipeline=4, latency_s=0.01, layout=across | {"data": 3}, global_batch=66), 4096)
    with pytest.raises(InfeasibleError, match="room for"):
        chunk_layout(job(pipeline=8, latency_s=0.01, layout=across | {"data": 32}), 4096)
