"""Bytes of activations and of the state, against the published formulas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_jobs import gpt, layout, llama, site, training
from farpipe.cost import memory, stage_cost

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


@pytest.mark.parametrize(("precision", "per_param"), [("bf16", 2 + 4 + 12), ("fp16", 2 + 2 + 12), ("fp32", 4 + 4 + 8)])
def test_state_bytes_per_parameter(precision, per_param):
    assert memory.state_bytes(1000, training(precision=precision), layout()) == 1000 * per_param


@pytest.mark.parametrize(("precision", "rest", "adam"), [("bf16", 6, 12), ("fp16", 4, 12), ("fp32", 8, 8)])
def test_zero_1_divides_the_optimizer_alone(precision, rest, adam):
    spec = training(precision=precision, zero1=True)
    assert memory.state_bytes(1000, spec, layout(data=4)) == 1000 * (rest + adam / 4)


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
