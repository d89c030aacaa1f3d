"""Tuples of tensors as one tensor of bytes, which describes itself: a message between two stages is one tensor."""

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from farpipe.errors import InputError, RunError
from farpipe.runtime.peers import describe, form_of

MAX_TENSORS: Final = 64
_ALIGNMENT: Final = 16
"""Bytes of which every tensor begins at a multiple."""
_LENGTH: Final = struct.Struct("<I")
_MAX_HEAD_BYTES: Final = 1 << 13

Values = tuple[Tensor | None, ...]


def joined(values: Sequence[Tensor | None]) -> Tensor:
    """One tensor for all of `values`: the only one itself, unless it looks like several; else their bytes.

    InputError for too many, and for tensors that have no form on the wire.
    """
    if len(values) > MAX_TENSORS:
        raise InputError(f"a stage passes on {len(values)} tensors; the limit is {MAX_TENSORS}")
    if len(values) == 1 and values[0] is not None and values[0].dtype != torch.uint8:
        return values[0].detach()
    there = [value.detach() for value in values if value is not None]
    words = [b"" if value is None else describe(value) for value in values]
    head = b"".join(bytes([len(word)]) + word for word in words)
    device = there[0].device if there else torch.device("cpu")
    start = torch.frombuffer(bytearray(_LENGTH.pack(len(head)) + head), dtype=torch.uint8).to(device)
    flat = [value.contiguous().reshape(-1).view(torch.uint8) for value in there]
    return torch.cat([functional.pad(part, (0, -len(part) % _ALIGNMENT)) for part in (start, *flat)])


def parted(tensor: Tensor) -> Values:
    """The values of which `joined` made `tensor`, without a copy; RunError where it made none like it.

    On a GPU this waits for the message: sizes are read on the host.
    """
    if tensor.dtype != torch.uint8:
        return (tensor,)
    try:
        return tuple(_parts(tensor))
    except (ValueError, IndexError, struct.error, RuntimeError) as error:
        raise RunError(f"a message of {tensor.nbytes} bytes is no tuple of tensors: {error}") from None


def _parts(tensor: Tensor) -> Iterator[Tensor | None]:
    head = tensor[:_MAX_HEAD_BYTES].cpu().numpy().tobytes()
    (length,) = _LENGTH.unpack_from(head)
    place, at = _LENGTH.size, _aligned(_LENGTH.size + length)
    while place < _LENGTH.size + length:
        end = place + 1 + head[place]
        if end == place + 1:
            yield None
        else:
            dtype, shape = form_of(head[place + 1 : end])
            num_bytes = math.prod(shape) * dtype.itemsize
            yield tensor[at : at + num_bytes].view(dtype).view(shape)
            at += _aligned(num_bytes)
        place = end


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % _ALIGNMENT
