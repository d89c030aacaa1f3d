"""Checkpoints of one training under one division after the other, as processes of one site write and read them."""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from transformers import AutoConfig

from farpipe.core.spec import Training
from farpipe.engine.checkpoint.checkpointer import state_pieces
from farpipe.engine.checkpoint.files import Checkpoint, Piece
from farpipe.engine.checkpoint.manifest import Manifest, Trained
from farpipe.engine.executor.optimizer import Optimizer
from farpipe.engine.replicas.collectives import Rings, whole_shards
from farpipe.engine.site.mesh import shares_in, stage_mesh
from farpipe.engine.site.shared_weights import SharedWeights
from farpipe.engine.site.twin_stage import twin_stage
from farpipe.engine.stages.divided_stages import divide_module, twins_in
from farpipe.engine.stages.hugging_face import HuggingFaceSlice, build
from farpipe.engine.stages.self_check import random_model, shrunk
from farpipe.engine.stages.slices import slices
from farpipe.engine.stages.stage import Boundary, TorchStage
from small_models import TIED
from snapshots import write_tensors

TRAINING = Training(sequence_length=12, global_batch=8, microbatch_size=2, precision="fp32", zero=1)


class Division(NamedTuple):
    """Cut of a model of six layers, and the processes that have each stage."""

    partition: tuple[tuple[int, int], ...]
    data: int = 1
    tensor: int = 1
    context: int = 1


DIVISIONS = {
    "tensor 2 x FSDP 2": Division(((0, 6),), data=2, tensor=2),
    "FSDP 4": Division(((0, 6),), data=4),
    "two stages of tensor 2": Division(((0, 2), (2, 6)), tensor=2),
    "context 2 x tensor 2": Division(((0, 6),), tensor=2, context=2),
    "one process": Division(((0, 6),)),
    "four stages": Division(((0, 1), (1, 2), (2, 5), (5, 6))),
    "tensor 2 x FSDP 2, again": Division(((0, 6),), data=2, tensor=2),
    "FSDP 2 in two stages": Division(((0, 5), (5, 6)), data=2),
    "context 2 in two stages": Division(((0, 1), (1, 6)), context=2),
}
"""In the order in which each is read by the next."""


def checkpoints(folder):
    """Differences of what a division reads from what the one before has written, or writes itself; by its name."""
    found, before, truth = {}, None, {}
    for number, (label, division) in enumerate(DIVISIONS.items()):
        state = state_of(division, seed=1 + 100 * number + dist.get_rank())
        if before is not None:
            Checkpoint(before, Manifest.load(before)).fill(state)
        before = write(Path(folder) / label, state)
        written = whole_state(before)
        truth = truth or written
        wrong = [name for name, values in truth.items() if not torch.equal(values, written[name])]
        wrong += [piece.name for piece in state if not is_equal(piece, truth)] if number else []
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, wrong)
        found[label] = [name for names in everywhere for name in names]
    return found


def state_of(division, seed):
    """Pieces of this process's random weights and moments; none on a process without a stage."""
    degrees = {"data": division.data, "tensor": division.tensor, "context": division.context}
    mesh, parts = stage_mesh("cpu", **degrees), slices(division.partition)
    shares_in(mesh)  # all processes make it
    block = dist.get_rank() // mesh.size()
    if block >= len(parts):
        return []
    torch.manual_seed(seed)
    config = config_of_all()
    module = HuggingFaceSlice(random_model(config, torch.float32), parts[block], "none")
    if is_divided := mesh.size() > 1:
        divide_module(module, mesh, torch.float32)
    boundary, twins = Boundary((2, 12, config.hidden_size), torch.float32), twins_in(mesh)
    stage = TorchStage(module, boundary) if twins is None else twin_stage(module, boundary, twins, share=1.0)
    if is_divided:
        shards = list(SharedWeights(block, stage.module, stage.store, Rings((), 0), 1).shards())
    else:
        shards = whole_shards(block, dict(module.named_parameters()))
    optimizer = Optimizer([shard.parameter for shard in shards], TRAINING)
    pieces = list(state_pieces(shards, module.shared_names, optimizer, is_writer=not is_divided))
    for piece in pieces:
        piece.values.normal_()
    return pieces


def write(folder, state):
    """A checkpoint of what all processes have."""
    mine, rank = {piece.key: piece.stored for piece in state if piece.is_mine}, dist.get_rank()
    entries = [None] * dist.get_world_size()
    dist.all_gather_object(entries, write_tensors(folder, rank, "zurich", mine) if mine else None)
    if rank == 0:
        trained = Trained(model=TIED, sequence_length=12, global_batch=8, seed=0)
        files = tuple(entry for entry in entries if entry is not None)
        Manifest(step=1, farpipe="0", trained=trained, batches_sha256="", files=files).save(folder)
    dist.barrier()
    return folder


def config_of_all():
    """A small Qwen3 with tied ends."""
    config = shrunk(AutoConfig.for_model("qwen3"))
    config.tie_word_embeddings = True
    return config


def whole_state(folder):
    """Weights and moments of the whole model in a checkpoint, by name."""
    shapes = {name: tuple(p.shape) for name, p in build(config_of_all(), torch.float32).named_parameters()}
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    pieces = [Piece(f"{k}/{n}", s, 0, torch.full(s, torch.nan).view(-1)) for n, s in shapes.items() for k in kinds]
    Checkpoint(folder, Manifest.load(folder)).fill(pieces)
    return {piece.name: piece.values.view(piece.shape) for piece in pieces}


def is_equal(piece, truth):
    """True if a process has what the whole model has there, to the last bit."""
    return all(
        torch.equal(values, truth[piece.name][tuple(slice(*ends) for ends in box)]) for box, values in piece.parts()
    )
