"""The stages of a run with their initial weights."""

import os
from collections.abc import Collection
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from farpipe.core.errors import InputError
from farpipe.core.spec import Model, Training
from farpipe.core.spec.recompute import Recompute
from farpipe.engine.stages.adapters import add_adapters
from farpipe.engine.stages.balanced_stage import torch_stage
from farpipe.engine.stages.chunk_stage import ChunkStage
from farpipe.engine.stages.decoder import Decoder, Numerics, compute_dtype, initialise
from farpipe.engine.stages.divided_stages import divide_module, twins_in
from farpipe.engine.stages.dropout import OF_ADAPTERS, seed_dropout
from farpipe.engine.stages.own_module import check_outputs, own_module
from farpipe.engine.stages.slices import SliceModule, StageSlice
from farpipe.engine.stages.stage import Boundary, TorchStage

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from farpipe.engine.site.context_chunks import Groups
    from farpipe.engine.stages.hugging_face import HuggingFaceSlice


def numerics_of(training: Training, parameters: torch.dtype = torch.float32, recompute: Recompute = "none") -> Numerics:
    """Precision in which a stage computes."""
    compute = compute_dtype(training.precision)
    compute = parameters if compute == torch.float32 else compute
    return Numerics(parameters, compute, recompute)


def choose_gpu() -> None:
    """Each rank of a machine takes the GPU with its local number, or the only one that it is shown.

    A scheduler that gives every task one GPU (Slurm's ``--gpus-per-task``) shows it no other.
    """
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if num_gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        local_rank = 0
    if local_rank >= num_gpus:
        raise InputError(
            f"device 'cuda': there are {num_gpus} GPUs for local rank {local_rank}; start fewer ranks here"
        )
    torch.cuda.set_device(local_rank)


def expect_gpu(why: str, instead: str) -> None:
    """InputError where torch sees no GPU on this machine; `why` one is needed, and what to do without."""
    if not torch.cuda.device_count():
        raise InputError(f"{why}, and this machine has no GPU that torch can use: {instead}")


def check_model(model: Model, recompute: Collection[Recompute], *, on_chunks: bool) -> None:
    """InputError where stages of a model of Hugging Face would compute something else than the whole."""
    if not model.is_of_transformers:
        return
    if find_spec("transformers") is None:
        raise InputError("model: needs transformers: pip install 'farpipe[train]'")
    from farpipe.engine.stages.hugging_face_weights import config_of_model
    from farpipe.engine.stages.self_check import check_split

    config = config_of_model(model)
    for mode in sorted({*recompute} or {"none"}):
        check_split(config, mode)
    if on_chunks:
        check_split(config, on_chunks=True)


def make_stage(
    model: Model,
    training: Training,
    part: StageSlice,
    numerics: Numerics,
    device: str,
    *,
    on_chunks: bool = False,
    only_times: bool = False,
    mesh: "DeviceMesh | None" = None,
    expert: int = 1,
    groups: "Groups | None" = None,
) -> TorchStage:
    """A stage with its initial weights: those of a model of Hugging Face, or random ones.

    `on_chunks`: its microbatches are chunks, a ChunkStage. `only_times`: weights may have any values. `mesh`: the
    processes that have the stage in parts; not for farpipe's own decoder. `expert`: how many of them share a layer's
    experts. `groups`: those that share chunks.
    """
    stage = _make(model, training, part, numerics, device, on_chunks, only_times, mesh, expert, groups)
    if training.dropout:
        stage.masks = seed_dropout(stage.module, training.seed)
        if stage.masks is None and part.first_layer < part.end_layer:
            raise InputError(
                f"training.dropout = true: in its slice {part} the module of {model.module} has not one "
                "torch.nn.Dropout; leave it out"
            )
    elif training.lora is not None and training.lora.dropout:
        stage.masks = seed_dropout(stage.module, training.seed, only=OF_ADAPTERS)
    return stage


def _make(
    model: Model,
    training: Training,
    part: StageSlice,
    numerics: Numerics,
    device: str,
    on_chunks: bool,
    only_times: bool,
    mesh: "DeviceMesh | None",
    expert: int,
    groups: "Groups | None",
) -> TorchStage:
    assert training.microbatch_size is not None
    boundary = Boundary((training.microbatch_size, training.sequence_length, model.hidden), numerics.compute)
    share = training.microbatch_size / training.global_batch
    kind = ChunkStage if on_chunks else partial(torch_stage, share=share)
    if model.is_of_transformers:
        theirs = _of_transformers(model, training, part, numerics)
        _divide(theirs, mesh, numerics, training, expert)
        _fill(theirs, model, training.seed, only_times=only_times)
        _adapt(theirs, training, numerics)
        if (twins := twins_in(mesh)) is None:
            return kind(theirs, boundary, device)
        from farpipe.engine.site.twin_stage import twin_chunk_stage, twin_stage

        if on_chunks:
            return twin_chunk_stage(theirs, boundary, twins, device, groups)
        return twin_stage(theirs, boundary, twins, device, share=share)
    if model.module is not None:
        own = own_module(model.module, part, training.seed, numerics.recompute).to(numerics.parameters)
        _adapt(own, training, numerics)
        _divide(own, mesh, numerics, training)
        stage = kind(own, boundary, device)
        check_outputs(model.module, stage.module, boundary.shape, model.vocab_size)
        return stage
    module = Decoder(model, part, training.sequence_length, numerics)
    initialise(module, training.seed)
    _adapt(module, training, numerics)
    return kind(module, boundary, device)


def _adapt(module: SliceModule, training: Training, numerics: Numerics) -> None:
    if training.lora is not None:
        add_adapters(module, training.lora, training.seed, numerics.compute)


def _divide(
    module: SliceModule, mesh: "DeviceMesh | None", numerics: Numerics, training: Training, expert: int = 1
) -> None:
    if mesh is not None:
        divide_module(module, mesh, numerics.compute, expert=expert, reshard_after_forward=training.zero == 3)


def _of_transformers(model: Model, training: Training, part: StageSlice, numerics: Numerics) -> "HuggingFaceSlice":
    """A slice that is computed by transformers' code; its parameters have no memory yet."""
    from farpipe.engine.stages import hugging_face as models  # takes seconds, which other runs need not wait for
    from farpipe.engine.stages.hugging_face_weights import config_of_model

    config = config_of_model(model)
    whole, biases = models.build(config, numerics.parameters), training.moe_router_bias_update_rate > 0
    module = models.HuggingFaceSlice(whole, part, numerics.recompute, trains_router_biases=biases)
    if module.balancing is not None and training.wire_type != "none":
        raise InputError(
            "training.wire_type: the loss that balances experts (output_router_logits) sends counts, which are not "
            'rounded; say training.wire_type = "none"'
        )
    if bool(module.shared_names) != model.tied_embeddings:
        tied = "true" if module.shared_names else "false"
        raise InputError(f"{model.hugging_face}: embedding and head: say model.tied_embeddings = {tied}")
    return module


def _fill(module: "HuggingFaceSlice", model: Model, seed: int, *, only_times: bool) -> None:
    """Give the parameters, or this process's parts of them, memory and the values of the model's files, if any."""
    from farpipe.engine.stages import hugging_face_weights as weights

    if only_times:
        weights.randomise(module)
    elif model.hugging_face is not None:
        weights.load(module, model.hugging_face)
    else:
        weights.initialise(module, seed, model.num_layers)
