"""Files of settings: whose they are, several together, torchtitan's, DeepSpeed's and Hugging Face's."""

import json
import tomllib

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from farpipe import planning
from farpipe.core.errors import InputError
from farpipe.core.spec import Training, parse_job
from farpipe.interop.files import draft_of_devices, read_draft
from farpipe.interop.hugging_face import preset_of
from farpipe.interop.torchtitan import read_saved_torchtitan, read_torchtitan
from farpipe.interop.torchtitan_config import torchtitan_config, torchtitan_flags
from planning.planner.jobs import device, job, site

LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-05, "hidden_act": "silu",
}  # fmt: skip
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "weight_decay": 0.1}},
}  # fmt: skip
TRAINER = "max_seq_length: 4096\nmax_steps: 100\nlearning_rate: 1e-4\ngradient_checkpointing: true\noutput_dir: x\n"
ACCELERATE = "compute_environment: LOCAL_MACHINE\nnum_processes: 16\nnum_machines: 2\nmixed_precision: bf16\n"
TITAN = """\
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[training]
local_batch_size = 2
seq_len = 8192
steps = 10
strange = 3
[parallelism]
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
[metrics]
log_freq = 1
"""


@pytest.fixture
def files(tmp_path):
    """Writes files and returns their paths."""

    def write(**texts):
        paths = [tmp_path / name.replace("_", ".") for name in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text if isinstance(text, str) else json.dumps(text))
        return paths

    return write


def test_a_model_a_training_and_devices_from_four_files(files):
    paths = files(config_json=LLAMA, ds_json=DEEPSPEED, args_yaml=TRAINER, default_yaml=ACCELERATE)
    draft = draft_of_devices(read_draft(paths), None)
    read = parse_job(draft.to_toml("h100"))
    assert read.model.num_params == pytest.approx(1.24e9, rel=0.01)
    assert (read.training.zero, read.training.global_batch, read.training.recompute) == (2, 4 * 8 * 16, "full")
    assert read.training.sequence_length == 4096
    assert (read.cluster.sites[0].num_devices, read.cluster.sites[0].devices_per_machine) == (16, 8)
    assert draft.changes == ["zero_optimization.offload_optimizer.device: cpu: state waits in the host's memory"]


WORDS = ("model", "train", "trainer", "model_type", "output_dir", "num_processes", "train_batch_size", "extends")


@pytest.mark.parametrize("value", [7, "x", {"a": 1, "b": [1]}, [{"a": 1}, 3], None, 0.5])
@pytest.mark.parametrize("word", [*WORDS, "model_spec", "zero_optimization", "start", "nodes", "resources", "kind"])
def test_one_key_tells_no_framework(word, value, files):
    for name in ("x_json", "x_yaml"):
        with pytest.raises(InputError, match=r"no file of a known kind \(keys"):
            read_draft(files(**{name: json.dumps({word: value, "the": 1})}))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({word: number for number, word in enumerate((*WORDS, *"abcdefghijkl"))}, "keys model, train"),  # a vocabulary
        ({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 1}}, "added_tokens": []}, "keys version, model"),
        ({"extends": "./base.json", "compilerOptions": {"strict": True}}, "keys extends, compilerOptions"),
        ({"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "spec": {}}, "a PyTorchJob of Kubernetes, kubeflow"),
        ({"apiVersion": "v1", "kind": "Pod", "spec": {}}, "a Pod of Kubernetes, v1: only records of jobs that ran"),
    ],
)
def test_a_file_of_another_kind_is_told_with_what_was_tried(data, words, files):
    with pytest.raises(InputError, match=f"{words}.*tried: settings.*logs.*links.*traces.*lists"):
        read_draft(files(x_json=data))


def test_files_that_contradict_each_other_are_refused(files):
    with pytest.raises(InputError, match=r"training\.precision: 'bf16' by bf16\.enabled, but 'fp32' by mixed"):
        read_draft(files(ds_json=DEEPSPEED, acc_yaml=ACCELERATE.replace("bf16", "no")))


def test_the_number_of_devices_from_outside_counts(files):
    draft = draft_of_devices(read_draft(files(config_json=LLAMA, ds_json=DEEPSPEED)), 64)
    assert (draft.num_devices.value, draft.value("layout", "data")) == (64, 64)
    assert draft.missing() == ["training.sequence_length"]


def test_nvlink_reaches_over_a_rack(files):
    paths = files(config_json=LLAMA, ds_json=DEEPSPEED)
    assert draft_of_devices(read_draft(paths), 512, "gb200").num_devices_per_machine.value == 64
    assert draft_of_devices(read_draft(paths), 144, "gb300").num_devices_per_machine.value == 72
    assert draft_of_devices(read_draft(paths), 64, "h100").num_devices_per_machine is None


def test_torchtitan(files):
    draft = draft_of_devices(read_draft(files(job_toml=TITAN)), None)
    read = parse_job(draft.to_toml("h100"))
    assert read.model.name == "llama-3-8b"
    assert (read.layout.data, read.layout.tensor, read.cluster.sites[0].num_devices) == (8, 2, 16)
    training = read.training
    assert (training.zero, training.matmul, training.recompute, training.kernels) == (3, "fp8", "full", "eager")
    assert (training.microbatch_size, training.global_batch) == (2, 16)
    assert draft.not_understood == ["training.strange: 3"]


def saved(flags, recompute):
    """What torchtitan 0.3 saves of a debug model that is started with these options, but for what is not read."""
    tables = {"model_spec": {"name": "llama3", "flavor": "debugmodel", "model": {}}, "training": {}, "parallelism": {}}
    for line in flags.splitlines():
        place, _, text = line.removeprefix("--").partition(" ")
        table, _, key = place.partition(".")
        tables[table][key] = int(text) if text.isdigit() else text or True
    tables["optimizer"] = {"param_groups": [{"optimizer_kwargs": {"lr": 8e-4}}]}
    tables["activation_checkpoint"] = {"none": None, "full": {"debug": False}}[recompute]
    return tables


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([2, 4]),
    st.sampled_from(["none", "full"]),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([512, 1024, 2048]),
    st.sampled_from([0, 1]),
)
def test_a_plan_goes_to_torchtitan_and_comes_back(pipeline, tensor, data, recompute, batch, length, zero):
    assume(zero or pipeline * tensor == 1)  # torchtitan shards replicas beside other degrees
    training = Training(sequence_length=length, global_batch=batch, microbatch_size=1, zero=zero, recompute=recompute)
    pins = {"pipeline": pipeline, "data": data, "tensor": tensor, "virtual": 1, "context": 1}
    rates = device().model_copy(update={"peak_flops": {"bf16": 312e12, "fp32": 20e12}})
    plan = planning.plan(job([site("a", pipeline * tensor * data, rates)], (), training, "1f1b", **pins))
    draft = read_torchtitan(tomllib.loads(torchtitan_config(plan)), "x.toml")
    later = read_saved_torchtitan(saved(torchtitan_flags(plan), recompute), "x.json")
    for found in (draft, later):
        for key in ("pipeline", "tensor", "data", "context"):
            assert found.value("layout", key) == getattr(plan.layout, key), key
        for key in ("sequence_length", "global_batch", "precision", "recompute"):
            assert found.value("training", key) == getattr(plan.job.training, key), key
    assert later.not_understood == []
    assert draft.value("training", "zero") == zero
    if pipeline > 1:
        assert draft.value("layout", "layers") == [place.num_layers for place in plan.placements]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x_json", "{", "x.json"),
        ("x_json", "[1]", "no file of a known kind .list at the top.*tried: settings.*logs.*links.*traces.*lists"),
        ("x_json", '{"model_spec": 3, "training": {}}', "x.json: model_spec: expected a table, found 3"),
        ("x_json", '{"a": 1}', "no file of a known kind \\(keys a; --format names a framework"),
        ("x_yaml", "a: [1", "not YAML"),
        ("x_toml", "a = ", "x.toml"),
        ("x_txt", "hello", "no file of a known kind; tried: settings.*logs.*links.*traces.*lists"),
        ("x_json", '{"model_type": "bert", "hidden_size": 8}', "model_type: 'bert' is not supported"),
    ],
)
def test_what_is_of_no_framework_is_refused(name, text, words, files):
    with pytest.raises(InputError, match=words):
        read_draft(files(**{name: text}))


def test_yaml_builds_no_objects(files, tmp_path):
    text = f"model: !!python/object/apply:os.system ['touch {tmp_path}/made']\nnum_layers: 3\ntrainer: {{}}\n"
    draft = read_draft(files(x_yaml=text))
    assert not (tmp_path / "made").exists()
    assert draft.value("model", "num_layers") == 3


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-3.1-70B", "llama-3-70b"),
        ("NousResearch/Llama-2-7b-hf", "llama-2-7b"),
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("gpt2-medium", "gpt2-medium"),
        ("codellama/CodeLlama-7b-hf", None),
        ("Qwen/Qwen3-8B", None),
    ],
)
def test_names_of_models_on_the_hub_are_those_of_the_catalogue(name, preset):
    assert preset_of(name) == preset


def test_arguments_of_the_trainer_name_their_model(tmp_path):
    """Keys and values of recipes/zephyr-7b-beta/sft/config_full.yaml and accelerate_configs/zero3.yaml
    (huggingface/alignment-handbook), and an example of axolotl-ai-cloud/axolotl in the third."""
    recipe = {"model_name_or_path": "mistralai/Mistral-7B-v0.1", "bf16": True, "max_seq_length": 2048}
    recipe |= {"gradient_accumulation_steps": 1, "gradient_checkpointing": True, "per_device_train_batch_size": 16}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(recipe | {"chat_template": "x"}))
    zero = {"deepspeed_config": {"zero_stage": 3}, "distributed_type": "DEEPSPEED", "num_processes": 8}
    (tmp_path / "zero3.yaml").write_text(yaml.safe_dump(zero))
    draft = draft_of_devices(read_draft([tmp_path / "sft.yaml", tmp_path / "zero3.yaml"]), None)
    assert (draft.missing(), draft.not_understood) == ([], [])
    assert (draft.value("model", "preset"), draft.value("training", "zero")) == ("mistral-7b", 3)
    assert draft.value("training", "global_batch") == 128
    axolotl = {"base_model": "NousResearch/Nous-Yi", "model_type": "LlamaForCausalLM", "sequence_len": 4096}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(axolotl | {"micro_batch_size": 2}))
    own = draft_of_devices(read_draft([tmp_path / "own.yaml"]), 8)
    assert own.value("training", "microbatch_size") == 2
    assert own.not_understood == ["base_model: NousResearch/Nous-Yi: give its config.json too"]


EARLY_TITAN = """
[model]
name = "llama3"
flavor = "405B"
norm_type = "rmsnorm"
converters = "float8"
[training]
batch_size = 2
seq_len = 8192
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
compile = true
[experimental]
context_parallel_degree = 1
pipeline_parallel_degree = 2
pipeline_parallel_split_points = "layers.63"
[activation_checkpoint]
mode = "full"
"""


def test_names_of_early_versions_of_torchtitan_count(tmp_path):
    """As llama3_405b.toml of torchtitan in March 2025: its batch and degrees had been defaults, without a word."""
    path = tmp_path / "llama3_405b.toml"
    path.write_text(EARLY_TITAN)
    draft = read_draft([path])
    found = [draft.value("layout", key) for key in ("pipeline", "tensor", "context")]
    assert found == [2, 8, 1]
    assert draft.replica_batch.value == 2
    assert draft.value("training", "matmul") == "fp8"
    assert draft.value("training", "kernels") is None
    assert draft.tables["layout"]["tensor"].origin == "training.tensor_parallel_degree"
    assert draft.not_understood == ["experimental.pipeline_parallel_split_points: layers.63"]


def test_a_torchtitan_of_2024_has_its_own_float8_and_microbatches(tmp_path):
    """As llama3_405b.toml of wfu-fb/torchtitan (3247841): its products in 8 bit were listed and counted in 16."""
    path = tmp_path / "llama3_405b.toml"
    path.write_text(
        '[model]\nname = "llama3"\nflavor = "405B"\nnorm_type = "np_layernorm"\n[training]\nbatch_size = 32\n'
        "warmup_steps = 600\n[experimental]\npipeline_parallel_degree = 8\nenable_async_tensor_parallel = false\n"
        "[float8]\nenable_float8_linear = true\nenable_fsdp_float8_all_gather = true\nscaling_type_input = 'dynamic'\n"
    )
    draft = read_draft([path])
    found = [draft.value(*place) for place in (("training", "matmul"), ("training", "microbatch_size"))]
    assert found == ["fp8", 4]
    assert draft.value("model", "norm") == "layernorm"
    assert draft.changes == ["float8.enable_fsdp_float8_all_gather: True: weights are gathered in 8 bit"]


@pytest.mark.parametrize(
    ("recipe", "matmul"),
    [("tensorwise", "fp8"), ("rowwise", "fp8_rowwise"), ("rowwise_with_gw_hp", "fp8_rowwise")],
)
def test_float8_of_torchtitan_is_read_by_its_recipe(tmp_path, recipe, matmul):
    path = tmp_path / "llama3_70b.toml"
    path.write_text(f'{EARLY_TITAN}\n[quantize.linear.float8]\nrecipe_name = "{recipe}"\n')
    draft = read_draft([path])
    assert draft.value("training", "matmul") == matmul
    assert any("gradients of weights" in note for note in draft.notes) == recipe.endswith("gw_hp")


def test_number_formats_of_torchtitan_are_read_or_said(tmp_path):
    """As llama3_32b-8xb200-65k.toml of pytorch/torchtitan (46a5985): both had been passed over without a word."""
    path = tmp_path / "llama3_8b.toml"
    path.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\ndtype = "bfloat16"\nmixed_precision_reduce = "bfloat16"\n'
    )
    draft = read_draft([path])
    assert draft.value("training", "grad_reduce_in_fp32") is False
    assert draft.changes == ["training.dtype: bfloat16: weights and Adam's state are counted in float32"]


def test_accelerate_and_a_recipe_do_not_contradict_each_other(files):
    """As recipes/accelerate_configs/fsdp.yaml of huggingface/open-r1 (1416fa0) beside a recipe that checkpoints."""
    accelerate = ACCELERATE + (
        "fsdp_config: {fsdp_activation_checkpointing: false, fsdp_sharding_strategy: FULL_SHARD, "
        "fsdp_offload_params: true, fsdp_use_orig_params: true}\n"
    )
    draft = read_draft(files(fsdp_yaml=accelerate, recipe_yaml=TRAINER))
    assert (draft.value("training", "recompute"), draft.value("training", "zero")) == ("full", 3)
    assert draft.changes == [
        "fsdp_config.fsdp_offload_params: True: weights or the optimizer's state wait in the host's memory"
    ]


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("fsdp: [full_shard, auto_wrap]", 3),
        ("fsdp: shard_grad_op auto_wrap", 2),
        ("fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}", 3),
        ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: false}", 2),
        ("fsdp: ''", None),
    ],
)
def test_every_spelling_of_fsdp_counts(text, stage, files):
    """The Trainer's words, Accelerate's second version, axolotl's: they had been listed, and nothing was sharded."""
    draft = read_draft(files(train_yaml=TRAINER + text))
    assert draft.value("training", "zero") == stage


def test_adapters_of_a_fine_tuning_are_read(files):
    """As examples/mistral/mistral-qlora-fsdp.yml of axolotl (067b021) and LLaMA-Factory's (ff6d4d1): it had been a
    training of all weights."""
    text = "bf16: auto\nadapter: qlora\nlora_r: 32\nlora_alpha: 16\nlora_dropout: 0.05\nrl: dpo\nstage: sft\n"
    draft = read_draft(
        files(one_yaml=TRAINER + text + "lora_target_modules: [q_proj, v_proj, down_proj, embed_tokens]")
    )
    assert draft.value("training", "lora") == {
        "rank": 32, "target_modules": ["q_proj", "v_proj", "down_proj"], "dropout": 0.05, "base_weights": "nf4",
        "alpha": 16.0,
    }  # fmt: skip
    assert draft.value("training", "precision") == "bf16"
    assert draft.changes == [
        "rl: dpo: counted as one pass over each sequence",
        "adapters of embed_tokens are not counted",
    ]
    whole = read_draft(files(two_yaml=TRAINER + "finetuning_type: full\nstage: dpo\nlora_rank: 8\n"))
    assert whole.value("training", "lora") is None
    assert whole.changes == ["stage: dpo: counted as one pass over each sequence"]
    assert (whole.shapes, whole.not_understood) == ({}, [])
    every = read_draft(files(three_yaml=TRAINER + "finetuning_type: lora\nlora_target: all\n"))
    assert every.value("training", "lora") == {"rank": 8, "dropout": 0.0}, "all of them"


def test_what_deepspeed_leaves_to_the_trainer_contradicts_nothing(files):
    """As deepspeed_configs/zero3.json of axolotl (067b021): fp16 of the Trainer was refused beside its two ``auto``."""
    auto = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    assert read_draft(files(train_yaml=TRAINER + "fp16: true\n", ds_json=auto)).value("training", "precision") == "fp16"
    assert read_draft(files(alone_json=auto)).value("training", "precision") == "bf16"


def test_what_one_file_assumes_another_may_say(files):
    """As the two YAML of OpenSeek-Small-v1 (FlagAI-Open/OpenSeek, 50212ea): model and machines apart."""
    model = "num_layers: 4\nhidden_size: 64\nnum_attention_heads: 4\nvocab_size: 151851\nseq_length: 64\n"
    machines = "runner: {nnodes: 2, nproc_per_node: 8}\nsystem: {tensor_model_parallel_size: 1}\n"
    for paths in (files(a_yaml=model, b_yaml=machines), files(b_yaml=machines, a_yaml=model)):
        draft = read_draft(paths, "megatron")
        assert (draft.num_devices.value, draft.value("model", "vocab_size")) == (16, 151936)


ARGUMENTS = {
    "model_name_or_path": "gpt2", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 12,
    "max_seq_length": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("degrees", "found"),
    [
        ({"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 2}, (2, 2, None, 4)),
        ({"parallelism_config_dp_shard_size": 8, "parallelism_config_tp_size": 2}, (2, None, None, 8)),
        ({"sp_size": 4}, (None, 4, "ulysses", 4)),
        ({"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 8}, (None, None, None, 16)),
        ({"tensor_parallel_size": 2, "context_parallel_size": 4}, (2, 4, None, 2)),
        ({"megatron_lm_tp_degree": 2, "megatron_lm_num_micro_batches": 12}, (2, None, None, 8)),
    ],
)
def test_degrees_of_accelerate_divide_the_devices_before_replicas_are_counted(degrees, found, files):
    accelerate = {"num_processes": 16, "num_machines": 2, "parallelism_config": degrees}
    draft = read_draft(files(acc_yaml=yaml.safe_dump(accelerate), args_yaml=yaml.safe_dump(ARGUMENTS)))
    draft.expect_understood()
    draft_of_devices(draft, None)
    assert tuple(draft.value("layout", key) for key in ("tensor", "context", "context_exchange", "data")) == found
    assert draft.value("training", "global_batch") == 12 * found[-1]


def test_degrees_that_do_not_fit_the_devices_are_refused(files):
    accelerate = {"num_processes": 16, "parallelism_config": {"tp_size": 2, "dp_shard_size": 4}}
    draft = read_draft(files(acc_yaml=yaml.safe_dump(accelerate), args_yaml=yaml.safe_dump(ARGUMENTS)))
    with pytest.raises(InputError, match=r"16 devices \(num_processes\) do not fit .+ = 2 x data = 4"):
        draft_of_devices(draft, None)
    with pytest.raises(InputError, match=r"12 devices .+ do not fit pipeline x tensor x context = 8"):
        draft_of_devices(
            read_draft(files(x_toml=TITAN.replace("tensor_parallel_degree = 2", "tensor_parallel_degree = 8"))), 12
        )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"num_processes": 16}, {"num_processes": 8}),
        ({"gradient_accumulation_steps": 12}, {"gradient_accumulation_steps": 6}),
        ({"per_device_train_batch_size": 1}, {"per_device_train_batch_size": 2}),
        ({"max_seq_length": 512}, {"max_seq_length": 1024}),
        ({"parallelism_config": {"tp_size": 2}}, {"tp_size": 4}),
    ],
)
def test_two_files_with_two_values_are_refused_and_both_are_named(one, other, files):
    texts = {
        f"{name}_yaml": yaml.safe_dump({"output_dir": "x", "max_steps": 9} | table)
        for name, table in (("a", one), ("b", other))
    }
    with pytest.raises(InputError) as refused:
        read_draft(files(**texts))
    assert all(str(value) in str(refused.value) for table in (one, other) for value in _numbers(table))


def _numbers(table):
    return [number for value in table.values() for number in (_numbers(value) if isinstance(value, dict) else [value])]


TEACHER = {"num_layers": 64, "hidden_size": 6144, "num_attention_heads": 48}
STUDENT = {"num_layers": 28, "hidden_size": 2560, "num_attention_heads": 20}


@pytest.mark.parametrize(
    "tables",
    [
        {"teacher": TEACHER, "student": STUDENT},
        {"policy": STUDENT, "draft": TEACHER, "trainer": {"devices": 8}},
        {"model": {"language": STUDENT, "audio": TEACHER}},
        {"model": {"num_layers": 4}, "again": {"encoder_num_layers": 5}},
    ],
)
def test_two_values_as_deep_in_a_file_are_refused_and_both_are_named(tables, files):
    with pytest.raises(InputError, match=r"two values for \w+: \d+ by [\w.]+, \d+ by [\w.]+; leave the one"):
        read_draft(files(x_yaml=yaml.safe_dump(tables)), "megatron")


def test_a_deeper_value_is_said_not_to_count(files):
    tables = {"model": {**STUDENT, "aside": {"num_layers": 4}}}
    draft = read_draft(files(x_yaml=yaml.safe_dump(tables)), "megatron")
    assert draft.value("model", "num_layers") == 28
    assert "model.num_layers: 28 counts, not model.aside.num_layers: 4" in draft.notes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {num_layers: 2}\nmodel: {num_layers: 3}\n", "model is there twice, on lines 1 and 2"),
        ("trainer: {}\nmodel:\n  num_layers: 2\n  num_layers: 3\n", "num_layers is there twice, on lines 3 and 4"),
        ("model: {num_layers: 2}\n---\nmodel: {num_layers: 3}\n", "2 documents"),
    ],
)
def test_what_is_there_twice_in_yaml_is_refused(text, words, files):
    with pytest.raises(InputError, match=words):
        read_draft(files(x_yaml=text), "megatron")


VARIABLES = """
MODEL_ARGS:
  --num-layers: {layers}
  --hidden-size: 512
  --seq-length: ${{SEQ:-1024}}
  --data-path: $HOME/data
"""


@pytest.mark.parametrize("layers", ["${LAYERS}", "$LAYERS", "${LAYERS:-7}", "${oc.env:LAYERS}", "${oc.env:LAYERS,7}"])
def test_variables_in_yaml_have_the_values_that_are_set(layers, files):
    paths = files(x_yaml=VARIABLES.format(layers=layers))
    draft = read_draft(paths, known={"LAYERS": "24", "UNHEARD": "3"})
    assert [draft.value(*place) for place in (("model", "num_layers"), ("training", "sequence_length"))] == [24, 1024]
    assert "SEQ is not set in the file; its default 1024 was taken" in draft.notes
    assert [note for note in draft.notes if "--set" in note] == [
        "--set UNHEARD was not used: no file takes a variable of this name from outside"
    ]
    alone = read_draft(paths)
    if "7" in layers:
        assert alone.value("model", "num_layers") == 7
    else:
        assert alone.unset == {"LAYERS"}
        assert "model.num_layers" in alone.missing()


def test_a_variable_that_a_script_sets_itself_is_not_taken_from_outside(files):
    degrees = "--tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP"
    script = f"TP=2\nPP=${{PP:-1}}\npython x.py --num-layers 4 {degrees}"
    draft = read_draft(files(x_sh=script), known={"TP": "4", "PP": "2"})
    assert (draft.value("layout", "tensor"), draft.value("layout", "pipeline")) == (2, 2)
    assert [note for note in draft.notes if "--set" in note] == [
        "--set TP was not used: no file takes a variable of this name from outside"
    ]


def test_an_option_that_is_there_twice_counts_as_the_framework_counts_it(files):
    draft = read_draft(files(x_sh="python x.py --num-layers 4 --hidden-size 64 --num-layers 8 --hidden-size 64"))
    assert draft.value("model", "num_layers") == 8
    assert "--num-layers is there more than once: 4, then 8; the last one counts" in draft.notes
    assert "--hidden-size is there" not in " ".join(draft.notes)


@pytest.mark.parametrize(
    "options",
    [
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 20",
        "--pipeline-model-parallel-size 0",
        "--pipeline-model-parallel-size 3 --num-layers-per-virtual-pipeline-stage 7",
        "--tensor-model-parallel-size 0",
        "--tensor-model-parallel-size -2",
        "--context-parallel-size inf",
        "--num-layers 0",
        "--make-vocab-size-divisible-by 0 --vocab-size 100",
        "--num-experts 8 --expert-model-parallel-size 0",
        "--num-virtual-stages-per-pipeline-rank 0",
    ],
)
def test_degrees_that_divide_nothing_are_refused_without_a_traceback(options, files):
    words = f"python x.py --num-layers 40 --hidden-size 64 {options}"
    with pytest.raises(InputError):
        read_draft(files(x_sh=words)).expect_understood()
