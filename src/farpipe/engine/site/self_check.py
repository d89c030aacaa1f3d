"""Check of a model before twins train it: small stages of its class, shared by them, against the small whole."""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from farpipe.core.spec.recompute import Recompute
from farpipe.engine.data.batches import Batch
from farpipe.engine.site.expert_exchange import divide_experts, expert_mesh, experts_of
from farpipe.engine.site.mesh import CONTEXT, TENSOR
from farpipe.engine.site.sharding import settle
from farpipe.engine.site.tensor_plans import divide, expect_all_divided
from farpipe.engine.site.twin_stage import twin_chunk_stage, twin_stage
from farpipe.engine.stages.hugging_face import HuggingFaceSlice
from farpipe.engine.stages.self_check import (
    NUM_LAYERS,
    error_on_chunks,
    expect_equal,
    random_model,
    reference_loss,
    run_in_turn,
    shrunk,
    worst_error,
)
from farpipe.engine.stages.slices import slices
from farpipe.engine.stages.stage import Boundary, TorchStage
from farpipe.engine.stages.weight_grads import local_part

_LENGTH: Final = 16
"""Tokens of a sequence: more than shrunk windows of attention."""


def check_divided(config: PreTrainedConfig, twins: DeviceMesh, recompute: Recompute = "none") -> None:
    """Cut a shrunk copy of `config`'s model in two, divide it over `twins` and compare loss and gradients.

    `twins`: a mesh ``(CONTEXT, TENSOR)``, of which all call it at once. InputError names the model type and what
    differs: the class can't be trained so.
    """
    keys = [name for name in (CONTEXT, TENSOR) if twins[name].size() > 1]
    names, change = ", ".join(f"layout.{key}" for key in keys), " and ".join(f"layout.{key} = 1" for key in keys)
    expect_equal(
        f"{names}: models of type {config.model_type!r} can't be divided over {twins.size()} processes: a small one",
        lambda: _error(shrunk(config, twins.size()), twins, recompute),
        f"; say {change}",
    )


def check_divided_chunks(config: PreTrainedConfig, twins: DeviceMesh) -> None:
    """The same on chunks of documents, as with ``data.packing``."""
    expect_equal(
        f"layout.context: models of type {config.model_type!r} can't be trained on chunks (data.packing) over "
        f"{twins.size()} processes: a small one",
        lambda: error_on_chunks(
            random_model(shrunk(config, twins.size()), torch.float64),
            lambda module, boundary: twin_chunk_stage(module, boundary, twins, twins.device_type),
            lambda stages: _summed(stages, twins),
        ),
        "; say layout.context = 1",
    )


def _error(config: PreTrainedConfig, twins: DeviceMesh, recompute: Recompute) -> tuple[float, str]:
    """The largest relative error of loss and gradients, and what it is of."""
    whole = random_model(config, torch.float64)
    tokens = torch.randint(config.vocab_size, (2, 2, _LENGTH))
    batch, cuts = Batch(tokens, tokens.roll(-1, -1)), (0, NUM_LAYERS // 2, NUM_LAYERS)
    boundary = Boundary((2, _LENGTH, config.hidden_size), whole.dtype)
    modules = [HuggingFaceSlice(copy.deepcopy(whole), part, recompute) for part in slices(tuple(pairwise(cuts)))]
    for module in modules if twins[TENSOR].size() > 1 else ():
        divide(module, twins[TENSOR])
        if next(experts_of(module), None) is not None:
            divide_experts(module, expert_mesh(twins, twins[TENSOR].size()))
        expect_all_divided(module)
    stages = [twin_stage(module, boundary, twins, twins.device_type, share=1 / len(tokens)) for module in modules]
    for stage in stages:
        stage.begin_step(batch)
    run_in_turn(stages, len(tokens))
    return worst_error(stages, whole, _summed(stages, twins), reference_loss(whole, batch))


def _summed(stages: Sequence[TorchStage], twins: DeviceMesh) -> float:
    """The loss of all; gradients are summed over the twins."""
    loss, group = torch.tensor(stages[-1].loss, dtype=torch.float64), twins[CONTEXT].get_group()
    dist.all_reduce(loss, group=group)
    for stage in stages:
        settle(stage.module)
        for parameter in stage.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(local_part(parameter.grad), group=group)
    return float(loss)
