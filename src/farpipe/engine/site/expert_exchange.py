"""Expert parallelism inside a site: a process has some of a layer's experts, and tokens go to theirs and back.

The exchange is transformers' own (``AllToAllEP``): two of torch's all-to-alls in F and two in the backward. Processes
that share experts have different sequences, or different parts of them, so an expert's gradient is the sum over them
without a further exchange; FSDP2 divides and sums the experts of those that have the same ones.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed.expert_parallel import AllToAllEP

from farpipe.core.errors import InputError
from farpipe.engine.stages.experts import ExpertsForward, has_grouped_experts
from farpipe.engine.stages.weight_grads import WeightGradStore

SAME: Final = "same experts"
"""Mesh dimension of the processes that have the same experts of a layer."""
EXPERT: Final = "expert"
"""Mesh dimension of the processes that share the experts of a layer; neighbours."""


ALONE: Final = "alone"
"""Mesh dimension of this process alone."""


@cache
def expert_mesh(mesh: DeviceMesh, degree: int) -> DeviceMesh:
    """The mesh ``(SAME, EXPERT, ALONE)`` of the processes in `mesh`; all processes of the world make it at once.

    Experts are whole on each process: tensor-parallel ones, which have different tokens between layers, share them too.
    """
    processes = mesh._flatten(" x ".join(mesh.mesh_dim_names or ()))
    if processes.size() % degree:
        raise InputError(f"layout.expert = {degree}: does not divide {processes.size()} processes of a stage")
    return processes._unflatten(0, (processes.size() // degree, degree, 1), (SAME, EXPERT, ALONE))


def experts_of(module: nn.Module) -> Iterator[Any]:
    """Yield the experts of every layer."""
    return (leaf for leaf in module.modules() if has_grouped_experts(leaf))


def divide_experts(module: nn.Module, owners: DeviceMesh) -> None:
    """Divide the experts in `module` over EXPERT of `owners` (`expert_mesh`), in place; their tokens are exchanged.

    Parameters may be on the meta device; others must be equal on all processes. InputError where experts don't divide.
    """
    mesh = owners[EXPERT]
    for experts in experts_of(module):
        if experts.num_experts % mesh.size():
            raise InputError(f"layout.expert = {mesh.size()}: does not divide the {experts.num_experts} experts")
        for name, parameter in [*experts.named_parameters(recurse=False)]:
            own = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(own, parameter.requires_grad))
        experts.num_experts //= mesh.size()
        experts.forward = ExchangedTokens(experts, AllToAllEP(experts, mesh, owners[ALONE]))


class ExchangedTokens:
    """Forward of a layer's experts that other processes share: tokens [n, hidden], experts and weights [n, k] each."""

    def __init__(self, experts: nn.Module, exchange: Any) -> None:
        self._experts, self._exchange = experts, exchange

    def defer_to(self, store: WeightGradStore) -> None:
        """Let the weight gradients of this process's experts wait in `store`."""
        self._exchange.experts_forward = ExpertsForward(self._experts, store)

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = self._exchange(hidden, experts, weights)
        return y.to(hidden.dtype)
