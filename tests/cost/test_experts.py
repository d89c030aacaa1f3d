"""Traffic of experts inside a device, by hand."""

from dataclasses import replace

import pytest

from cost_jobs import layout, llama, training
from farpipe.cost import memory
from farpipe.cost.experts import expert_traffic_bytes

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
