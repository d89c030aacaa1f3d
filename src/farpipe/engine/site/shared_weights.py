"""Stages that are divided over processes of a site, twins or replicas with FSDP2; across sites each shard is summed."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from farpipe.core.spec.training import Zero
from farpipe.engine.replicas.collectives import Line, Rings, Shard, local_grad
from farpipe.engine.site.sharding import StepReduction, is_counted
from farpipe.engine.stages.slices import SliceModule
from farpipe.engine.stages.weight_grads import WeightGradStore


class SharedWeights:
    """The StageSync of a stage whose parameters are divided (`divide_module`).

    Inside the site torch gathers and sums, in the actions themselves; `reduce` sums a process's shards with those of
    the processes that have the same ones at other sites.
    """

    def __init__(self, number: int, module: SliceModule, store: WeightGradStore, across: Rings, zero: Zero) -> None:
        self.number, self._module, self._across = number, module, across
        self._reduction = StepReduction(module, store, zero=zero)
        self._divided = dict(self._module.named_parameters())

    def begin_step(self) -> None:
        for parameter in self._divided.values():
            parameter.grad = None
        self._reduction.begin()

    def end_actions(self) -> None:
        """Sum the gradients over the replicas at this site; on all of them, after the stage's last action."""
        self._reduction.end()

    def gather(self, line: Line) -> None:
        """Do nothing: weights are gathered where they are needed."""

    def updated(self) -> None:
        """Do nothing: what is gathered next is new."""

    @torch.no_grad()
    def reduce(self, line: Line) -> None:
        grads = [local_grad(parameter) for parameter in self._divided.values()]
        length = sum(grad.numel() for grad in grads)
        flat = torch.zeros(self._across.padded(length), dtype=grads[0].dtype, device=grads[0].device)
        torch.cat([grad.view(-1) for grad in grads], out=flat[:length])
        self._across.all_reduce(flat, line)
        for grad, total in zip(grads, torch.split(flat[:length], [grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))

    def shards(self) -> Iterator[Shard]:
        """Yield this process's boxes of the parameters."""
        for name, parameter in self._divided.items():
            assert isinstance(parameter, DTensor)
            local = parameter.to_local().detach()
            _, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            if local.numel():
                own = nn.Parameter(local, parameter.requires_grad)
                mine = is_counted(parameter)
                yield Shard(self.number, name, 0, local.numel(), parameter, own, is_share=mine, offset=tuple(offset))
