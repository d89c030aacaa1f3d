"""The parameters of one stage, and their gradients, as one tensor each: what its replicas sum and gather.

The module's parameters and gradients are views of the flat tensors, so nothing is copied to and fro.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farpipe.runtime.replicas.collectives import Line, Rings


@dataclass(frozen=True)
class Shard:
    """What one process's optimizer has of a module's parameter: elements ``start <= i < end`` of it, flattened."""

    stage: int
    name: str
    """Of the whole parameter, in the whole model."""
    start: int
    end: int
    whole: nn.Parameter
    parameter: nn.Parameter
    """What the optimizer updates: `whole`, or a view of a part of it, of a matrix as one row of it, for matrices
    decay."""

    def take_grad(self) -> None:
        """Give the part its part of the gradient."""
        if self.parameter is not self.whole:
            assert self.whole.grad is not None
            self.parameter.grad = self.whole.grad.view(-1)[self.start : self.end].view_as(self.parameter)


def whole_shards(stage: int, parameters: Mapping[str, nn.Parameter]) -> list[Shard]:
    """Every parameter as one shard."""
    return [Shard(stage, name, 0, p.numel(), p, p) for name, p in parameters.items()]


class Flat:
    """Some parameters of a stage in one tensor, the gradients in another; both are padded for `rings`."""

    def __init__(
        self, stage: int, parameters: Mapping[str, nn.Parameter], rings: Rings, *, sharded: bool, scattered: bool
    ) -> None:
        """`sharded`: a process updates its share of the weights only; `scattered`: it gets that share of the sum only.

        Parameters of one dtype and device; from now on they live in the flat tensor.
        """
        self.stage, self.rings, self.sharded, self.scattered = stage, rings, sharded, scattered
        self.parameters = dict(parameters)
        like = next(iter(parameters.values()), torch.empty(0))
        length = rings.padded(sum(p.numel() for p in parameters.values()))
        self._grads = torch.zeros(length, dtype=like.dtype, device=like.device)
        self._weights = torch.zeros_like(self._grads)
        with torch.no_grad():
            for parameter, view in self._views(self._weights):
                view.copy_(parameter)
                parameter.data = view

    def _views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        start = 0
        for parameter in self.parameters.values():
            yield parameter, flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    def clear_grads(self) -> None:
        """All gradients are zero, and views."""
        self._grads.zero_()
        for parameter, view in self._views(self._grads):
            parameter.grad = view

    @torch.no_grad()
    def sum_grads(self, line: Line) -> None:
        """Over the replicas; where they are scattered, only this process's share is right afterwards."""
        if self.scattered:
            self.rings.reduce_scatter(self._grads, line)
        else:
            self.rings.all_reduce(self._grads, line)

    @torch.no_grad()
    def gather_weights(self, line: Line, dtype: torch.dtype | None = None) -> None:
        """Everybody's share of the weights to everybody; `dtype`: what travels, if not their own."""
        if self.sharded:
            self.rings.all_gather(self._weights, line, None if dtype == self._weights.dtype else dtype)

    def shards(self) -> Iterator[Shard]:
        """What this process's optimizer has of the parameters."""
        if not self.sharded:
            yield from whole_shards(self.stage, self.parameters)
            return
        first, end = self.rings.share(len(self._weights))
        before = 0
        for name, parameter in self.parameters.items():
            low, high = max(first - before, 0), min(end - before, parameter.numel())
            if low < high:
                part = parameter.data.view(-1)[low:high]
                view = nn.Parameter(part.view(1, -1) if parameter.ndim >= 2 else part)
                yield Shard(self.stage, name, low, high, parameter, view)
            before += parameter.numel()
