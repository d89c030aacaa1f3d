"""Trainings of transformers' models over ranks: steps, checkpoints and exports are those of one process."""

import json

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from expert_models import MODELS
from farpipe.core.errors import InputError
from farpipe.core.spec.hugging_face import read_model
from farpipe.engine.checkpoint.export import export_to_hugging_face
from farpipe.engine.checkpoint.manifest import Manifest
from farpipe.engine.executor.work import batches_of
from farpipe.engine.stages.hugging_face import HuggingFaceSlice, build
from farpipe.engine.stages.hugging_face_weights import config_of_model, initialise, save
from farpipe.engine.stages.profile_request import ProfileRequest
from farpipe.engine.stages.self_check import one_thread, shrunk
from farpipe.engine.stages.slices import StageSlice
from farpipe.engine.stages.stack_times import ChunkStacks, Stacks
from small_models import relative_error
from snapshots import write_tensors
from trainings import make_run, train


def write_model(folder, name, **changes):
    """A small model of a type, as transformers writes it."""
    config = shrunk(AutoConfig.for_model(name))
    config.update({"vocab_size": 256, **changes})
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def hf_run(folder, text_file, **options):
    model = read_model(folder)
    run = make_run(text_file, model=model, **{"method": "zb-h1", "num_steps": 4} | options)
    return run.with_plan(model=model)


def train_whole(folder, run):
    """The same steps by a loop over transformers' model: losses and the model."""
    model, training = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), run.plan.training
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    groups = [
        {"params": decayed, "weight_decay": training.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas)
    batches, losses = batches_of(run), []
    routers = [_listen(module) for module in model.modules() if hasattr(module, "e_score_correction_bias")]
    for step in range(run.num_steps):
        batch, total = batches.batch(step), 0.0
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
            output = model(input_ids=tokens, use_cache=False)
            loss = functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss = loss / batch.num_target_tokens
            if getattr(model.config, "output_router_logits", False):
                loss = loss + model.config.router_aux_loss_coef / len(batch.tokens) * output.aux_loss
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        adamw.step()
        adamw.zero_grad()
        _move_biases(routers, training.moe_router_bias_update_rate)
    return losses, model


def _listen(router):
    router.chosen = []
    router.register_forward_hook(lambda module, inputs, output: module.chosen.append(output[2]))
    return router


def _move_biases(routers, rate):
    """DeepSeek-V3's rule, by the choices of the whole step."""
    for router in routers:
        counts = torch.bincount(torch.cat(router.chosen).flatten(), minlength=router.num_experts).float()
        router.e_score_correction_bias += rate * torch.sign(counts.mean() - counts)
        router.chosen.clear()


def losses_of(run_dir):
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


TOKENS = torch.tensor([[*b"pack my box"]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gpt2"])
def test_a_training_resumed_under_another_cut_and_exported_is_that_of_one_process(name, text_file, tmp_path):
    folder = write_model(tmp_path / "model", name, **({"tie_word_embeddings": True} if name == "qwen3" else {}))
    with one_thread():
        short = hf_run(folder, text_file, num_steps=2)
        train(short, tmp_path / "first")
        other = {"placement": (0,)} if name == "gpt2" else {"placement": (0, 1, 0, 1), "method": "interleaved"}
        rest = hf_run(folder, text_file, num_steps=10, **other)
        train(rest.model_copy(update={"resume": str(tmp_path / "first")}), tmp_path / "rest")
        losses, model = train_whole(folder, rest)
        assert losses_of(tmp_path / "first") + losses_of(tmp_path / "rest") == pytest.approx(losses, rel=1e-5)
        assert export_to_hugging_face(tmp_path / "rest", tmp_path / "out") == 10
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
        assert relative_error(loaded(TOKENS).logits, model(TOKENS).logits) < 1e-3
    for (parameter, found), expected in zip(loaded.named_parameters(), model.parameters(), strict=True):
        limit = 1e-2 if parameter.endswith("c_attn.bias") else 1e-4  # keys' biases have no gradient but rounding
        assert relative_error(found, expected) < limit, parameter


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_experts_are_balanced_over_replicas_as_in_one_process(zero, text_file, tmp_path):
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    folder = write_model(tmp_path / "model", "mixtral", **balanced)
    run = hf_run(folder, text_file, num_replicas=2, zero=zero)
    with one_thread():
        train(run, tmp_path / "run")
        losses, _ = train_whole(folder, hf_run(folder, text_file))
    assert losses_of(tmp_path / "run") == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_biases_of_routers_move_over_replicas_as_in_one_process_and_are_exported(zero, text_file, tmp_path):
    folder = write_model(tmp_path / "model", "deepseek_v3")
    options = {"moe_router_bias_update_rate": 0.01, "num_steps": 6}
    with one_thread():
        train(hf_run(folder, text_file, num_replicas=2, zero=zero, **options), tmp_path / "run")
        losses, model = train_whole(folder, hf_run(folder, text_file, **options))
    assert losses_of(tmp_path / "run") == pytest.approx(losses, rel=1e-4)
    export_to_hugging_face(tmp_path / "run", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    biases = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    assert biases
    for name, found in loaded.named_buffers():
        if name in biases:
            assert biases[name].any()
            torch.testing.assert_close(found, biases[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_bf16_keeps_float32_weights_however_many_replicas_share_them(text_file, tmp_path):
    folder = write_model(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    found = {}
    with one_thread():
        for label, options in {
            "one": {},
            "replicas": {"num_replicas": 2},
            "zero": {"num_replicas": 2, "zero": 1},
        }.items():
            train(hf_run(folder, text_file, precision="bf16", **options), tmp_path / label)
            export_to_hugging_face(tmp_path / label, tmp_path / f"out-{label}")
            found[label] = AutoModelForCausalLM.from_pretrained(tmp_path / f"out-{label}", dtype=torch.float32)
    losses = {label: losses_of(tmp_path / label) for label in found}
    assert losses["one"] == pytest.approx(losses["replicas"], rel=1e-3)
    assert losses["zero"] == losses["replicas"]
    assert losses["one"][-1] < losses["one"][0]
    weights = {label: dict(model.named_parameters()) for label, model in found.items()}
    for name, weight in weights["zero"].items():
        assert torch.equal(weight, weights["replicas"][name]), name
        assert not torch.equal(weight, weight.bfloat16().float()), "more digits than bf16 has"


@pytest.mark.slow
def test_checkpoints_from_before_transformers_computed_are_read(text_file, tmp_path):
    """Their names were those of farpipe's own decoder."""
    from farpipe.engine.checkpoint import files
    from farpipe.engine.stages.decoder_weights import expected_names, their_name

    folder = write_model(tmp_path / "model", "llama")
    run = hf_run(folder, text_file, num_steps=1)
    with one_thread():
        train(run, tmp_path / "run")
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    manifest = Manifest.load(checkpoint)
    named = {their_name(name, run.plan.model): name for name in expected_names(run.plan.model)}
    old, entries = tmp_path / "old", []
    for rank, entry in enumerate(manifest.files):
        places = files._places(checkpoint / entry.name, entry)
        tensors = {}
        for key, place in places:
            kind, _, name = key.partition("/")
            tensors[f"{kind}/{named[name]}"] = files._read(place).clone()
        entries.append(write_tensors(old, rank, entry.site, tensors))
    Manifest(**dict(manifest) | {"files": tuple(entries)}).save(old)
    for place in (checkpoint, old):
        export_to_hugging_face(place, tmp_path / f"from-{place.name}")
    written = [(tmp_path / f"from-{place.name}" / "model.safetensors").read_bytes() for place in (checkpoint, old)]
    assert written[0] == written[1]


def test_what_can_t_be_trained_is_refused_before_the_first_step(text_file, tmp_path):
    with pytest.raises(InputError, match="OPTForCausalLM: can't be cut into stages"):
        train(hf_run(write_model(tmp_path / "opt", "opt"), text_file), tmp_path / "run")
    folder = write_model(tmp_path / "gemma", "gemma3_text")
    run = hf_run(folder, text_file)
    untied = run.with_plan(model=run.plan.model.model_copy(update={"tied_embeddings": False}))
    with pytest.raises(InputError, match=r"embedding and head: say model\.tied_embeddings = true"):
        train(untied, tmp_path / "untied")


@pytest.mark.slow
def test_times_of_a_models_parts_are_measured_on_its_own_code(text_file, tmp_path):
    folder = write_model(tmp_path / "model", "mixtral")
    run = hf_run(folder, text_file)
    with one_thread():
        for on_chunks, stacks in ((False, Stacks), (True, ChunkStacks)):
            request = ProfileRequest(
                model=run.plan.model, training=run.plan.training, device="cpu", seconds=0.01, sequences=on_chunks
            )
            found = stacks(request).times()
            seconds = found.forward_s["three_layers"] if on_chunks else found[0]["three_layers"].values()
            assert min(seconds) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_experts_given_by_numbers_train_from_their_seed_as_in_one_process(kind, text_file, tmp_path):
    model = MODELS[kind]
    run = make_run(text_file, model=model, method="zb-h1", num_steps=4)
    whole = HuggingFaceSlice(build(config_of_model(model), torch.float32), StageSlice(0, model.num_layers, True, True))
    initialise(whole, run.plan.training.seed, model.num_layers)
    save(dict(whole.named_parameters()), model, tmp_path / "model")
    with one_thread():
        train(run.with_plan(model=model), tmp_path / "run")
        losses, trained = train_whole(tmp_path / "model", run)
    assert losses_of(tmp_path / "run") == pytest.approx(losses, rel=1e-5)
    assert export_to_hugging_face(tmp_path / "run", tmp_path / "out") == 4
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert relative_error(loaded(TOKENS).logits, trained(TOKENS).logits) < 1e-3
