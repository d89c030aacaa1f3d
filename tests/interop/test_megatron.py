"""Settings of Megatron-LM as a job, and plans as its options and back."""

import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe import planning
from farpipe.core.errors import InputError
from farpipe.core.spec import Training, parse_job, preset_model
from farpipe.interop.interpolation import interpolated
from farpipe.interop.megatron import (
    layers_of_layout,
    num_dense_layers,
    read_script_of_megatron,
    read_tables_of_megatron,
)
from farpipe.interop.megatron_flags import megatron_flags
from farpipe.interop.nemo_config import nemo_config
from planning.planner.jobs import both_ways, device, job, site

SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2 --gpus-per-node=8
GPUS_PER_NODE=8
NNODES=${NUM_MACHINES:-2}
TP=4; PP=2
MODEL=(
    --num-layers 24 --hidden-size 2048   # GPT
    --num-attention-heads 16
    --group-query-attention --num-query-groups 4
    --seq-length 4096 --max-position-embeddings 4096
    --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope
    --untie-embeddings-and-output-weights
    # --qk-layernorm
)
PARALLEL="--tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size $PP --sequence-parallel \\
    --num-layers-per-virtual-pipeline-stage 6"
if [ "$TP" -gt 1 ]; then EXTRA="--overlap-grad-reduce"; else EXTRA="--never"; fi
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py ${MODEL[@]} $PARALLEL $EXTRA \\
    --micro-batch-size 2 --global-batch-size 64 --bf16 --use-distributed-optimizer --vocab-size 50257 \\
    --recompute-granularity selective --recompute-modules core_attn layernorm --lr 3e-4 --hidden-dropout 0 \\
    --attention-dropout 0 --save /checkpoints --some-new-flag 7 --train-iters $STEPS
"""


# Options and values of meg_gpt2_base_n16.slurm and tr11-176B-ml (bigscience-workshop/bigscience), of
# 2.distributed-training.sbatch (aws-samples/awsome-distributed-training) and of Megatron-DeepSpeed's dense GPT.
OLD_SCRIPT = """\
#!/bin/bash
#SBATCH --constraint=v100-32g --time 00:10:00
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1          # crucial
#SBATCH --gres=gpu:4                 # number of gpus
: "${NUM_LAYERS:=64}"
ZERO_STAGE=1
cat <<EOT > $config_json
{"train_micro_batch_size_per_gpu": 1, "zero_optimization": { "reduce": true,
   "stage": $ZERO_STAGE }}
EOT
GPT_ARGS=" --num-layers $NUM_LAYERS --hidden-size 9216 --num-attention-heads 32 --seq-length 1024 \\
   --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 4 --fp16 --checkpoint-activations \\
   --position-embedding-type rotary --glu-activation geglu --pad-vocab-size-to 50432 --num-experts 1 --topk 2"
torchrun --nnodes $SLURM_JOB_NUM_NODES --nproc_per_node 4 pretrain_gpt.py --tensor-model-parallel-size 4 \\
   --pipeline-model-parallel-size 16 $GPT_ARGS --deepspeed --deepspeed_config $config_json
"""


def tables(draft):
    """The values of a draft, without their places."""
    return {name: {key: found.value for key, found in table.items()} for name, table in draft.tables.items()}


def test_a_script_is_a_job_with_the_place_of_every_value():
    draft = read_script_of_megatron(SCRIPT, "train.sh")
    draft.settle()
    read = parse_job(draft.to_toml("h100"))
    assert (read.model.num_layers, read.model.hidden, read.model.num_kv_heads) == (24, 2048, 4)
    assert read.model.ffn_hidden == 5440 // 64 * 64  # Megatron-LM's default for gated MLPs
    assert read.model.vocab_size == 50688  # to a multiple of 128 x 4
    assert {read.model.qk_norm, read.model.bias, read.model.tied_embeddings} == {False}
    assert read.layout.model_dump(exclude_none=True) == {
        "pipeline": 2, "data": 2, "tensor": 4, "virtual": 2, "layers": (6,) * 4, "context": 1, "expert": 1
    }  # fmt: skip
    assert (read.training.zero, read.training.overlap, read.training.recompute) == (1, True, "core_attn layernorm")
    assert read.schedule == "interleaved"
    assert read.cluster.sites[0].num_devices == 16
    text = draft.to_toml("h100")
    assert "hidden = 2048" in text
    assert "# --hidden-size, line 7" in text
    assert draft.not_understood == [
        "--train-iters, line 23: $STEPS is not set in the file (give it with --set NAME=VALUE)",
        "--some-new-flag, line 23: 7",
    ]
    assert "NUM_MACHINES is not set in the file; its default 2 was taken" in draft.notes
    assert "--save, line 23" in draft.without_effect


def test_values_from_outside():
    draft = read_script_of_megatron(SCRIPT, "train.sh", {"STEPS": "500", "NUM_MACHINES": "4"})
    assert draft.value("training", "num_steps") == 500
    assert draft.num_devices.value == 32


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ("--vocab-file v.json --merge-file $4", 50304),
        ("--tokenizer-model meta-llama/Llama-2-7b", 32000),
        ("--tokenizer-type Llama3Tokenizer", 128256),
        ("--tokenizer-model mine", 128256),
    ],
)
def test_a_vocabulary_that_is_not_told_is_assumed_and_said(options, size):
    draft = read_script_of_megatron(f"python x.py --num-layers 2 {options}", "x.sh")
    assert draft.value("model", "vocab_size") == size
    assert "the vocabulary is not in the file" in draft.notes[0]


def test_tables_of_nemo_and_of_megatron_bridge():
    nemo = {
        "trainer": {"devices": 8, "num_nodes": 4, "precision": "bf16", "max_steps": 100},
        "model": {
            "encoder_seq_length": 8192, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
            "num_query_groups": 8, "ffn_hidden_size": 14336, "activation": "fast-swiglu", "normalization": "rmsnorm",
            "bias": False, "share_embeddings_and_output_weights": False, "position_embedding_type": "rope",
            "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "micro_batch_size": 1,
            "virtual_pipeline_model_parallel_size": None, "global_batch_size": 256, "sequence_parallel": True,
            "override_vocab_size": 128256, "optim": {"name": "distributed_fused_adam", "lr": 1e-4},
            "activations_checkpoint_granularity": "full", "hidden_dropout": 0.0, "attention_dropout": 0.0,
        },
    }  # fmt: skip
    draft = read_tables_of_megatron(nemo, "nemo.yaml", "NeMo")
    draft.settle()
    read = parse_job(draft.to_toml("h100"))
    assert read.model.model_copy(update={"name": "llama-3-8b"}).num_params == pytest.approx(8.03e9, rel=1e-2)
    assert (read.layout.data, read.training.precision, read.training.recompute) == (4, "bf16", "full")
    assert draft.tables["training"]["learning_rate"].origin == "model.optim.lr"


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("Et*3|(tt|)*2tL", [3, 2, 2, 1]),
        ("E|t*2|(t|)*3,m|L", [0, 2, 1, 1, 1, 0, 0]),
        ('"Et|t|t|tL"', [1, 1, 1, 1]),
    ],
)
def test_layouts_of_stages(text, layers):
    assert layers_of_layout(text) == layers


def test_layers_with_experts():
    assert num_dense_layers("([0]*3+[1]*58)") == 3
    assert num_dense_layers("1") == 0
    with pytest.raises(ValueError, match="2"):
        num_dense_layers("2")


@pytest.mark.parametrize("text", ["echo hello", "", "python train.py --lr 3"])
def test_a_file_without_options_is_refused(text):
    with pytest.raises(InputError, match="no command with options of a training"):
        read_script_of_megatron(text, "x.sh")


WITH_EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b")
SHAPES = ("llama-3.2-1b", "qwen2.5-7b", "gpt2", *WITH_EXPERTS)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(SHAPES),
    st.sampled_from([(1, 1, 1), (2, 1, 1), (4, 2, 1), (2, 1, 2)]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from(["none", "full", "selective", "layernorm"]),
    st.booleans(),
    st.sampled_from([16, 64]),
    st.sampled_from(["alltoall", "flex"]),
)
def test_a_plan_goes_out_and_comes_back(shape, degrees, zero, recompute, overlap, batch, dispatcher):
    """Options of a plan, read again, are the model, the degrees and the settings of the plan."""
    pipeline, tensor, virtual = degrees
    training = Training(
        sequence_length=1024,
        global_batch=batch,
        microbatch_size=1,
        zero=zero,
        recompute=recompute,
        overlap=overlap,
        moe_token_dispatcher_type=dispatcher if shape in WITH_EXPERTS else "alltoall",
    )
    big = device().model_copy(update={"memory_bytes": 1e13})
    pins = {"pipeline": pipeline, "tensor": tensor, "virtual": virtual, "data": 2, "context": 1, "expert": 1}
    asked = job([site("a", 2 * pipeline * tensor, big)], (), training, "interleaved" if virtual > 1 else "1f1b", **pins)
    found = planning.plan(asked.model_copy(update={"model": preset_model(shape)}))
    for draft in (
        read_script_of_megatron(megatron_flags(found), "flags.txt"),
        read_tables_of_megatron(yaml.safe_load(nemo_config(found)), "bridge.yaml", "NeMo"),
    ):
        expect_settings_of(draft, found, recompute, zero)


@pytest.mark.parametrize("pattern", [None, 2, (1, 1, 0, 1), (0, 0, 0, 1)])
def test_windows_go_out_and_come_back(pattern):
    model = preset_model("llama-3.2-1b").model_copy(
        update={"num_layers": 4, "sliding_window": 128, "window_attn_skip_freq": pattern}
    )
    asked = job([site("a", 2)], (), Training(sequence_length=1024, global_batch=8), "1f1b", data=2, context=1)
    found = planning.plan(asked.model_copy(update={"model": model}))
    assert "--window-size 127,0\n" in megatron_flags(found)
    for draft in (
        read_script_of_megatron(megatron_flags(found), "flags.txt"),
        read_tables_of_megatron(yaml.safe_load(nemo_config(found)), "bridge.yaml", "NeMo"),
    ):
        draft.settle()
        read = parse_job(draft.to_toml("h100")).model
        assert (read.sliding_window, read.window_attn_skip_freq) == (128, pattern)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"window_size": [128, 0], "window_attn_skip_freq": 2}, (129, 2)),
        ({"window_size": "(128, 0)", "window_attn_skip_freq": "([1]*5+[0])*4"}, (129, [1, 1, 1, 1, 1, 0] * 4)),
        ({"window_size": 512}, (513, None)),
        ({"window_size": [-1, 0]}, (None, None)),
        ({"window_size": [128, 0], "window_attn_skip_freq": 1}, (None, None)),
        ({"window_attn_skip_freq": 2}, (None, None)),
    ],
)
def test_windows_as_frameworks_write_them(told, expected):
    draft = read_tables_of_megatron({"model": {"num_layers": 24, "hidden_size": 64} | told}, "bridge.yaml", "NeMo")
    assert (draft.value("model", "sliding_window"), draft.value("model", "window_attn_skip_freq")) == expected


def test_options_come_with_what_a_launch_needs():
    """Rows of positions, an environment and sockets: without the first two Megatron-LM's validation ends the run."""
    training = Training(sequence_length=1024, global_batch=16, microbatch_size=1)
    links = both_ways("a", "b", latency_s=0.05, gbit_per_s=400)
    places = [site("a", 4), site("b", 4)]
    asked = job(places, links, training, "1f1b", pipeline=4, tensor=2, data=1, virtual=1)
    found = planning.plan(asked)
    text = megatron_flags(found)
    assert "--max-position-embeddings 1024" in text
    assert text.splitlines()[:3] == [
        "# Environment: CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron-LM asks for before Blackwell.",
        f"# Ranks by site: {found.sites[0]} 0-3, {found.sites[-1]} 4-7; number the machines so (node rank). "
        "Only neighbours in the pipeline cross.",
        "# a to b: 400 Gbit/s x 100 ms round trip = 4.66 GiB in flight, of 2 neighbours: NCCL_SOCKET_NTHREADS=4 "
        'NCCL_NSOCKS_PERTHREAD=16, and on the hosts net.ipv4.tcp_rmem and tcp_wmem = "4096 131072 58593750"; '
        "NCCL_NET=Socket where NCCL finds InfiniBand, which does not reach the other site.",
    ]
    assert read_script_of_megatron(text, "flags.txt").not_understood == []
    bridge = yaml.safe_load(nemo_config(found))
    assert "max_position_embeddings" not in bridge["model"], "no field of Megatron-Bridge's GPTModelProvider"
    assert None not in bridge.values()
    tied = planning.plan(asked.model_copy(update={"model": asked.model.model_copy(update={"tied_embeddings": True})}))
    assert "Only neighbours in the pipeline and gradients of the embedding" in megatron_flags(tied)


def test_options_say_what_the_defaults_of_megatron_lm_would_change():
    """Tokens sent by all-to-all, a router with a bias, ZeRO-3, and who shares the embedding."""
    training = Training(sequence_length=1024, global_batch=16, microbatch_size=1, zero=3)
    big = device().model_copy(update={"memory_bytes": 1e14})
    places = [site("a", 8, big), site("b", 8, big)]
    asked = job(places, both_ways("a", "b", latency_s=0.01, gbit_per_s=400), training, "1f1b", pipeline=2, virtual=1)
    pins = {"tensor": 1, "data": 8, "expert": 8}
    layout = asked.layout.model_copy(update=pins)
    found = planning.plan(asked.model_copy(update={"layout": layout, "model": preset_model("deepseek-v3")}))
    words = megatron_flags(found)
    assert "--moe-token-dispatcher-type alltoall" in words
    assert "--moe-router-enable-expert-bias --moe-router-score-function sigmoid" in words
    assert "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params" in words
    assert "CUDA_DEVICE_MAX_CONNECTIONS not 1" in words
    assert "Only neighbours in the pipeline cross." in words


def expect_settings_of(draft, found, recompute, zero):
    """The settings of a draft are those of the plan that it was exported from."""
    pipeline, tensor = found.layout.pipeline, found.layout.tensor
    assert (draft.not_understood, draft.shapes, draft.changes) == ([], {}, [])
    settled = found.job.training.decided(zero)
    expected = found.job.model.model_dump()
    expected["vocab_size"] = math.ceil(expected["vocab_size"] / tensor) * tensor  # as Megatron-LM pads it
    read = tables(draft)
    for key, value in read["model"].items():
        wanted = expected[key]
        if isinstance(value, dict):
            value, wanted = dict(value), {name: wanted[name] for name in value}
        assert value == wanted, key
    for key in ("pipeline", "tensor", "virtual", "context", "expert"):
        assert read["layout"][key] == getattr(found.layout, key), key
    if pipeline > 1:
        assert read["layout"]["layers"] == [place.num_layers for place in found.placements]
    for key in ("sequence_length", "global_batch", "microbatch_size", "precision", "zero", "overlap", "learning_rate"):
        assert read["training"][key] == getattr(settled, key), key
    assert read["training"].get("moe_token_dispatcher_type", "alltoall") == settled.moe_token_dispatcher_type
    assert read["training"]["recompute"] in (recompute, "core_attn" if recompute == "selective" else recompute)


def test_scripts_of_megatron_2_and_deepspeed_are_read():
    draft = read_script_of_megatron(OLD_SCRIPT, "old.slurm")
    draft.settle()
    model, training = (tables(draft)[name] for name in ("model", "training"))
    assert (draft.num_devices.value, draft.num_devices_per_machine.value) == (64, 4)
    assert (model["num_layers"], model["vocab_size"], model["gated_mlp"]) == (64, 50432, True)
    assert model["positions"] == "rotary"
    assert "experts" not in model
    assert (training["recompute"], training["zero"], training["precision"]) == ("full", 1, "fp16")
    assert draft.not_understood == []


def test_machines_without_tasks_each_are_those_of_the_batch_script():
    draft = read_script_of_megatron(OLD_SCRIPT.replace("--nproc_per_node 4", ""), "old.slurm")
    assert draft.num_devices.value == 64


def test_learned_positions_without_rows_are_missing_with_the_flags_that_nobody_knows():
    text = (
        "torchrun pretrain.py --bogus-flag 3 --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
        "--micro-batch-size 1 --global-batch-size 8 --bf16"
    )
    draft = read_script_of_megatron(text, "x.sh")
    draft.settle()
    assert draft.missing() == ["model.max_sequence_length"]
    assert draft.not_understood == ["--bogus-flag, line 1: 3"]


def test_degrees_that_stand_in_variables_from_outside_are_asked_for():
    """As in examples/qwen3/run_mcore_qwen3.sh of alibaba/Pai-Megatron-Patch."""
    script = (
        "TP=${10}\nif [ $2 = 8B ]; then LAYERS=36; fi\n"
        "torchrun pretrain.py --num-layers $LAYERS --hidden-size 4096 --tensor-model-parallel-size ${TP} \\\n"
        "  --num-attention-heads 32 --seq-length 4096 --global-batch-size 16 --bf16 ${load_option} --swiglu \\\n"
        "  --max-position-embeddings 4096"
    )
    draft = read_script_of_megatron(script, "run.sh")
    draft.settle()
    assert draft.missing() == ["model.num_layers", "layout.tensor"]
    assert draft.unset == {"2", "10", "LAYERS", "load_option"}
    assert draft.value("training", "precision") == "bf16"
    settled = read_script_of_megatron(script, "run.sh", {"2": "8B", "10": "4"})
    settled.settle()
    assert settled.missing() == []
    assert (settled.value("model", "num_layers"), settled.value("layout", "tensor")) == (36, 4)


# Keys and values of gpt3-175b-256gpus-fp8.yaml (AI-Hypercomputer/gpu-recipes), a few of them.
NEMO = """
run: {name: gpt3_175b}
trainer: {devices: 8, num_nodes: 32, precision: bf16, accumulate_grad_batches: 1}
exp_manager:
  checkpoint_callback_params: {model_parallel_size: "${multiply:${model.tensor_model_parallel_size}, 8}"}
model:
  micro_batch_size: 1
  global_batch_size: 2048
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 8
  virtual_pipeline_model_parallel_size: 2
  encoder_seq_length: ${training.model.max_position_embeddings}
  max_position_embeddings: 2048
  num_layers: 96
  hidden_size: 12288
  ffn_hidden_size: "${multiply:4, ${.hidden_size}}"
  num_attention_heads: 96
  fp8: true
  fp8_hybrid: true
  ub_tp_comm_overlap: true
  cross_entropy_loss_fusion: false
  optim: {name: distributed_fused_adam, overlap_grad_sync: true, grad_sync_dtype: bf16, betas: [0.9, 0.95]}
"""


def test_a_configuration_of_nemo_is_read_with_its_references():
    draft = read_tables_of_megatron(yaml.safe_load(NEMO), "gpt3.yaml", "NeMo")
    draft.settle()
    model, training = (tables(draft)[name] for name in ("model", "training"))
    assert draft.missing() == []
    assert (model["ffn_hidden"], training["sequence_length"], draft.num_devices.value) == (49152, 2048, 256)
    assert (training["zero"], training["overlap"], training["grad_reduce_in_fp32"]) == (1, True, False)
    assert (training["matmul"], training["betas"], training["tp_comm_overlap"]) == ("fp8", [0.9, 0.95], True)
    assert training["cross_entropy_loss_fusion"] is False
    assert (draft.not_understood, draft.shapes) == (["trainer.accumulate_grad_batches: 1"], {})


# Keys and values of the ConfigContainer that Megatron-Bridge 0.1 printed of Llama-3.2-1B into a log, a few of them.
BRIDGE = """
_target_: megatron.bridge.training.config.ConfigContainer
dataset: {_target_: megatron.bridge.training.config.GPTDatasetConfig, sequence_length: 1024, mock: true}
ddp: {overlap_grad_reduce: true, overlap_param_gather: true, grad_reduce_in_fp32: true, use_distributed_optimizer: true}
mixed_precision: {bf16: true, fp8: null, params_dtype: {_call_: false, _target_: torch.bfloat16}}
model:
  activation_func: {_call_: false, _target_: torch.nn.functional.silu}
  add_bias_linear: false
  ffn_hidden_size: 8192
  fp8: null
  gated_linear_unit: true
  hidden_size: 2048
  kv_channels: 64
  normalization: RMSNorm
  num_attention_heads: 32
  num_layers: 16
  num_moe_experts: null
  num_query_groups: 8
  pipeline_model_parallel_size: 1
  position_embedding_type: rope
  recompute_granularity: null
  recompute_modules: [core_attn]
  rotary_base: 500000.0
  seq_length: 131072
  share_embeddings_and_output_weights: true
  tensor_model_parallel_size: 1
  vocab_size: 128256
optimizer: {lr: 0.0003, weight_decay: 0.1, overlap_param_gather: false, adam_beta2: 0.95}
train: {global_batch_size: 512, micro_batch_size: 1, train_iters: 10}
"""


def test_what_megatron_bridge_dumps_is_read():
    """Sequences are as long as the data's, not as the longest of the model; modules without a granularity are none."""
    draft = read_tables_of_megatron(yaml.safe_load(BRIDGE), "bridge.yaml", "NeMo")
    draft.settle()
    model, training = (tables(draft)[name] for name in ("model", "training"))
    assert draft.missing() == []
    assert (training["sequence_length"], training["global_batch"], training["recompute"]) == (1024, 512, "none")
    assert (training["overlap"], training["zero"], training["precision"]) == (True, 1, "bf16")
    assert "matmul" not in training
    assert "grad_reduce_in_fp32" not in training
    narrow = yaml.safe_load(BRIDGE.replace("grad_reduce_in_fp32: true", "grad_reduce_in_fp32: false"))
    assert tables(read_tables_of_megatron(narrow, "bridge.yaml"))["training"]["grad_reduce_in_fp32"] is False
    assert (model["num_kv_heads"], model["gated_mlp"], model["tied_embeddings"], model["head_dim"]) == (
        8,
        True,
        True,
        64,
    )
    assert draft.not_understood == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${.b}", 3),
        ("${t.b}", 3),
        ("${mounted.t.b}", 3),
        ("${..top}", 7),
        ("${multiply:${.b}, 2}", 6),
        ("${divide_floor:${.b}, 2}", "${divide_floor:${.b}, 2}"),
        ("${multiply:${.b}, ${absent}}", "${multiply:${.b}, ${absent}}"),
        ("${oc.env:HOME}", "${oc.env:HOME}"),
        ("${.a}", "${.a}"),
        ("${.b", "${.b"),
    ],
)
def test_references_whose_value_stands_in_the_file_are_put_in(text, expected):
    assert interpolated({"top": 7, "t": {"a": text, "b": 3}})["t"]["a"] == expected


# Options as the scripts of deepspeedai/Megatron-DeepSpeed (4efb479) have them.
EXPERTS = """
EXPERTS={experts}
run="deepspeed pretrain_gpt.py --deepspeed --num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 128 \\
  --num-key-value-heads 2 --max-position-embeddings 128 --micro-batch-size 1 --moe-expert-parallel-size 4 --bf16 \\
  --global-batch-size 8 --num-experts $EXPERTS --deepspeed-activation-checkpointing &> out/$NAME.log"
eval $run
"""


def test_experts_and_key_heads_of_megatron_deepspeed():
    """Its experts stand in every second layer and take one expert a token; its key heads need no switch."""
    draft = read_script_of_megatron(EXPERTS.replace("{experts}", "'8 8'"), "moe.sh")
    draft.settle()
    model = tables(draft)["model"]
    assert (model["num_kv_heads"], model["experts"]["num_experts"], model["experts"]["per_token"]) == (2, 8, 1)
    assert tables(draft)["training"]["recompute"] == "full"
    assert draft.not_understood == []
    assert draft.shapes == {
        "expert_interval": "--num-experts, line 5: Megatron-DeepSpeed has experts in one of 2 layers"
    }
    assert draft.num_devices.value == 4
    assert draft.missing() == []
    pyramid = read_script_of_megatron(EXPERTS.replace("{experts}", "'8 16'"), "moe.sh")
    assert pyramid.missing() == ["model.experts"]


def test_models_that_are_no_decoders_are_named():
    command = (
        "python -m torch.distributed.launch --nproc_per_node 8 pretrain_t5.py --num-layers 12 --hidden-size 768 "
        "--encoder-seq-length 512 --decoder-seq-length 128 --tokenizer-type BertWordPieceCase"
    )
    draft = read_script_of_megatron(command, "t5.sh")
    assert draft.shapes == {
        "pretrain_t5.py": "pretrain_t5.py: its model is no decoder alone; its layers are counted as a decoder's",
        "decoder_seq_length": "--decoder-seq-length, line 1: 128",
    }
    assert draft.value("model", "vocab_size") == math.ceil(30522 / 128) * 128
    assert "pretrain" not in str(read_script_of_megatron(command.replace("_t5", "_gpt2"), "x.sh").shapes)


def test_experts_over_devices_need_as_many_replicas():
    """As mixtral-8x7b-256gpus-bf16.yaml of AI-Hypercomputer/gpu-recipes, which has no number of machines."""
    model = {"num_layers": 32, "hidden_size": 64, "num_attention_heads": 8, "num_moe_experts": 8}
    degrees = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "expert_model_parallel_size": 8}
    draft = read_tables_of_megatron({"model": model | degrees}, "m.yaml")
    draft.settle()
    assert (draft.num_devices.value, draft.value("layout", "data")) == (32, 4)
