"""Tensors to and from other ranks over a transport of bytes: their memory as it is, dtype and shape beside it."""

import math
import struct
from typing import Final

import torch
from torch import Tensor

from farpipe.errors import InputError, RunError
from farpipe.runtime.peers import TensorMessage
from farpipe.transport import ChannelKind, Tag, Transport

DTYPES: Final[tuple[torch.dtype, ...]] = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
"""A dtype's code in a description is its place here."""
MAX_DIMENSIONS: Final = 8
MAX_ELEMENTS: Final = 1 << 40
_HEAD: Final = struct.Struct("<BB")


class TensorPeers:
    """The Peers of a rank, over its `transport`; see Transport for limits and errors."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.world_size, self.clock = transport.rank, transport.world_size, transport.clock
        self.exchange, self.post, self.poll = transport.exchange, transport.post, transport.poll
        self.paused_s, self.abort = transport.paused_s, transport.abort
        self.clock_offsets, self.take_events = transport.clock_offsets, transport.take_events

    def send(self, peer: int, kind: ChannelKind, tag: Tag, tensor: Tensor) -> None:
        """See Messenger. A contiguous tensor in CPU memory is not copied; InputError for a dtype that can't be sent."""
        description = describe(tensor)
        self.transport.send(peer, kind, tag, tensor_bytes(tensor.detach().cpu().contiguous()), description)

    def receive(self, peer: int, kind: ChannelKind, tag: Tag, *, waiting_for: str) -> TensorMessage:
        """See Messenger: a tensor in CPU memory, the receiver's own. RunError for bytes that are no tensor."""
        data, description, times = self.transport.receive(peer, kind, tag, waiting_for=waiting_for)
        try:
            return TensorMessage(tensor_of(data, description), times)
        except ValueError as error:
            raise RunError(
                f"{waiting_for}: the {kind} message of {tag} from rank {peer} is no tensor: {error}"
            ) from None


def describe(tensor: Tensor) -> bytes:
    """Dtype and shape of `tensor`, for `tensor_of`; InputError for a tensor that has no form on the wire."""
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
        known = ", ".join(map(str, DTYPES))
        raise InputError(f"a {tensor.layout} tensor of {tensor.dtype} can't be sent; send a strided one of {known}")
    if tensor.dim() > MAX_DIMENSIONS:
        raise InputError(f"a tensor of {tensor.dim()} dimensions can't be sent; the limit is {MAX_DIMENSIONS}")
    return _HEAD.pack(DTYPES.index(tensor.dtype), tensor.dim()) + struct.pack(f"<{tensor.dim()}Q", *tensor.shape)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def tensor_of(data: memoryview, description: bytes) -> Tensor:
    """The tensor that lies in `data`, without a copy; ValueError when `description` (see `describe`) does not fit."""
    if len(description) < _HEAD.size:
        raise ValueError(f"it is described in {len(description)} bytes")
    code, num_dimensions = _HEAD.unpack_from(description)
    if code >= len(DTYPES) or len(description) != _HEAD.size + 8 * num_dimensions or num_dimensions > MAX_DIMENSIONS:
        raise ValueError(f"unknown dtype {code} or {num_dimensions} dimensions in {len(description)} bytes")
    dtype, shape = DTYPES[code], struct.unpack_from(f"<{num_dimensions}Q", description, _HEAD.size)
    spread = math.prod(size or 1 for size in shape)  # an empty one has no bytes, but strides as if it had
    if math.prod(shape) * dtype.itemsize != len(data) or spread > MAX_ELEMENTS:
        raise ValueError(f"{len(data)} bytes for shape {shape} of {dtype}")
    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)
