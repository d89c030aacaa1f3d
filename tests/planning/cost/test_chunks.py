"""Chunks under the cost model: equal to the plain model's microbatches where both are defined."""

import json
from dataclasses import replace

import numpy as np
import pytest

from cost_jobs import site
from farpipe.core.errors import InputError
from farpipe.core.spec import Cluster, Model, Training
from farpipe.planning.cost import JobCosts, Layout, chunk_laws, place_evenly, step_cost
from farpipe.planning.cost.chunk_laws import Law, Laws, Load, fit_law, model_laws
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.cost.compute import layer_times
from farpipe.planning.cost.job_chunks import job_chunk_costs
from farpipe.planning.workload import Chunk, Slice
from farpipe.planning.workload.chunk import load_of

MODEL = Model(num_layers=8, hidden=4096, num_heads=32, ffn_hidden=11008, vocab_size=32000)
CLUSTER = Cluster(sites=(site("a"),))
LAYOUT = Layout(2, 1, 1, 1, 1, 1)
PLACES = place_evenly(["a", "a"], [4, 4])


def whole(lengths):
    """The load of chunks that are one whole sequence each."""
    tokens = np.array(lengths, np.float64)
    none = np.zeros(tokens.size)
    return Load(tokens, tokens**2 / 2, none > 0, none, none > 0, none, none)


def chunk_costs(longest=65536, context=1, **training):
    asked = Training(sequence_length=4096, global_batch=1, **training)
    return job_chunk_costs(JobCosts(MODEL, asked), LAYOUT, PLACES, CLUSTER, longest, context)


@pytest.mark.parametrize("length", [1024, 3000, 8192, 20_000, 65_536])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_chunk_of_one_whole_sequence_costs_what_its_microbatch_does(length, recompute):
    asked = Training(sequence_length=length, global_batch=1, recompute=recompute)
    places = [replace(place, recompute=recompute) for place in PLACES]
    plain = step_cost(JobCosts(MODEL, asked), LAYOUT, places, CLUSTER).problem
    layers = np.full((2, 1), 4 if recompute == "full" else 0)
    chunks = chunk_costs().problem(whole([length]), [None], layers)
    first, its_first = chunks.stages[0], plain.stages[0]
    for name in ("forward_s", "input_grad_s", "weight_grad_s"):
        assert getattr(first, name)[0] == pytest.approx(getattr(its_first, name), rel=0.05)
    for name in ("activation_bytes", "weight_stash_bytes"):
        assert getattr(first, name)[0] == pytest.approx(getattr(its_first, name))
    last, its_last = chunks.stages[1], plain.stages[1]  # whose head has moved into the backward, without its logits
    both = [s.forward_s[0] + s.input_grad_s[0] + s.weight_grad_s[0] for s in (last,)]
    assert both[0] == pytest.approx(its_last.forward_s + its_last.input_grad_s + its_last.weight_grad_s, rel=0.05)
    assert last.forward_s[0] == pytest.approx(first.forward_s[0], rel=0.05)
    residual, logits = length * 4096 * 2, 4 * length * 32000
    assert last.activation_bytes[0] == pytest.approx(its_last.activation_bytes - residual - logits)
    assert chunks.ranks[0].static_bytes == pytest.approx(plain.ranks[0].static_bytes)
    assert chunks.hops[0].forward.bytes[0] == pytest.approx(plain.hops[0].forward.bytes)


def test_slices_of_a_sequence_together_cost_what_it_does_whole_but_for_fixed_times():
    stage = chunk_costs().stages[0]
    ends = np.array([0, 30_000, 45_000, 60_000], np.float64)
    tokens, pairs = np.diff(ends), np.diff(ends**2) / 2
    for law in stage.laws:
        apart = float((law.seconds(tokens, pairs) - law.fixed_s).sum())
        assert apart == pytest.approx(float(law.seconds(ends[-1], ends[-1] ** 2 / 2)) - law.fixed_s)


def test_a_fit_finds_the_law_that_made_the_times():
    rng = np.random.default_rng(0)
    tokens, context = rng.uniform(100, 20_000, 40), rng.uniform(0, 60_000, 40)
    pairs = ((context + tokens) ** 2 - context**2) / 2
    law = Law(3e-10, 2e-6, 1e-4)
    found = fit_law(tokens, pairs, law.seconds(tokens, pairs) * rng.uniform(0.99, 1.01, 40))
    assert found.pair_s == pytest.approx(law.pair_s, rel=0.05)
    assert found.token_s == pytest.approx(law.token_s, rel=0.05)


def test_a_fit_finds_what_a_pair_takes_more_in_slices_of_split_sequences():
    rng = np.random.default_rng(1)
    tokens, context = rng.uniform(100, 2000, 40), rng.uniform(0, 6000, 40)
    pairs = ((context + tokens) ** 2 - context**2) / 2
    split_pairs = pairs * (np.arange(40) % 2)
    law = Law(3e-9, 2e-6, 1e-4, 2e-9)
    found = fit_law(tokens, pairs, law.seconds(tokens, pairs, split_pairs), split_pairs)
    assert vars(found) == pytest.approx(vars(law))
    one_rate = fit_law(tokens, pairs, law.seconds(tokens, pairs, split_pairs))
    assert one_rate.split_pair_s == 0
    assert law.pair_s < one_rate.pair_s < law.of_slices.pair_s


def test_only_the_slice_of_a_hybrid_chunk_has_the_rate_of_slices():
    law = Law(1.0, 10.0, 100.0, 0.5)
    chunk = Chunk((Slice(0, 4, 2, 6), Slice(1, 0, 3, 3)))
    (seconds,) = law.of_load(load_of([chunk]))
    assert seconds == (1 + 0.5) * (36 - 16) / 2 + 9 / 2 + 10 * 5 + 100
    assert load_of([chunk]).part(0, 1).split_pairs == [10]


def test_laws_add_up_with_the_rate_of_slices():
    one, two = Law(1.0, 2.0, 3.0, 4.0), Law(10.0, 20.0, 30.0, 40.0)
    assert one + two == Law(11.0, 22.0, 33.0, 44.0)
    assert one.times(2) == Law(2.0, 4.0, 6.0, 8.0)
    assert two.spread(10) == Law(1.0, 2.0, 30.0, 4.0)
    assert one.of_slices == Law(5.0, 2.0, 3.0)


def test_a_fit_finds_what_a_call_of_attention_takes():
    rng = np.random.default_rng(2)
    tokens, calls = rng.uniform(100, 2000, 40), rng.integers(0, 16, 40).astype(float)
    pairs = tokens**2 / (2 * (1 + calls))
    law = Law(3e-9, 2e-6, 1e-4, call_s=4e-5)
    found = fit_law(tokens, pairs, law.seconds(tokens, pairs, further_calls=calls), None, calls)
    assert vars(found) == pytest.approx(vars(law))
    assert (law + law).call_s == 8e-5
    assert law.spread(4).call_s == law.call_s


def test_whole_sequences_of_one_length_side_by_side_are_one_call():
    parts = [Slice(0, 4, 2, 6), Slice(1, 0, 3, 3), Slice(2, 0, 2, 2), Slice(3, 0, 2, 2), Slice(4, 0, 1, 1)]
    chunk = Chunk(tuple(parts))
    assert [len(run) for run in chunk.runs] == [1, 1, 2, 1]
    assert load_of([chunk]).further_calls.tolist() == [3]
    law = Law(fixed_s=100.0, call_s=1.0)
    assert law.of_load(load_of([chunk])).tolist() == [103]


def test_no_coefficient_of_a_fit_is_below_zero():
    tokens = np.array([1.0, 2.0, 3.0])
    assert min(vars(fit_law(tokens, tokens**2 / 2, np.array([3.0, 2.0, 1.0]))).values()) >= 0


def test_a_recomputed_layer_saves_activations_but_never_keys_and_values_that_others_use():
    stage = chunk_costs().stages[0]
    rows = ([1000.0] * 2, [5e5] * 2, [False, True], [0.0, 1000.0], [False, False], [0.0, 5e5], [0.0, 0.0])
    load = Load(*map(np.array, rows))
    saved = stage.saved_of(load)
    assert saved[0] - saved[1] == pytest.approx(2 * 4096 * 2 * 1000)
    assert (stage.held_bytes(load, 4) > 0).all()
    assert stage.chain_of(load).tolist() == pytest.approx([0, 4 * 2 * 4096 * 4 * 1000])


def test_a_recomputed_layer_that_keeps_its_attention_saves_less_and_computes_no_pairs_again():
    for context in (1, 4):
        costs = chunk_costs(context=context)
        stage, kept = costs.stages[0], costs.keeping_attention.stages[0]
        load = whole([1000.0, 4000.0])
        results = (4096 * 2 + 32 * 4) / context * load.tokens
        assert stage.saved_of(load) - kept.saved_of(load) == pytest.approx(results)
        assert kept.held_bytes(load, 0) == pytest.approx(stage.held_bytes(load, 0))
        assert kept.held_bytes(load, 3) - stage.held_bytes(load, 3) == pytest.approx(3 * results)
        no_pairs = load._replace(pairs=0 * load.pairs)
        assert kept.layer_forward.of_load(load) == pytest.approx(stage.layer_forward.of_load(no_pairs))
        assert costs.keeping_attention.seconds(load)[0] == pytest.approx(costs.seconds(load)[0])


def test_slices_that_keep_their_attention_do_not_compute_it_once_more_in_the_backward():
    costs = chunk_costs()
    law = Law(1e-9, 1e-6, split_pair_s=1e-10)
    stage = replace(costs.stages[0], layer=Laws(replace(law, split_pair_s=0.0), law, Law()))
    load = load_of([Chunk((Slice(0, 0, 1000, 3000),))])
    kept, all_of_it = (each.layer_forward.of_load(load) for each in (stage.keeping_attention, stage))
    assert kept == pytest.approx(1e-6 * 1000 - 1e-10 * load.split_pairs)
    assert all_of_it == pytest.approx(1e-6 * 1000 + 1e-9 * load.pairs)


def test_devices_that_share_a_chunk_divide_work_activations_and_with_zero1_the_optimizer():
    one, four = chunk_costs(zero1=True), chunk_costs(zero1=True, context=4)
    assert four.stages[0].laws.weight_grad.token_s == pytest.approx(one.stages[0].laws.weight_grad.token_s / 4)
    assert four.stages[0].laws.forward.token_s > one.stages[0].laws.forward.token_s / 4
    assert four.stages[0].activation_bytes == pytest.approx(one.stages[0].activation_bytes / 4)
    nothing = whole([0.0]), np.zeros((2, 1), np.int64)
    assert (four.headroom_bytes(*nothing) > one.headroom_bytes(*nothing)).all()
    assert four.overhead_s > one.overhead_s


def test_devices_that_share_a_chunk_divide_the_time_of_the_optimizer_as_zero_divides_its_state():
    asked = Training(sequence_length=4096, global_batch=1)
    spared_s = 3 / 4 * step_cost(JobCosts(MODEL, asked), LAYOUT, PLACES, CLUSTER).optimizer_s
    more_s = [chunk_costs(zero=z, context=4).overhead_s - chunk_costs(zero=z).overhead_s for z in (0, 1, 3)]
    assert more_s[0] - more_s[1] == pytest.approx(spared_s)  # both sum gradients over them
    assert more_s[2] == pytest.approx(-spared_s)


def test_whether_devices_send_side_by_side_follows_from_the_kind_of_the_link_not_from_its_name():
    costs = chunk_costs(context=4)
    links = {name: link.model_copy(update={"kind": "inter-site"}) for name, link in costs.base.links.items()}
    far = replace(costs, base=costs.base.model_copy(update={"links": links}))
    load, layers = whole([4096.0]), np.zeros((2, 1), np.int64)
    inside, across = (one.problem(load, [None], layers).hops[0].forward.bytes[0] for one in (costs, far))
    assert across == pytest.approx(4 * inside)
    assert far.trips(4096.0)[0][0] > costs.trips(4096.0)[0][0]


def test_scores_in_memory_are_refused():
    with pytest.raises(InputError, match="flash_attention"):
        chunk_costs(flash_attention=False)


def test_costs_of_before_slices_had_a_rate_are_read():
    costs = chunk_costs()
    data = json.loads(costs.to_json())
    for stage in data["stages"]:
        for law in (*stage["laws"], *stage["layer"]):
            del law["split_pair_s"]
    assert ChunkCosts.from_json(json.dumps(data)) == costs


def test_costs_survive_the_way_to_the_ranks():
    costs = chunk_costs(zero1=True, context=2)
    text = costs.to_json()
    assert ChunkCosts.from_json(text) == costs
    for damaged in (text.replace("token_s", "tokens_s"), text.replace('"context": 2', '"context": 0')):
        with pytest.raises(InputError, match="chunk-costs"):
            ChunkCosts.from_json(damaged)


def test_laws_of_one_device_are_fitted_once_for_all_layouts(monkeypatch):
    fits, costs = [], JobCosts(MODEL, Training(sequence_length=4096, global_batch=1, zero=3))
    monkeypatch.setattr(chunk_laws, "fit_law", lambda *points: fits.append(points) or fit_law(*points))
    chunk_laws._of_one_device.cache_clear()
    for data, name in ((1, "a"), (2, "b"), (8, "b")):
        layout, home = Layout(4 // data or 1, data, 1, 1, 1, 1), site(name, num_devices=8)
        layer, *_ = model_laws(MODEL, costs.training, layout, home, costs.calibration(home), longest=4096, context=data)
    assert len(fits) == 9  # F, I and W of a layer, an embedding and a head
    assert layer.forward.fixed_s > 0  # ZeRO-3's gathers and the exchange are each layout's own


@pytest.mark.parametrize("tensor", [1, 4, 8])
def test_a_packed_chunk_costs_what_the_cost_model_says_though_no_sequence_is_long(tensor):
    """A law of lengths up to 16K alone took half of that at tensor 8: it gave tokens' time to pairs."""
    layout, costs = Layout(1, 1, tensor, 1, 1, 1), JobCosts(MODEL, Training(sequence_length=4096, global_batch=1))
    home = CLUSTER.sites[0]
    layer, *_ = model_laws(MODEL, costs.training, layout, home, costs.calibration(home), longest=16384)
    for count, length in ((16, 1024), (32, 1024), (8, 4096), (1, 16384)):
        training = costs.training.model_copy(update={"sequence_length": length})
        job = (replace(layout, microbatch_size=count), home, costs.calibration(home))
        wanted = layer_times(MODEL, training, *job)
        tokens = np.array([float(count * length)])
        found = float(layer.total.seconds(tokens, tokens * length / 2)[0])
        assert found == pytest.approx(wanted.forward_s + wanted.input_grad_s + wanted.weight_grad_s, rel=0.1)


@pytest.mark.parametrize(("window", "pattern"), [(128, 2), (1024, 4), (4096, None)])
def test_pairs_inside_windows_are_time_of_tokens(window, pattern):
    """A slice far behind the begin of its sequence costs windowed layers what one that is near does."""
    local = MODEL.model_copy(update={"sliding_window": window, "window_attn_skip_freq": pattern})
    training, home = Training(sequence_length=4096, global_batch=1, recompute="none"), CLUSTER.sites[0]
    job = (Layout(1, 1, 1, 1, 1, 1), home, JobCosts(MODEL, training).calibration(home))
    part, full = (model_laws(model, training, *job, longest=65536)[0].total for model in (local, MODEL))
    assert part.pair_s / full.pair_s == pytest.approx(1 - local.windowed_share, abs=0.01)
    assert part.token_s > full.token_s
    for length in (16384, 65536):
        times = layer_times(local, training.model_copy(update={"sequence_length": length}), *job)
        found = float(part.seconds(np.array([float(length)]), np.array([length**2 / 2]))[0])
        assert found == pytest.approx(times.forward_s + times.input_grad_s + times.weight_grad_s, rel=0.05)


def test_costs_of_before_attention_could_be_kept_are_read_and_never_keep_it():
    data = json.loads(chunk_costs().to_json())
    for stage in data["stages"]:
        del stage["attention_bytes"]
    (first, _) = ChunkCosts.from_json(json.dumps(data)).stages
    assert first.kinds(True) == (first,)
    assert len(chunk_costs().stages[0].kinds(True)) == 2
