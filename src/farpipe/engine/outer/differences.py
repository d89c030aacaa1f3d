"""Differences of parameters on the wire between sites: in 32 or 16 bit, or in 8 or 4 with a scale for every block.

A block is `OUTER_BLOCK` neighbouring numbers of a row of the whole tensor, counted from the row's first, whatever part
of the row a process has. Each process rounds what it has once, so whoever gets a part of it, at sites of any layout,
gets the same numbers to the last bit. What a message is made of: scales (bfloat16), then numbers, box after box.
"""

from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from farpipe.core.errors import RunError
from farpipe.core.spec import OUTER_BLOCK, OuterWireType
from farpipe.engine.checkpoint.boxes import Box, sizes_of, within

_LARGEST: Final = {"int8": 127, "int4": 7}
"""The largest number of the narrow type; a block's largest is scaled to it."""


@dataclass(frozen=True)
class Difference:
    """A box of one tensor's difference, rounded to a wire type."""

    box: Box
    wire_type: OuterWireType
    numbers: Tensor
    """[size per dimension]: float32, bfloat16, or int8 from -127 or -7."""
    scales: Tensor | None = None
    """[rows, blocks], bfloat16; None where numbers are as they are. Rows are all dimensions but the last."""

    @property
    def values(self) -> Tensor:
        """[size per dimension], float32."""
        if self.scales is None:
            return self.numbers.float()
        first, columns = _columns(self.box)
        blocks = torch.arange(first, first + columns) // OUTER_BLOCK - first // OUTER_BLOCK
        rows = self.numbers.reshape(-1, columns).float() * self.scales.float()[:, blocks]
        return rows.view(self.numbers.shape)

    def part(self, box: Box) -> "Difference":
        """The elements of `box`, which is inside this one, as they are rounded here."""
        place = within(self.box, box)
        if self.scales is None:
            return Difference(box, self.wire_type, self.numbers[place])
        (mine, _), (first, columns) = _columns(self.box), _columns(box)
        begin = first // OUTER_BLOCK - mine // OUTER_BLOCK
        scales = self.scales.view(*self.numbers.shape[:-1], -1)[place[:-1]]
        scales = scales[..., begin : begin + _num_blocks(first, columns)]
        return Difference(box, self.wire_type, self.numbers[place], scales.reshape(-1, scales.shape[-1]))

    def wire(self) -> Tensor:
        """Bytes for a message (uint8)."""
        scales = [] if self.scales is None else [_as_bytes(self.scales)]
        return torch.cat([*scales, _packed(self.numbers) if self.wire_type == "int4" else _as_bytes(self.numbers)])


def difference(values: Tensor, box: Box, wire_type: OuterWireType) -> Difference:
    """Round `values` [size per dimension], float32, the elements of `box`."""
    if wire_type not in _LARGEST:
        return Difference(box, wire_type, values.to(torch.bfloat16 if wire_type == "bf16" else torch.float32))
    (first, columns), largest = _columns(box), _LARGEST[wire_type]
    before = first % OUTER_BLOCK
    after = -(before + columns) % OUTER_BLOCK
    blocks = torch.nn.functional.pad(values.reshape(-1, columns), (before, after)).view(-1, OUTER_BLOCK)
    scales = (blocks.abs().amax(dim=1) / largest).to(torch.bfloat16)
    divided = blocks / torch.where(scales == 0, 1.0, scales.float())[:, None]
    numbers = divided.round().clamp(-largest, largest).nan_to_num(0.0).to(torch.int8)
    kept = numbers.view(-1, before + columns + after)[:, before : before + columns]
    return Difference(box, wire_type, kept.reshape(values.shape), scales.view(kept.shape[0], -1))


def num_wire_bytes(box: Box, wire_type: OuterWireType) -> int:
    """Bytes of a message with the elements of `box`."""
    count = prod(sizes_of(box))
    if wire_type not in _LARGEST:
        return count * (2 if wire_type == "bf16" else 4)
    return 2 * _num_scales(box) + (count if wire_type == "int8" else -(-count // 2))


def from_wire(data: Tensor, box: Box, wire_type: OuterWireType) -> Difference:
    """The inverse of `Difference.wire`; RunError for another number of bytes than such a box has."""
    expected = num_wire_bytes(box, wire_type)
    if len(data) != expected:
        raise RunError(f"a difference of {expected} bytes was expected, {len(data)} came; do all sites run one job?")
    sizes = sizes_of(box)
    if wire_type not in _LARGEST:
        dtype = torch.bfloat16 if wire_type == "bf16" else torch.float32
        return Difference(box, wire_type, _from_bytes(data, dtype).view(sizes))
    end = 2 * _num_scales(box)
    scales = _from_bytes(data[:end], torch.bfloat16)
    numbers = _unpacked(data[end:], prod(sizes)) if wire_type == "int4" else _from_bytes(data[end:], torch.int8)
    return Difference(box, wire_type, numbers.view(sizes), scales.view(-1, _num_blocks(*_columns(box))))


def _columns(box: Box) -> tuple[int, int]:
    """The box's first place in a row, and its number of places; a scalar is a row of one."""
    if not box:
        return 0, 1
    return box[-1][0], box[-1][1] - box[-1][0]


def _num_blocks(first: int, columns: int) -> int:
    return (first + columns - 1) // OUTER_BLOCK - first // OUTER_BLOCK + 1


def _num_scales(box: Box) -> int:
    return prod(sizes_of(box[:-1])) * _num_blocks(*_columns(box))


def _packed(numbers: Tensor) -> Tensor:
    """Two numbers from -7 to 7 in every byte."""
    flat = torch.nn.functional.pad(numbers.reshape(-1), (0, numbers.numel() % 2)).to(torch.int16) + 8
    return (flat[0::2] | flat[1::2] << 4).to(torch.uint8)


def _unpacked(data: Tensor, count: int) -> Tensor:
    wide = data.to(torch.int16)
    return (torch.stack([wide & 15, wide >> 4], dim=1).view(-1)[:count] - 8).to(torch.int8)


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.clone().view(dtype)  # a copy, for the numbers may begin anywhere
