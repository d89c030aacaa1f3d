"""Layers whose weight gradient can wait: the store of deferred gradients behind I and W.

Backward through such a layer (a matrix, an embedding) computes the input gradient only and hands (input, output
gradient) to the store of its stage. While the store defers, they stay there until W asks for them; otherwise the weight
gradient is computed at once, which is B. Autograd itself stays untouched: nothing is retained, cut or run twice. The
idea is that of the zero-bubble schedules (arXiv 2401.10241). Gains and shifts of norms get their gradient in I.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


class WeightedLayer(Protocol):
    """A layer whose weight gradient follows from its input and the gradient of its output."""

    def accumulate(self, x: Tensor, gy: Tensor) -> None:
        """Add the weights' gradient to what they have."""


class Deferred(NamedTuple):
    """A weight gradient still to be computed."""

    layer: WeightedLayer
    x: Tensor
    """The layer's input."""
    gy: Tensor
    """The gradient of the layer's output."""


class WeightGradStore:
    """The deferred weight gradients of one stage, by microbatch."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Deferred]] = {}
        self._open: list[Deferred] | None = None

    @contextmanager
    def deferring(self, microbatch: int) -> Iterator[None]:
        """Inside, weight gradients are kept for `microbatch` instead of being computed."""
        assert self._open is None, "one backward at a time"
        self._open = self._waiting[microbatch] = []
        try:
            yield
        finally:
            self._open = None

    def add(self, deferred: Deferred) -> None:
        """Keep the gradient for later while deferring; compute it now otherwise."""
        if self._open is None:
            deferred.layer.accumulate(deferred.x, deferred.gy)
        else:
            self._open.append(deferred)

    @torch.no_grad()
    def compute(self, microbatch: int) -> None:
        """Add the kept gradients of `microbatch` to the weights' and free what they held, layer by layer."""
        waiting = self._waiting.pop(microbatch)
        while waiting:
            deferred = waiting.pop()
            deferred.layer.accumulate(deferred.x, deferred.gy)

    @property
    def num_bytes(self) -> int:
        """Bytes that the store keeps alive; a tensor that several layers share counts once."""
        entries = [entry for waiting in self._waiting.values() for entry in waiting]
        tensors = [tensor for entry in entries for tensor in (entry.x, entry.gy)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())


class Linear(nn.Module):
    """``y = x W^T + b``, its weight gradient deferred through `store`; without a store, plain autograd.

    The weight is kept in its own dtype (float32 for training, unless the optimizer has its digits elsewhere) and cast
    to the input's; the cast copy lives until `forget_cast`, so that a step pays for it once and not per microbatch.
    """

    def __init__(
        self, in_features: int, out_features: int, store: WeightGradStore | None, *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.store = store
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None
        self._cast: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if self.store is None:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return functional.linear(x, self.weight.to(x.dtype), bias)
        y: Tensor = _DeferredLinear.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return y

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        """The weight in the dtype of the computation."""
        if self.weight.dtype == dtype:
            return self.weight
        if self._cast is None:
            self._cast = self.weight.detach().to(dtype)
        return self._cast

    def forget_cast(self) -> None:
        """Drop the cast copy: the weight has changed."""
        self._cast = None

    def accumulate(self, x: Tensor, gy: Tensor) -> None:
        """Add this microbatch's gradient to ``weight.grad`` (and ``bias.grad``)."""
        rows, grads = x.reshape(-1, x.shape[-1]), gy.reshape(-1, gy.shape[-1])
        if self.weight.grad is None:
            self.weight.grad = (grads.T @ rows).to(self.weight.grad_dtype)
        elif self.weight.grad.dtype == rows.dtype:
            self.weight.grad.addmm_(grads.T, rows)
        else:
            self.weight.grad += grads.T @ rows
        if self.bias is not None:
            bias_grad = grads.sum(0, dtype=self.bias.grad_dtype)
            self.bias.grad = bias_grad if self.bias.grad is None else self.bias.grad.add_(bias_grad)


class _DeferredLinear(torch.autograd.Function):
    """The weight is an input only so that the output always requires a gradient; none is returned for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, linear: Linear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.linear = linear
        bias = None if linear.bias is None else linear.bias.to(x.dtype)
        return functional.linear(x, linear.weight_as(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        linear: Linear = ctx.linear
        gx = gy @ linear.weight_as(gy.dtype) if ctx.needs_input_grad[0] else None
        linear.store.add(Deferred(linear, x, gy))  # type: ignore[union-attr]
        return gx, None, None


class Embedding(nn.Module):
    """Rows of a table; the deferred gradient touches only the rows that were looked up."""

    def __init__(self, num_rows: int, width: int, store: WeightGradStore | None, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.store = store
        self.weight = nn.Parameter(torch.empty(num_rows, width, dtype=dtype))

    def forward(self, rows: Tensor) -> Tensor:
        """Integer indices [...] -> [..., width]."""
        if self.store is None:
            return functional.embedding(rows, self.weight)
        y: Tensor = _DeferredEmbedding.apply(rows, self.weight, self)  # type: ignore[no-untyped-call]
        return y

    def accumulate(self, x: Tensor, gy: Tensor) -> None:
        """Add the gradients of rows `x`; autograd's own backward would fill a whole table for every microbatch."""
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight, dtype=self.weight.grad_dtype)
        grads = gy.reshape(-1, gy.shape[-1]).to(self.weight.grad.dtype)
        self.weight.grad.index_add_(0, x.reshape(-1), grads)


class _DeferredEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, embedding: Embedding) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.embedding = embedding
        return functional.embedding(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[None, None, None]:
        (rows,) = ctx.saved_tensors
        embedding: Embedding = ctx.embedding
        embedding.store.add(Deferred(embedding, rows, gy))  # type: ignore[union-attr]
        return None, None, None
