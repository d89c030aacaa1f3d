"""Work whose results are not kept for the backward, which does it once more."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary


class Again:
    """Forward of a module of which only the inputs are kept: its backward does it once more."""

    def __init__(self, module: nn.Module) -> None:
        self.work = module.forward

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return again(self.work, *inputs, **options)


def again(work: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """``work(*inputs, **options)``, of which only the inputs are kept: its backward does it once more."""
    return checkpoint(work, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


class _Discarded:
    """A result that is not kept for the backward, and the work that makes it again there."""

    def __init__(self, work: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
        self._work, self._x = work, x
        self._address, self._shape = y.untyped_storage().data_ptr(), y.shape
        self._made: weakref.ref[Tensor] | None = None

    def pack(self, tensor: Tensor) -> Any:
        """The thing that autograd keeps in place of `tensor`: its shape, where that is the result or a view of all."""
        is_all = tensor.numel() == self._shape.numel() and tensor.is_contiguous()
        return tensor.shape if is_all and tensor.untyped_storage().data_ptr() == self._address else tensor

    def unpack(self, kept: Any) -> Any:
        """The tensor behind what was kept; layers that share the result get one and the same while any has it."""
        if isinstance(kept, Tensor):
            return kept
        made = None if self._made is None else self._made()
        if made is None:
            with torch.no_grad():
                made = self._work(self._x)
        if made.shape != kept:
            made = made.view(kept)
        self._made = weakref.ref(made)
        return made


@contextmanager
def discarding(work: Callable[[Tensor], Tensor], x: Tensor) -> Iterator[Tensor]:
    """``work(x)``, which nothing computed inside the context keeps: its backward makes it again from `x`.

    It is Megatron-LM's output-discarding checkpoint; `x` must be kept anyway for that to free memory.
    """
    y = work(x)
    discarded = _Discarded(work, x, y)
    with torch.autograd.graph.saved_tensors_hooks(discarded.pack, discarded.unpack):
        yield y


def recompute_norms(layer: nn.Module) -> None:
    """Let the parts of `layer` that take a norm's result not keep it: their backward makes it again; in place.

    Norms are the layer's children whose class is called so. A part that is computed again itself begins with its norm.
    """
    children = {child: "norm" in type(child).__name__.lower() for child in layer.children()}
    norms = [_Remembering(child) for child, is_norm in children.items() if is_norm]
    for part in (child for child, is_norm in children.items() if not is_norm):
        part.forward = _BehindNorm(part, norms)


class _Remembering:
    """Forward of a norm that remembers what its results were made from, as long as they are there."""

    def __init__(self, norm: nn.Module) -> None:
        self.work: Callable[[Tensor], Tensor] = norm.forward
        self.inputs = WeakTensorKeyDictionary()
        norm.forward = self

    def __call__(self, x: Tensor) -> Tensor:
        y = self.work(x)
        if torch.is_grad_enabled():
            self.inputs[y] = x
        return y


class _BehindNorm:
    """Forward of a part that keeps the input of the norm before it instead of its own."""

    def __init__(self, part: nn.Module, norms: list[_Remembering]) -> None:
        self._forward, self._norms = part.forward, norms

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        y: Any = inputs[0] if inputs else options.get("hidden_states")
        norm = next((one for one in self._norms if y is not None and y in one.inputs), None)
        if norm is None:
            return self._forward(*inputs, **options)
        x = norm.inputs.pop(y)  # type: ignore[no-untyped-call]  # torch annotates only half of it
        if isinstance(self._forward, Again) and inputs:
            work, rest = self._forward.work, inputs[1:]
            return again(lambda inner: work(norm.work(inner), *rest, **options), x)
        discarded = _Discarded(norm.work, x, y)
        with torch.autograd.graph.saved_tensors_hooks(discarded.pack, discarded.unpack):
            return self._forward(*inputs, **options)
