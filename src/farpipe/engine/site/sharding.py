"""FSDP2 around a step of many microbatches in any order of actions.

A stage's module is wrapped by `shard`, or by anybody else's ``fully_shard``; the module that is called is the root.

    defer(module, store)                                 # weight gradients wait in the store for W
    shard(module, layers, mesh["data"], param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reduction = StepReduction(module, store)             # right without FSDP, too: it settles partial sums of DTensor
    for step in ...:
        reduction.begin()                                # before the first action of the stage
        ...                                              # F, I, W and B in any order
        reduction.end()                                  # after the last one: p.grad has the placements of p
        optimizer.step()

Without `begin` FSDP would reduce after every input gradient, and weight gradients that come later would be lost. So the
store takes none outside a step.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from farpipe.core.spec.training import Zero
from farpipe.engine.stages.weight_grads import WeightGradStore


def shard(
    module: nn.Module,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = False,
) -> None:
    """Divide the parameters of `module` over `mesh` by FSDP2, in place: each of `layers` by itself, and all the rest.

    `mesh` has one dimension, or two for HSDP (replicas, shards). A stage computes in `param_dtype` and sums gradients
    in `reduce_dtype` whatever the order of its actions; None: the parameters' own. Gradients are sums over the mesh,
    not means. With `reshard_after_forward` every F and every backward gathers a layer's weights (ZeRO-3's memory);
    otherwise they stay whole for the step.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for part in [*layers, module]:
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        _sum_only(part)


def _sum_only(part: nn.Module) -> None:
    """Let the reduction be a plain sum: gloo knows no other, and losses are divided by all targets of the step."""
    assert isinstance(part, FSDPModule)
    part.set_gradient_divide_factor(1.0)
    part.set_force_sum_reduction_for_comms(enable=True)


class _SumsIn:
    """Hook that lets gradients of a part's gathered parameters be summed in one dtype.

    FSDP widens what autograd has added after each backward, but not what W adds: it would be summed in the dtype of the
    parameters, or meet the widened one. The gathered parameters exist from the first forward on, for ever.
    """

    def __init__(self, dtype: torch.dtype, part: FSDPModule) -> None:
        assert isinstance(part, nn.Module)
        self._dtype = dtype
        self._handle = part.register_forward_pre_hook(self)

    def __call__(self, part: nn.Module, inputs: Any) -> None:
        for parameter in _own_parameters(part):
            parameter.grad_dtype = self._dtype
        self._handle.remove()


def _own_parameters(part: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that are gathered with `part`, not with parts of it that are gathered by themselves."""
    yield from part.parameters(recurse=False)
    for child in part.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)


class StepReduction:
    """The sum of a stage's gradients over the processes that share its parameters."""

    def __init__(self, module: nn.Module, store: WeightGradStore, *, zero: Zero = 1) -> None:
        """`store` has the weight gradients of `module` that wait; it takes them between `begin` and `end` only.

        `zero` 1: gradients are summed once a step. 2: also in every backward, after which only their shards are kept
        (of a weight gradient that waited, after the next one). 3: a backward frees the gathered weights as well.
        """
        self._module, self._store, self._zero = module, store, zero
        parts = {name: part for name, part in module.named_modules() if isinstance(part, FSDPModule)}
        self._parts = list(parts.values())
        self._roots = [part for name, part in parts.items() if not any(_is_inside(name, other) for other in parts)]
        for part in self._parts:
            if dtype := fully_shard.state(part)._mp_policy.reduce_dtype:  # type: ignore[attr-defined]
                _SumsIn(dtype, part)
        store.close()

    def begin(self) -> None:
        """Get ready for a step: from now on backwards reduce and free no more than `zero` says."""
        for part in self._parts:
            part.reshard()  # an evaluation may have left gathered weights of before the last update
        self._set(is_last=False, reduces=self._zero > 1, frees=self._zero > 2)
        self._store.open()

    def end(self) -> None:
        """Sum the step's gradients; each then has the placements of its parameter. RunError where W is missing."""
        self._store.close()
        self._set(is_last=True, reduces=True, frees=True)
        for root in self._roots:
            _reduce(root)
        settle(self._module)

    def _set(self, *, is_last: bool, reduces: bool, frees: bool) -> None:
        for root in self._roots:
            root.set_is_last_backward(is_last)
            root.set_requires_gradient_sync(reduces)
            root.set_reshard_after_backward(frees)


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _reduce(root: FSDPModule) -> None:
    """Let FSDP do after the last action what it does after a last backward; torch 2.10 to 2.14 have no public name."""
    if hasattr(root, "finalize_backward"):
        root.finalize_backward()
    else:
        fully_shard.state(root)._root_post_backward_final_callback()  # type: ignore[attr-defined]


@torch.no_grad()
def settle(module: nn.Module) -> list[str]:
    """Sum what gradients of `module` are partial over tensor-parallel processes; names of the parameters that had such.

    Gains of norms are replicated under sequence parallelism, but each process sees its own tokens: `to_local` of their
    gradients would be wrong, and so would a norm of all gradients.
    """
    found = []
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)
            found.append(name)
    return found


def is_counted(parameter: nn.Parameter) -> bool:
    """True on one of the processes that have the same part of a divided parameter: the one that counts it in a norm."""
    if not isinstance(parameter, DTensor):
        return True
    here = parameter.device_mesh.get_coordinate() or ()
    return all(at == 0 for at, one in zip(here, parameter.placements, strict=True) if isinstance(one, Replicate))
