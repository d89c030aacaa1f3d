"""A user's module as a stage: called with the user's arguments, its weight gradients put off until W."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from farpipe.errors import InputError
from farpipe.runtime.site.sharding import StepReduction
from farpipe.runtime.stages.deferred import WeightGradStore, defer
from farpipe.torch.inputs import Microbatches
from farpipe.torch.tuples import joined, parted


class CalledStage:
    """A PipelineStage over a module that takes and returns one tensor or several."""

    def __init__(
        self,
        module: nn.Module,
        number: int,
        is_last: bool,
        loss_fn: Callable[..., Any] | None,
        loss_scale: float,
        store: WeightGradStore | None = None,
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

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Output of the module; on the last stage the loss is computed and nothing is returned."""
        assert self._given is not None
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
