"""Dropout in stages: masks of seed, step, microbatch and layer, so that every cut and order computes the same."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from engine.stages.test_adapters import MODULES
from farpipe.core.errors import InputError
from farpipe.core.schedule.library import order
from farpipe.core.spec import Lora
from farpipe.engine.data.batches import Batch
from farpipe.engine.executor.executor import Executor, stage_ranks
from farpipe.engine.stages.adapters import add_adapters
from farpipe.engine.stages.dropout import OF_ADAPTERS, Masks, seed_dropout
from farpipe.engine.stages.self_check import make_stages, one_thread, random_model, shrunk
from farpipe.engine.stages.stage import TorchStage
from in_process import run_ranks
from small_models import LLAMA, placed_problem, relative_error
from trainings import losses, make_run, train

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks for it

NUM_MICROBATCHES, SHARE, SEED, STEP, FIRST = 4, 0.25, 5, 3, 8
LORA = Lora(rank=3, dropout=SHARE)


def dropped(batch, whole, recompute, num_stages):
    """Stages of copies of `whole` with adapters that drop out, all of whose values are random numbers."""
    stages = make_stages(whole, batch, recompute, num_stages)
    for number, stage in enumerate(stages):
        add_adapters(stage.module, LORA, seed=1, compute=torch.float64)
        for parameter in stage.module.trained_parameters.values():
            parameter.data.normal_(0, 0.3)
        stages[number] = TorchStage(stage.module, stage.boundary)
        stages[number].masks = seed_dropout(stage.module, SEED, only=OF_ADAPTERS)
        stages[number].masks.begin_step(STEP, FIRST)
        stages[number].begin_step(batch)
    return stages


def reference_gradients(whole, batch, values):
    """Gradients of peft's model, each microbatch alone, whose dropout layers take the masks that their names say."""
    config = peft.LoraConfig(
        r=3, lora_alpha=3, lora_dropout=SHARE, target_modules=MODULES["llama"].split(), task_type="CAUSAL_LM"
    )
    model, masks = peft.get_peft_model(whole, config, autocast_adapter_dtype=False), Masks(SEED)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, value in values.items():
        trained[f"base_model.model.{name}"].data.copy_(value)
    masks.begin_step(STEP, FIRST)
    for name, layer in model.base_model.model.named_modules():
        if isinstance(layer, nn.Dropout):
            layer.forward = lambda x, name=name: x * ~masks.dropped(name, SHARE, x) / (1 - SHARE)
    for number, (tokens, targets) in enumerate(zip(batch.tokens, batch.targets, strict=True)):
        masks.begin(number)
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        (loss / batch.num_target_tokens).backward()
    return {name: trained[f"base_model.model.{name}"].grad for name in values}


@pytest.mark.parametrize(
    ("method", "ranks", "recompute"),
    [("1f1b", (0, 1), "none"), ("zb-h1", (0, 1), "full"), ("wave", (0, 1, 1, 0), "core_attn")],
)
def test_stages_that_drop_out_have_the_gradients_of_pefts_model_with_the_same_masks(method, ranks, recompute):
    schedule = order(method, placed_problem(ranks, NUM_MICROBATCHES))
    with one_thread():
        torch.manual_seed(0)
        whole = random_model(shrunk(AutoConfig.for_model("llama")), torch.float64)
        tokens = torch.randint(64, (NUM_MICROBATCHES, 2, 12))
        batch = Batch(tokens, tokens.roll(-1, -1))
        stages = dropped(batch, whole, recompute, len(ranks))
        values = {n: p for stage in stages for n, p in stage.module.trained_parameters.items()}

        def work(peers):
            own = {s: stages[s] for s, rank in enumerate(stage_ranks(schedule)) if rank == peers.rank}
            Executor(schedule, own, peers).run(0)

        run_ranks(len(schedule.ranks), work)
        expected = reference_gradients(whole, batch, {name: p.detach() for name, p in values.items()})
    for name, value in values.items():
        assert relative_error(value.grad, expected[name]) <= 1e-10, name


def test_masks_differ_by_step_microbatch_and_layer_and_drop_the_share_that_is_asked_for():
    masks, like, found = Masks(SEED), torch.empty(100, 100), []
    for step, microbatch, name in [(0, 0, "a"), (0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")]:
        masks.begin_step(step, 0)
        masks.begin(microbatch)
        found.append(masks.dropped(name, SHARE, like))
        assert float(found[-1].float().mean()) == pytest.approx(SHARE, abs=0.02)
    assert torch.equal(found[0], found[1])
    assert all(0.3 < float((found[0] == other).float().mean()) < 0.7 for other in found[2:])


MODEL = LLAMA.model_copy(update={"num_layers": 4, "module": "engine.stages.own_modules:build"})


def test_a_module_of_the_users_drops_out_alike_in_every_order_replica_and_recomputation(text_file, tmp_path):
    found = {}
    for name, recompute, options in [
        ("plain", "none", {"method": "1f1b"}),
        ("again", "full", {"method": "zb-h1"}),
        ("replicas", "none", {"method": "zb-2p", "num_replicas": 2}),
        ("off", "none", {"dropout": False}),
    ]:
        run = make_run(text_file, model=MODEL, num_steps=3, **{"dropout": True} | options)
        with one_thread():
            train(run.with_plan(recompute=(recompute,) * 2), tmp_path / name)
        found[name] = losses(tmp_path / name)
    for name in ("again", "replicas"):
        assert [row[:2] for row in found[name]] == [pytest.approx(row[:2], rel=1e-5) for row in found["plain"]]
    assert abs(found["off"][0][1] / found["plain"][0][1] - 1) > 1e-4, "it is on"


def test_a_resumed_run_drops_out_what_it_would_have(text_file, tmp_path):
    run = make_run(text_file, model=MODEL, num_steps=4, dropout=True, checkpoint_every_steps=2)
    with one_thread():
        train(run, tmp_path / "whole")
        train(run.model_copy(update={"num_steps": 2}), tmp_path / "half")
        train(run.model_copy(update={"resume": str(tmp_path / "half")}), tmp_path / "rest")
    assert losses(tmp_path / "rest") == losses(tmp_path / "whole")[2:]


def test_dropout_in_a_module_without_such_layers_is_refused(text_file, tmp_path):
    model = MODEL.model_copy(update={"module": "engine.stages.own_modules:without_dropout"})
    with pytest.raises(InputError, match=r"training\.dropout = true: .* has not one torch\.nn\.Dropout"):
        train(make_run(text_file, model=model, dropout=True), tmp_path / "run")
