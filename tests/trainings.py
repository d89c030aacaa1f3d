"""Small trainings for tests, and what is left of them."""

import json

import torch

from farpipe.core.schedule.library import order
from farpipe.core.spec import Data, Training
from farpipe.engine.checkpoint.files import Checkpoint, Piece
from farpipe.engine.checkpoint.folders import CHECKPOINTS_NAME, folder_of, whole_checkpoints
from farpipe.engine.checkpoint.manifest import Manifest
from farpipe.engine.data.batches import load_batches
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.train import train_rank
from in_process import run_ranks
from small_models import TIED, even_partition, placed_problem, reference_step, whole_model

TRAINING = Training(
    sequence_length=6,
    global_batch=8,
    microbatch_size=2,
    precision="fp32",
    learning_rate=1e-2,
    seed=7,
    checkpoint_every_minutes=0,
)


def make_run(
    text_file, *, model=TIED, placement=(0, 1), num_replicas=1, num_steps=6, method="1f1b", run_fields=None, **training
):
    """A run of four microbatches on every step, of all replicas together; `training` changes fields of TRAINING."""
    problem = placed_problem(placement, 4 // num_replicas)
    sites = tuple(f"site{rank}" for rank in range(problem.num_ranks))
    return RunSpec.bare(
        problem=problem,
        schedule=order(method, problem),
        sites=sites,
        replicas=(sites,) * num_replicas,
        num_steps=num_steps,
        model=model.model_copy(update={"vocab_size": 256}),
        training=TRAINING.model_copy(update=training),
        data=Data(source=str(text_file), held_out=0.2),
        partition=even_partition(model, len(placement)),
        **(run_fields or {}),
    )


def train(run, run_dir, **options):
    """All ranks of `run` as threads; the summary."""
    run_dir.mkdir(exist_ok=True)
    return run_ranks(run.num_processes, lambda peers: train_rank(run, peers, run_dir, **options))[0]


def train_in_one_process(run, dtype, num_steps=None):
    """Plain autograd on the whole batch, torch's own clipping and AdamW: losses, norms and the final module."""
    module, training = whole_model(run.plan.model, dtype), run.plan.training
    decayed = [p for p in module.parameters() if p.ndim >= 2]
    others = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": training.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas)
    shape = (training.global_batch // training.microbatch_size, training.microbatch_size, training.sequence_length)
    batches = load_batches(run.plan.data, run.plan.model, shape, training.seed)
    losses, norms = [], []
    for step in range(num_steps or run.num_steps):
        losses.append(reference_step(module, batches.batch(step)))
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), training.clip_norm)))
        adamw.step()
        adamw.zero_grad()
    return losses, norms, module


def metrics(run_dir):
    """The lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir):
    """(step, loss, gradient norm) of every step."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(run_dir)]


def checkpoints(run_dir):
    """The steps of the checkpoints, the newest first."""
    return whole_checkpoints(run_dir / CHECKPOINTS_NAME)


def folder(run_dir, step):
    """Of one checkpoint."""
    return folder_of(run_dir / CHECKPOINTS_NAME, step)


def state(run_dir, run, step=None):
    """Weights and moments of the whole model from a checkpoint, by name; the newest by default."""
    place = folder(run_dir, checkpoints(run_dir)[0] if step is None else step)
    shapes = {name: p.shape for name, p in whole_model(run.plan.model, torch.float32).named_parameters()}
    pieces = [
        Piece(f"{kind}/{name}", tuple(shape), 0, torch.full((shape.numel(),), torch.nan))
        for name, shape in shapes.items()
        for kind in ("weight", "exp_avg", "exp_avg_sq")
    ]
    Checkpoint(place, Manifest.load(place)).fill(pieces)
    return {piece.name: piece.values for piece in pieces}


def equal_states(one, other):
    """True if two states are the same to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
