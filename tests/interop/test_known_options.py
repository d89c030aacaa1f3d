"""Options that no reader takes: a shape stops the import, a change is said first, what has no effect is named."""

import json
import re
import tomllib
from importlib.resources import files as resources

import pytest
import yaml

from farpipe.core.errors import InputError, UsageError
from farpipe.interop.files import draft_of_devices, read_draft

pytest.importorskip("yaml")

SCRIPT = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 "
    "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 16 --bf16 --vocab-size 320"
)
BRIDGE = {
    "model": {
        "num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 512, "vocab_size": 32000,
        "position_embedding_type": "rope",
    },
    "train": {"micro_batch_size": 1, "global_batch_size": 16},
}  # fmt: skip
TRAINER = {"model_name_or_path": "gpt2", "per_device_train_batch_size": 2, "max_length": 512, "num_processes": 8}
TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 512\n'
DEEPSPEED = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}


@pytest.fixture
def read(tmp_path):
    """Reads one file of settings: a script, tables by the name of the file, or text."""

    def draft_of(content, name="x.sh", **known):
        path = tmp_path / name
        is_text = isinstance(content, str)
        path.write_text(
            content if is_text else json.dumps(content) if name.endswith("json") else yaml.safe_dump(content)
        )
        return read_draft([path], known=known)

    return draft_of


@pytest.mark.parametrize(
    "options",
    [
        "--moe-intermediate-size 896",
        "--n-routed-experts 64",
        "--linear-attention-type gated_delta_net",
        "--spec mymodels.layers hybrid_stack_spec",
        "--multi-query-group-num 2",
        "--num-kv-heads 2",
        "--mlp-width 2048",
        "--hybrid-layer-pattern M*M*",
        "--mamba-state-dim 64",
        "--latent-dim 256",
        "--mtp-depth 1",
        "--d-model 1024",
        "--activation-kind swiglu",
        "--model-builder my.pkg.build_model",
        "--heterogeneous-layers-config-path x.json",
        "--moe-layer-freq 2 --num-experts 8",
        "--kv-channels $KV",
        "--attention-head-type grouped",
        "--sequence-tensor-parallel 4",
        "--num-micro-batch-accumulation 8",
    ],
)
def test_an_option_that_may_say_a_shape_or_a_degree_stops_the_import(options, read):
    draft = read(f"{SCRIPT} {options}")
    option = next(word for word in options.split() if word.removeprefix("--").replace("-", "_") in draft.shapes)
    with pytest.raises(InputError, match=rf"(?s){option}, line 1: .+--accept"):
        draft.expect_understood()
    draft.accept([option])
    draft.expect_understood()
    settled = draft_of_devices(draft, None)
    assert option in settled.to_toml("h100").splitlines()[1], "said in the first lines"
    assert settled.to_data()["accepted"]


@pytest.mark.parametrize(
    "options",
    [
        "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss",
        "--vocab-file v.json --merge-file m.txt",
        "--transformer-impl transformer_engine --eval-micro-batch-size 2",
        "--some-new-flag 7 --experiment-name moe-1",
        "--new-expert-kind none --shadow-layers 0 --ulysses-degree 1",
        "--qk-head-dim 128 --kv-lora-rank 512",
    ],
)
def test_names_without_a_shape_options_that_are_off_and_known_ones_stop_nothing(options, read):
    read(f"{SCRIPT} {options}").expect_understood()


def test_accepting_what_stops_nothing_is_refused(read):
    with pytest.raises(UsageError, match=r"--accept foo: .+; there are moe_width"):
        read(f"{SCRIPT} --moe-width 7").accept(["foo"])


@pytest.mark.parametrize(
    ("content", "name", "place"),
    [
        ({**BRIDGE, "model": {**BRIDGE["model"], "attention": {"kind": "linear"}}}, "x.yaml", "model.attention.kind"),
        ({**BRIDGE, "model": {**BRIDGE["model"], "_target_": "nemo.llm.mamba.MambaModel"}}, "x.yaml", "model._target_"),
        (
            {**BRIDGE, "model": {**BRIDGE["model"], "transformer_layer_spec": "mine.spec"}},
            "x.yaml",
            "transformer_layer_",
        ),
        ({**TRAINER, "ring_attention_degree": 2}, "x.yaml", "ring_attention_degree"),
        ({**TRAINER, "num_hidden_layers": 4}, "x.yaml", "num_hidden_layers"),
        ({**DEEPSPEED, "sparse_attention": {"mode": "fixed"}}, "x.json", "sparse_attention.mode"),
        ({**DEEPSPEED, "pipeline": {"stages": 4}}, "x.json", "pipeline.stages"),
        (TITAN + "[parallelism]\nulysses_degree = 2\n", "x.toml", "parallelism.ulysses_degree"),
        (TITAN.replace("[training]", "n_layers = 4\n[training]"), "x.toml", "model.n_layers"),
        (TITAN.replace("[training]", 'converters = ["lora"]\n[training]'), "x.toml", "model.converters"),
    ],
)
def test_shapes_in_files_of_every_framework_stop_the_import(content, name, place, read):
    with pytest.raises(InputError, match=place):
        read(content, name).expect_understood()


@pytest.mark.parametrize(
    ("content", "name", "place"),
    [
        (f"{SCRIPT} --fp32-residual-connection", "x.sh", "--fp32-residual-connection"),
        (f"{SCRIPT} --optimizer-cpu-offload", "x.sh", "--optimizer-cpu-offload"),
        (f"{SCRIPT} --optimizer sgd", "x.sh", "--optimizer"),
        (f"{SCRIPT} --no-use-flash", "x.sh", "--no-use-flash"),
        (f"{SCRIPT} --quantized-allgather", "x.sh", "--quantized-allgather"),
        ({**TRAINER, "optimizer_state_8bit": True}, "x.yaml", "optimizer_state_8bit"),
        (f"{SCRIPT} --num-distributed-optimizer-instances 2", "x.sh", "--num-distributed-optimizer-instances"),
        (f"{SCRIPT} --exp-avg-dtype fp8", "x.sh", "--exp-avg-dtype"),
        (f"{SCRIPT} --fine-grained-activation-offloading", "x.sh", "--fine-grained-activation-offloading"),
        (f"{SCRIPT} --no-overlap-p2p-communication", "x.sh", "--no-overlap-p2p-communication"),
        ({**BRIDGE, "optimizer": {"optimizer": "muon"}}, "x.yaml", "optimizer.optimizer"),
        ({**TRAINER, "optim": "paged_adamw_8bit"}, "x.yaml", "optim"),
        ({**TRAINER, "optim": "adafactor"}, "x.yaml", "optim"),
        ({**TRAINER, "tf32": True}, "x.yaml", "tf32"),
        ({**TRAINER, "fsdp": "full_shard offload"}, "x.yaml", "fsdp"),
        (
            {**TRAINER, "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}},
            "x.yaml",
            "fsdp_config.fsdp_sharding_",
        ),
        ({**TRAINER, "activation_offloading": True}, "x.yaml", "activation_offloading"),
        ({**TRAINER, "dp_replicate_size": 2, "dp_shard_size": 4}, "x.yaml", "dp_replicate_size"),
        ({**DEEPSPEED, "zero_optimization": {"zero_hpz_partition_size": 8}}, "x.json", "zero_optimization.zero_hpz"),
        (
            {**DEEPSPEED, "zero_optimization": {"zero_quantized_weights": True}},
            "x.json",
            "zero_optimization.zero_quant",
        ),
        ({**DEEPSPEED, "zero_optimization": {"mics_shard_size": 8}}, "x.json", "zero_optimization.mics_shard_size"),
        (
            {**DEEPSPEED, "zero_optimization": {"offload_param": {"device": "nvme"}}},
            "x.json",
            "zero_optimization.offload",
        ),
        ({**DEEPSPEED, "optimizer": {"type": "OneBitAdam"}}, "x.json", "optimizer.type"),
        (
            {**DEEPSPEED, "activation_checkpointing": {"cpu_checkpointing": True}},
            "x.json",
            "activation_checkpointing.cpu",
        ),
        (TITAN + "enable_cpu_offload = true\n", "x.toml", "training.enable_cpu_offload"),
        (TITAN + '[optimizer]\nname = "Muon"\n', "x.toml", "optimizer.name"),
    ],
)
def test_what_changes_bytes_or_seconds_and_is_not_planned_is_said_in_the_first_lines(content, name, place, read):
    draft = read(content, name)
    assert [text for text in draft.changes if text.startswith(place)], draft.changes
    assert not [text for text in draft.without_effect if text.startswith(place)]
    lines = draft_of_devices(draft, 8).to_toml("h100").splitlines()
    assert any(line.startswith(f"# Not planned, though it changes a step: {place}") for line in lines[1:3])


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (f"{SCRIPT} --num-distributed-optimizer-instances 1 --optimizer adam --exp-avg-dtype fp32", "x.sh"),
        ({**TRAINER, "bf16": True, "tf32": True}, "x.yaml"),
        ({**TRAINER, "optim": "adamw_torch_fused", "fsdp_config": {"fsdp_offload_params": False}}, "x.yaml"),
        ({**DEEPSPEED, "zero_optimization": {"offload_param": {"device": "none"}, "mics_shard_size": -1}}, "x.json"),
        ({**DEEPSPEED, "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen"}}, "x.json"),
        (TITAN + 'enable_cpu_offload = false\n[optimizer]\nname = "AdamW"\n', "x.toml"),
    ],
)
def test_what_is_switched_off_changes_nothing(content, name, read):
    draft = read(content, name)
    assert (draft.changes, draft.shapes, draft.not_understood) == ([], {}, [])


@pytest.mark.parametrize(
    ("content", "name", "flash"),
    [
        (f"{SCRIPT} --transformer-impl local", "x.sh", False),
        (f"{SCRIPT} --transformer-impl local --use-flash-attn", "x.sh", True),
        (f"{SCRIPT} --attention-backend unfused", "x.sh", False),
        (f"{SCRIPT} --deepspeed", "x.sh", False),
        (f"{SCRIPT} --deepspeed --use-flash-attn-v2", "x.sh", True),
        (f"export NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0\n{SCRIPT}", "x.sh", False),
        (f"export NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=1\n{SCRIPT}", "x.sh", True),
        (SCRIPT, "x.sh", True),
        (
            {**BRIDGE, "model": {**BRIDGE["model"], "attention_backend": {"_target_": "m.AttnBackend", "_args_": [3]}}},
            "x.yaml",
            False,
        ),
        ({**TRAINER, "attn_implementation": "eager"}, "x.yaml", False),
        ({**TRAINER, "model_init_kwargs": {"attn_implementation": "flash_attention_2"}}, "x.yaml", True),
        ({**TRAINER, "flash_attn": "disabled"}, "x.yaml", False),
        ({**TRAINER, "eager_attention": True}, "x.yaml", False),
        (TRAINER, "x.yaml", True),
    ],
)
def test_attention_that_keeps_its_scores_is_in_the_job(content, name, flash, read):
    assert read(content, name).value("training", "flash_attention") is flash


@pytest.mark.parametrize("device", ["v100-32gb", "v100", "t4", "titan-rtx", "rtx-2080-ti"])
def test_a_device_without_flash_attention_keeps_scores_whatever_the_file_says(device, read):
    draft = draft_of_devices(read(f"{SCRIPT} --use-flash-attn".replace("--bf16", "--fp16")), 8, device)
    assert draft.value("training", "flash_attention") is False
    assert any("has no FlashAttention 2" in note for note in draft.notes)
    assert draft_of_devices(read(SCRIPT), 8, "l4").value("training", "flash_attention") is True


@pytest.mark.parametrize("framework", ["megatron", "neox", "deepspeed", "trainer", "torchtitan"])
def test_options_are_named_one_by_one(framework):
    table = tomllib.loads(resources("farpipe.interop").joinpath("known_options.toml").read_text())[framework]
    named = table["without_effect"].split() + table.get("on_their_own", "").split()
    changes = [name for names in table["changes"].values() for name in names.split()]
    assert all(re.fullmatch(r"[\w.]+", name) for name in named + changes)
    assert len({*named, *changes}) == len(named + changes), "one meaning each"
