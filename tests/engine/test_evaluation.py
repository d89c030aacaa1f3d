"""The evaluation loss is that of the whole model, computed outside of the pipeline, on the text that is held out."""

import pytest
import torch
from torch.nn import functional

from farpipe.engine.data.batches import IGNORED, Batches
from farpipe.planning.documents.tokens import load_tokens
from small_models import LLAMA, TIED, whole_model
from trainings import make_run, metrics, state, train


@pytest.mark.slow
@pytest.mark.parametrize("num_batches", [1, 3, 8], ids="{} of 8 batches".format)
@pytest.mark.parametrize(
    ("model", "placement", "method", "num_replicas"),
    [(TIED, (0, 1), "1f1b", 1), (LLAMA, (0, 1, 1, 0), "gpipe", 1), (LLAMA, (0, 1), "1f1b", 2)],
    ids=["two stages", "four stages", "two replicas"],
)
def test_the_loss_is_the_whole_models_mean_per_token(
    model, placement, method, num_replicas, num_batches, text_file, tmp_path
):
    options = {"placement": placement, "method": method, "num_replicas": num_replicas}
    options |= {"num_steps": 2, "evaluate_every_steps": 2, "evaluation_batches": num_batches}
    run = make_run(text_file, model=model, **options)
    train(run, tmp_path / "run")
    whole = whole_model(run.plan.model, torch.float32)
    trained = state(tmp_path / "run", run, step=2)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(trained[f"weight/{name}"].view_as(parameter))
    batches = Batches(load_tokens(run.plan.data), (4, 2, 6), run.plan.training.seed, held_out=run.plan.data.held_out)
    assert batches.num_held_out_batches == 8
    found = metrics(tmp_path / "run")[-1]["evaluation_loss"]
    assert found == pytest.approx(mean_loss(whole, [batches.held_out_batch(i) for i in range(num_batches)]), rel=1e-6)


@torch.no_grad()
def mean_loss(module, batches):
    """Per token over all batches."""
    total, num_tokens = 0.0, 0
    for batch in batches:
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
            logits = module(tokens).flatten(0, 1).double()
            total += float(functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"))
            num_tokens += int((targets != IGNORED).sum())
    return total / num_tokens
