"""Narrower numbers on the wire between sites: a message is rounded before it is sent and widened where it arrives.

Off by default, for it changes what is computed. `bf16` halves float32. `int8` and `fp8` quarter it: every block of
WIRE_BLOCK numbers has a scale of its own, so that one large number costs its block precision and no other (blocks as in
the microscaling formats of OCP, with float32 scales). A narrowed message describes itself:

    dtype code, wire type, number of dimensions, 0 | shape, int64 each | scales, float32 each | numbers
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

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


class Form(NamedTuple):
    """What the head of a narrowed message says."""

    dtype: torch.dtype
    wire_type: WireType
    shape: tuple[int, ...]

    @property
    def head_bytes(self) -> int:
        return WIRE_HEAD_BYTES + 8 * len(self.shape)


@lru_cache(maxsize=64)
def _head(form: Form, device: torch.device) -> Tensor:
    """The head of a message, kept where it is used: to copy it to a GPU each time would wait for that."""
    codes = [_WIDE.index(form.dtype), WIRE_TYPES.index(form.wire_type), len(form.shape), 0]
    head = torch.cat([torch.tensor(codes, dtype=torch.uint8), _as_bytes(torch.tensor(form.shape, dtype=torch.int64))])
    return head.to(device)


def narrow(x: Tensor, wire_type: WireType) -> Tensor:
    """`x` as one message of bytes (uint8), made where `x` is; numbers that are not finite stay so in bf16 and spoil
    their block else."""
    parts = [_head(Form(x.dtype, wire_type, tuple(x.shape)), x.device)]
    flat = x.detach().reshape(-1)
    if wire_type == "bf16":
        parts.append(_as_bytes(flat.to(torch.bfloat16)))
    else:
        scales, numbers = _scaled(flat.float(), wire_type)
        parts += [_as_bytes(scales), _as_bytes(numbers)]
    return torch.cat(parts)


def _scaled(flat: Tensor, wire_type: WireType) -> tuple[Tensor, Tensor]:
    """A scale per block, and the numbers divided by it."""
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % WIRE_BLOCK)).view(-1, WIRE_BLOCK)
    scales = blocks.abs().amax(dim=1) / _LARGEST[wire_type]
    divided = blocks / torch.where(scales == 0, 1.0, scales)[:, None]
    if wire_type == "int8":
        divided = divided.round().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-127, 127)
    return scales, divided.to(_NARROW[wire_type]).view(-1)[: len(flat)]


def narrowed_form(data: Tensor) -> Form:
    """Head of the message `data` in the host's memory; RunError for bytes that `narrow` can't have made."""
    if data.dtype != torch.uint8 or data.dim() != 1 or len(data) < WIRE_HEAD_BYTES:
        raise RunError(f"not a narrowed message: {data.dtype}, {tuple(data.shape)}; do all ranks have one wire_type?")
    dtype, kind, num_dimensions, _ = data[:WIRE_HEAD_BYTES].tolist()
    end = WIRE_HEAD_BYTES + 8 * num_dimensions
    if dtype >= len(_WIDE) or kind >= len(WIRE_TYPES) or num_dimensions > MAX_DIMENSIONS or len(data) < end:
        raise RunError("not a narrowed message: its head makes no sense")
    shape = _from_bytes(data[WIRE_HEAD_BYTES:end], torch.int64).tolist()
    wire_type = WIRE_TYPES[kind]
    if min(shape, default=0) < 0 or len(data) != wire_bytes(math.prod(shape), 4, wire_type, num_dimensions):
        raise RunError(f"not a narrowed message: {len(data)} bytes for shape {shape} as {wire_type}")
    return Form(_WIDE[dtype], wire_type, tuple(shape))


def widen(data: Tensor, form: Form) -> Tensor:
    """Return the tensor that `narrow` was given, rounded, where `data` is."""
    count, narrow_type, end = math.prod(form.shape), _NARROW[form.wire_type], form.head_bytes
    numbers = _from_bytes(data[len(data) - count * narrow_type.itemsize :], narrow_type)
    if form.wire_type != "bf16":
        scales = _from_bytes(data[end : end + 4 * math.ceil(count / WIRE_BLOCK)], torch.float32)
        numbers = numbers.float() * scales[:, None].expand(-1, WIRE_BLOCK).reshape(-1)[:count]
    return numbers.to(form.dtype).view(form.shape)


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.clone().view(dtype)  # a copy, for the numbers may begin anywhere


@dataclass
class Rounding:
    """Rounding errors of this rank's narrowed messages so far."""

    squares: Tensor | None = None
    """[2]: sums of squared errors and of squared numbers, where they are computed: to ask a GPU would wait for it."""
    num_messages: int = 0
    wide_bytes: int = 0
    wire_bytes: int = 0

    def add(self, x: Tensor, sent: Tensor, wire_type: WireType) -> None:
        """`x` was to be sent, `sent` was."""
        difference = widen(sent, Form(x.dtype, wire_type, tuple(x.shape))).float() - x.float()
        both = torch.stack([difference.square().sum(), x.float().square().sum()]).double()
        self.squares = both if self.squares is None else self.squares + both
        self.num_messages += 1
        self.wide_bytes += x.nbytes
        self.wire_bytes += sent.nbytes

    @property
    def relative_error(self) -> float:
        """Root of squared error over squared size of all that was measured; 0 before the first."""
        error, size = (0.0, 0.0) if self.squares is None else self.squares.tolist()
        return math.sqrt(error / size) if size else 0.0

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
            self.rounding.add(tensor.detach(), sent, self.wire_type)
        self._num_sent += 1
        self._peers.send(peer, kind, tag, sent)

    def receive(self, peer: int, kind: ChannelKind, tag: Tag, *, waiting_for: str) -> TensorMessage:
        message = self._peers.receive(peer, kind, tag, waiting_for=waiting_for)
        if not self._far[peer]:
            return message
        form = narrowed_form(message.tensor if message.on_host is None else message.on_host)
        return TensorMessage(widen(message.tensor, form), message.times, message.num_bytes)
