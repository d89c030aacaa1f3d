"""Weight gradients that can wait: the store of a stage behind I and W, and the patch that puts them off in any module.

Backward through a linear layer or an embedding computes the input gradient only and hands (input, output gradient) to
the store of its stage. While the store defers, they stay there until W asks for them; otherwise the weight gradient is
computed at once, which is B. Autograd itself stays untouched: nothing is retained, cut or run twice. The idea is that
of the zero-bubble schedules (arXiv 2401.10241). All other parameters (gains, experts in one tensor) get their gradient
in I.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from farpipe.core.errors import RunError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


SMALL: Final = 1 << 19
"""Elements of a weight up to which plain autograd is faster where nothing has to wait.

Each deferred product costs 25 us of Python. It adds to the gradient in place, where autograd makes a second tensor and
adds that: of weights larger than a cache this takes longer. On a CPU autograd takes 0.64 times as long for 16,384
elements and 16 tokens, 0.93 to 1.01 times for 524,288, 1.23 times for a million and 1.33 times for four. What waits of
small layers is computed as autograd does it, so that gradients have the same bits in every order.
"""


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
        self._is_closed = False
        self._at_once: set[int] = set()
        self._in_parts = True

    def open(self) -> None:
        """Take weight gradients again."""
        self._is_closed = False

    def close(self) -> None:
        """Take no weight gradient until `open`: they would miss the sum over processes. RunError while some wait."""
        if self._waiting:
            raise RunError(
                f"the step ends, but the weight gradients of microbatches {sorted(self._waiting)} still wait for "
                "their W; every I needs its W in the schedule"
            )
        self._is_closed = True

    def forward_begins(self, microbatch: int, *, in_parts: bool) -> None:
        """What is computed next is the forward of `microbatch`, whose backward comes in parts, I and W, or at once."""
        (self._at_once.discard if in_parts else self._at_once.add)(microbatch)
        self._in_parts = in_parts

    def backward_begins(self, microbatch: int) -> None:
        """What is computed next is the backward of `microbatch`, which may do parts of its forward again."""
        self._in_parts = microbatch not in self._at_once

    def leaves(self, weight: Tensor, bias: Tensor | None = None) -> bool:
        """True if autograd should give the gradients of a layer: it is small, and nothing has to wait.

        False where a bias is summed with more digits: autograd rounds each of its gradients first.
        """
        if self._in_parts or weight.numel() > SMALL or is_divided(weight):
            return False
        return bias is None or (bias.is_leaf and bias.grad_dtype in (None, bias.dtype))

    def _expect_open(self) -> None:
        if self._is_closed:
            raise RunError(
                "a weight gradient comes outside a step, where the sum over the processes of the stage would miss it; "
                "call StepReduction.begin before the stage's first action and end after its last"
            )

    @contextmanager
    def deferring(self, microbatch: int) -> Iterator[None]:
        """Inside, weight gradients are kept for `microbatch` instead of being computed."""
        assert self._open is None, "one backward at a time"
        self._expect_open()
        self._open = self._waiting[microbatch] = []
        try:
            yield
        finally:
            self._open = None

    def add(self, deferred: Deferred) -> None:
        """Keep the gradient for later while deferring; compute it now otherwise."""
        if self._open is None:
            self._expect_open()
            deferred.layer.accumulate(deferred.x, deferred.gy)
        else:
            self._open.append(deferred)

    @torch.no_grad()
    def compute(self, microbatch: int) -> None:
        """Add the kept gradients of `microbatch` to the weights' and free what they held, layer by layer."""
        self._expect_open()
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


def defer(module: nn.Module, store: WeightGradStore) -> int:
    """Patch the layers inside `module` so that `store` gets their weight gradients; the number of layers patched.

    Patched are `nn.Linear`, `nn.Embedding` and GPT-2's ``Conv1D``, and subclasses that keep their forward; frozen ones
    keep nothing and have no W. Others (FP8, quantised layers) stay as they are: autograd gives their gradients in I,
    which is right as well.
    """
    patched = [(leaf, forward) for leaf in module.modules() if (forward := _patched_forward(leaf, store)) is not None]
    for leaf, forward in patched:
        leaf.forward = forward
    return len(patched)


def _patched_forward(leaf: nn.Module, store: WeightGradStore) -> Callable[[Tensor], Tensor] | None:
    """The forward of a layer that puts off its weight gradient; None for a module that is none of these layers.

    None also where somebody has put another forward around that of this very layer, which would be lost.
    """
    if not isinstance(leaf.__dict__.get("forward"), _LinearForward | _EmbeddingForward | NoneType):
        return None
    if type(leaf).forward is nn.Linear.forward:
        return _LinearForward(leaf, store)
    if _is_conv1d(leaf):
        return _LinearForward(leaf, store, transposed=True)
    if isinstance(leaf, nn.Embedding) and _is_plain(leaf):
        return _EmbeddingForward(leaf, store)
    return None


def _is_conv1d(leaf: nn.Module) -> bool:
    """True for the linear layer of GPT-2 in transformers, whose weight is [in, out]."""
    return type(leaf).__name__ == "Conv1D" and type(leaf).__module__ == "transformers.pytorch_utils"


def _is_plain(table: nn.Embedding) -> bool:
    """True for an embedding that only looks up rows."""
    is_changed = type(table).forward is not nn.Embedding.forward or table.max_norm is not None
    return not (is_changed or table.scale_grad_by_freq or table.sparse)


def _can_wait(weight: Any) -> bool:
    """True for a trained parameter; what is computed from others (a parametrisation) needs autograd behind it."""
    return isinstance(weight, Tensor) and weight.is_leaf and weight.requires_grad


class _LinearForward:
    """Forward of a linear layer that is patched."""

    def __init__(self, layer: nn.Module, store: WeightGradStore, *, transposed: bool = False) -> None:
        self._layer, self._store, self._transposed = layer, store, transposed

    def __call__(self, x: Tensor) -> Tensor:
        weight: Any = self._layer.weight
        bias: Any = self._layer.bias
        if self._store.leaves(weight, bias) or not _can_wait(weight) or not (bias is None or _can_wait(bias)):
            return functional.linear(x, weight.t() if self._transposed else weight, bias)
        call = _LinearCall(weight, bias, transposed=self._transposed)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            found: Tensor = _Linear.apply(x, weight, call, self._store)  # type: ignore[no-untyped-call]
            return found
        gys: list[Tensor] = []
        kept = _KeptInput.apply(x, weight, call, self._store, gys)  # type: ignore[no-untyped-call]
        y: Tensor = _Product.apply(kept, call, gys, x.requires_grad)  # type: ignore[no-untyped-call]
        return y


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
        is_large = self.weight.numel() > SMALL
        if is_large and self.weight.grad is not None and self.weight.grad.dtype == right.dtype:
            self.weight.grad.addmm_(left, right)
        else:
            _add_grad(self.weight, left @ right)
        if self.bias is not None:
            _add_grad(self.bias, grads.sum(0, dtype=self.bias.grad_dtype))


def _add_grad(parameter: Tensor, grad: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = grad.to(parameter.grad_dtype or grad.dtype)
    else:
        parameter.grad += grad


class _Linear(torch.autograd.Function):
    """The output of a layer, whose backward leaves the weight's gradient to the store.

    The weight is an input only so that the output always requires a gradient; none is returned for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: _LinearCall, store: WeightGradStore) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.store = layer, store
        return layer.output(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.store.add(Deferred(ctx.layer, x, gy))
        return ctx.layer.input_grad(gy) if ctx.needs_input_grad[0] else None, None, None, None


class _KeptInput(torch.autograd.Function):
    """The input of a layer as it is, kept for W before the layer computes; `_Product` follows.

    Recomputation of a block ends with the last tensor that is kept in it. One function (`_Linear`) would keep the input
    after its product, and a block's last product would be computed once more for nothing: 5 % of a Llama's step. But it
    takes 7 us of Python less than two, so these are for what somebody packs: recomputation does.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, layer: _LinearCall, store: WeightGradStore, gys: list[Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.store, ctx.gys = layer, store, gys
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gx: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.store.add(Deferred(ctx.layer, x, ctx.gys.pop()))
        return gx, None, None, None, None


class _Product(torch.autograd.Function):
    """The output of a layer; leaves the gradient of the output to the `_KeptInput` before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _LinearCall, gys: list[Tensor], needs_gx: bool) -> Tensor:
        ctx.layer, ctx.gys, ctx.needs_gx = layer, gys, needs_gx
        return layer.output(x)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, None, None, None]:
        ctx.gys.append(gy)
        return ctx.layer.input_grad(gy) if ctx.needs_gx else None, None, None, None


class _EmbeddingForward:
    """Forward of an embedding that is patched."""

    def __init__(self, layer: nn.Embedding, store: WeightGradStore) -> None:
        self._layer, self._store = layer, store

    def __call__(self, rows: Tensor) -> Tensor:
        weight, padding = self._layer.weight, self._layer.padding_idx
        is_by_rows = not is_divided(weight) or weight.placements[0].is_shard(0)
        if self._store.leaves(weight) or not _can_wait(weight) or not is_by_rows:
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
            _add_grad(self.weight, torch.ops.aten.embedding_dense_backward(gy, x, len(self.weight), padding, False))
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


def is_divided(tensor: Tensor) -> "TypeGuard[DTensor]":
    """True for a DTensor, whose class takes a second to import."""
    return hasattr(tensor, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has: all of it, unless it is a DTensor."""
    return tensor.to_local() if is_divided(tensor) else tensor


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
