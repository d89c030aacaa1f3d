"""The heads of frames: fixed binary headers that are checked before anything is allocated for what follows.

The frames of a data pipe have a chunk of a tensor as their body, those of a control pipe the payload, and the name
behind the header. All numbers are little-endian.
"""

import math
import struct
from enum import IntEnum
from typing import Final, NamedTuple

import torch

from farpipe.errors import InputError
from farpipe.transport.message import Tag

MAX_DIMENSIONS: Final = 8
MAX_NAME_BYTES: Final = 256
MAX_CONTROL_BYTES: Final = 64 << 20
"""A longer control payload is refused; data belongs on data channels."""

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
"""A dtype's code on the wire is its place here."""

_DATA_MAGIC: Final = b"fpD1"
_CONTROL_MAGIC: Final = b"fpC1"
_DATA: Final = struct.Struct("<4sBBxx Q qii QQQ qqq 8Q")
_CONTROL: Final = struct.Struct("<4sBxH I qq")

_NO_SIZES: Final = (0,) * MAX_DIMENSIONS

DATA_HEADER_BYTES: Final = _DATA.size
CONTROL_HEADER_BYTES: Final = _CONTROL.size


class WireError(Exception):
    """The bytes are not what a rank of this version sends; the connection is of no more use."""


class ControlFrame(IntEnum):
    """What a frame on a control connection is."""

    EXCHANGE = 1
    POST = 2
    PING = 3
    PONG = 4
    ABORT = 5
    GOODBYE = 6
    DOWN = 7
    """The sender has lost a connection with some rank and tries to get it back: waiting longer is in order."""
    UP = 8
    """It is back."""


class ChunkHeader(NamedTuple):
    """A chunk and the message that it is part of: everything needed to make the tensor, whichever chunk comes first."""

    number: int
    """The message's number on its channel."""
    tag: Tag
    dtype: torch.dtype
    shape: tuple[int, ...]
    total_bytes: int
    offset: int
    chunk_bytes: int
    ready_ns: int
    start_ns: int
    """When the link took the message (emulated) or the chunk (real); the sender's clock, as `ready_ns`."""
    deliver_ns: int
    """Emulated arrival on the machine's clock; 0: as soon as it is there."""

    def of_chunk(self, offset: int, chunk_bytes: int, start_ns: int) -> "ChunkHeader":
        """The header of another chunk of the message."""
        number, tag, dtype, shape, total_bytes, _, _, ready_ns, _, deliver_ns = self
        return ChunkHeader(number, tag, dtype, shape, total_bytes, offset, chunk_bytes, ready_ns, start_ns, deliver_ns)

    def same_message(self, other: "ChunkHeader") -> bool:
        """Whether both describe one and the same message."""
        return self[:5] == other[:5] and self.deliver_ns == other.deliver_ns


class ControlHeader(NamedTuple):
    """A control frame without its name and payload."""

    kind: ControlFrame
    name_bytes: int
    payload_bytes: int
    sent_ns: int
    """The sender's clock, just before the frame was handed to the kernel."""
    deliver_ns: int
    """As in ChunkHeader."""


def check_sendable(tensor: torch.Tensor) -> None:
    """InputError for a tensor of a kind that has no form on the wire."""
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
        known = ", ".join(map(str, DTYPES))
        raise InputError(f"a {tensor.layout} tensor of {tensor.dtype} can't be sent; send a strided one of {known}")
    if tensor.dim() > MAX_DIMENSIONS:
        raise InputError(f"a tensor of {tensor.dim()} dimensions can't be sent; the limit is {MAX_DIMENSIONS}")


def pack_chunk(header: ChunkHeader) -> bytes:
    """The header as bytes."""
    number, tag, dtype, shape, *rest = header
    unused = _NO_SIZES[len(shape) :]
    return _DATA.pack(_DATA_MAGIC, DTYPES.index(dtype), len(shape), number, *tag, *rest, *shape, *unused)


def unpack_chunk(data: bytes | bytearray | memoryview, max_message_bytes: int) -> ChunkHeader:
    """The header in `data`; WireError for anything that can't be right."""
    if len(data) != DATA_HEADER_BYTES:
        raise WireError(f"a data header of {len(data)} bytes")
    magic, code, num_dimensions, number, step, stage, microbatch, total_bytes, offset, chunk_bytes, *rest = (
        _DATA.unpack(data)
    )
    if magic != _DATA_MAGIC:
        raise WireError(f"not a data frame: {bytes(data[:8])!r}")
    if code >= len(DTYPES) or num_dimensions > MAX_DIMENSIONS:
        raise WireError(f"unknown dtype {code} or too many dimensions, {num_dimensions}")
    dtype, shape = DTYPES[code], tuple(rest[3 : 3 + num_dimensions])
    # an empty one has no bytes, but strides as if it had
    spread_bytes = total_bytes or math.prod(size or 1 for size in shape) * dtype.itemsize
    if math.prod(shape) * dtype.itemsize != total_bytes or spread_bytes > max_message_bytes:
        raise WireError(f"a message of {total_bytes} bytes for shape {shape}; the limit is {max_message_bytes}")
    if offset + chunk_bytes > total_bytes:
        raise WireError(f"a chunk beyond its message: {offset} + {chunk_bytes} of {total_bytes} bytes")
    tag = Tag(step, stage, microbatch)
    return ChunkHeader(number, tag, dtype, shape, total_bytes, offset, chunk_bytes, *rest[:3])


def pack_control(header: ControlHeader) -> bytes:
    """The header as bytes."""
    return _CONTROL.pack(_CONTROL_MAGIC, *header)


def unpack_control(data: bytes | bytearray) -> ControlHeader:
    """The header in `data`; WireError for anything that can't be right."""
    if len(data) != CONTROL_HEADER_BYTES:
        raise WireError(f"a control header of {len(data)} bytes")
    magic, kind, name_bytes, payload_bytes, sent_ns, deliver_ns = _CONTROL.unpack(data)
    if magic != _CONTROL_MAGIC or kind not in iter(ControlFrame):
        raise WireError(f"not a control frame: {bytes(data[:8])!r}")
    if name_bytes > MAX_NAME_BYTES or payload_bytes > MAX_CONTROL_BYTES:
        raise WireError(f"a control frame of {name_bytes} + {payload_bytes} bytes")
    return ControlHeader(ControlFrame(kind), name_bytes, payload_bytes, sent_ns, deliver_ns)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
