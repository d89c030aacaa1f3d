"""Linear layers and embeddings of farpipe's own decoder: digits that they keep and compute in, gradients that wait."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from farpipe.engine.stages.deferred import EmbeddingCall, WeightGradStore, add_linear_grads, deferred_linear


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
        return deferred_linear(x, self, self.store)

    def output(self, x: Tensor) -> Tensor:
        """Output of `forward`, without autograd."""
        return functional.linear(x, self.weight_as(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def input_grad(self, gy: Tensor) -> Tensor:
        """Gradient of the output -> gradient of the input."""
        return gy @ self.weight_as(gy.dtype)

    def accumulate(self, x: Tensor, gy: Tensor) -> None:
        """Add this microbatch's gradient to ``weight.grad`` (and ``bias.grad``)."""
        add_linear_grads(self.weight, self.bias, x, gy)

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
        return EmbeddingCall(self.weight).deferred(rows, self.store)
