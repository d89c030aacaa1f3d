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
    """Part of a module's parameter in one process's optimizer: elements ``start <= i < end`` of it, flattened."""

    stage: int
    name: str
    """Of the whole parameter, in the whole model."""
    start: int
    end: int
    whole: nn.Parameter
    parameter: nn.Parameter
    """Parameter that the optimizer updates: `whole`, or a view of the masters of a part of it, of a matrix as one row,
    for matrices decay."""

    def take_grad(self) -> None:
        """Give the part its part of the gradient."""
        if self.parameter is not self.whole:
            assert self.whole.grad is not None
            self.parameter.grad = self.whole.grad.view(-1)[self.start : self.end].view_as(self.parameter)


def whole_shards(stage: int, parameters: Mapping[str, nn.Parameter]) -> list[Shard]:
    """Every parameter as one shard."""
    return [Shard(stage, name, 0, p.numel(), p, p) for name, p in parameters.items()]


class Flat:
    """Some parameters of a stage in one tensor, the gradients in another; both are padded for `rings`.

    With ZeRO-1 the weights are kept in the dtype that stages compute in, and a process has more digits of its own share
    only: in `masters`, what its optimizer updates. Gradients are summed in the masters' dtype.
    """

    def __init__(
        self,
        stage: int,
        parameters: Mapping[str, nn.Parameter],
        rings: Rings,
        *,
        sharded: bool,
        scattered: bool,
        compute: torch.dtype = torch.float32,
    ) -> None:
        """`sharded`: a process updates its share of the weights only; `scattered`: it gets that share of the sum only.

        Parameters of one dtype and device; from now on they live in the flat tensor, if sharded in the dtype `compute`.
        """
        self.stage, self.rings, self.sharded, self.scattered = stage, rings, sharded, scattered
        self.parameters = dict(parameters)
        like = next(iter(parameters.values()), torch.empty(0))
        length = rings.padded(sum(p.numel() for p in parameters.values()))
        self._first, self._end = rings.share(length) if sharded else (0, length)
        self._weights = torch.zeros(length, dtype=compute if sharded else like.dtype, device=like.device)
        self.masters = self._weights[self._first : self._end]
        """[end - first]: the share with all its digits; a view of the weights where they have as many."""
        if self._weights.dtype != like.dtype:
            self.masters = torch.zeros(self._end - self._first, dtype=like.dtype, device=like.device)
        self._take_over()
        self._grads = torch.zeros(length, dtype=self.masters.dtype, device=like.device)

    @torch.no_grad()
    def _take_over(self) -> None:
        """Move the parameters, one after the other, so that hardly more memory is needed than there is afterwards."""
        for (parameter, view), part in zip(self._views(self._weights), self._parts(), strict=True):
            low, high, master = part
            master.copy_(parameter.view(-1)[low:high])
            view.copy_(parameter)
            parameter.data = view
            parameter.grad_dtype = self.masters.dtype

    def _views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        start = 0
        for parameter in self.parameters.values():
            yield parameter, flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    def _parts(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the ranges of every parameter's elements in this process's share (first, end), and their masters."""
        before = 0
        for parameter in self.parameters.values():
            low = min(max(self._first - before, 0), parameter.numel())
            high = max(min(self._end - before, parameter.numel()), low)
            place = before + low - self._first
            yield low, high, self.masters[max(place, 0) : max(place, 0) + high - low]
            before += parameter.numel()

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
    def take_masters(self) -> None:
        """Round the masters, which have changed, to this process's share of the weights."""
        if self.masters.dtype != self._weights.dtype:
            self._weights[self._first : self._end].copy_(self.masters)

    @torch.no_grad()
    def gather_weights(self, line: Line) -> None:
        """Everybody's share of the weights to everybody."""
        if self.sharded:
            self.rings.all_gather(self._weights, line)

    def shards(self) -> Iterator[Shard]:
        """Yield the parts of the parameters that this process's optimizer has."""
        if not self.sharded:
            yield from whole_shards(self.stage, self.parameters)
            return
        for (name, parameter), (low, high, part) in zip(self.parameters.items(), self._parts(), strict=True):
            if low < high:
                view = nn.Parameter(part.view(1, -1) if parameter.ndim >= 2 else part)
                yield Shard(self.stage, name, low, high, parameter, view)
