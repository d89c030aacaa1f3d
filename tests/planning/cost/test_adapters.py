"""Low-rank adapters beside frozen weights, and the switches of 8-bit trainings."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_jobs import A100, layout, llama, site, stage_cost, training
from farpipe.core.spec import preset_model, preset_site
from farpipe.core.spec.model import Experts
from farpipe.planning.cost import calibration_of, compute, memory, step_flops
from farpipe.planning.cost.adapters import trained_model_params
from farpipe.planning.cost.exchange import layer_expert_exchange_s
from farpipe.planning.cost.speed import core_speed
from farpipe.planning.cost.transfer import _reached, expert_exchange_s

LAW = calibration_of(A100)
LORA = {"rank": 16, "target_modules": ["linear_qkv", "linear_proj"]}
H100 = preset_site("a", "h100", 8)
FP8 = {"matmul": "fp8", "sequence_parallel": True}


def stage(model=None, degrees=None, place=None, **how):
    """Without launches, which all stages would take equally."""
    return stage_cost(
        model or llama(), training(**{"cuda_graphs": True} | how), degrees or layout(), place or site(), 2
    )


def test_the_parameters_of_llama_2_70b_s_adapters_are_those_of_mlperf():
    """Rank 16 on query, key, value and output of 80 layers: 16 x (8192 + 10240 + 2 x 8192) each."""
    count = trained_model_params(preset_model("llama-2-70b"), training(lora=LORA))
    assert count == 80 * 16 * (8192 + 10240 + 8192 + 8192)


def test_frozen_weights_have_no_gradient_no_state_and_next_to_no_w():
    whole, frozen = stage(), stage(lora=LORA)
    assert frozen.num_params == 2 * 16 * (512 + 768 + 512 + 512)
    assert frozen.static_bytes == pytest.approx(2 * whole.num_params + 18 * frozen.num_params)
    assert frozen.weight_grad_s < 0.1 * whole.weight_grad_s
    assert frozen.weight_stash_bytes < whole.weight_stash_bytes
    assert frozen.activation_bytes < whole.activation_bytes
    assert whole.forward_s < frozen.forward_s < 1.5 * whole.forward_s


@given(rank=st.sampled_from([4, 64]), tensor=st.sampled_from([1, 4]), dropout=st.sampled_from([0.0, 0.1]))
def test_more_adapters_never_take_less_time_or_memory(rank, tensor, dropout):
    few, many = (
        stage(degrees=layout(tensor=tensor), lora={"rank": rank, "target_modules": modules, "dropout": dropout})
        for modules in (["linear_proj"], ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
    )
    for name in ("forward_s", "input_grad_s", "weight_grad_s", "activation_bytes", "static_bytes", "num_params"):
        assert getattr(few, name) <= getattr(many, name)


@pytest.mark.parametrize(
    ("base", "per_param"), [("same", 2), ("fp8", 1), ("nf4", 0.5 + 1 / 64 + 4 / (64 * 256))], ids=str
)
def test_frozen_weights_take_the_bytes_of_their_format(base, per_param):
    spec = training(lora=LORA | {"base_weights": base})
    assert memory.state_bytes(1000, spec, layout()) == pytest.approx(1000 * per_param)


def test_narrow_weights_are_widened_for_each_product_unless_it_takes_them():
    def seconds(base, **how):
        return stage(place=H100, lora=LORA | {"base_weights": base}, **how).forward_s

    assert seconds("same") < seconds("nf4")
    assert seconds("fp8", matmul="fp8") == seconds("same", matmul="fp8") < seconds("nf4", matmul="fp8")


def test_zero_divides_the_adapters_state_and_stage_3_the_frozen_weights():
    plain, one, three = (stage(degrees=layout(data=8), zero=zero, lora=LORA).static_bytes for zero in (0, 1, 3))
    params = stage().num_params
    assert plain - one == pytest.approx(7 / 8 * 12 * stage(lora=LORA).num_params)
    assert one - three == pytest.approx(7 / 8 * (2 * params + 6 * stage(lora=LORA).num_params))


def test_experts_have_an_adapter_each_and_a_dense_layer_has_its_own():
    experts = {"num_experts": 8, "per_token": 2, "ffn_hidden": 704, "num_dense_layers": 1}
    lora = {"rank": 4, "target_modules": ["linear_fc1", "linear_fc2"]}
    found = stage(llama(experts=experts), layout(data=8), lora=lora)
    each, dense = 4 * (512 + 2 * 704 + 704 + 512), 4 * (512 + 2 * 1408 + 1408 + 512)
    assert found.num_params == round(2 * (0.75 * 8 * each + 0.25 * dense))
    shared = stage(llama(experts=experts), replace(layout(data=8), expert=8), lora=lora)
    assert shared.expert_params == pytest.approx(found.expert_params / 8)


def test_frozen_weights_need_two_thirds_of_the_flops_of_products():
    model = llama()
    whole, frozen = (step_flops(model, 1, 1, frozen=on) for on in (False, True))
    assert frozen / whole == pytest.approx(2 / 3, rel=1e-3)  # one token: next to no attention


@given(tensor=st.sampled_from([1, 2, 4, 8]), frozen=st.booleans())
def test_overlapped_collectives_are_never_slower_and_never_free(tensor, frozen):
    how = {"sequence_parallel": True, "cuda_graphs": True, "lora": LORA if frozen else None}
    model, degrees = llama(hidden=4096, num_heads=32, ffn_hidden=14336), layout(tensor=tensor)
    plain, overlapped = (
        compute.layer_times(model, training(4096, tp_comm_overlap=on, **how), degrees, site(), LAW)
        for on in (False, True)
    )
    alone = compute.layer_times(model, training(4096, **how), replace(degrees, tensor=1), site(), LAW)
    assert overlapped.forward_s <= plain.forward_s
    assert overlapped.input_grad_s <= plain.input_grad_s
    assert overlapped.weight_grad_s == plain.weight_grad_s
    assert overlapped.forward_s > alone.forward_s / tensor or tensor == 1


def test_attention_on_8_bit_numbers_is_twice_as_fast_and_nothing_else_is():
    plain, narrow = (
        compute.layer_times(llama(), training(32768, fp8_dot_product_attention=on, **FP8), layout(), H100, LAW)
        for on in (False, True)
    )
    core = compute.attention_core_times(llama(), training(32768), layout(), core_speed(training(), A100, LAW))
    assert narrow.forward_s < plain.forward_s
    assert narrow.weight_grad_s == plain.weight_grad_s
    assert plain.forward_s - narrow.forward_s < core.forward_s


def test_a_nonlinearity_that_keeps_8_bit_keeps_half_of_its_input():
    model, degrees = llama(ffn_hidden=1000), layout(microbatch_size=1)
    wide, narrow = (
        memory.layer_activation_bytes(model, training(activation_func_fp8_input_store=on, **FP8), degrees)
        for on in (False, True)
    )
    assert wide - narrow == 256 * 2 * 1000


EXPERTS = {"num_experts": 64, "per_token": 8, "ffn_hidden": 704}


def of(copies, **groups):
    return Experts(**EXPERTS | {"per_token": copies} | groups)


@given(expert=st.sampled_from([2, 8, 32]), copies=st.sampled_from([1, 2, 8]))
def test_sending_a_token_once_to_a_device_is_never_slower_and_equal_for_one_expert(expert, copies):
    degrees = replace(layout(data=32), expert=expert)
    plain, once = (expert_exchange_s(site(), LAW, degrees, 1e8, of(copies), once=on) for on in (False, True))
    assert once <= plain * (1 + 1e-9)
    if copies == 1:
        assert once == pytest.approx(plain)


@pytest.mark.parametrize(("places", "groups", "chosen"), [(16, 8, 4), (8, 8, 3), (4, 8, 4), (2, 8, 2), (8, 64, 9)])
def test_a_token_reaches_as_many_places_as_drawn_experts_do(places, groups, chosen):
    rng, k = np.random.default_rng(0), 6
    each = 64 // groups
    found = []
    for _ in range(4000):
        held = rng.permutation(groups)[:chosen]
        drawn = rng.choice((held[:, None] * each + np.arange(each)).ravel(), k, replace=True)
        found.append(len({*(drawn * places // 64)}))
    expected = _reached(places, of(k, num_groups=groups, group_topk=chosen))
    assert expected == pytest.approx(np.mean(found), rel=0.02)


def test_neighbouring_experts_are_at_one_place():
    assert _reached(8, of(8, num_groups=8)) == 1
    assert _reached(8, of(4, num_groups=16)) == pytest.approx(1)


def test_an_exchange_beside_another_microbatch_leaves_only_what_is_longer_than_computing():
    degrees = replace(layout(data=32), expert=32)
    model = llama(experts=EXPERTS)

    def seconds(**how):
        times = compute.layer_times(model, training(4096, cuda_graphs=True, **how), degrees, site(), LAW)
        return times.forward_s + times.input_grad_s + times.weight_grad_s

    sent = 2 * layer_expert_exchange_s(model, training(4096), degrees, site(), LAW)
    open_s, hidden = seconds(), seconds(overlap_moe_expert_parallel_comm=True)
    assert hidden == pytest.approx(max(sent, open_s - sent))
    assert seconds(moe_token_dispatcher_type="flex") < open_s


def test_the_host_takes_longer_to_launch_a_layer_with_experts():
    few = training(64)
    plain, mixed = (
        compute.layer_times(model, few, layout(microbatch_size=1), site(), LAW).forward_s
        for model in (llama(), llama(experts=EXPERTS))
    )
    assert mixed - plain == pytest.approx(LAW.expert_launch_s)


def test_maps_that_are_apart_have_an_adapter_each():
    """As peft has them in a Llama: 8 x (in + out) for each of query, key, value, output, gate, up and down."""
    megatron = {"target_modules": "linear_qkv linear_proj linear_fc1 linear_fc2"}
    apart, fused = (stage(lora={"rank": 8} | named) for named in ({}, megatron))
    model = llama()
    heads, keys, wide = model.attention_hidden, model.kv_hidden, model.ffn_hidden
    widths, depths = (heads, keys, keys, model.hidden, wide, wide, model.hidden), (*(model.hidden,) * 5, heads, wide)
    assert apart.num_params == 2 * 8 * sum(widths + depths)
    assert fused.num_params == apart.num_params - 2 * 8 * 3 * model.hidden, "three matrices less from the same input"
    assert apart.weight_grad_s > fused.weight_grad_s
    assert apart.activation_bytes == fused.activation_bytes
