"""Adapters (LoRA) in stages: gradients of peft's own model in every order, and folders that peft loads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from engine.stages.test_training import TOKENS, hf_run, losses_of, write_model
from farpipe.core.errors import InputError
from farpipe.core.schedule.library import order
from farpipe.core.spec import Lora
from farpipe.engine.checkpoint.export import export_to_hugging_face
from farpipe.engine.checkpoint.files import Checkpoint
from farpipe.engine.checkpoint.folders import folder_of
from farpipe.engine.checkpoint.manifest import Manifest
from farpipe.engine.data.batches import Batch
from farpipe.engine.executor.executor import Executor, stage_ranks
from farpipe.engine.executor.work import batches_of
from farpipe.engine.stages.adapters import add_adapters, their_name
from farpipe.engine.stages.hugging_face import HuggingFaceSlice
from farpipe.engine.stages.self_check import NUM_LAYERS, make_stages, one_thread, random_model, reference_loss, shrunk
from farpipe.engine.stages.slices import StageSlice
from farpipe.engine.stages.stage import TorchStage
from in_process import run_ranks
from small_models import LLAMA, placed_problem, relative_error
from trainings import make_run, train

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks for it

FUSED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
LATENT = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
MODULES = {
    "llama": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "gpt2": "attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj",
    "phi3": "qkv_proj o_proj gate_up_proj down_proj",
    "gpt_neox": "query_key_value attention.dense dense_h_to_4h dense_4h_to_h",
    "gemma3_text": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "mixtral": "q_proj k_proj v_proj o_proj",
    "deepseek_v3": "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj",
}
"""What peft calls the maps that get an adapter, by type of model."""
TARGETS = {"mixtral": ("q_proj", "k_proj", "v_proj", "o_proj"), "deepseek_v3": LATENT} | dict.fromkeys(
    ("gpt2", "phi3", "gpt_neox"), FUSED
)
"""What a job calls them; None: all."""
FLAT, VEE, ROUND = (0, 1), (0, 1, 1, 0), (0, 1, 0, 1)
ORDERS = {"1f1b": FLAT, "zb-h1": FLAT, "zb-2p": FLAT, "wave": VEE, "interleaved": ROUND}
NUM_MICROBATCHES = 4


def lora_of(name):
    return Lora(rank=3, alpha=5, target_modules=TARGETS.get(name))


def with_peft(whole, name):
    """The model with peft's adapters, which it puts where its own settings say."""
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=MODULES[name].split(), task_type="CAUSAL_LM", fan_in_fan_out=name == "gpt2"
    )
    return peft.get_peft_model(whole, config, autocast_adapter_dtype=False)


def adapted_stages(whole, batch, recompute, num_stages, lora):
    """Stages of copies of `whole` with adapters, all of whose values are random numbers."""
    stages = make_stages(whole, batch, recompute, num_stages)
    for number, stage in enumerate(stages):
        add_adapters(stage.module, lora, seed=1, compute=torch.float64)
        for parameter in stage.module.trained_parameters.values():
            parameter.data.normal_(0, 0.3)
        stages[number] = TorchStage(stage.module, stage.boundary)
        stages[number].begin_step(batch)
    return stages


@pytest.mark.parametrize(
    ("name", "method", "recompute"),
    [
        *((name, "zb-h1", "none") for name in MODULES),
        *(("llama", method, "full") for method in ORDERS if method != "zb-h1"),
        *(
            pytest.param(name, method, "full", marks=[pytest.mark.slow, pytest.mark.nightly])
            for name in MODULES
            for method in ORDERS
        ),
    ],
)
def test_stages_have_the_gradients_of_pefts_model_in_every_order(name, method, recompute):
    schedule = order(method, placed_problem(ORDERS[method], NUM_MICROBATCHES))
    ranks = stage_ranks(schedule)
    with one_thread():
        torch.manual_seed(0)
        whole = random_model(shrunk(AutoConfig.for_model(name)), torch.float64)
        tokens = torch.randint(64, (NUM_MICROBATCHES, 2, 12))
        batch = Batch(tokens, tokens.roll(-1, -1))
        stages = adapted_stages(whole, batch, recompute, len(ranks), lora_of(name))
        values = {n: p for stage in stages for n, p in stage.module.trained_parameters.items()}

        def work(peers):
            Executor(schedule, {s: stages[s] for s, rank in enumerate(ranks) if rank == peers.rank}, peers).run(0)

        run_ranks(len(schedule.ranks), work)
        reference = with_peft(whole, name)
        trained = {n: p for n, p in reference.named_parameters() if p.requires_grad}
        assert {their_name(n) for n in values} == {n.replace(".default.", ".") for n in trained}
        for parameter, value in values.items():
            trained[f"base_model.model.{parameter}"].data.copy_(value)
        expected = reference_loss(reference.get_base_model(), batch)
    assert abs(stages[-1].loss - expected) <= 1e-10 * expected
    for parameter, value in values.items():
        assert relative_error(value.grad, trained[f"base_model.model.{parameter}"].grad) <= 1e-10, parameter
    for stage in stages:
        frozen = [n for n, p in stage.module.named_parameters() if not p.requires_grad]
        assert frozen, "the base"
        assert all(dict(stage.module.named_parameters())[n].grad is None for n in frozen)
        assert stage.store.num_bytes == 0


def test_only_adapters_wait_for_w():
    with one_thread():
        whole = random_model(shrunk(AutoConfig.for_model("llama")), torch.float64)
        tokens = torch.randint(64, (1, 2, 12))
        (stage,) = adapted_stages(whole, Batch(tokens, tokens.roll(-1, -1)), "none", 1, lora_of("llama"))
        stage.forward(0, None)
        stage.input_grad(0, None)
        waiting = stage.store._waiting[0]
    assert len(waiting) == 2 * 7 * NUM_LAYERS
    assert {min(deferred.layer.weight.shape) for deferred in waiting} == {3}, "matrices of that rank alone"


def peft_loop(folder, run, name):
    """The same steps by a loop over peft's own model: losses and the model."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = with_peft(base, name).eval()
    whole = HuggingFaceSlice(AutoModelForCausalLM.from_pretrained(folder), StageSlice(0, NUM_LAYERS, True, True))
    add_adapters(whole, lora_of(name), run.plan.training.seed, torch.float32)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for parameter, value in whole.trained_parameters.items():
        trained[f"base_model.model.{parameter}"].data.copy_(value)
    training = run.plan.training
    adamw = torch.optim.AdamW(
        trained.values(), lr=training.learning_rate, betas=training.betas, weight_decay=training.weight_decay
    )
    batches, losses = batches_of(run), []
    for step in range(run.num_steps):
        batch, total = batches.batch(step), 0.0
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
            logits = model(input_ids=tokens, use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            (loss / batch.num_target_tokens).backward()
            total += float(loss.detach()) / batch.num_target_tokens
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(trained.values(), training.clip_norm)
        adamw.step()
        adamw.zero_grad()
    return losses, model


def load_with_peft(folder):
    """Base and adapters, as peft's users load them: without farpipe."""
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_training_resumed_under_another_cut_is_that_of_pefts_loop(name, text_file, tmp_path):
    folder = write_model(tmp_path / "model", name, **({"tie_word_embeddings": True} if name == "llama" else {}))
    lora = {"lora": lora_of(name)}
    with one_thread():
        train(hf_run(folder, text_file, num_steps=3, num_replicas=2, **lora), tmp_path / "first")
        rest = hf_run(folder, text_file, num_steps=8, placement=ROUND, method="interleaved", **lora)
        train(rest.model_copy(update={"resume": str(tmp_path / "first")}), tmp_path / "rest")
        losses, model = peft_loop(folder, rest, name)
        assert losses_of(tmp_path / "first") + losses_of(tmp_path / "rest") == pytest.approx(losses, rel=1e-5)
        assert losses[-1] < losses[0] - 0.01
        assert export_to_hugging_face(tmp_path / "rest", tmp_path / "out") == 8
        loaded = load_with_peft(tmp_path / "out").eval()
        assert relative_error(loaded(TOKENS).logits, model(TOKENS).logits) < 1e-3
    files = [path.stat().st_size for path in (tmp_path / "rest" / "checkpoints").rglob("*.safetensors")]
    assert sum(files) < (folder / "model.safetensors").stat().st_size, "checkpoints have the adapters alone"


@pytest.mark.slow
def test_zero_and_bf16_train_adapters_as_one_replica_does(text_file, tmp_path):
    folder, found = write_model(tmp_path / "model", "llama"), {}
    with one_thread():
        for label, options in {
            "one": {},
            "replicas": {"num_replicas": 2},
            "zero": {"num_replicas": 2, "zero": 1},
        }.items():
            train(hf_run(folder, text_file, precision="bf16", lora=lora_of("llama"), **options), tmp_path / label)
            found[label] = losses_of(tmp_path / label)
    assert found["zero"] == found["replicas"]
    assert found["one"] == pytest.approx(found["replicas"], rel=1e-3)


@pytest.mark.slow
def test_adapters_of_a_model_given_by_numbers_come_with_their_base(text_file, tmp_path):
    run = make_run(text_file, model=LLAMA, num_steps=4, lora=lora_of("llama"))
    with one_thread():
        train(run, tmp_path / "run")
        export_to_hugging_face(tmp_path / "run", tmp_path / "out")
        loaded = load_with_peft(tmp_path / "out").eval()
        last = folder_of(tmp_path / "run" / "checkpoints", 4)
        weights = Checkpoint(last, Manifest.load(last))
        assert weights.manifest.trained.lora == lora_of("llama")
        batch = batches_of(run).batch(3)
        total = sum(
            float(
                functional.cross_entropy(
                    loaded(input_ids=tokens).logits.flatten(0, 1), targets.flatten(), reduction="sum"
                ).detach()
            )
            for tokens, targets in zip(batch.tokens, batch.targets, strict=True)
        )
    assert total / batch.num_target_tokens < losses_of(tmp_path / "run")[3], "one more update, on this very batch"


def test_what_gets_no_adapter_is_named(tmp_path):
    def refusal(name, **fields):
        whole = HuggingFaceSlice(
            random_model(shrunk(AutoConfig.for_model(name)), torch.float32), StageSlice(0, NUM_LAYERS, True, True)
        )
        with pytest.raises(InputError) as caught:
            add_adapters(whole, Lora(rank=2, **fields), 0, torch.float32)
        return str(caught.value)

    assert "the MLP of model.layers.0 is one of experts" in refusal("mixtral")
    assert "the MLP of model.layers.0 is one of experts" in refusal("mixtral", target_modules=["o_proj", "down_proj"])
    assert "model.layers.0 has no linear_qkv; its linear maps are self_attn.q_proj, self_attn.k_proj, " in refusal(
        "llama", target_modules=["linear_qkv"]
    )
    assert "model.layers.0 has no linear_q_up_proj; its linear maps are self_attn.q_proj, " in refusal(
        "llama", target_modules=["linear_q_up_proj"]
    )


def test_adapters_of_another_rank_are_another_training(text_file, tmp_path):
    first = make_run(text_file, model=LLAMA, num_steps=1, lora=lora_of("llama"))
    with one_thread():
        train(first, tmp_path / "first")
        other = make_run(text_file, model=LLAMA, num_steps=2, lora=Lora(rank=2))
        with pytest.raises(InputError, match="another lora"):
            train(other.model_copy(update={"resume": str(tmp_path / "first")}), tmp_path / "other")


@pytest.mark.slow
def test_a_base_that_changed_between_two_starts_is_noticed(text_file, tmp_path):
    folder = write_model(tmp_path / "model", "llama")
    with one_thread():
        train(hf_run(folder, text_file, num_steps=1, lora=lora_of("llama")), tmp_path / "first")
        again = hf_run(folder, text_file, num_steps=2, lora=lora_of("llama"))
        again = again.model_copy(update={"resume": str(tmp_path / "first")})
        train(again, tmp_path / "unchanged")
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1.0
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(InputError, match=r"model\.layers\.1, which no checkpoint has, is no longer the same"):
            train(again, tmp_path / "changed")
