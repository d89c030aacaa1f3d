"""From a placed job to the Problem of one step."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_jobs import A100, layout, llama, placed, site, stage_cost, step, training, two_sites
from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.spec import Cluster, LocalLink, preset_model, preset_site
from farpipe.core.step import Problem, is_inter_site
from farpipe.planning.cost import (
    JobCosts,
    Placement,
    calibration_of,
    chunk_laws,
    compute,
    place_evenly,
    place_stages,
    settle,
    step_cost,
    step_flops,
)
from farpipe.planning.cost.speed import core_speed
from farpipe.planning.cost.stage import stage_params

ONE_SITE = Cluster(sites=(site(),))
LAW = calibration_of(A100)


def problem_of(model=None, degrees=None, cluster=ONE_SITE, sites=("a",), **how):
    model, degrees = model or llama(), degrees or layout()
    stages = placed(model, degrees, sites, how.get("recompute", "none"))
    return step(model, training(**how), degrees, stages, cluster).problem


def overhead_of(model=None, degrees=None, cluster=ONE_SITE, sites=("a",), **how):
    model, degrees = model or llama(), degrees or layout()
    return step(model, training(**how), degrees, placed(model, degrees, sites), cluster).overhead_s


def test_stages_carry_the_costs_of_their_slices():
    problem = problem_of(degrees=layout(pipeline=4))
    model, spec = llama(), training()
    first, inner, last = (
        stage_cost(model, spec, layout(pipeline=4), site(), 1, embedding=e, head=h)
        for e, h in ((True, False), (False, False), (False, True))
    )
    for stage, cost in zip(problem.stages, (first, inner, inner, last), strict=True):
        for name in ("forward_s", "input_grad_s", "weight_grad_s", "activation_bytes", "weight_stash_bytes"):
            assert getattr(stage, name) == getattr(cost, name)
    assert problem.num_microbatches == 16
    assert problem.ranks[1].memory_bytes == A100.memory_bytes - 2.5 * 2**30
    assert problem.ranks[1].static_bytes == inner.static_bytes + inner.working_bytes


@given(pipeline=st.integers(1, 8), virtual=st.integers(1, 3), tied=st.booleans(), num_layers=st.integers(1, 40))
def test_the_stages_together_have_all_parameters(pipeline, virtual, tied, num_layers):
    model = llama(num_layers=num_layers, tied_embeddings=tied)
    degrees = layout(pipeline=pipeline, virtual=virtual)
    stages = placed(model, degrees)
    last = len(stages) - 1
    total = sum(
        stage_params(model, stage.num_layers, embedding=i == 0, head=i == last) for i, stage in enumerate(stages)
    )
    copy = model.vocab_size * model.hidden if tied and last > 0 else 0
    assert total == model.num_params + copy


def test_virtual_stages_go_round_the_ranks_and_share_their_working_memory():
    model, degrees = llama(num_layers=8), layout(pipeline=2, virtual=2)
    problem = problem_of(model, degrees, recompute="full")
    assert [stage.rank for stage in problem.stages] == [0, 1, 0, 1]
    first, third = (
        stage_cost(model, training(recompute="full"), degrees, site(), 2, embedding=e) for e in (True, False)
    )
    assert problem.ranks[0].static_bytes == first.static_bytes + third.static_bytes + first.working_bytes
    assert [hop.forward.link for hop in problem.hops] == ["a:0>a:1", "a:1>a:0", "a:0>a:1"]


def test_every_stage_recomputes_in_its_own_way():
    model, degrees = llama(num_layers=8), layout(pipeline=4)
    ways = ("full", "none", "full", "none")
    stages = place_stages(range(4), ["a"] * 4, [2] * 4, ways)
    found = step(model, training(), degrees, stages, ONE_SITE).problem
    first, second, third, _ = found.stages
    assert first.activation_bytes < second.activation_bytes > third.activation_bytes
    assert third.input_grad_s == pytest.approx(second.input_grad_s + second.forward_s - LAW.action_overhead_s)
    assert (third.forward_s, third.weight_grad_s) == (second.forward_s, second.weight_grad_s)
    assert third.weight_stash_bytes == second.weight_stash_bytes
    assert found.ranks[2].static_bytes > found.ranks[1].static_bytes


@pytest.mark.parametrize("change", [{"global_batch": 64}, {"wire_type": "int8"}, {"sequence_length": 512}, {"zero": 1}])
def test_costs_under_another_training_are_those_computed_anew(change):
    costs, other = JobCosts(llama(), training()), training().model_copy(update=change)
    asked = (layout(data=2), site(), 2, "full")
    costs.stage(*asked, embedding=True, head=False)
    found = costs.trained(other).stage(*asked, embedding=True, head=False)
    assert found == JobCosts(llama(), other).stage(*asked, embedding=True, head=False)


def test_equal_stages_are_priced_once_and_equal_to_those_priced_alone():
    costs = JobCosts(llama(), training())
    one, same = (costs.stage(layout(), site(), 2, "full", embedding=True, head=False) for _ in range(2))
    assert one is same
    assert one == stage_cost(llama(), training(recompute="full"), layout(), site(), 2, embedding=True)


def test_neighbours_on_one_rank_need_no_link():
    model, degrees = llama(), layout(pipeline=1, virtual=2)
    problem = problem_of(model, degrees)
    assert problem.hops == (None,)
    assert problem.links == {}


def test_links_are_named_after_sites_and_ranks():
    problem = problem_of(degrees=layout(pipeline=4), cluster=two_sites(), sites=("a", "b"))
    names = [(hop.forward.link, hop.backward.link) for hop in problem.hops]
    assert names == [("a:0>a:1", "a:1>a:0"), ("a>b", "b>a"), ("b:2>b:3", "b:3>b:2")]
    assert [name for name in problem.links if is_inter_site(name)] == ["a>b", "b>a"]
    assert problem.links["a>b"].bandwidth_bytes_per_s == 1.25e9
    assert problem.links["b>a"].bandwidth_bytes_per_s == 2.5e9
    assert problem.links["a:0>a:1"].bandwidth_bytes_per_s == 300e9 * LAW.machine_link_fraction


def test_a_message_is_the_residual_stream_and_replicas_cross_together():
    for data in (1, 4):
        problem = problem_of(degrees=layout(pipeline=4, data=data), cluster=two_sites(), sites=("a", "b"))
        message = 2 * 256 * 512 * 2
        assert problem.hops[0].forward.bytes == message
        assert problem.hops[1].forward.bytes == problem.hops[1].backward.bytes == data * message


def test_sites_without_a_link_are_infeasible():
    cluster = Cluster(sites=two_sites().sites, links=two_sites().links[:1])
    with pytest.raises(InfeasibleError, match=r"there is no link from 'b' to 'a'; add it to cluster.links"):
        problem_of(cluster=cluster, sites=("a", "b"))


def test_replicas_reduce_their_gradients_after_the_last_weight_gradient():
    assert problem_of().sync is None
    problem = problem_of(degrees=layout(data=4, tensor=2), overlap=False)
    params = stage_cost(llama(), training(), layout(), site(), 2, embedding=True).num_params
    assert problem.sync[0].gather is None
    assert problem.sync[0].reduce.link == "a:0>a:0"
    assert problem.sync[0].reduce.bytes == pytest.approx(2 * 3 / 4 * params / 2 * 4)
    assert not is_inter_site("a:0>a:0")


def test_zero_1_gathers_parameters_and_scatters_gradients():
    problem = problem_of(degrees=layout(data=4), zero1=True, overlap=False)
    params = stage_cost(llama(), training(), layout(), site(), 2, embedding=True).num_params
    assert problem.sync[0].gather.bytes == pytest.approx(3 / 4 * params * 2)
    assert problem.sync[0].reduce.bytes == pytest.approx(3 / 4 * params * 4)


def test_tied_embeddings_are_exchanged_between_the_first_and_the_last_stage():
    model = llama(tied_embeddings=True)
    problem = problem_of(model, layout(pipeline=4), two_sites(), ("a", "b"))
    assert problem.sync is None
    found = [(one.kind, one.after, one.before, one.target, one.transfer.link) for one in problem.collectives]
    assert found == [("exchange", 0, None, 3, "a>b"), ("exchange", 3, None, 0, "b>a")]
    assert problem.exchanges[0].bytes == 1000 * 512 * 4
    assert not problem_of(model, layout(pipeline=1)).collectives


def test_behind_the_reduction_of_replicas_the_tied_exchange_is_overhead():
    degrees = layout(pipeline=2, data=2)
    tied, untied = (
        overhead_of(llama(tied_embeddings=tied), degrees, two_sites(), ("a", "b")) for tied in (True, False)
    )
    exchange = 0.01 + 2 * 1000 * 512 * 4 / 1.25e9
    assert tied - untied == pytest.approx(exchange)


def test_zero_1_divides_the_optimizer_s_time():
    plain, divided = (overhead_of(degrees=layout(pipeline=1, data=8), zero1=z) for z in (False, True))
    fixed = LAW.step_overhead_s
    assert divided - fixed == pytest.approx((plain - fixed) / 8)


def test_the_exchange_of_norms_waits_for_the_latency_between_the_sites():
    far, near = (overhead_of(cluster=two_sites(latency_s), sites=("a", "b")) for latency_s in (0.05, 0.0))
    assert far - near == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (layout(num_microbatches=5), "data 1 x num_microbatches 5 x microbatch_size 2 is 10 sequences"),
        (layout(pipeline=3), "placements: expected one per stage, 3, found 2"),
    ],
)
def test_parts_that_do_not_fit_together_are_an_input_error(degrees, message):
    model = llama()
    with pytest.raises(InputError, match=message):
        step(model, training(), degrees, placed(model, layout()), ONE_SITE)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            [Placement(0, "a", 0, 2), Placement(1, "a", 3, 4)],
            r"placements\[1\]: layers 3 to 4 do not continue at layer 2",
        ),
        ([Placement(0, "a", 0, 2), Placement(1, "a", 2, 3)], "they hold 3 layers, the model has 4"),
        ([Placement(0, "a", 0, 2), Placement(0, "a", 2, 4)], "expected ranks 0 to 1"),
    ],
)
def test_slices_must_cover_the_model_in_order(stages, message):
    with pytest.raises(InputError, match=message):
        step(llama(), training(), layout(), stages, ONE_SITE)


def test_a_rank_has_one_site():
    stages = place_evenly(["a", "b"], [1, 1, 1, 1])
    moved = [*stages[:2], Placement(0, "b", 2, 3), stages[3]]
    with pytest.raises(InputError, match=r"placements\[2\].site: rank 0 is on 'a' already"):
        step(llama(), training(), layout(virtual=2), moved, two_sites())


def test_a_site_with_too_few_devices_is_infeasible():
    cluster = Cluster(sites=(site(num_devices=8),))
    with pytest.raises(InfeasibleError, match="site 'a' has 8 devices; 2 ranks x tensor 8 x data 1 need 16"):
        problem_of(degrees=layout(tensor=8), cluster=cluster)


def test_the_problem_survives_its_file(tmp_path):
    problem = problem_of(degrees=layout(data=2, pipeline=4), cluster=two_sites(), sites=("a", "b"), zero1=True)
    problem.save(tmp_path / "problem.json")
    assert Problem.load(tmp_path / "problem.json") == problem


def step_s(**parts):
    problem = problem_of(**parts)
    return simulate(problem, order("1f1b", problem)).makespan_s


@settings(deadline=None)
@given(latency_s=st.floats(0, 1), factor=st.floats(1, 1000))
def test_a_faster_link_never_hurts(latency_s, factor):
    slow, fast = (
        step_s(cluster=two_sites(s, 1e8 * f, 2e8 * f), sites=("a", "b"))
        for s, f in ((latency_s, 1), (latency_s / factor, factor))
    )
    assert fast <= slow or math.isclose(fast, slow)


def test_a_step_over_a_slow_link_takes_longer_than_inside_a_site():
    assert step_s(cluster=two_sites(), sites=("a", "b")) > step_s() + 2 * 0.01


def test_overlap_leaves_one_bucket_of_each_collective_or_what_does_not_fit_beside_the_pass():
    fast, slow = (problem_of(degrees=layout(data=4), zero=1, overlap=overlap).sync[0] for overlap in (True, False))
    cost = stage_cost(llama(), training(zero=1), layout(data=4), site(), 2, embedding=True)
    assert fast.reduce.bytes == pytest.approx(slow.reduce.bytes / 2)  # two layers, two buckets
    rate = 300e9 * LAW.machine_link_fraction
    hidden = min(cost.forward_s * rate, slow.gather.bytes / 2)
    assert fast.gather.bytes == pytest.approx(slow.gather.bytes - hidden)


@given(data=st.sampled_from([2, 4, 8]), zero=st.sampled_from([0, 1, 2, 3]), pipeline=st.sampled_from([1, 2, 4]))
def test_overlap_never_makes_a_step_longer(data, zero, pipeline):
    fast, slow = (
        step_s(degrees=layout(pipeline=pipeline, data=data), zero=zero, overlap=overlap) for overlap in (True, False)
    )
    assert fast <= slow * (1 + 1e-12)


@given(data=st.sampled_from([2, 4, 8]), context=st.sampled_from([1, 2]))
def test_each_stage_of_zero_needs_less_memory_than_the_one_before(data, context):
    degrees = replace(layout(data=data), context=context)
    held = [
        stage_cost(llama(num_layers=64), training(zero=zero), degrees, site(), 32).static_bytes for zero in range(4)
    ]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == 4


def test_what_a_layout_decides_counts_only_where_the_training_leaves_it_open():
    chosen = replace(layout(data=4, tensor=2), zero=1, sequence_parallel=True)
    free, pinned = settle(training(), chosen), settle(training(zero=0, sequence_parallel=False), chosen)
    assert (free.zero, free.sequence_parallel) == (1, True)
    assert (pinned.zero, pinned.sequence_parallel) == (0, False)
    assert settle(training(), layout()).zero == 0
    costs = JobCosts(llama(), training())
    kept = [
        costs.stage(degrees, site(), 2, "none", embedding=False, head=False).activation_bytes
        for degrees in (layout(data=4, tensor=2), chosen)
    ]
    assert kept[1] < kept[0]


def test_ulysses_takes_four_all_to_alls_in_each_direction():
    model, asked, degrees = llama(num_kv_heads=8), training(sequence_length=4096), replace(layout(), context=4)
    ulysses = replace(degrees, context_exchange="ulysses")
    speed = core_speed(asked, A100, LAW)
    found = compute._context_times(model, asked, ulysses, site(), speed)
    tokens, each = 2 * 4096 / 4, 8 * 64 * 2  # bytes of one token's queries, and of its keys, values, context
    once = LAW.collective_start_s + 3e-6 + 3 / 4 * tokens * each / (300e9 * LAW.machine_link_fraction)
    assert (found.forward_s, found.input_grad_s, found.weight_grad_s) == pytest.approx((4 * once, 4 * once, 0))


@given(st.sampled_from([2, 4]), st.integers(1, 2), st.sampled_from([512, 8192, 65536]))
def test_ulysses_is_exposed_and_a_ring_only_beyond_attention(context, size, length):
    model, asked = llama(num_kv_heads=8), training(sequence_length=length)
    speed = core_speed(asked, A100, LAW)
    ring, ulysses = (
        compute._context_times(
            model,
            asked,
            replace(layout(microbatch_size=size), context=context, context_exchange=how),
            site(devices_per_machine=2),
            speed,
        )
        for how in ("ring", "ulysses")
    )
    core = compute.attention_core_times(model, asked, replace(layout(microbatch_size=size), context=context), speed)
    assert ring.forward_s >= 0
    assert ulysses.forward_s == ulysses.input_grad_s > 4 * LAW.collective_start_s
    whole = compute.context_exchange_s(
        site(devices_per_machine=2),
        LAW,
        replace(layout(), context=context),
        length * size / context * 2 * 2 * model.kv_hidden,
    )
    assert ring.forward_s == pytest.approx(max(0, whole - (context - 1) / context * core.forward_s))


def test_chunks_and_microbatches_have_one_formula_of_ulysses():
    model, asked, place = llama(num_kv_heads=8), training(sequence_length=4096), site()
    degrees = replace(layout(microbatch_size=1), context=4, context_exchange="ulysses")
    law = chunk_laws._all_to_all(model, asked, degrees, place, LAW, 4)
    whole = compute._context_times(model, asked, degrees, place, core_speed(asked, A100, LAW))
    assert law.token_s * 4096 + law.fixed_s == pytest.approx(whole.forward_s)


def test_the_published_gain_of_fused_kernels_is_met_and_narrower_numbers_are_faster():
    """Gain in tokens/s of Llama 3 8B: torchtitan's on H100 by torch.compile."""
    model, long = preset_model("llama-3-8b"), training(8192, 8, zero=3)
    degrees = replace(layout(1, 8), num_microbatches=1, microbatch_size=1)
    b200, h100 = (preset_site("a", name, 8) for name in ("b200", "h100-96gb-500w"))

    def seconds(place, **how):
        at = long.model_copy(update=how)
        cost = step(model, at, degrees, place_evenly(["a"], [model.num_layers]), Cluster(sites=(place,)))
        return simulate(cost.problem, order("1f1b", cost.problem)).makespan_s + cost.overhead_s

    plain, fp8, nvfp4 = (seconds(b200, matmul=matmul) for matmul in ("same", "fp8", "nvfp4"))
    assert plain > fp8 > nvfp4 > plain / 4
    assert seconds(h100, kernels="eager") / seconds(h100) == pytest.approx(6514 / 5762, rel=0.02)


@given(size=st.sampled_from([64, 1024, 16384]), hidden=st.sampled_from([256, 4096]))
def test_cuda_graphs_take_the_launch_floor_away_and_nothing_else(size, hidden):
    model, degrees = llama(hidden=hidden), layout(microbatch_size=1)
    plain, replayed = (
        compute.layer_times(model, training(size, cuda_graphs=graphs), degrees, site(), LAW) for graphs in (False, True)
    )
    assert plain.forward_s == max(replayed.forward_s, LAW.layer_launch_s)
    assert replayed.input_grad_s <= plain.input_grad_s


@given(context=st.sampled_from([1, 2, 4, 8]))
def test_context_parallelism_divides_activations_and_products(context):
    whole, divided = (stage_cost(llama(), training(), replace(layout(), context=c), site(), 2) for c in (1, context))
    assert divided.activation_bytes == pytest.approx(whole.activation_bytes / context)
    assert divided.static_bytes == whole.static_bytes
    assert divided.boundary_bytes == whole.boundary_bytes


def test_expert_parallelism_divides_experts_and_sends_tokens():
    model = llama(experts={"num_experts": 8, "per_token": 2, "ffn_hidden": 704})
    whole, divided = (stage_cost(model, training(), replace(layout(data=4), expert=e), site(), 2) for e in (1, 4))
    assert divided.num_params == whole.num_params
    assert divided.expert_params == pytest.approx(whole.expert_params / 4)
    assert whole.device_params - divided.device_params == pytest.approx(0.75 * whole.expert_params)
    assert divided.static_bytes < whole.static_bytes


def test_experts_that_fill_a_machine_are_summed_over_one_port_each():
    """Eight experts on eight devices of a machine: each one's replicas are a ring of its own over its own port."""
    model = llama(experts={"num_experts": 8, "per_token": 2, "ffn_hidden": 1408})
    degrees = replace(layout(pipeline=1, data=32, microbatch_size=1), expert=8)
    step = problem_of(model, degrees, overlap=False, zero=1)
    cost = stage_cost(model, training(zero=1), degrees, site(), 4, embedding=True, head=True)
    port = 25e9 * LAW.site_link_fraction
    ports = min(8 * port, 300e9 * LAW.machine_link_fraction)
    common_s = (cost.device_params - cost.expert_params) * 4 * 31 / 32 / ports
    experts_s = cost.expert_params * 4 * 3 / 4 / port
    reduce = step.sync[0].reduce
    assert reduce.bytes / ports == pytest.approx(common_s + experts_s)


def test_offloaded_layers_keep_nothing_and_cost_what_their_copies_take_beyond_computing():
    model, degrees = llama(num_layers=4), layout(pipeline=1)
    plain, some, all_of_it = (
        stage_cost(model, training(cpu_offloading_num_layers=n), degrees, site(), 4) for n in (0, 2, 4)
    )
    assert some.activation_bytes == pytest.approx(plain.activation_bytes / 2)
    assert (all_of_it.activation_bytes, some.working_bytes) == (0, plain.working_bytes)
    assert all_of_it.working_bytes == pytest.approx(plain.working_bytes + plain.activation_bytes / 2)
    slow, fast = (
        stage_cost(
            *(model, training(cpu_offloading_num_layers=4), degrees, site(), 4),
            calibration=replace(LAW, host_link_bytes_per_s=rate),
        )
        for rate in (1e6, 1e15)
    )
    copied_s = plain.activation_bytes / 1e6
    assert slow.forward_s == pytest.approx(LAW.action_overhead_s + copied_s)
    assert (fast.forward_s, fast.input_grad_s) == (plain.forward_s, plain.input_grad_s)


def test_multi_token_prediction_is_a_layer_and_a_head_more_on_the_last_stage():
    experts = {"num_experts": 8, "per_token": 2, "ffn_hidden": 1408, "num_dense_layers": 1}
    plain = llama(experts=experts)
    model = plain.model_copy(update={"mtp_num_layers": 1})
    degrees = replace(layout(data=4), expert=4)
    without, further = (stage_cost(m, training(), degrees, site(), 2, head=True) for m in (plain, model))
    layer = compute.layer_times(plain, training(), degrees, site(), LAW)
    head = compute.head_times(plain, training(), degrees, site(), LAW)
    more_s = further.forward_s - without.forward_s
    assert layer.forward_s + head.forward_s < more_s < 1.2 * (layer.forward_s + head.forward_s)
    assert further.expert_params - without.expert_params == plain.num_expert_params / 4
    copy = model.vocab_size * model.hidden
    assert further.num_params - without.num_params == model.num_mtp_params + copy
    assert further.activation_bytes > without.activation_bytes
    first = [stage_cost(m, training(), degrees, site(), 2, embedding=True) for m in (plain, model)]
    assert first[0] == first[1]
    assert step_flops(model, 256, 1) > step_flops(plain, 256, 1)


def test_a_host_that_asks_how_many_tokens_experts_got_leaves_the_device_idle():
    model = llama(hidden=4096, experts={"num_experts": 8, "per_token": 2, "ffn_hidden": 14336})
    degrees, spec = layout(pipeline=1, microbatch_size=1), training(8192)
    idle, replayed = (
        compute.layer_times(model, spec.model_copy(update={"cuda_graphs": graphs}), degrees, site(), LAW)
        for graphs in (False, True)
    )
    assert idle.forward_s - replayed.forward_s == pytest.approx(LAW.expert_sync_s)
    assert idle.input_grad_s == replayed.input_grad_s


def test_attention_over_a_window_has_no_ring():
    local, long = (llama(sliding_window=window) for window in (255, 256))
    degrees = replace(layout(), context=2)
    assert problem_of(model=long, degrees=degrees)
    assert problem_of(model=local, degrees=replace(degrees, context_exchange="ulysses"))
    with pytest.raises(InputError, match=r"no ring is known for attention over a window.*'ulysses' would do"):
        problem_of(model=local, degrees=degrees)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 3}, "layout.context: 3 does not divide training.sequence_length 256"),
        ({"context": 4, "context_exchange": "ulysses"}, "the model has 8 heads and 2 key heads"),
        ({"expert": 2}, "the model has no experts, which 2 devices can't share evenly"),
    ],
)
def test_shares_that_do_not_come_out_even_are_an_input_error(change, message):
    degrees = replace(layout(), **change)
    with pytest.raises(InputError, match=message):
        problem_of(degrees=degrees)


def test_a_hidden_collective_slows_the_computation_beside_it():
    place = site(device=A100)
    asked = training(256, 32, zero=1)
    degrees = layout(pipeline=1, data=8)
    found = []
    for slowdown in (0.0, 0.5):
        costs = JobCosts(llama(), asked, None, {"a100-80gb": replace(LAW, overlap_slowdown=slowdown)})
        problem = step_cost(costs, degrees, place_evenly(["a"], [4]), Cluster(sites=(place,))).problem
        found.append(problem.sync[0].reduce.bytes)
    whole = 4 * llama().num_params * 7 / 8
    assert found[1] == pytest.approx(found[0] + 0.5 * (whole - found[0]))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_in_groups_takes_more_memory_and_gathers_inside_them(zero):
    degrees, wide = replace(layout(data=16), tensor=1), site()
    whole, grouped, one = (
        stage_cost(llama(), training(4096, zero=zero, **how), degrees, wide, 2)
        for how in ({}, {"zero_group_size": 8}, {"zero_group_size": 16})
    )
    assert one == whole
    assert grouped.static_bytes > whole.static_bytes
    assert training(zero=zero, zero_group_size=8).grouped(12) == 4


def test_parameters_that_are_not_gathered_beside_computing_are_all_exposed():
    how = {"degrees": layout(data=4), "zero": 1}
    beside, before, open_ = (
        problem_of(**how, **more).sync[0] for more in ({}, {"overlap_param_gather": False}, {"overlap": False})
    )
    assert beside.gather.bytes < before.gather.bytes == open_.gather.bytes
    assert before.reduce.bytes == beside.reduce.bytes


@pytest.mark.parametrize(
    ("hides", "how"), [(False, {"zero": 0}), (False, {"zero": 3}), (True, {"overlap": False, "zero": 1})]
)
def test_a_gather_that_nothing_hides_needs_no_switch(hides, how):
    with pytest.raises(ValueError, match="parameters are gathered by zero = 1"):
        training(overlap_param_gather=hides, **how)
    assert training(overlap_param_gather=False, overlap=False, zero=1), "says what is so anyway"


def test_a_group_without_zero_is_a_mistake():
    with pytest.raises(ValueError, match="it divides what ZeRO does"):
        training(zero=0, zero_group_size=8)


def test_gradients_are_summed_over_the_groups_of_zero():
    degrees, model = replace(layout(data=16), tensor=1), llama(hidden=8192, num_heads=64)
    h100 = preset_site("site", "h100-sxm", 64).model_copy(
        update={"site_link": LocalLink(latency_s=14e-6, bandwidth_bytes_per_s=1e9)}
    )

    def seconds(**how):
        return compute.layer_times(model, training(1, zero=3, **how), degrees, h100, calibration_of(h100.device))

    whole, grouped = seconds(), seconds(zero_group_size=8)
    assert grouped.forward_s < whole.forward_s
    alone = compute.zero_times(
        *(model, training(1, zero=3, zero_group_size=8), degrees, h100, calibration_of(h100.device)),
        compute.Times(0.0, 0.0, 0.0),
    )
    assert alone.input_grad_s > 2 * alone.forward_s


def test_dense_layers_are_where_the_model_has_them():
    model = preset_model("deepseek-v3")
    assert [model.dense_share(*span) for span in ((0, 2), (2, 6), (3, 9), (4, 4))] == [1.0, 0.25, 0.0, None]
    assert llama().dense_share(0, 4) is None
    costs, degrees = JobCosts(model, training()), replace(layout(data=8), expert=8, tensor=1)
    ends = {"embedding": False, "head": False}
    first, later, mean = (
        costs.stage(degrees, site(), 3, "none", **ends, dense_share=share) for share in (1.0, 0.0, None)
    )
    assert first.expert_params == 0
    assert first.static_bytes < mean.static_bytes < later.static_bytes
    assert later.num_params == pytest.approx(3 * model.num_layer_params)
