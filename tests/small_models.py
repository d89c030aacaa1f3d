"""Small models, cut into stages in every way, and the un-pipelined model that they must equal."""

from itertools import pairwise

import torch
from torch.nn import functional

from farpipe.core.spec import Model
from farpipe.core.step import Hop, Problem, Rank, Schedule, Stage
from farpipe.engine.data.batches import IGNORED, Batch
from farpipe.engine.stages.decoder import Decoder, Numerics, initialise
from farpipe.engine.stages.slices import StageSlice, slices
from farpipe.engine.stages.stage import Boundary, TorchStage

SEED, MICROBATCH_SIZE, SEQUENCE_LENGTH = 7, 2, 6

LLAMA = Model(name="small llama", num_layers=8, hidden=16, num_heads=4, num_kv_heads=2, ffn_hidden=24, vocab_size=32)
TIED = LLAMA.model_copy(update={"tied_embeddings": True})
GPT = Model(
    name="small gpt",
    num_layers=8,
    hidden=16,
    num_heads=4,
    ffn_hidden=24,
    gated_mlp=False,
    vocab_size=32,
    norm="layernorm",
    positions="learned",
    max_sequence_length=8,
    bias=True,
    tied_embeddings=True,
)


def even_partition(model, num_stages):
    """Layers per stage as equal as can be: ((first, end), ...)."""
    cuts = [round(stage * model.num_layers / num_stages) for stage in range(num_stages + 1)]
    return tuple(pairwise(cuts))


def placed_problem(ranks_of_stages, num_microbatches):
    """A Problem that says no more than which rank has which stage."""
    stages = tuple(Stage(rank=rank, forward_s=1, input_grad_s=1, weight_grad_s=1) for rank in ranks_of_stages)
    ranks = tuple(Rank() for _ in range(max(ranks_of_stages) + 1))
    hops = (Hop(),) * (len(stages) - 1)
    return Problem(num_microbatches=num_microbatches, ranks=ranks, stages=stages, hops=hops)


def make_batch(model, num_microbatches, *, uneven=True):
    """Random tokens; with `uneven`, microbatch j has j targets less that count, and the last of several has none."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (num_microbatches, MICROBATCH_SIZE, SEQUENCE_LENGTH)
    tokens, targets = (torch.randint(model.vocab_size, shape, generator=generator) for _ in range(2))
    if uneven:
        for microbatch in range(num_microbatches):
            targets[microbatch].view(-1)[:microbatch] = IGNORED
        targets[1:][-1:] = IGNORED
    return Batch(tokens, targets)


def make_stage(model, part, dtype, *, recompute="none"):
    """A TorchStage with initial weights."""
    module = Decoder(model, part, SEQUENCE_LENGTH, Numerics(dtype, dtype, recompute))
    initialise(module, SEED)
    return TorchStage(module, Boundary((MICROBATCH_SIZE, SEQUENCE_LENGTH, model.hidden), dtype))


def make_stages(model, num_stages, dtype, **options):
    """All stages of the model."""
    return [make_stage(model, part, dtype, **options) for part in slices(even_partition(model, num_stages))]


def whole_model(model, dtype):
    """The un-pipelined model in plain autograd."""
    module = Decoder(model, StageSlice(0, model.num_layers, True, True), SEQUENCE_LENGTH, Numerics(dtype, dtype))
    initialise(module, SEED)
    return module


def reference_step(module, batch):
    """The loss of the step and, in `module`, its gradients: one microbatch after the other, plain autograd."""
    loss = 0.0
    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
        logits = module(tokens)
        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        share = total / (batch.targets != IGNORED).sum()
        share.backward()
        loss += share.item()
    return loss


def relative_error(found, expected):
    """The largest difference relative to the largest expected value."""
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max())


def split_backward(schedule):
    """Every B as I, with its W some actions later."""
    orders = []
    for actions in schedule.ranks:
        out, late = [], []
        for action in actions:
            out.append(action._replace(kind="I") if action.kind == "B" else action)
            if action.kind == "B":
                late.append(action._replace(kind="W"))
            if len(late) > 2:
                out.append(late.pop(0))
        orders.append(tuple(out + late))
    return Schedule(schedule.num_microbatches, tuple(orders), schedule.method + " split")
