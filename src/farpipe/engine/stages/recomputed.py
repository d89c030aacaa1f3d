"""Work whose results are not kept for the backward, which does it once more."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Again:
    """Forward of a module of which only the inputs are kept: its backward does it once more."""

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return again(self._forward, *inputs, **options)


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
