"""The patch that puts off weight gradients in any module: linear layers, embeddings and experts of transformers.

All other parameters (gains, routers, biases of experts) get their gradient in I, by autograd.
"""

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from farpipe.engine.stages.experts import ExpertsForward, has_grouped_experts
from farpipe.engine.stages.router_bias import RouterForward, is_trained_router
from farpipe.engine.stages.weight_grads import (
    SMALL,
    Deferred,
    WeightGradStore,
    add_grad,
    add_product,
    can_wait,
    deferred_product,
    is_divided,
    local_part,
)


def defer(module: nn.Module, store: WeightGradStore) -> int:
    """Patch the layers inside `module` so that `store` gets their weight gradients; the number of layers patched.

    Patched are `nn.Linear`, `nn.Embedding` and GPT-2's ``Conv1D``, subclasses that keep their forward, and experts of
    transformers; frozen ones keep nothing and have no W. Others (FP8, quantised layers) stay as they are: autograd
    gives their gradients in I, which is right as well.
    """
    for leaf in module.modules():
        if (defer_to := getattr(leaf.__dict__.get("forward"), "defer_to", None)) is not None:
            defer_to(store)
    patched = [(leaf, forward) for leaf in module.modules() if (forward := _patched_forward(leaf, store)) is not None]
    for leaf, forward in patched:
        leaf.forward = forward
    store.switch = _Switch([(leaf, f) for leaf, f in patched if isinstance(f, _LinearForward | _EmbeddingForward)])
    return len(patched)


class _Switch:
    """Takes the patches off layers that autograd does alone while no backward comes in parts, and puts them on again.

    An order of whole backwards so pays for no call of farpipe's in such layers.
    """

    def __init__(self, patched: list[tuple[nn.Module, "_LinearForward | _EmbeddingForward"]]) -> None:
        self._patched = patched

    def __call__(self, in_parts: bool) -> None:
        for leaf, forward in self._patched:
            own = leaf.__dict__
            if in_parts:
                own.setdefault("forward", forward)
            elif own.get("forward") is forward and forward.is_off():
                del own["forward"]


def _patched_forward(leaf: nn.Module, store: WeightGradStore) -> Callable[..., Tensor] | None:
    """The forward of a layer that puts off its weight gradient; None for a module that is none of these layers.

    None also where somebody has put another forward around that of this very layer, which would be lost.
    """
    if not isinstance(leaf.__dict__.get("forward"), _Patched | NoneType):
        return None
    if type(leaf).forward is nn.Linear.forward:
        return _LinearForward(leaf, store)
    if _is_conv1d(leaf):
        return _LinearForward(leaf, store, transposed=True)
    if isinstance(leaf, nn.Embedding) and _is_plain(leaf):
        return _EmbeddingForward(leaf, store)
    if is_trained_router(leaf):
        return RouterForward(leaf, store)
    return ExpertsForward(leaf, store) if has_grouped_experts(leaf) else None


def _is_conv1d(leaf: nn.Module) -> bool:
    """True for the linear layer of GPT-2 in transformers, whose weight is [in, out]."""
    return type(leaf).__name__ == "Conv1D" and type(leaf).__module__ == "transformers.pytorch_utils"


def _is_plain(table: nn.Embedding) -> bool:
    """True for an embedding that only looks up rows."""
    is_changed = type(table).forward is not nn.Embedding.forward or table.max_norm is not None
    return not (is_changed or table.scale_grad_by_freq or table.sparse)


class _LinearForward:
    """Forward of a linear layer that is patched."""

    def __init__(self, layer: nn.Module, store: WeightGradStore, *, transposed: bool = False) -> None:
        self._layer, self._store, self._transposed = layer, store, transposed

    def is_off(self) -> bool:
        """True if the layer's own forward does the same; that of GPT-2's computes in another order."""
        return not self._transposed and self._store.leaves(self._layer.weight, self._layer.bias)  # type: ignore[arg-type]

    def __call__(self, x: Tensor) -> Tensor:
        weight: Any = self._layer.weight
        bias: Any = self._layer.bias
        if self._store.leaves(weight, bias) or not can_wait(weight) or not (bias is None or can_wait(bias)):
            return functional.linear(x, weight.t() if self._transposed else weight, bias)
        call = _LinearCall(weight, bias, transposed=self._transposed)
        return deferred_product(x, weight, call, self._store)


class _LinearCall:
    """One call of ``y = x W^T + b`` with the very parameters that it was called with.

    A layer's ``weight`` may be another tensor by the time of W: FSDP2 swaps the whole parameter for its shard.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> None:
        self.weight, self.bias, self._transposed = weight, bias, transposed

    def output(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.t() if self._transposed else self.weight, self.bias)

    def input_grad(self, gy: Tensor) -> Tensor:
        weight = self.weight.to(gy.dtype)
        return gy @ (weight.t() if self._transposed else weight)

    def accumulate(self, x: Tensor, gy: Tensor) -> None:
        grads = gy.reshape(-1, gy.shape[-1])
        rows = x.reshape(-1, x.shape[-1]).to(grads.dtype)
        left, right = (rows.t(), grads) if self._transposed else (grads.t(), rows)
        add_product(self.weight, left, right)
        if self.bias is not None:
            add_grad(self.bias, grads.sum(0, dtype=self.bias.grad_dtype))


class _EmbeddingForward:
    """Forward of an embedding that is patched."""

    def __init__(self, layer: nn.Embedding, store: WeightGradStore) -> None:
        self._layer, self._store = layer, store

    def is_off(self) -> bool:
        """True if the layer's own forward does the same."""
        return self._store.leaves(self._layer.weight)

    def __call__(self, rows: Tensor) -> Tensor:
        weight, padding = self._layer.weight, self._layer.padding_idx
        is_by_rows = not is_divided(weight) or weight.placements[0].is_shard(0)
        if self._store.leaves(weight) or not can_wait(weight) or not is_by_rows:
            return functional.embedding(rows, weight, padding)
        call = _EmbeddingCall(weight, padding)
        y: Tensor = _DeferredEmbedding.apply(local_part(rows), weight, call, self._store)  # type: ignore[no-untyped-call]
        return y


class _EmbeddingCall:
    """One look-up in a table of embeddings; row number `padding` is not trained.

    A table may be divided by rows over tensor-parallel processes (a DTensor): each finds its own rows, zeros for
    others, and the output is their sum. Autograd's backward would give every process the gradient of all rows.
    """

    def __init__(self, weight: Tensor, padding: int | None) -> None:
        self.weight, self.padding = weight, padding

    def output(self, rows: Tensor) -> Tensor:
        """[...] -> [..., width]"""
        if not is_divided(self.weight):
            return functional.embedding(rows, self.weight)
        from torch.distributed.tensor import DTensor, Partial

        own, absent = self._own(rows)
        found = functional.embedding(own, local_part(self.weight)).masked_fill(absent[..., None], 0.0)
        return DTensor.from_local(found, self.weight.device_mesh, [Partial()], run_check=False)

    def _own(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of `rows` in this process's part of the table, and True where they are in another's."""
        assert is_divided(self.weight)
        mesh, num_rows = self.weight.device_mesh, len(local_part(self.weight))
        first = mesh.get_local_rank() * -(-len(self.weight) // mesh.size())
        absent = (rows < first) | (rows >= first + num_rows)
        return (rows - first).masked_fill(absent, 0), absent

    def accumulate(self, x: Tensor, gy: Tensor) -> None:
        """Add the gradients of rows `x`; autograd's own backward would fill a large table for every microbatch."""
        if self.weight.numel() <= SMALL and not is_divided(self.weight):
            padding = -1 if self.padding is None else self.padding
            add_grad(self.weight, torch.ops.aten.embedding_dense_backward(gy, x, len(self.weight), padding, False))
            return
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight, dtype=self.weight.grad_dtype)
        rows, table = x.flatten(), local_part(self.weight.grad)
        grads = gy.flatten(0, -2).to(table.dtype)
        if self.padding is not None:
            grads = grads.masked_fill((rows == self.padding)[:, None], 0.0)
        if is_divided(self.weight):
            rows, absent = self._own(rows)
            grads = grads.masked_fill(absent[:, None], 0.0)
        table.index_add_(0, rows, grads)


class _DeferredEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, call: _EmbeddingCall, store: WeightGradStore) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.call, ctx.store = call, store
        return call.output(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[None, None, None, None]:
        (rows,) = ctx.saved_tensors
        ctx.store.add(Deferred(ctx.call, rows, gy.full_tensor() if is_divided(gy) else gy))
        return None, None, None, None


_Patched = _LinearForward | _EmbeddingForward | ExpertsForward | RouterForward
