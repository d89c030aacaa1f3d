"""Check of a model before twins train it: small stages of its class, divided over them, against the small whole."""

import copy
from itertools import pairwise

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel

from farpipe.runtime.data.batches import Batch
from farpipe.runtime.site.sharding import settle
from farpipe.runtime.site.tensor_plans import divide, expect_all_divided
from farpipe.runtime.stage import Boundary
from farpipe.runtime.stages.hugging_face import HuggingFaceSlice
from farpipe.runtime.stages.module_stage import ModuleStage
from farpipe.runtime.stages.self_check import (
    NUM_LAYERS,
    expect_equal,
    random_model,
    reference_loss,
    run_in_turn,
    shrunk,
    worst_error,
)
from farpipe.runtime.stages.slices import StageSlice, slices
from farpipe.spec.recompute import Recompute


def check_divided(config: PreTrainedConfig, twins: DeviceMesh, recompute: Recompute = "none") -> None:
    """Cut a shrunk copy of `config`'s model in two, divide it over `twins` and compare loss and gradients.

    All twins call it at once. InputError names the model type and what differs: the class can't be trained so.
    """
    what = f"layout.tensor: models of type {config.model_type!r} can't be divided over {twins.size()} processes"
    expect_equal(
        f"{what}: a small one",
        lambda: _error(shrunk(config, twins.size()), twins, recompute),
        "; say layout.tensor = 1",
    )


def _error(config: PreTrainedConfig, twins: DeviceMesh, recompute: Recompute) -> tuple[float, str]:
    """The largest relative error of loss and gradients, and what it is of."""
    whole = random_model(config, torch.float64)
    tokens = torch.randint(config.vocab_size, (2, 2, 16))
    batch, cuts = Batch(tokens, tokens.roll(-1, -1)), (0, NUM_LAYERS // 2, NUM_LAYERS)
    stages = [_divided(copy.deepcopy(whole), part, twins, recompute) for part in slices(tuple(pairwise(cuts)))]
    for stage in stages:
        stage.begin_step(batch)
    run_in_turn(stages, len(tokens))
    for stage in stages:
        settle(stage.module)
    return worst_error(stages, whole, reference_loss(whole, batch))


def _divided(model: PreTrainedModel, part: StageSlice, twins: DeviceMesh, recompute: Recompute) -> ModuleStage:
    module = HuggingFaceSlice(model, part, recompute)
    divide(module, twins)
    expect_all_divided(module)
    return ModuleStage(module, Boundary((2, 16 // twins.size(), model.config.hidden_size), model.dtype))
