"""Weight gradients of experts that can wait: transformers' grouped experts with their products handed to the store.

transformers keeps all experts of a layer in one tensor, which no linear layer has. Its own function sorts tokens by
expert and multiplies them group by group; here each of these products leaves its weight gradient to W. Of biases,
which are looked up token by token, autograd gives the gradient in I.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from farpipe.engine.stages.weight_grads import (
    WeightGradStore,
    add_grad,
    can_wait,
    deferred_product,
    is_divided,
    like_parameter,
    local_part,
)


def has_grouped_experts(leaf: nn.Module) -> bool:
    """True for experts of transformers that its grouped function can compute."""
    return all(hasattr(leaf, name) for name in ("num_experts", "is_transposed", "has_gate", "_is_expert_parallel"))


class ExpertsForward:
    """Forward of a layer's experts that is patched: tokens [n, hidden], experts and their weights [n, k] each."""

    def __init__(self, experts: nn.Module, store: WeightGradStore) -> None:
        from transformers.integrations.moe import grouped_mm_experts_forward

        self._experts, self._store = experts, store
        self._forward: Callable[..., Tensor] = grouped_mm_experts_forward

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        divided = {
            local_part(own).data_ptr(): own for own in self._experts.parameters(recurse=False) if is_divided(own)
        }
        with _local_parameters(self._experts, divided), _Products(self._store, divided):
            return self._forward(self._experts, hidden, experts, weights)


def _local_parameters(experts: nn.Module, divided: Mapping[int, Tensor]) -> AbstractContextManager[None]:
    """Context in which the parameters of experts that processes share are plain tensors of this process's experts."""
    if not divided:
        return nullcontext()
    from transformers.distributed.parallel_utils import _use_local_dtensor_params

    found: AbstractContextManager[None] = _use_local_dtensor_params(experts)
    return found


class _Products(TorchFunctionMode):
    """Context in which grouped products by a parameter are deferred ones."""

    def __init__(self, store: WeightGradStore, divided: Mapping[int, Tensor]) -> None:
        """`divided`: parameters that processes share, by where this process's part of them begins in memory."""
        super().__init__()
        self._store, self._divided = store, divided

    def __torch_function__(self, function: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        options = options or {}
        if function is not torch._grouped_mm:
            return function(*inputs, **options)
        x, matrices = inputs
        weight = self._divided.get(matrices.data_ptr(), matrices if matrices._base is None else matrices._base)
        call = _GroupedCall(weight, options["offs"], transposed=matrices.stride(-1) != 1)
        if can_wait(weight):
            return deferred_product(x, weight, call, self._store)
        return call.output(x)


class _GroupedCall:
    """One product of rows [rows, in], sorted by expert, with the matrices [experts, in, out] of their experts.

    `ends`: behind the last row of each. `transposed`: the weight is [experts, out, in]. It is torch's grouped product,
    and one product after the other in float64, which that has not.
    """

    def __init__(self, weight: Tensor, ends: Tensor, *, transposed: bool) -> None:
        self.weight, self._ends, self._transposed = weight, ends, transposed

    def output(self, x: Tensor) -> Tensor:
        return self._product(x, local_part(self.weight).to(x.dtype), transposed=self._transposed)

    def input_grad(self, gy: Tensor) -> Tensor:
        return self._product(gy, local_part(self.weight).to(gy.dtype), transposed=not self._transposed)

    @torch.no_grad()
    def accumulate(self, x: Tensor, gy: Tensor) -> None:
        """Add the gradients of all experts that have rows."""
        left, right = (gy, x.to(gy.dtype)) if self._transposed else (x.to(gy.dtype), gy)
        if gy.dtype != torch.float64:
            self._add(functional.grouped_mm(left.t(), right, offs=self._ends))
            return
        grad = torch.zeros_like(local_part(self.weight))
        for expert, rows in self._rows:
            torch.mm(left[rows].t(), right[rows], out=grad[expert])
        self._add(grad)

    def _add(self, grad: Tensor) -> None:
        add_grad(self.weight, like_parameter(grad, self.weight))

    def _product(self, x: Tensor, weight: Tensor, *, transposed: bool) -> Tensor:
        matrices = weight.transpose(1, 2) if transposed else weight
        if x.dtype != torch.float64:
            return functional.grouped_mm(x, matrices, offs=self._ends)
        return torch.cat([x[rows] @ matrices[expert] for expert, rows in self._rows])

    @cached_property
    def _rows(self) -> list[tuple[int, slice]]:
        """The rows of every expert."""
        ends = [0, *self._ends.tolist()]
        return [(expert, slice(*ends[expert : expert + 2])) for expert in range(len(ends) - 1)]
