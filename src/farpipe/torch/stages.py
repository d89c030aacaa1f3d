"""A user's module as a stage: its arguments by microbatch, tensors as one message, weight gradients until W."""

import math
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from farpipe.core.errors import InputError, RunError
from farpipe.engine.executor.peers import describe, form_of
from farpipe.engine.site.sharding import StepReduction
from farpipe.engine.stages.deferred import defer
from farpipe.engine.stages.weight_grads import WeightGradStore

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


@dataclass(frozen=True)
class Microbatches:
    """Arguments of a step on one rank, by microbatch."""

    args: Sequence[tuple[Any, ...]]
    """Positional arguments of the first stage."""
    kwargs: Sequence[Mapping[str, Any]]
    """Keyword arguments, which every stage gets."""
    targets: Sequence[Any] | None = None
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keep_outputs: bool = False
    """True if the last stage keeps what its module returns."""


def cut(number: int, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, **further: Any) -> Microbatches:
    """`number` microbatches of a whole batch, whose tensors are cut along the first dimension.

    InputError for a batch that has fewer rows.
    """
    cut_args, cut_kwargs = split_args_kwargs_into_chunks(args, kwargs, number) if args or kwargs else ((), ())
    targets = None if target is None else [one for (one,) in split_args_kwargs_into_chunks((target,), {}, number)[0]]
    return from_lists(number, cut_args or None, cut_kwargs or None, targets, **further)


def from_lists(
    number: int,
    args: Sequence[tuple[Any, ...]] | None,
    kwargs: Sequence[Mapping[str, Any]] | None,
    targets: Sequence[Any] | None,
    **further: Any,
) -> Microbatches:
    """Microbatches out of lists with an entry for each; None: nothing. InputError for a list of another length."""
    for name, found in {"arguments": args, "keyword arguments": kwargs, "targets": targets}.items():
        if found is not None and len(found) != number:
            raise InputError(f"{name} of {number} microbatches are needed, found {len(found)}")
    return Microbatches(args or [()] * number, kwargs or [{}] * number, targets, **further)


class CalledStage:
    """A PipelineStage over a module that takes and returns one tensor or several."""

    def __init__(
        self,
        module: nn.Module,
        number: int,
        is_last: bool,
        loss_fn: Callable[..., Any] | None,
        loss_scale: float,
        store: WeightGradStore | None,
    ) -> None:
        """Gradients are those of `loss_scale` times the last stage's loss; `store` has those put off already."""
        self._module, self._number, self._is_last = module, number, is_last
        self._loss_fn, self._loss_scale = loss_fn, loss_scale
        self._store = store or WeightGradStore()
        if store is None:
            _put_off(module, number, self._store)
        is_divided = any(isinstance(parameter, DTensor) for parameter in module.parameters())
        self._reduction = StepReduction(module, self._store) if is_divided else None
        self._saved: dict[int, tuple[tuple[Any, ...], tuple[Tensor, ...]]] = {}
        self._given: Microbatches | None = None
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}

    def begin_step(self, given: Microbatches) -> None:
        """Take the arguments of a step, before any action of the rank."""
        self._given = given
        for kept in (self._saved, self.losses, self.outputs):
            kept.clear()

    def begin_actions(self) -> None:
        """Get FSDP ready for a step, before the first action that needs gradients."""
        if self._reduction is not None:
            self._reduction.begin()

    def end_actions(self) -> None:
        """Sum the gradients over the processes that share the weights, after the last action."""
        if self._reduction is not None:
            self._reduction.end()

    def forward(self, microbatch: int, x: Tensor | None, *, in_parts: bool = True) -> Tensor | None:
        """Output of the module; on the last stage the loss is computed and nothing is returned."""
        assert self._given is not None
        self._store.forward_begins(microbatch, in_parts=in_parts)
        inputs = tuple(self._given.args[microbatch]) if x is None else tuple(map(_leaf, parted(x)))
        found = self._module(*inputs, **self._given.kwargs[microbatch])
        if self._is_last:
            self._keep(microbatch, inputs, found, self._given)
            return None
        outputs = self._tensors(found)
        if torch.is_grad_enabled():
            self._saved[microbatch] = inputs, outputs
        return joined(outputs)

    def _keep(self, microbatch: int, inputs: tuple[Any, ...], found: Any, given: Microbatches) -> None:
        """Keep what the last stage has: its output, where it is asked for, and its loss."""
        if given.keep_outputs:
            self.outputs[microbatch] = found.detach() if isinstance(found, Tensor) else found
        if self._loss_fn is None or (given.targets is None and not torch.is_grad_enabled()):
            return
        if given.targets is None:
            raise InputError("the rank of the last stage needs a target (or target_mbs) for its loss")
        loss = self._loss_fn(found, given.targets[microbatch], **given.loss_kwargs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise InputError(f"loss_fn returns {_facts(loss)}; return one number, as a tensor")
        self.losses[microbatch] = loss.detach()
        if torch.is_grad_enabled():
            self._saved[microbatch] = inputs, (loss,)

    def _tensors(self, found: Any) -> tuple[Tensor, ...]:
        values = tuple(found) if isinstance(found, tuple | list) else (found,)
        for value in values:
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                raise InputError(
                    f"stage {self._number} returns {_facts(value)}; it must return a tensor or a tuple of tensors, and "
                    "of a DTensor what `to_local` gives"
                )
        return values

    def input_grad(self, microbatch: int, gy: Tensor | None) -> Tensor | None:
        """Gradient of the output -> gradient of the input."""
        with self._store.deferring(microbatch):
            return self.backward(microbatch, gy)

    def weight_grad(self, microbatch: int) -> None:
        """Add the weight gradients that `input_grad` has put off."""
        self._store.compute(microbatch)

    def backward(self, microbatch: int, gy: Tensor | None) -> Tensor | None:
        """`input_grad` and `weight_grad` at once."""
        self._store.backward_begins(microbatch)
        inputs, outputs = self._saved.pop(microbatch)
        grads = (torch.full_like(outputs[0], self._loss_scale),) if gy is None else parted(gy)
        pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad and g is not None]
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        return None if self._number == 0 else joined([x.grad for x in inputs])


def _leaf(value: Tensor | None) -> Tensor | None:
    """A received value, whose gradient is asked for where it can have one."""
    if value is None or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.detach().requires_grad_(torch.is_grad_enabled())


def _facts(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "")


def _put_off(module: nn.Module, number: int, store: WeightGradStore) -> None:
    """Let the weight gradients of `module` wait in `store` for W, unless it is compiled; InputError for DDP."""
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise InputError(
                f"stage {number}: {name or 'the module'} is wrapped by DistributedDataParallel, which would sum after "
                "every backward; wrap it by torch's fully_shard, or sum the gradients after the step"
            )
        if isinstance(part, torch._dynamo.OptimizedModule) or part._compiled_call_impl is not None:
            warnings.warn(
                f"farpipe: stage {number} is compiled: its whole backward is done where the order has I, and W does "
                "nothing; compile what has no linear layers, or take an order with whole backwards (B)",
                stacklevel=4,
            )
            return
    defer(module, store)
