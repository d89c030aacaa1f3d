"""Training of a module of the user's own, cut by the user's function."""

import json

import pytest
import torch
from torch.nn import functional

from farpipe.core.errors import InputError
from farpipe.core.spec import Model
from farpipe.core.strict import validate
from farpipe.engine.checkpoint.export import export_to_hugging_face
from farpipe.engine.executor.work import batches_of
from farpipe.engine.stages.own_module import own_module
from farpipe.engine.stages.self_check import one_thread
from farpipe.engine.stages.slices import StageSlice, slices
from small_models import LLAMA, relative_error
from trainings import make_run, train

BUILD = "engine.stages.own_modules:build"
MODEL = LLAMA.model_copy(update={"num_layers": 4, "module": BUILD})
PART = StageSlice(1, 3, False, False)


def train_run(text_file, run_dir, recompute, **options):
    run = make_run(text_file, model=MODEL, method="zb-h1", num_steps=3, **options)
    run = run.with_plan(recompute=(recompute,) * 2)
    with one_thread():
        train(run, run_dir)
    return run, [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_it_learns_as_in_one_process(recompute, text_file, tmp_path):
    run, losses = train_run(text_file, tmp_path / "run", recompute)
    modules = [own_module(BUILD, part, run.plan.training.seed) for part in slices(run.plan.partition)]
    parameters = [p for module in modules for p in module.parameters()]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": run.plan.training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=run.plan.training.learning_rate, betas=run.plan.training.betas)
    expected, batches = [], batches_of(run)
    for step in range(run.num_steps):
        batch, total = batches.batch(step), 0.0
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
            logits = modules[1](modules[0](tokens))
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(batch.tokens)
            loss.backward()
            total += loss.item()
        expected.append(total)
        torch.nn.utils.clip_grad_norm_(parameters, run.plan.training.clip_norm)
        adamw.step()
        adamw.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-5)
    with pytest.raises(InputError, match=r"a module of your own \(engine\.stages\.own_modules:build\) has no form"):
        export_to_hugging_face(tmp_path / "run", tmp_path / "out")


def test_replicas_of_it_learn_the_same_in_bf16(text_file, tmp_path):
    _, one = train_run(text_file, tmp_path / "one", "none", precision="bf16")
    _, two = train_run(text_file, tmp_path / "two", "none", precision="bf16", num_replicas=2, zero=1)
    assert one == pytest.approx(two, rel=1e-3)


def test_slices_start_with_unlike_layers_and_replicas_with_the_same():
    first, second, again = (own_module(BUILD, part, 7) for part in (PART, StageSlice(3, 4, False, False), PART))
    weights = [dict(module.named_parameters()) for module in (first, second, again)]
    assert weights[0].keys() == {f"layers.{n}.0.{kind}" for n in (1, 2) for kind in ("weight", "bias")}
    assert torch.equal(weights[0]["layers.1.0.weight"], weights[2]["layers.1.0.weight"])
    assert relative_error(weights[0]["layers.1.0.weight"], weights[1]["layers.3.0.weight"]) > 0.1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package:build", "No module named 'no_such_package'; expected package.module:function"),
        ("engine.stages.own_modules:absent", "has no attribute 'absent'"),
        ("engine.stages.own_modules", "expected package.module:function"),
        ("engine.stages.own_modules:__doc__", "is no function"),
        ("engine.stages.own_modules:broken", "raises RuntimeError: no layer 1"),
        ("engine.stages.own_modules:no_module", r"returns StageSlice, not a torch\.nn\.Module"),
    ],
)
def test_functions_that_do_not_build_are_told(name, message):
    with pytest.raises(InputError, match=message):
        own_module(name, PART, 7)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("counting", "own_modules:counting keeps a state between microbatches"),
        ("dropping", "draws random numbers, as dropout does"),
        ("pair", "gives tuple, not a tensor; let it return the hidden states alone"),
        ("tuples", r"breaks in its forward \(TypeError: .*; each layer takes and gives one tensor"),
        ("narrow", r"gives \[\d+, \d+, 100\], not \[\d+, \d+, 256\]: sequences, tokens, model.vocab_size"),
    ],
)
def test_a_module_whose_output_is_not_what_stages_need_is_refused(name, message, text_file, tmp_path):
    model = MODEL.model_copy(update={"module": f"engine.stages.own_modules:{name}"})
    with pytest.raises(InputError, match=message):
        train(make_run(text_file, model=model, num_steps=1), tmp_path / "run")


def test_what_can_not_be_done_with_it_is_told():
    with pytest.raises(InputError, match="needs its layers as `layers`"):
        own_module("engine.stages.own_modules:without_layers", PART, 7, "full")
    with pytest.raises(InputError, match="neither with hugging_face nor with tied_embeddings"):
        validate(Model, MODEL.model_dump() | {"tied_embeddings": True}, "job.toml")
