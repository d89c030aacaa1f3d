"""Settings of DeepSpeed, and of GPT-NeoX, which has Megatron's and DeepSpeed's in one file."""

import json

import pytest
import yaml

from farpipe.core.errors import InputError
from farpipe.core.spec import parse_job
from farpipe.interop.files import draft_of_devices, read_draft

# Keys and values as configs/2-7B.yml and configs/llama2/7B.yml of EleutherAI/gpt-neox have them, smaller.
NEOX = {
    "pipe_parallel_size": 2, "model_parallel_size": 2, "num_layers": 8, "hidden_size": 512, "num_attention_heads": 8,
    "seq_length": 1024, "max_position_embeddings": 1024, "norm": "rmsnorm", "pos_emb": "rotary",
    "no_weight_tying": True, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
    "zero_optimization": {"stage": 1, "overlap_comm": True, "allgather_bucket_size": 5e8}, "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 2e-4, "betas": [0.9, 0.95], "eps": 1e-8}}, "weight_decay": 0.1,
    "fp16": {"fp16": True, "enabled": True, "loss_scale": 0, "min_loss_scale": 1}, "train_iters": 320000,
    "checkpoint_activations": True, "init_method": "small_init", "data_impl": "mmap", "make_vocab_size_divisible_by": 1,
    "vocab_size": 50432,
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    def draft_of(**tables):
        paths = [tmp_path / name.replace("_", ".") for name in tables]
        for path, data in zip(paths, tables.values(), strict=True):
            path.write_text(json.dumps(data) if path.suffix == ".json" else yaml.safe_dump(data))
        return read_draft(paths)

    return draft_of


@pytest.mark.parametrize("spell", [str, lambda key: key.replace("_", "-"), lambda key: f"--{key.replace('_', '-')}"])
def test_gpt_neox_is_read_in_both_its_spellings(spell, read):
    names = {key if isinstance(value, dict) else spell(key): value for key, value in NEOX.items()}
    draft = draft_of_devices(read(x_yml=names), 16)
    job = parse_job(draft.to_toml("a100"))
    assert (job.model.num_layers, job.model.ffn_hidden, job.model.tied_embeddings, job.model.norm) == (
        *(8, 2048, False, "rmsnorm"),
    )
    assert (job.layout.pipeline, job.layout.tensor, job.layout.data) == (2, 2, 4)
    training = job.training
    assert (training.microbatch_size, training.global_batch, training.zero, training.overlap) == (4, 4 * 8 * 4, 1, True)
    assert (training.precision, training.recompute, training.betas) == ("fp16", "full", (0.9, 0.95))
    assert (training.dropout, training.flash_attention) == (False, False), "defaults of GPT-NeoX"
    assert (draft.form, draft.shapes, draft.changes, draft.not_understood) == ("GPT-NeoX", {}, [], [])


@pytest.mark.parametrize(
    ("settings", "ffn_hidden", "is_gated"),
    [
        ({"activation": "swiglu", "intermediate_size": 4128, "mlp_multiple_of": 256}, 1536, True),
        ({"activation": "swiglu"}, 682, True),
        ({"intermediate_size": 3000}, 3000, False),
        ({"expansion_factor": 2}, 1024, False),
    ],
)
def test_the_width_of_an_mlp_of_gpt_neox(settings, ffn_hidden, is_gated, read):
    draft = read(x_yml=NEOX | settings)
    assert (draft.value("model", "ffn_hidden"), draft.value("model", "gated_mlp")) == (ffn_hidden, is_gated)


@pytest.mark.parametrize(
    ("config", "flash"),
    [([[["flash"], 8]], True), ([[["global"], 8]], False), ([[["flash", "global"], "all"]], False)],
)
def test_attention_of_gpt_neox(config, flash, read):
    assert read(x_yml=NEOX | {"attention_config": config}).value("training", "flash_attention") is flash


@pytest.mark.parametrize("config", [[[["mamba"], 8]], [[["local", "global"], "all"]], [], [[]], "flash"])
def test_other_attention_of_gpt_neox_stops(config, read):
    with pytest.raises(InputError, match="attention_config"):
        read(x_yml=NEOX | {"attention_config": config}).expect_understood()


def test_bfloat16_of_early_versions(read):
    half = {"fp16": {"enabled": True, "type": "bfloat16"}}
    assert read(x_yml=NEOX | half).value("training", "precision") == "bf16"
    alone = {key: value for key, value in NEOX.items() if key != "fp16"} | {"precision": "bfloat16"}
    assert read(x_yml=alone).value("training", "precision") == "bf16"


TRAINER = {"model_name_or_path": "gpt2", "max_length": 512}


def test_a_batch_that_does_not_fit_the_devices_names_the_degrees(read):
    """Eight devices, and a batch of four replicas: a degree stands in a script that was not given."""
    whole = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    draft = read(ds_json=whole, a_yaml=TRAINER)
    with pytest.raises(
        InputError, match=r"train_batch_size: 32 is not 8 .+ on 8 replicas; .+tensor, pipeline, context"
    ):
        draft_of_devices(draft, 8)
    assert draft_of_devices(read(ds_json=whole, a_yaml=TRAINER), 4).value("layout", "data") == 4


def test_degrees_of_autotp_and_ulysses(read):
    deepspeed = {
        "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2},
        "sequence_parallel_size": 4,
    }
    draft = draft_of_devices(read(ds_json=deepspeed, a_yaml=TRAINER), 16)
    assert [draft.value("layout", key) for key in ("tensor", "context", "context_exchange", "data")] == [
        *(2, 4, "ulysses", 2),
    ]


def test_deepspeed_inside_the_arguments_of_the_trainer(read):
    inner = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "train_micro_batch_size_per_gpu": "auto",
    }
    draft = read(a_yaml=TRAINER | {"deepspeed": inner, "per_device_train_batch_size": 2})
    assert draft.value("training", "zero") == 3
    assert len(draft.changes) == 1


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_config_file"])
def test_a_file_with_more_settings_that_was_not_given_is_said_first(name, read):
    trainer = TRAINER | {name: "configs/ds.json"}
    assert read(a_yaml=trainer).changes == [f"{name}: ds.json has more settings, and was not given"]
    both = read(a_yaml=trainer, ds_json={"zero_optimization": {"stage": 3}})
    assert (both.changes, both.value("training", "zero")) == ([], 3)
