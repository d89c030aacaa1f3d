"""The engine's interface to the other ranks, and its form over a transport of bytes: a tensor's memory as it is."""

import math
import struct
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from farpipe.core.errors import InputError, RunError
from farpipe.engine.transport import ChannelKind, LinkEvent, MessageTimes, Tag, Transport
from farpipe.engine.transport.clock import Clock

DTYPES: Final[tuple[torch.dtype, ...]] = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""A dtype's code in a description is its place here."""
MAX_DIMENSIONS: Final = 8
MAX_ELEMENTS: Final = 1 << 40
_HEAD: Final = struct.Struct("<BB")


MessageRow = tuple[int, int, int, int, int]
"""ready, start, end, arrival (ns) and bytes of a received message."""


class TensorMessage(NamedTuple):
    """A received tensor, the receiver's own, and the times of its journey; in CPU memory unless Staging gives it."""

    tensor: Tensor
    times: MessageTimes
    wire_bytes: int | None = None
    """Bytes that went over the link, if that is not the tensor as it is."""
    on_host: Tensor | None = None
    """The same in the host's memory, where `tensor` is on a GPU."""

    @property
    def num_bytes(self) -> int:
        """Bytes that went over the link."""
        return self.tensor.nbytes if self.wire_bytes is None else self.wire_bytes

    @property
    def row(self) -> MessageRow:
        """Record of the message among those of a step."""
        return *self.times, self.num_bytes


class Messenger(Protocol):
    """Tensors to and from other ranks.

    Those of a training are one around the other, each there only where it is needed: NarrowMessenger (`wire_type`),
    Staging (tensors on a GPU), PipelinePeers (ranks to processes), TensorPeers (over a Transport).
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def clock(self) -> Clock:
        """Stamps the messages that this rank sends and receives."""

    def send(self, peer: int, kind: ChannelKind, tag: Tag, tensor: Tensor) -> None:
        """Hand `tensor` over; never waits for the receiver. `tensor` must not be written to afterwards."""

    def receive(self, peer: int, kind: ChannelKind, tag: Tag, *, waiting_for: str) -> TensorMessage:
        """The message with this tag; RunError when it doesn't come in time."""


class Peers(Messenger, Protocol):
    """The other ranks of a run, as one rank sees them."""

    @property
    def world_size(self) -> int:
        """Ranks of the run."""

    def exchange(self, name: str, payload: bytes, *, waiting_for: str) -> list[bytes]:
        """Every rank's payload, by rank; RunError when one doesn't come in time."""

    def post(self, peer: int, name: str, payload: bytes) -> None:
        """Put `payload` under the topic `name` of `peer`."""

    def poll(self, name: str) -> list[tuple[int, bytes]]:
        """Take what has come under the topic `name` so far: (sender, payload)."""

    def take_events(self) -> list[LinkEvent]:
        """Outages, reconnections and bursts of retransmissions on this rank's links since the last call."""

    def paused_s(self) -> float:
        """Total time for which outages have kept messages from arriving: limits of waits are extended by that."""

    def abort(self, reason: str) -> None:
        """Tell all ranks why the run ends; from now on every wait raises."""

    def clock_offsets(self) -> list[int]:
        """Nanoseconds to subtract from each rank's stamps to have them on rank 0's clock."""


class TensorPeers:
    """The Peers of a rank, over its `transport`; see Transport for limits and errors."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.world_size, self.clock = transport.rank, transport.world_size, transport.clock
        self.exchange, self.post, self.poll = transport.exchange, transport.post, transport.poll
        self.paused_s, self.abort = transport.paused_s, transport.abort
        self.clock_offsets, self.take_events = transport.clock_offsets, transport.take_events

    def send(self, peer: int, kind: ChannelKind, tag: Tag, tensor: Tensor) -> None:
        """Hand `tensor` over, without a copy if contiguous in CPU memory; InputError for a dtype that can't be sent."""
        description = describe(tensor)
        self.transport.send(peer, kind, tag, tensor_bytes(tensor.detach().cpu().contiguous()), description)

    def receive(self, peer: int, kind: ChannelKind, tag: Tag, *, waiting_for: str) -> TensorMessage:
        """The message with this tag: a tensor of the receiver's own in CPU memory; RunError for bytes that are none."""
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


def form_of(description: bytes) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape in a description (see `describe`); ValueError where it is none."""
    if len(description) < _HEAD.size:
        raise ValueError(f"it is described in {len(description)} bytes")
    code, num_dimensions = _HEAD.unpack_from(description)
    if code >= len(DTYPES) or len(description) != _HEAD.size + 8 * num_dimensions or num_dimensions > MAX_DIMENSIONS:
        raise ValueError(f"unknown dtype {code} or {num_dimensions} dimensions in {len(description)} bytes")
    shape = struct.unpack_from(f"<{num_dimensions}Q", description, _HEAD.size)
    if math.prod(size or 1 for size in shape) > MAX_ELEMENTS:  # an empty one has no bytes, but strides as if it had
        raise ValueError(f"the shape {shape} is too large")
    return DTYPES[code], shape


def tensor_of(data: memoryview, description: bytes) -> Tensor:
    """The tensor that lies in `data`, without a copy; ValueError when `description` (see `describe`) does not fit."""
    dtype, shape = form_of(description)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for shape {shape} of {dtype}")
    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)
