"""Differences of parameters on the wire: what each part of a box is rounded to, and how many bytes it takes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import RunError
from farpipe.core.spec import OUTER_BLOCK
from farpipe.engine.checkpoint.boxes import sizes_of, within
from farpipe.engine.outer.differences import difference, from_wire, num_wire_bytes

WIRE_TYPES = ("none", "bf16", "int8", "int4")
ERRORS = {"none": 0.0, "bf16": 2**-8, "int8": 1 / 254 + 2**-8, "int4": 1 / 14 + 2**-8}
"""Largest error relative to a block's largest number; scales are rounded to bfloat16 as well."""


@st.composite
def range_in(draw, begin, end):
    start = draw(st.integers(begin, end - 1))
    return start, draw(st.integers(start + 1, end))


@st.composite
def boxes(draw):
    """A box of a tensor, and one inside it."""
    shape = [*draw(st.lists(st.integers(1, 5), max_size=2)), draw(st.integers(1, 3 * OUTER_BLOCK))]
    box = tuple(draw(range_in(0, size)) for size in shape)
    return box, tuple(draw(range_in(*bounds)) for bounds in box)


def values_in(box, seed=0):
    return torch.randn(sizes_of(box), generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=60)
@given(found=boxes(), wire_type=st.sampled_from(WIRE_TYPES))
def test_a_part_is_rounded_as_the_whole_and_survives_the_wire(found, wire_type):
    box, inner = found
    rounded = difference(values_in(box), box, wire_type)
    part = rounded.part(inner)
    assert torch.equal(part.values, rounded.values[within(box, inner)])
    sent = part.wire()
    assert sent.dtype == torch.uint8
    assert len(sent) == num_wire_bytes(inner, wire_type)
    assert torch.equal(from_wire(sent, inner, wire_type).values, part.values)


@settings(deadline=None, max_examples=60)
@given(found=boxes(), wire_type=st.sampled_from(WIRE_TYPES))
def test_the_error_is_bounded_by_the_block_s_largest(found, wire_type):
    box, _ = found
    values = values_in(box)
    error = (difference(values, box, wire_type).values - values).abs()
    first = box[-1][0]
    for block in torch.arange(*box[-1]).div(OUTER_BLOCK, rounding_mode="floor").unique():
        columns = slice(max(0, int(block) * OUTER_BLOCK - first), int(block + 1) * OUTER_BLOCK - first)
        largest = values[..., columns].abs().amax(dim=-1, keepdim=True)
        assert bool((error[..., columns] <= ERRORS[wire_type] * largest * (1 + 1e-6)).all())


@pytest.mark.parametrize("wire_type", WIRE_TYPES)
def test_zeros_stay_zeros_and_one_large_number_costs_its_own_block_alone(wire_type):
    box = ((0, 4 * OUTER_BLOCK),)
    assert torch.equal(difference(torch.zeros(sizes_of(box)), box, wire_type).values, torch.zeros(sizes_of(box)))
    values = values_in(box)
    spoilt = values.clone()
    spoilt[0] = 1e6
    one, other = (difference(each, box, wire_type).values[OUTER_BLOCK:] for each in (values, spoilt))
    assert torch.equal(one, other)


def test_a_scalar_is_a_row_of_one():
    for wire_type in WIRE_TYPES:
        sent = difference(torch.tensor(2.0), (), wire_type)
        assert float(from_wire(sent.wire(), (), wire_type).values) == pytest.approx(2.0, rel=2**-8)


def test_what_is_not_finite_does_not_look_like_a_difference():
    values = torch.ones(OUTER_BLOCK)
    values[3] = torch.nan
    for wire_type in WIRE_TYPES:
        assert not bool(difference(values, ((0, OUTER_BLOCK),), wire_type).values.isfinite().all())


def test_a_message_of_another_length_is_refused():
    with pytest.raises(RunError, match="a difference of 34 bytes was expected, 33 came"):
        from_wire(torch.zeros(33, dtype=torch.uint8), ((0, 64),), "int4")


def test_four_bits_are_an_eighth_of_32_but_for_the_scales():
    box = ((0, 16), (0, 16 * OUTER_BLOCK))
    assert num_wire_bytes(box, "int4") == 16 * 16 * (OUTER_BLOCK // 2 + 2)
    assert num_wire_bytes(box, "none") == 4 * 16 * 16 * OUTER_BLOCK
