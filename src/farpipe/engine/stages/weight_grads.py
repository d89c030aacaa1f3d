"""Weight gradients that can wait: the store of a stage behind I and W, and the product whose backward fills it.

Backward through a linear layer computes the input gradient only and hands (input, output gradient) to the store of its
stage. While the store defers, they stay there until W asks for them; otherwise the weight gradient is computed at once,
which is B. Autograd itself stays untouched: nothing is retained, cut or run twice. The idea is that of the zero-bubble
schedules (arXiv 2401.10241).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from farpipe.core.errors import RunError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


SMALL: Final = 1 << 19
"""Elements of a weight up to which plain autograd is faster on a CPU where nothing has to wait.

Each deferred product costs 25 us of Python. It adds to the gradient in place, where autograd makes a second tensor and
adds that: of weights larger than a cache this takes longer. On a CPU autograd takes 0.64 times as long for 16,384
elements and 16 tokens, 0.93 to 1.01 times for 524,288, 1.23 times for a million and 1.33 times for four. What waits of
small layers is computed as autograd does it, so that gradients have the same bits in every order.
"""


LARGE_ON_GPU: Final = 1 << 23
"""Elements of a weight from which W on a GPU adds the product to a gradient with more digits itself, by reading only:
autograd's rounding, widening and adding move 10 bytes an element, 25 us of them at 3.3 TB/s."""


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
        self.switch: Callable[[bool], None] = lambda in_parts: None
        """Hears whether the backward of what is computed next comes in parts, when that changes; at first it does."""

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
        self._expect(in_parts=in_parts)

    def backward_begins(self, microbatch: int) -> None:
        """What is computed next is the backward of `microbatch`, which may do parts of its forward again."""
        self._expect(in_parts=microbatch not in self._at_once)

    def _expect(self, *, in_parts: bool) -> None:
        if in_parts != self._in_parts:
            self._in_parts = in_parts
            self.switch(in_parts)

    def leaves(self, weight: Tensor, bias: Tensor | None = None) -> bool:
        """True if autograd should give the gradients of a layer: nothing has to wait, and it is small.

        A GPU adds a gradient of the same digits sooner than Python calls a function. False where a bias is summed with
        more digits: autograd rounds each of its gradients first.
        """
        if self._in_parts or is_divided(weight) or _is_large(weight):
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


def _is_large(weight: Tensor) -> bool:
    """True if the deferred path adds the weight's gradient sooner than autograd does."""
    if weight.device.type == "cpu":
        return weight.numel() > SMALL
    return weight.numel() >= LARGE_ON_GPU and weight.grad_dtype not in (None, weight.dtype)


def is_divided(tensor: Tensor) -> "TypeGuard[DTensor]":
    """True for a DTensor, whose class takes a second to import."""
    return hasattr(tensor, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has: all of it, unless it is a DTensor."""
    return tensor.to_local() if is_divided(tensor) else tensor


def like_parameter(part: Tensor, parameter: Tensor) -> Tensor:
    """This process's part of what is divided over processes as `parameter` is."""
    if not is_divided(parameter):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False)


def can_wait(weight: Any) -> bool:
    """True for a trained parameter; what is computed from others (a parametrisation) needs autograd behind it."""
    return isinstance(weight, Tensor) and weight.is_leaf and weight.requires_grad


def add_product(weight: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices to the gradient of `weight`: of a large one without a second tensor.

    Where the gradient has more digits than the matrices, a GPU adds with the gradient's (`torch.addmm` with out_dtype,
    for CUDA only). Small ones as autograd does, so that gradients have the same bits in every order.
    """
    grad = weight.grad
    if grad is None or weight.numel() <= SMALL:
        add_grad(weight, left @ right)
    elif grad.dtype == right.dtype:
        grad.addmm_(left, right)
    elif _adds_wider(grad, right):
        torch.addmm(grad, left, right, out_dtype=grad.dtype, out=grad)
    else:
        add_grad(weight, left @ right)


def _adds_wider(grad: Tensor, factor: Tensor) -> bool:
    is_known = grad.dtype == torch.float32 and factor.dtype in (torch.bfloat16, torch.float16)
    return is_known and grad.is_cuda and not is_divided(grad)


def add_grad(parameter: Tensor, grad: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = grad.to(parameter.grad_dtype or grad.dtype)
    else:
        parameter.grad += grad


class ProductLayer(WeightedLayer, Protocol):
    """One call of a layer that multiplies its input by a weight."""

    def output(self, x: Tensor) -> Tensor:
        """The product."""

    def input_grad(self, gy: Tensor) -> Tensor:
        """The gradient of the input by that of the output."""


def deferred_product(x: Tensor, weight: Tensor, call: ProductLayer, store: WeightGradStore) -> Tensor:
    """``call.output(x)``, whose backward leaves the gradient of `weight` to `store`."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        found: Tensor = _Linear.apply(x, weight, call, store)  # type: ignore[no-untyped-call]
        return found
    gys: list[Tensor] = []
    kept = _KeptInput.apply(x, weight, call, store, gys)  # type: ignore[no-untyped-call]
    y: Tensor = _Product.apply(kept, call, gys, x.requires_grad)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    """The output of a layer, whose backward leaves the weight's gradient to the store.

    The weight is an input only so that the output always requires a gradient; none is returned for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: ProductLayer, store: WeightGradStore) -> Tensor:
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
        ctx: Any, x: Tensor, weight: Tensor, layer: ProductLayer, store: WeightGradStore, gys: list[Tensor]
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
    def forward(ctx: Any, x: Tensor, layer: ProductLayer, gys: list[Tensor], needs_gx: bool) -> Tensor:
        ctx.layer, ctx.gys, ctx.needs_gx = layer, gys, needs_gx
        return layer.output(x)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, None, None, None]:
        ctx.gys.append(gy)
        return ctx.layer.input_grad(gy) if ctx.needs_gx else None, None, None, None
