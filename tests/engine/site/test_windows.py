"""Attention over a window, block by block."""

import pytest
import torch
from torch.nn import functional

from farpipe.engine.site import context


def attend(query, key, value, mask):
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)


@pytest.mark.parametrize(("length", "num_blocks"), [(5, 3), (16, 2), (29, 1), (None, 1)])
def test_blocks_are_the_whole_masked_sequence(monkeypatch, length, num_blocks):
    monkeypatch.setattr(context, "_LEAST_BLOCK", 10)
    query, key, value = torch.randn(3, 1, 2, 29, 4, dtype=torch.float64)
    blocks = list(context._windows(query, length))
    found = [attend(query[:, :, here], key[:, :, seen], value[:, :, seen], mask) for here, seen, mask in blocks]
    before = torch.arange(29)[:, None] - torch.arange(29)
    expected = attend(query, key, value, (before >= 0) & (before < (length or 29)))
    assert len(blocks) == num_blocks
    assert torch.allclose(torch.cat(found, dim=2), expected, rtol=1e-12)
    assert all(mask is None or mask.shape[-1] < 29 for _, _, mask in blocks[:-1])
