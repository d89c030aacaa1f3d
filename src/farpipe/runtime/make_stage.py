"""Making of the stages of a model on this process's device."""

import os

import torch

from farpipe.errors import InputError
from farpipe.runtime.model.decoder import Numerics, StageModule, StageSlice, compute_dtype, initialise
from farpipe.runtime.model.hugging_face import load_weights
from farpipe.runtime.model.weight_grads import WeightGradStore
from farpipe.runtime.stage import Boundary, TorchStage
from farpipe.spec import Model, Training
from farpipe.spec.recompute import Recompute


def numerics_of(training: Training, parameters: torch.dtype = torch.float32, recompute: Recompute = "none") -> Numerics:
    """Precision in which a stage computes."""
    compute = compute_dtype(training.precision)
    compute = parameters if compute == torch.float32 else compute
    return Numerics(parameters, compute, recompute)


def choose_gpu() -> None:
    """Each rank of a machine takes the GPU with its local number."""
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise InputError(
            f"device 'cuda': there are {num_gpus} GPUs for local rank {local_rank}; start fewer ranks here"
        )
    torch.cuda.set_device(local_rank)


def make_stage(
    model: Model,
    training: Training,
    part: StageSlice,
    numerics: Numerics,
    device: str,
    kind: type[TorchStage] = TorchStage,
) -> TorchStage:
    """A stage with its initial weights: those of a model of Hugging Face, or random ones."""
    assert training.microbatch_size is not None
    store = WeightGradStore()
    module = StageModule(model, part, training.sequence_length, store, numerics)
    if model.hugging_face is None:
        initialise(module, training.seed)
    else:
        load_weights(module, model, model.hugging_face)
    boundary = Boundary((training.microbatch_size, training.sequence_length, model.hidden), numerics.compute)
    return kind(module.to(device), store, boundary, device)
