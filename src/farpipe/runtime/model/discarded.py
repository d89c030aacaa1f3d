"""Results that are not kept for the backward, but made again there from what they were made of."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Discarded:
    """A result that is gone, and the work that makes it again."""

    def __init__(self, work: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
        self._work, self._x = work, x
        self._address, self._shape = y.untyped_storage().data_ptr(), y.shape
        self._made: weakref.ref[Tensor] | None = None

    def pack(self, tensor: Tensor) -> Any:
        """The thing that autograd keeps in place of `tensor`: this, where that is the result."""
        is_result = tensor.shape == self._shape and tensor.untyped_storage().data_ptr() == self._address
        return self if is_result else tensor

    def unpack(self, kept: Any) -> Any:
        """The tensor behind what was kept; layers that share the result get one and the same while any has it."""
        if kept is not self:
            return kept
        made = None if self._made is None else self._made()
        if made is None:
            with torch.no_grad():
                made = self._work(self._x)
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
