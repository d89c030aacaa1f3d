"""Narrower numbers on the wire between sites: a message is rounded before it is sent and widened where it arrives.

Off by default, for it changes what is computed. `bf16` halves float32. `int8` and `fp8` quarter it: every block of
WIRE_BLOCK numbers has a scale of its own, so that one large number costs its block precision and no other (blocks as in
the microscaling formats of OCP, with float32 scales). A narrowed message describes itself:

    dtype code, wire type, number of dimensions, 0 | shape, int64 each | scales, float32 each | numbers
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from farpipe.core.errors import RunError
from farpipe.core.spec import WireType
from farpipe.engine.executor.peers import MAX_DIMENSIONS, Messenger, TensorMessage
from farpipe.engine.transport import ChannelKind, Tag
from farpipe.engine.transport.clock import Clock
from farpipe.planning.cost.transfer import WIRE_BLOCK, WIRE_HEAD_BYTES, wire_bytes

WIRE_TYPES: Final[tuple[WireType, ...]] = ("bf16", "fp8", "int8")
_WIDE: Final = (torch.float32, torch.bfloat16, torch.float16)
_NARROW: Final = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_LARGEST: Final = {"fp8": 448.0, "int8": 127.0}
"""The largest number of the narrow type; a block's largest is scaled to it."""


def narrow(x: Tensor, wire_type: WireType) -> Tensor:
    """`x` as one message of bytes (uint8); numbers that are not finite stay so in bf16 and spoil their block else."""
    head = torch.tensor([_WIDE.index(x.dtype), WIRE_TYPES.index(wire_type), x.dim(), 0], dtype=torch.uint8)
    parts = [head, _as_bytes(torch.tensor(x.shape, dtype=torch.int64))]
    flat = x.detach().reshape(-1)
    if wire_type == "bf16":
        parts.append(_as_bytes(flat.to(torch.bfloat16)))
    else:
        scales, numbers = _scaled(flat.float(), wire_type)
        parts += [_as_bytes(scales), _as_bytes(numbers)]
    return torch.cat([part.cpu() for part in parts])


def _scaled(flat: Tensor, wire_type: WireType) -> tuple[Tensor, Tensor]:
    """A scale per block, and the numbers divided by it."""
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % WIRE_BLOCK)).view(-1, WIRE_BLOCK)
    scales = blocks.abs().amax(dim=1) / _LARGEST[wire_type]
    divided = blocks / torch.where(scales == 0, 1.0, scales)[:, None]
    if wire_type == "int8":
        divided = divided.round().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-127, 127)
    return scales, divided.to(_NARROW[wire_type]).view(-1)[: len(flat)]


def widen(data: Tensor) -> Tensor:
    """Return the tensor that `narrow` was given, rounded; RunError for bytes that it can't have made."""
    if data.dtype != torch.uint8 or data.dim() != 1 or len(data) < WIRE_HEAD_BYTES:
        raise RunError(f"not a narrowed message: {data.dtype}, {tuple(data.shape)}; do all ranks have one wire_type?")
    dtype, kind, num_dimensions, _ = data[:WIRE_HEAD_BYTES].tolist()
    end = WIRE_HEAD_BYTES + 8 * num_dimensions
    if dtype >= len(_WIDE) or kind >= len(WIRE_TYPES) or num_dimensions > MAX_DIMENSIONS or len(data) < end:
        raise RunError("not a narrowed message: its head makes no sense")
    shape = _from_bytes(data[WIRE_HEAD_BYTES:end], torch.int64).tolist()
    count, wire_type = math.prod(shape), WIRE_TYPES[kind]
    num_bytes = wire_bytes(count, 4, wire_type, num_dimensions)
    if min(shape, default=0) < 0 or len(data) != num_bytes:
        raise RunError(f"not a narrowed message: {len(data)} bytes for shape {shape} as {wire_type}")
    numbers = _from_bytes(data[num_bytes - count * _NARROW[wire_type].itemsize :], _NARROW[wire_type])
    if wire_type != "bf16":
        scales = _from_bytes(data[end : end + 4 * math.ceil(count / WIRE_BLOCK)], torch.float32)
        numbers = numbers.float() * scales.repeat_interleave(WIRE_BLOCK)[:count]
    return numbers.to(_WIDE[dtype]).view(shape)


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.clone().view(dtype)  # a copy, for the numbers may begin anywhere


@dataclass
class Rounding:
    """Rounding errors of this rank's narrowed messages so far."""

    squared_error: float = 0.0
    squared_size: float = 0.0
    num_messages: int = 0
    wide_bytes: int = 0
    wire_bytes: int = 0

    def add(self, x: Tensor, sent: Tensor) -> None:
        """`x` was to be sent, `sent` was."""
        difference = widen(sent).to(x.device).float() - x.float()
        self.squared_error += float(difference.square().sum())
        self.squared_size += float(x.float().square().sum())
        self.num_messages += 1
        self.wide_bytes += x.nbytes
        self.wire_bytes += sent.nbytes

    @property
    def relative_error(self) -> float:
        """Root of squared error over squared size of all that was measured; 0 before the first."""
        return math.sqrt(self.squared_error / self.squared_size) if self.squared_size else 0.0

    def __str__(self) -> str:
        saved = self.wide_bytes / max(1, self.wire_bytes)
        measured = f"{self.num_messages} messages measured"
        return f"relative error {self.relative_error:.2e}, {saved:.2f} times fewer bytes ({measured})"


class NarrowMessenger:
    """The Messenger of a pipeline, with messages to and from those at other sites narrowed; `sites` by rank.

    Every `measure_every`-th message that is sent is compared with what arrives, into `rounding`.
    """

    def __init__(self, peers: Messenger, sites: Sequence[str], wire_type: WireType, measure_every: int = 16) -> None:
        self.wire_type: Final = wire_type
        self._peers, self._measure_every = peers, measure_every
        self._far = [site != sites[peers.rank] for site in sites]
        self._num_sent = 0
        self.rounding = Rounding()

    @property
    def rank(self) -> int:
        return self._peers.rank

    @property
    def clock(self) -> Clock:
        return self._peers.clock

    def send(self, peer: int, kind: ChannelKind, tag: Tag, tensor: Tensor) -> None:
        if not self._far[peer]:
            self._peers.send(peer, kind, tag, tensor)
            return
        sent = narrow(tensor, self.wire_type)
        if self._num_sent % self._measure_every == 0:
            self.rounding.add(tensor.detach(), sent)
        self._num_sent += 1
        self._peers.send(peer, kind, tag, sent)

    def receive(self, peer: int, kind: ChannelKind, tag: Tag, *, waiting_for: str) -> TensorMessage:
        message = self._peers.receive(peer, kind, tag, waiting_for=waiting_for)
        if not self._far[peer]:
            return message
        return TensorMessage(widen(message.tensor), message.times, message.num_bytes)
