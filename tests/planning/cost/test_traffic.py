"""Traffic inside a device beside what a layer keeps, by hand."""

from dataclasses import replace

import pytest

from cost_jobs import layout, llama, training
from farpipe.planning.cost import memory
from farpipe.planning.cost.flops import Product
from farpipe.planning.cost.traffic import (
    ROWWISE_BYTES,
    expert_traffic_bytes,
    rotary_traffic_bytes,
    scaling_traffic_bytes,
)

SORTED = 4 * 64 * 2
"""Bytes of a copy that is read and written on its way in, and again on its way back."""
MXFP8 = 2 * (1 + 1 / 32)
"""Bytes of a number written by rows and by columns."""


@pytest.mark.parametrize(
    ("degree", "how", "there", "back"),
    [
        (1, {}, 0, 0),
        (4, {}, SORTED, SORTED),
        (8, {}, 0, 0),  # a single expert on each device
        (1, {"matmul": "mxfp8"}, MXFP8 * (64 + 96), MXFP8 * (64 + 2 * 96)),
        (4, {"matmul": "fp8"}, SORTED + 2 * (64 + 96), SORTED + 2 * (64 + 2 * 96)),
        (1, {"matmul": "fp8", "lora": {"rank": 4}}, 64 + 96, 64 + 2 * 96),  # no W, no copy by columns for it
    ],
)
def test_tokens_are_sorted_and_narrow_copies_of_them_written(degree, how, there, back):
    model = llama(hidden=64, num_heads=4, num_kv_heads=4, experts={"num_experts": 8, "per_token": 2, "ffn_hidden": 96})
    spec, at = training(**how), replace(layout(data=8), expert=degree)
    copies = memory.microbatch_tokens(spec, at) * 2
    assert expert_traffic_bytes(model, spec, at) == pytest.approx((copies * there, copies * back))
    assert expert_traffic_bytes(llama(), spec, at) == (0, 0)


def test_scales_for_rows_take_passes_of_their_own_over_every_factor():
    """Of X [4, 3] W [3, 5]: X and W forward, both again and the gradient [4, 5] along both sides backward."""
    products, rowwise = [Product(rows=4, columns=5, depth=3)], training(matmul="fp8_rowwise")
    assert scaling_traffic_bytes(training(matmul="fp8"), layout(), products) == (0, 0)
    there, back = scaling_traffic_bytes(rowwise, layout(), products)
    assert (there, back) == (ROWWISE_BYTES * (12 + 15), ROWWISE_BYTES * (12 + 15 + 2 * 20))
    assert scaling_traffic_bytes(rowwise, layout(tensor=2), products) == (2 * there, 2 * back)


def test_biases_of_experts_and_positions_of_yarn_are_not_fused():
    at = replace(layout(data=8), expert=8)
    experts = {"num_experts": 8, "per_token": 2, "ffn_hidden": 96, "expert_bias": True}
    model = llama(hidden=64, num_heads=4, num_kv_heads=2, experts=experts)
    copies = memory.microbatch_tokens(training(), at) * 2 * 64
    assert expert_traffic_bytes(model, training(), at) == (12 * copies, 16 * copies)
    flex = training(moe_token_dispatcher_type="flex")
    assert expert_traffic_bytes(model, flex, at) == (28 * copies, 40 * copies)
    assert expert_traffic_bytes(model, training(cuda_graphs=True), at) == (0, 0)

    numbers = memory.microbatch_tokens(training(), at) * (64 + 32) * 2
    yarn = llama(hidden=64, num_heads=4, num_kv_heads=2, rotary_scaling={"kind": "yarn", "factor": 32.0})
    assert rotary_traffic_bytes(yarn, training(), at) == (12 * numbers, 14 * numbers)
    assert rotary_traffic_bytes(llama(rotary_scaling={"kind": "llama3", "factor": 8.0}), training(), at) == (0, 0)
