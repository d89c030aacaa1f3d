"""Ten trainings that are equal to the bit, and whose figures in float64 are frozen.

`python tests/engine/test_frozen_runs.py` rewrites the data.
"""

import json
import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from farpipe.engine.executor.executor import Executor
from farpipe.engine.executor.work import Trainer
from farpipe.engine.train import run_step
from in_process import run_ranks
from small_models import GPT, LLAMA
from trainings import make_run, train_in_one_process

pytestmark = pytest.mark.slow
FROZEN = Path(__file__).with_suffix(".json")
NUM_STEPS = 3
MODELS = {"llama": LLAMA, "gpt": GPT.model_copy(update={"tied_embeddings": False})}
RUNS = [
    ("gpipe", (0, 1)), ("1f1b", (0, 1)), ("zb-h1", (0, 1)), ("eager", (0, 1)), ("interleaved", (0, 1, 0, 1)),
    ("wave", (0, 1, 1, 0)), ("zbv", (0, 1, 1, 0)),
    ("1f1b", (0, 1, 2)), ("gpipe", (0, 1, 2, 3)), ("zb-h2", (0, 1, 2, 3)),
]  # fmt: skip
"""(order, rank of every stage)"""


@pytest.fixture(scope="module")
def text():
    with TemporaryDirectory() as folder:
        yield written(folder)


def written(folder):
    path = Path(folder) / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return path


@cache
def trained(text, model, method, placement, dtype):
    """Losses and norms of every step, and the final weights by name."""
    run = make_run(text, model=MODELS[model], placement=placement, num_steps=NUM_STEPS, method=method, clip_norm=1e9)

    def work(peers):
        learning = Trainer(run, peers, parameters=dtype)
        executor = Executor(run.plan.schedule, learning.stages, peers, learning.stage_done)
        reports = [run_step(step, 0, learning, executor, peers) for step in range(NUM_STEPS)]
        return reports, learning.torch_stages

    results = run_ranks(max(placement) + 1, work)
    reports = results[placement[-1]][0]
    stages = [stage for _, stages in results for stage in stages.values()]
    weights = {name: p.detach() for stage in stages for name, p in stage.module.named_parameters()}
    return [report.loss for report in reports], [report.grad_norm for report in reports], weights


def figures(losses, norms, weights):
    """What is frozen: losses, norms, and a sum over the weights in which every element has its own factor."""
    total = sum(
        float(weight.double().flatten() @ torch.arange(1, weight.numel() + 1, dtype=torch.float64).sqrt())
        for _, weight in sorted(weights.items())
    )
    return [*losses, *norms, total]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("method", "placement"), RUNS)
def test_figures_in_float64_are_what_they_were(method, placement, model, text):
    found = figures(*trained(text, model, method, placement, torch.float64))
    assert all(map(math.isfinite, found))
    assert found == pytest.approx(json.loads(FROZEN.read_text())[model], rel=1e-9)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("method", "placement"), RUNS[1:])
def test_weights_in_float32_are_those_of_gpipe_to_the_bit(method, placement, model, text):
    losses, _, weights = trained(text, model, method, placement, torch.float32)
    first_losses, _, first = trained(text, model, *RUNS[0], torch.float32)
    assert losses == first_losses
    assert weights.keys() == first.keys()
    assert all(torch.equal(weights[name], first[name]) for name in first)


if __name__ == "__main__":
    frozen = {}
    with TemporaryDirectory() as folder:
        for name, model in MODELS.items():
            run = make_run(written(folder), model=model, num_steps=NUM_STEPS, clip_norm=1e9)
            losses, norms, module = train_in_one_process(run, torch.float64)
            frozen[name] = figures(losses, norms, {name: p.detach() for name, p in module.named_parameters()})
    FROZEN.write_text(json.dumps(frozen, indent=0) + "\n")
