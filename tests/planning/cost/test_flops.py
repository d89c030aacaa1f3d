"""FLOPs of a step, against the published formula."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_jobs import gpt, llama
from farpipe.core.spec import preset_model
from farpipe.planning.cost import causal_share, flops, step_flops
from farpipe.planning.cost.flops import Product


@given(
    num_layers=st.integers(1, 200),
    num_heads=st.integers(1, 160),
    head_dim=st.integers(1, 256),
    sequence_length=st.integers(1, 1 << 17),
    vocab_size=st.integers(1, 300_000),
    batch=st.integers(1, 4096),
)
def test_a_gpt_step_has_the_flops_of_korthikanti(num_layers, num_heads, head_dim, sequence_length, vocab_size, batch):
    hidden = num_heads * head_dim
    model = gpt(num_layers, hidden, num_heads, vocab_size, positions="learned", max_sequence_length=sequence_length)
    published = 72 * batch * num_layers * sequence_length * hidden**2
    published *= 1 + sequence_length / (6 * hidden) + vocab_size / (12 * hidden * num_layers)
    assert step_flops(model, sequence_length, batch) == pytest.approx(published, rel=1e-12)


def test_grouped_queries_and_gates_are_counted_matrix_by_matrix():
    model = llama(hidden=6, num_heads=3, head_dim=4, num_kv_heads=1, ffn_hidden=5)
    linear = 2 * (6 * 12 + 6 * 4 + 6 * 4 + 12 * 6 + 3 * 6 * 5)
    attention = 2 * 2 * 7 * 12
    assert flops.layer_flops(model, sequence_length=7) == 7 * (linear + attention)


@given(rows=st.integers(1, 999), columns=st.integers(1, 999), depth=st.integers(1, 999))
def test_both_gradients_of_a_product_cost_as_much_as_the_product(rows, columns, depth):
    product = Product(rows, columns, depth)
    assert product.input_grad().flops == product.weight_grad().flops == product.flops
    assert product.input_grad().elements == product.weight_grad().elements == product.elements


@given(tensor=st.sampled_from([1, 2, 4, 8]))
def test_tensor_parallelism_divides_the_flops(tensor):
    model = llama()
    for parts in (flops.attention_linear, flops.mlp_linear, flops.head_linear):
        whole, part = (sum(p.flops for p in parts(model, 100, t)) for t in (1, tensor))
        assert part * tensor == pytest.approx(whole)


def test_the_causal_half_of_attention_is_what_the_mask_keeps_of_its_pairs():
    model, length = preset_model("gpt3-1.3b"), 128 * 1024
    without = step_flops(model, length, 1) - 3 * sum(p.flops for p in flops.attention_core(model, 1, length)) * 24
    kept = 3 * 24 * 4 * model.hidden * sum(range(1, length + 1))  # two products, a multiplication and an addition each
    assert causal_share(model, length) * step_flops(model, length, 1) == pytest.approx(without + kept, rel=1e-12)
    assert causal_share(model, length) < 0.6


@given(
    length=st.integers(1, 60), window=st.integers(1, 70), block=st.integers(1, 9), pattern=st.sampled_from([None, 2, 3])
)
def test_windows_leave_the_blocks_that_have_a_pair_in_one(length, window, block, pattern):
    model = llama(num_layers=6, sliding_window=window, window_attn_skip_freq=pattern)
    length = -(-length // block) * block
    blocks = {
        width: {(i // block, j // block) for i in range(length) for j in range(max(0, i - width + 1), i + 1)}
        for width in (window, length)
    }
    share = len(blocks[window]) / len(blocks[length])
    expected = 1 - model.windowed_share * (1 - share)
    assert flops.window_share(model, length, block) == pytest.approx(expected)
    assert flops.window_share(llama(), length, block) == 1


def test_gpt_oss_has_the_flops_of_a_token_that_megatron_bridge_publishes():
    """1,077 TFLOP/s at 33,024 tokens/s (docs/performance-summary.md, 26.08): pairs that windows and mask leave."""
    model, length = preset_model("gpt-oss-120b"), 4096
    published = 1077e12 / 33024
    counted = step_flops(model, length, 1) * causal_share(model, length) / length
    assert counted == pytest.approx(published, rel=0.005)
    whole = model.model_copy(update={"sliding_window": None, "window_attn_skip_freq": None})
    assert step_flops(whole, length, 1) * causal_share(whole, length) / length > 1.05 * published
