"""Bytes of activations and of the state, against the published formulas."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_jobs import gpt, layout, llama, site, stage_cost, training
from farpipe.core.spec import preset_model
from farpipe.planning.cost import flops, memory, stash

SHAPES = {
    "hidden": st.sampled_from([512, 1024, 6144]),
    "num_heads": st.sampled_from([4, 8, 64]),
    "length": st.sampled_from([128, 2048]),
    "b": st.sampled_from([1, 2, 4]),
    "t": st.sampled_from([1, 2, 4, 8]),
}


def layer_bytes(hidden, num_heads, length, b, t, **more):
    spec = training(sequence_length=length, **({"flash_attention": False, "dropout": True} | more))
    return memory.layer_activation_bytes(
        gpt(hidden=hidden, num_heads=num_heads), spec, layout(tensor=t, microbatch_size=b)
    )


@given(**SHAPES)
def test_a_gpt_layer_keeps_what_korthikanti_counts_under_tensor_parallelism(hidden, num_heads, length, b, t):
    expected = length * b * hidden * (10 + 24 / t + 5 * num_heads * length / (hidden * t))
    assert layer_bytes(hidden, num_heads, length, b, t) == pytest.approx(expected)


@given(**SHAPES)
def test_sequence_parallelism_divides_all_of_it(hidden, num_heads, length, b, t):
    expected = length * b * hidden * (34 + 5 * num_heads * length / hidden) / t
    assert layer_bytes(hidden, num_heads, length, b, t, sequence_parallel=True) == pytest.approx(expected)


@given(**SHAPES, how=st.sampled_from([{"recompute": "selective"}, {"flash_attention": True}]))
def test_selective_recomputation_or_flash_attention_leaves_34_bytes(hidden, num_heads, length, b, t, how):
    expected = length * b * hidden * 34 / t
    assert layer_bytes(hidden, num_heads, length, b, t, sequence_parallel=True, **how) == pytest.approx(expected)


@given(**SHAPES)
def test_full_recomputation_keeps_only_the_input(hidden, num_heads, length, b, t):
    assert layer_bytes(hidden, num_heads, length, b, t, recompute="full") == 2 * length * b * hidden


def test_32_bit_doubles_everything_but_the_masks():
    half, full = (layer_bytes(512, 8, 128, 1, 1, precision=p) for p in ("bf16", "fp32"))
    masks = 128 * (2 * 512 + 8 * 128)
    assert full - masks == 2 * (half - masks)


def test_grouped_queries_and_gates_are_counted_tensor_by_tensor():
    model = llama(hidden=6, num_heads=3, head_dim=4, num_kv_heads=1, ffn_hidden=5)
    kept = memory.layer_activation_bytes(model, training(sequence_length=7, dropout=True), layout(microbatch_size=1))
    assert kept == 7 * (2 * (4 * 6 + 2 * 12 + 2 * 4 + 4 * 5) + 2 * 6)


PER_PARAM = [("bf16", 2 + 4 + 12), ("fp16", 2 + 2 + 12), ("fp32", 4 + 4 + 8)]


@pytest.mark.parametrize(("precision", "per_param"), PER_PARAM)
def test_an_update_that_may_be_taken_back_is_kept(precision, per_param):
    how = {"precision": precision, "barrier": False}
    assert memory.state_bytes(1000, training(**how), layout()) == 1000 * (per_param + 16)
    assert memory.state_bytes(1000, training(**how, clip_norm=None), layout()) == 1000 * per_param


@pytest.mark.parametrize(("precision", "per_param"), PER_PARAM)
def test_state_bytes_per_parameter(precision, per_param):
    assert memory.state_bytes(1000, training(precision=precision), layout()) == 1000 * per_param


@pytest.mark.parametrize(("precision", "rest", "adam"), [("bf16", 6, 12), ("fp16", 4, 12), ("fp32", 8, 8)])
def test_zero_1_divides_the_optimizer_alone(precision, rest, adam):
    spec = training(precision=precision, zero1=True)
    assert memory.state_bytes(1000, spec, layout(data=4)) == 1000 * (rest + adam / 4)


FP8 = {"matmul": "fp8", "grad_reduce_in_fp32": False}


@pytest.mark.parametrize(
    ("how", "weight"),
    [
        ({"matmul": "same"}, 2),
        ({"matmul": "fp8"}, 2 + 1 + 1),  # bf16, the 8-bit copy and its transpose
        ({"matmul": "fp8", "fp8_param_gather": True}, 1 + 1),
        ({"matmul": "mxfp8", "fp8_param_gather": True}, 2 * (1 + 1 / 32)),  # blocks along rows, and along columns
        ({"matmul": "nvfp4", "fp8_param_gather": True}, 2 * (1 / 2 + 1 / 16)),
        ({"matmul": "fp8", "framework": "pytorch"}, 2),  # TorchAO quantizes for every product
    ],
)
def test_quantized_weights_are_kept_in_both_directions(how, weight):
    assert memory.state_bytes(1000, training(**how), layout()) == pytest.approx(1000 * (weight + 4 + 12))


def test_norms_of_pytorch_keep_the_normalised_numbers_too():
    """Of Llama 2 of them a layer; of Qwen3 also those inside of attention, with what they norm."""
    fused, eager = training(), training(kernels="eager")
    tokens = memory.microbatch_tokens(fused, layout())
    plain = llama()
    more = [memory.kept_bytes(plain, one, layout()) for one in (fused, eager)]
    assert more[1] - more[0] == tokens * 2 * plain.hidden * 4
    qwen = llama(qk_norm=True)
    more = [memory.kept_bytes(qwen, one, layout()) for one in (fused, eager)]
    assert more[1] - more[0] == tokens * (2 * qwen.hidden * 4 + (qwen.attention_hidden + qwen.kv_hidden) * 6)
    gpt = llama(norm="layernorm")
    assert memory.kept_bytes(gpt, fused, layout()) == memory.kept_bytes(gpt, eager, layout())
    assert memory.layer_traffic_bytes(qwen, eager, layout()) == memory.layer_traffic_bytes(qwen, fused, layout())


def test_devices_that_multiply_in_any_layout_keep_no_transpose_of_tensor_scaled_weights():
    spec = training(matmul="fp8", fp8_param_gather=True)
    sizes = [memory.state_bytes(1000, spec, layout(), transposed=transposed) for transposed in (True, False)]
    assert sizes[0] - sizes[1] == 1000
    both = [memory.weight_bytes(training(matmul="mxfp8"), transposed=transposed) for transposed in (True, False)]
    assert both[0] == both[1]


def test_embedding_and_head_are_never_quantized():
    spec = training(matmul="fp8", fp8_param_gather=True)
    plain = training()
    for ends in (0, 400, 1000):
        narrow, wide = (memory.state_bytes(1000, how, layout(), end_params=ends) for how in (spec, plain))
        assert narrow == wide
    blackwell = memory.state_bytes(1000, spec, layout(), end_params=400, transposed=False)
    assert blackwell == memory.state_bytes(1000, plain, layout()) - 600


def test_gradients_in_16_bit_are_half_as_wide():
    assert memory.state_bytes(1000, training(grad_reduce_in_fp32=False), layout()) == 1000 * (2 + 2 + 12)
    assert memory.state_bytes(1000, training(precision="fp16", grad_reduce_in_fp32=True), layout()) == 1000 * 18


def test_experts_state_is_divided_by_those_that_hold_the_same_experts():
    spec, at = training(zero1=True), replace(layout(data=8), expert=4)
    found = memory.state_bytes(1000, spec, at, expert_params=600)
    assert found == pytest.approx(1000 * 6 + 400 * 12 / 8 + 600 * 12 / 2)


@pytest.mark.parametrize(("expert", "width", "same"), [(1, 4, 8), (8, 4, 1), (16, 1, 2), (32, 1, 1)])
def test_more_experts_degrees_than_replicas_are_folded_over_the_tensor_parallel_devices(expert, width, same):
    """Every parameter of the experts is somewhere, as often as devices hold the same ones."""
    at = replace(layout(data=8, tensor=4), expert=expert)
    assert (at.expert_tensor, at.num_expert_shares) == (width, same)
    assert expert * width * same == 8 * 4
    assert memory.num_expert_shares(training(zero1=True), at) == same
    model = llama(experts={"num_experts": 32, "per_token": 4, "ffn_hidden": 64})
    work = [sum(p.flops for p in flops.mlp_linear(model, 1024, 4, e, w)) for e, w in ((1, 4), (expert, width))]
    assert work[0] == pytest.approx(work[1])


def test_quantized_products_keep_their_inputs_in_8_bit():
    """Inputs of norms and of the nonlinearity, query, key, value and context stay in 16 bit."""
    model = llama(hidden=6, num_heads=3, head_dim=4, num_kv_heads=1, ffn_hidden=5)
    kept = memory.layer_activation_bytes(model, training(sequence_length=7, **FP8), layout(microbatch_size=1))
    norms, attention, mlp = 2 * 6 * (2 + 1), (2 * 12 + 2 * 4) * 2 + 12, 5 * (2 * 2 + 1)
    assert kept == 7 * (norms + attention + mlp)
    kept = [stash.layer_stash_bytes(model, training(**how), layout()) for how in (FP8, {})]
    assert kept[1] == 2 * kept[0]


@given(operation=st.sampled_from(["layernorm", "mlp"]))
def test_recomputation_frees_quantized_activations_at_most(operation):
    model, spec = llama(), training(**FP8)
    freed = memory.freed_bytes(model, spec, layout(), operation)
    assert 0 < freed < memory.freed_bytes(model, training(), layout(), operation)


@given(
    tensor=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    sequence_parallel=st.booleans(),
    flash_attention=st.booleans(),
    zero1=st.booleans(),
)
def test_a_higher_tensor_degree_never_needs_more_memory(tensor, **how):
    spec = training(**how)
    few, many = (
        stage_cost(llama(), spec, layout(tensor=t, data=2), site(), 2, embedding=True, head=True)
        for t in (tensor, 2 * tensor)
    )
    for name in ("activation_bytes", "weight_stash_bytes", "static_bytes", "working_bytes"):
        assert getattr(many, name) <= getattr(few, name)


def test_recomputation_trades_activations_for_time():
    costs = [
        stage_cost(gpt(), training(recompute=how, flash_attention=False), layout(), site(), 2)
        for how in ("none", "selective", "full")
    ]
    kept = [cost.activation_bytes for cost in costs]
    seconds = [cost.input_grad_s for cost in costs]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 3
    assert seconds == sorted(seconds)
    assert costs[2].working_bytes > 0


def test_the_head_keeps_its_logits_in_32_bit():
    model, spec, degrees = gpt(vocab_size=5000), training(), layout(tensor=2, microbatch_size=1)
    with_head, without = (stage_cost(model, spec, degrees, site(), 1, head=h) for h in (True, False))
    logits = 4 * 256 * 5000 / 2
    assert with_head.activation_bytes - without.activation_bytes == logits + 2 * (2 * 256 * 512)


def test_each_module_of_multi_token_prediction_keeps_a_layer_a_head_and_both_streams_before_and_after_their_norms():
    spec, at = training(sequence_length=7), layout(tensor=1, microbatch_size=3)
    plain, one, two = (memory.head_activation_bytes(llama(mtp_num_layers=count), spec, at) for count in (0, 1, 2))
    stream, logits = 21 * 512 * 2, 4 * 21 * 1000
    assert plain == 2 * stream + logits
    assert one == 2 * plain + 4 * stream + memory.layer_activation_bytes(llama(), spec, at)
    assert two - one == one - plain


@pytest.mark.parametrize(("dropout", "num_bytes"), [(0.0, 2), (0.1, 3)])
def test_an_adapter_keeps_its_input_and_the_mask_of_its_dropout(dropout, num_bytes):
    spec = training(lora={"rank": 4, "target_modules": ["linear_qkv"], "dropout": dropout})
    assert memory.kept_input_bytes(spec, "linear_qkv") == num_bytes
    assert memory.kept_input_bytes(spec, "linear_proj") == 0


def test_with_frozen_weights_zero_3_gathers_two_layers_and_no_gradients():
    lora = {"rank": 4, "target_modules": ["linear_qkv"]}
    assert memory.gathered_bytes(100.0, training(zero=3, lora=lora)) == 2 * 100 * 2
    assert memory.gathered_bytes(100.0, training(zero=3)) == 100 * (2 * 2 + 4)
    assert memory.gathered_bytes(100.0, training(zero=2)) == 0


def test_what_the_up_projections_of_latent_attention_make_is_kept_as_narrow_vectors():
    """DeepSeek-V3: 128 heads of 192 query and key numbers for 1,536 + 512 + 64 narrow ones, 2 bytes each."""
    kept, freed = memory.freed_widths(preset_model("deepseek-v3"), training(), "mla_up_proj")
    assert (kept, freed) == (-2 * (1536 + 512 + 64), 2 * 3 * 128 * 192)
