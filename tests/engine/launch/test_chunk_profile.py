"""Measured costs of chunks: laws are found again from the times they made, and bytes are those that stages hold."""

import json
from dataclasses import replace

import numpy as np
import pytest

from chunk_runs import MODEL, PlanningHere, make_run, write_documents
from farpipe.core.errors import InputError
from farpipe.core.spec import Cluster, Training, preset_site
from farpipe.engine.launch.profile import chunk_profile, profile_chunks
from farpipe.engine.stages.profile_request import STACK_NAMES, ChunkTimes
from farpipe.engine.stages.stack_times import TimedSequence, points
from farpipe.engine.train import train_rank
from farpipe.planning.cost import JobCosts, place_evenly
from farpipe.planning.cost.chunk_laws import Law
from farpipe.planning.cost.chunk_profile import ChunkProfile, MeasuredLaw
from farpipe.planning.cost.job_chunks import job_chunk_costs
from farpipe.planning.cost.layout import Layout
from farpipe.planning.documents.batches import load_document_batches
from farpipe.planning.workload import Chunk, Slice, plan_sequences
from farpipe.planning.workload.chunk import load_of
from in_process import run_ranks
from trainings import metrics

TRAINING = Training(sequence_length=64, global_batch=1, precision="fp32")
FORWARD, BACKWARD = Law(1e-9, 2e-6, 1e-5, call_s=3e-5), Law(3e-9, 4e-6, 2e-5, 1e-9, call_s=7e-5)
HELD = {
    "one_layer": 300.0,
    "three_layers": 700.0,
    "embedding_and_layer": 280.0,
    "layer_and_head": 320.0,
    "recomputed": 250.0,
    "three_layers_of_a_slice": 610.0,
    "recomputed_slice": 370.0,
}
"""A layer holds 200 bytes of a whole sequence and 170 of a slice, computed again 50 and 90, a stage 100 beside them."""


def made(longest=4096, noise=0.0):
    """Times that laws have made: a head in the backward of its stack, an embedding in the forward of its own."""
    slices = [chunk for point in points(longest) for chunk in point.chunks]
    load = load_of(slices)
    tokens = load.tokens
    draw = np.random.default_rng(0)

    def of(law, layers, extra=0.0):
        seconds = layers * law.of_load(load) + extra * tokens + 1e-4
        return tuple((seconds * draw.uniform(1 - noise, 1 + noise, tokens.size)).tolist())

    layers = {"one_layer": 1, "three_layers": 3, "embedding_and_layer": 1, "layer_and_head": 1}
    return ChunkTimes(
        tokens=tuple(tokens.tolist()),
        pairs=tuple(load.pairs.tolist()),
        split_pairs=tuple(load.split_pairs.tolist()),
        further_calls=tuple(load.further_calls.tolist()),
        forward_s={name: of(FORWARD, layers[name], 1e-6 * (name == "embedding_and_layer")) for name in STACK_NAMES},
        backward_s={name: of(BACKWARD, layers[name], 5e-6 * (name == "layer_and_head")) for name in STACK_NAMES},
        held_bytes=HELD,
        cpu_share=1.0,
    )


def test_points_are_whole_sequences_and_slices_behind_prefixes():
    found = points(4096)
    assert len(found) == 20
    assert TimedSequence(4096, 3072) in found
    assert [chunk.slices[0].start for chunk in TimedSequence(4096, 3072).chunks] == [0, 3072]
    assert all(sum(chunk.num_tokens for chunk in point.chunks) == point.length for point in found)
    packed = [point for point in found if point.packed]
    assert [len(chunk.runs) for point in packed for chunk in point.chunks] == [16] * 5


def test_laws_are_found_again_and_errors_told_of_points_that_fits_did_not_see():
    found = chunk_profile([made(), made()], MODEL, TRAINING, "cpu")
    assert found.layer.forward.law.token_s == pytest.approx(FORWARD.token_s, rel=1e-6)
    assert found.layer.backward.law.pair_s == pytest.approx(BACKWARD.pair_s, rel=1e-6)
    assert found.layer.backward.law.split_pair_s == pytest.approx(BACKWARD.split_pair_s, rel=1e-6)
    assert found.layer.forward.law.call_s == pytest.approx(FORWARD.call_s, rel=1e-6)
    assert found.layer.laws.input_grad.call_s == pytest.approx(BACKWARD.call_s, rel=1e-6)
    assert found.layer.laws.input_grad.split_pair_s == found.layer.backward.split_pair_s
    assert found.embedding.forward.token_s == pytest.approx(1e-6, rel=1e-3)
    assert found.head.backward.token_s == pytest.approx(5e-6, rel=1e-3)
    assert found.action_forward_s == pytest.approx(1e-4, rel=1e-3)
    assert max(found.errors.values()) < 1e-6
    noisy = chunk_profile([made(noise=0.02)], MODEL, TRAINING, "cpu")
    assert 0 < noisy.errors["forward, mean"] <= noisy.errors["forward, largest"] < 0.1
    total = found.layer.laws.total
    assert total.token_s == pytest.approx(FORWARD.token_s + BACKWARD.token_s, rel=1e-6)
    assert ChunkProfile.from_json(found.to_json()) == found


def test_costs_are_those_that_were_measured():
    found = chunk_profile([made()], MODEL, TRAINING, "cpu")
    cluster = Cluster(sites=(preset_site("a", "cpu", 2),))
    job = (JobCosts(MODEL, TRAINING), Layout(2, 1, 1, 1, 1, 1), place_evenly(["a", "a"], [1, 3]), cluster, 64)
    first, last = job_chunk_costs(*job, profiles={"cpu": found}).stages
    whole, part = (Chunk((Slice(0, 0, 10, length),)) for length in (10, 20))
    for chunk, of_layer, again in ((whole, 200.0, 50.0), (part, 170.0, 90.0)):
        load = load_of([chunk])
        first_held, last_held = (float(stage.held_bytes(load, 0)[0]) / 10 for stage in (first, last))
        assert first_held == pytest.approx(280.0 - 200.0 + of_layer)
        assert last_held == pytest.approx(320.0 - 200.0 + 3 * of_layer)
        assert last.held_bytes(load, 2)[0] / 10 == pytest.approx(last_held - 2 * (of_layer - again))
    assert last.laws.forward.fixed_s == pytest.approx(3 * FORWARD.fixed_s + 1e-4, rel=1e-3)
    assert last.laws.total.token_s == pytest.approx(3 * 6e-6 + 5e-6, rel=1e-3)
    for change in ({"device": "h100"}, {"shape": "another"}, {"precision": "bf16"}, {"longest": 8}):
        other = found.model_copy(update=change)
        with pytest.raises(InputError, match="measure again"):
            job_chunk_costs(*job, profiles={"cpu": other})


def test_devices_that_share_chunks_divide_what_was_measured_and_pay_for_the_exchange():
    found = chunk_profile([made()], MODEL, TRAINING, "cpu")
    cluster = Cluster(sites=(preset_site("a", "cpu", 2),))
    job = (JobCosts(MODEL, TRAINING), Layout(1, 1, 1, 1, 1, 1), place_evenly(["a"], [4]), cluster, 64)
    (alone,), (both,) = (job_chunk_costs(*job, context, {"cpu": found}).stages for context in (1, 2))
    assert both.laws.total.pair_s == pytest.approx(alone.laws.total.pair_s / 2)
    assert both.laws.weight_grad.token_s == pytest.approx(alone.laws.weight_grad.token_s / 2)
    for one, two in zip(alone.laws[:2], both.laws[:2], strict=True):
        exchanged_s = two.token_s - one.token_s / 2
        assert 0 < exchanged_s == pytest.approx(both.laws.forward.token_s - alone.laws.forward.token_s / 2)
        assert two.fixed_s > one.fixed_s
    load = load_of([Chunk((Slice(0, 0, 40, 40),))])
    assert both.held_bytes(load, 1) == pytest.approx(alone.held_bytes(load, 1) / 2)


def test_profiles_of_before_slices_had_a_rate_are_read():
    data = json.loads(chunk_profile([made()], MODEL, TRAINING, "cpu").to_json())
    for part in ("layer", "embedding", "head"):
        for kind in ("forward", "backward"):
            del data[part][kind]["split_pair_s"]
    assert ChunkProfile.from_json(json.dumps(data)).layer.laws.total.split_pair_s == 0


def test_older_profiles_take_slices_for_whole_sequences():
    found = chunk_profile([made()], MODEL, TRAINING, "cpu")
    data = json.loads(found.to_json())
    older = ChunkProfile.from_json(
        json.dumps({key: value for key, value in data.items() if key not in ("slice_bytes", "recomputed_slice_bytes")})
    )
    assert older.slice_bytes is None
    cluster = Cluster(sites=(preset_site("a", "cpu", 1),))
    job = (JobCosts(MODEL, TRAINING), Layout(1, 1, 1, 1, 1, 1), place_evenly(["a"], [4]), cluster, 64)
    (stage,) = job_chunk_costs(*job, profiles={"cpu": older}).stages
    chunks = load_of([Chunk((Slice(0, 0, 10, length),)) for length in (10, 20)])
    assert np.ptp(stage.held_bytes(chunks, 0)) == 0


@pytest.fixture(scope="module")
def measured():
    """A measured profile, with times that are the same always."""
    return with_fixed_times(profile_chunks(MODEL, TRAINING, "cpu", seconds=0.1))


@pytest.mark.slow
@pytest.mark.parametrize("memory_share", [None, 0.5])
def test_peaks_of_a_run_are_within_five_per_cent_of_what_a_profile_predicts(measured, tmp_path, memory_share):
    """Split, hybrid and packed chunks; with half of the memory layers are computed again."""
    run = make_run(write_documents(tmp_path / "text"), profiles={"cpu": measured}, training={"global_batch": 8})
    if memory_share is not None:
        run = with_less_memory(run, memory_share)
    run_ranks(2, lambda peers: train_rank(run, peers, tmp_path, make_planner=PlanningHere))
    lines = metrics(tmp_path)
    assert any(line["chunks"]["recomputed_layers"] for line in lines) == (memory_share is not None)
    for line in lines:
        pairs = zip(line["chunks"]["predicted_held_bytes"], line["chunks"]["measured_held_bytes"], strict=True)
        for predicted, held in pairs:
            assert predicted == pytest.approx(held, rel=0.05)


def with_fixed_times(profile):
    """The profile with its own bytes and the same times always, so that every run of the test has the same plans."""
    laws = {"forward": MeasuredLaw.of(FORWARD), "backward": MeasuredLaw.of(BACKWARD)}
    parts = {name: getattr(profile, name).model_copy(update=laws) for name in ("embedding", "layer", "head")}
    return profile.model_copy(update={**parts, "action_forward_s": 1e-4, "action_backward_s": 1e-4})


def with_less_memory(run, share):
    """The run with so much of what the first step takes for activations."""
    costs = run.chunk_costs
    documents = load_document_batches(run.plan.data, run.plan.model, run.plan.training)
    plan = plan_sequences(costs, documents.lengths(0))
    working = costs.working_bytes(plan.batch.load, plan.pipelines[0].recomputed + 1)
    ranks = tuple(
        rank.model_copy(update={"memory_bytes": rank.static_bytes + more + share * (peak - rank.static_bytes)})
        for rank, more, peak in zip(costs.base.ranks, working, plan.peak_memory_bytes, strict=True)
    )
    base = costs.base.model_copy(update={"ranks": ranks})
    return run.model_copy(update={"chunk_costs": replace(costs, base=base)})
