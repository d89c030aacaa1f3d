"""Settings of Hugging Face (config.json, Trainer, Accelerate, adapters of fine-tunings) as a job."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from farpipe.core.catalog import model_names
from farpipe.core.spec.hugging_face import model_of_config
from farpipe.core.spec.hugging_face_keys import MTP
from farpipe.core.spec.lora import PARTS
from farpipe.core.spec.model import Model
from farpipe.interop.kinds import as_count, as_flag, as_size
from farpipe.interop.known_options import known_options
from farpipe.interop.megatron_names import settings_of_script, settings_of_tables
from farpipe.interop.settings import Draft, Setting, Settings

_STAGES: Final = {
    "FULL_SHARD": 3,
    "1": 3,
    "SHARD_GRAD_OP": 2,
    "2": 2,
    "NO_SHARD": 0,
    "3": 0,
    "HYBRID_SHARD": 3,
    "4": 3,
    "HYBRID_SHARD_ZERO2": 2,
    "_HYBRID_SHARD_ZERO2": 2,
    "5": 2,
}
"""Stage of ZeRO by FSDP's sharding strategy, by name or number."""

_MODEL_NAMES: Final = ("model_name_or_path", "base_model", "model_id", "model_name")


def preset_of(name: str) -> str | None:
    """The model of the catalogue that a name on the hub stands for; None where it has none of this shape."""
    bare = name.rpartition("/")[2].lower().removeprefix("meta-").removesuffix("-hf")
    bare = re.sub(r"^llama-?(3)\.[13]-", r"llama-\1-", re.sub(r"^llama(\d)", r"llama-\1", bare))
    found = [known for known in model_names() if bare == known or bare.startswith(f"{known}-")]
    return max(found, key=len, default=None)


def read_model_config(data: Mapping[str, Any], source: str) -> Draft:
    """The model of a ``config.json``; there is no training in it. InputError for an architecture that is not known."""
    draft = Draft("Hugging Face")
    model = model_of_config(data, source)
    for key in sorted(model.model_fields_set, key=list(Model.model_fields).index):
        value = getattr(model, key)
        draft.put("model", key, value.model_dump() if hasattr(value, "model_dump") else value, Path(source).name)
    draft.notes += [
        f"{key}: {data[key]}: no module of multi-token prediction (mtp_num_layers)" for key in MTP if data.get(key)
    ]
    return draft


_LAUNCHERS: Final = (
    *("torchrun", "deepspeed", "accelerate", "torch.distributed.run", "torch.distributed.launch"),
    "--per_device_train_batch_size",
)
_LAUNCHES: Final = re.compile(
    r"^[^#\n]*\b(torchrun|torch\.distributed\.(run|launch)|accelerate launch|deepspeed)\s+-|"
    r"--per_device_train_batch_size\b",
    re.MULTILINE,
)


def launches_training(text: str) -> bool:
    """True if a script starts a training by torchrun, Accelerate or DeepSpeed, or with options of the Trainer."""
    return bool(_LAUNCHES.search(text))


def read_script_of_trainer(text: str, source: str, known: Mapping[str, str] | None = None) -> Draft:
    """A script that launches the Trainer, or a training of one's own whose options have the Trainer's names.

    Without FSDP or DeepSpeed it is DDP: every device has the whole state, unless another file says otherwise.
    """
    settings = settings_of_script(text, source, known, _LAUNCHERS, {})
    draft = _draft_of(settings)
    draft.tables["training"].setdefault("zero", Setting(0, "default, DDP"))
    return draft


def read_trainer(data: Mapping[str, Any], source: str) -> Draft:
    """Arguments of transformers' Trainer (JSON or YAML) or an Accelerate configuration (YAML)."""
    return _draft_of(settings_of_tables(data, source, {}))


def _draft_of(settings: Settings) -> Draft:
    draft = Draft("Hugging Face Trainer")
    _named_model(settings, draft)
    _trainer_sizes(settings, draft)
    _trainer_precision(settings, draft)
    same = {name: (name, float) for name in ("learning_rate", "weight_decay")}
    draft.copy(settings, "training", same)
    clips = ("max_grad_norm", "gradient_clipping", "megatron_lm_gradient_clipping")
    clip = settings.first(clips, lambda value: None if value == "auto" else float(value))
    draft.put("training", "clip_norm", clip, settings.origin(*clips))
    if settings.take("max_grad_norm", float) == 0:
        draft.put("training", "clip_norm", "none", settings.origin("max_grad_norm"))
    full = [name for name in _RECOMPUTES if settings.flag(name)]
    draft.put("training", "recompute", "full" if full else "none", settings.origin(*full))
    _trainer_devices(settings, draft)
    _trainer_zero(settings, draft)
    _kernels(settings, draft)
    _expect_next_tokens(settings)
    _adapters(settings, draft)
    draft.close(settings, known_options("trainer"))
    return draft


_RECOMPUTES: Final = ("gradient_checkpointing", "activation_checkpointing", "fsdp_activation_checkpointing")
_LENGTHS: Final = (
    "max_seq_length",
    "max_length",
    "model_max_length",
    "block_size",
    "cutoff_len",
    "sequence_len",
    "seq_len",
    "seq_length",
)
"""Names of the length of a sequence, the first that is there."""


def _trainer_sizes(settings: Settings, draft: Draft) -> None:
    """Sequences of a device and of a step, their length, and the number of steps."""
    sizes = ("per_device_train_batch_size", "micro_batch_size")
    each, steps = settings.first(sizes, as_size), settings.first(_ACCUMULATIONS, _size_or_auto)
    draft.put("training", "microbatch_size", each, settings.origin(*sizes))
    if whole := settings.take("batch_size", as_size):  # of one device, in axolotl
        draft.replica_batch = Setting(whole, settings.origin("batch_size"))
    if steps is not None:
        draft.accumulation = Setting(steps, settings.origin(*_ACCUMULATIONS))
    lengths = settings.first(_LENGTHS, as_count)
    draft.put("training", "sequence_length", lengths, settings.origin(*_LENGTHS))
    if (steps := settings.take("max_steps", as_count)) and steps > 0:
        draft.put("training", "num_steps", steps, settings.origin("max_steps"))


_ACCUMULATIONS: Final = ("gradient_accumulation_steps", "megatron_lm_num_micro_batches")


def _size_or_auto(value: Any) -> int | None:
    return None if value == "auto" else as_size(value)


def _named_model(settings: Settings, draft: Draft) -> None:
    name = next((name for name in _MODEL_NAMES if settings.has(name)), None)
    if name is None:
        return
    known = preset_of(str(settings.values[name].value))
    draft.put("model", "preset", known, settings.origin(name))
    if known is None:
        settings.problems.append(f"{settings.origin(name)}: {settings.values[name].value}: give its config.json too")


def _trainer_precision(settings: Settings, draft: Draft) -> None:
    named = str(settings.take("mixed_precision", str, "no"))
    kinds = [kind for kind in ("bf16", "fp16") if settings.take(kind, _flag_or_auto) or named == kind]
    kind = next(iter(kinds), None)
    if settings.take("tf32", _flag_or_auto) and not kind:
        settings.change("tf32", 'products of 32-bit numbers have fewer bits: training.matmul = "tf32"')
    if kind or "mixed_precision" in settings.values:
        origin = settings.origin("bf16", "fp16", "mixed_precision")
        draft.put("training", "precision", kind or ("bf16" if named == "fp8" else "fp32"), origin)
        draft.put("training", "matmul", "fp8" if named == "fp8" else None, origin)


_SEQUENCES: Final = (*("parallelism_config_sp_size", "sp_size", "sequence_parallel_degree", "sequence_parallel_size"),)
"""Names of the degree of Ulysses."""
_DEGREES: Final = {
    "tensor": ("parallelism_config_tp_size", "tp_size", "tensor_parallel_size", "megatron_lm_tp_degree", "tp_degree"),
    "pipeline": ("megatron_lm_pp_degree", "pp_degree"),
    "expert": ("expert_parallel_size", "ep_size"),
    "context": ("parallelism_config_cp_size", "cp_size", "context_parallel_size", *_SEQUENCES),
}
"""Names of degrees in Accelerate, also of its plugin of Megatron-LM, transformers' `parallelism_config` and axolotl."""
_REPLICAS: Final = {
    "replicate": ("parallelism_config_dp_replicate_size", "dp_replicate_size"),
    "shard": ("parallelism_config_dp_shard_size", "dp_shard_size"),
}


_MACHINES: Final = ("num_machines", "nnodes", "num_nodes", "nodes")
_PER_MACHINE: Final = ("nproc_per_node", "num_gpus", "gpus_per_node", "num_gpus_per_node")
"""Names of launchers: torchrun, DeepSpeed, Slurm."""


def _fixed_count(value: Any) -> int:
    """``2``, or ``1:2`` of an elastic launch, whose largest number counts."""
    return as_size(str(value).rpartition(":")[2])


def _trainer_devices(settings: Settings, draft: Draft) -> None:
    count, each = settings.take("num_processes", as_size), settings.first(_PER_MACHINE, as_size)
    machines = settings.first(_MACHINES, _fixed_count) or 1
    if count is None and each is not None:
        origin = f"{settings.origin(*_MACHINES)} x {settings.origin(*_PER_MACHINE)}"
        draft.num_devices = Setting(machines * each, origin)
        draft.num_devices_per_machine = Setting(each, settings.origin(*_PER_MACHINE))
    if count is not None:
        draft.num_devices = Setting(count, settings.origin("num_processes"))
        if machines > 1 and count % machines == 0:
            draft.num_devices_per_machine = Setting(count // machines, settings.origin(*_MACHINES))
    for key, names in _DEGREES.items():
        degree = settings.first(names, as_size)
        draft.put("layout", key, degree, settings.origin(*names))
        if key == "context" and degree and settings.origin(*names) == settings.origin(*_SEQUENCES):
            draft.put("layout", "context_exchange", "ulysses", settings.origin(*names))
    sizes = {key: settings.first(names, as_size) for key, names in _REPLICAS.items()}
    if any(sizes.values()):
        origin = settings.origin(*_REPLICAS["shard"], *_REPLICAS["replicate"])
        draft.put("layout", "data", (sizes["replicate"] or 1) * (sizes["shard"] or 1), origin)
    name = next((name for name in _REPLICAS["replicate"] if name in settings.values), None)
    if name and (sizes["replicate"] or 1) > 1 and (sizes["shard"] or 1) > 1:
        settings.change(name, _PARTLY)


_STRATEGIES: Final = ("fsdp_sharding_strategy", "sharding_strategy", "fsdp_reshard_after_forward")
"""Settings that may name FSDP's sharding strategy; the last one is a switch in its second version."""
_PARTLY: Final = "state is divided among some of the replicas only"
_IN_HOST_MEMORY: Final = "weights or the optimizer's state wait in the host's memory"


def _trainer_zero(settings: Settings, draft: Draft) -> None:
    """Stage of ZeRO, and what of FSDP is not planned."""
    origin = settings.origin("zero_stage", "fsdp_sharding_strategy", "fsdp", "fsdp_version")
    sharded = 1 if settings.flag("megatron_lm_use_distributed_optimizer") else None
    stage = settings.take("zero_stage", as_count, _fsdp_stage(settings))
    draft.put("training", "zero", sharded if stage is None else stage, origin)
    for name in (*_STRATEGIES, "fsdp"):
        words = settings.take(name, _words, "").upper().split()
        if "OFFLOAD" in words:
            settings.change(name, _IN_HOST_MEMORY)
        if any("HYBRID" in word or word in ("4", "5") for word in words):
            settings.change(name, _PARTLY)
    if settings.flag("megatron_lm_sequence_parallelism"):
        draft.put("training", "sequence_parallel", value=True, origin="megatron_lm_sequence_parallelism")
    if settings.flag("megatron_lm_recompute_activations"):
        draft.put("training", "recompute", "core_attn", "megatron_lm_recompute_activations")
    for name in ("deepspeed", "deepspeed_config_file"):
        settings.refer(name)


_PLAIN_OPTIMIZERS: Final = (
    *("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla", "adamw_torch_npu_fused"),
    *("adam", "adamw", "auto"),
)
"""Optimizers that keep two numbers of 32 bit for a parameter on the device."""
_KEEP_SCORES: Final = {
    "attn_implementation": "eager",
    "flash_attn": ("disabled", "off", "False"),
    "eager_attention": "True",
}
"""Values by which attention keeps its scores: transformers, LLaMA-Factory, axolotl."""
_KERNELS_OF_ATTENTION: Final = (
    "attn_implementation",
    "flash_attn",
    "flash_attention",
    "sdp_attention",
    "xformers_attention",
)


_NAMED_KERNELS: Final = {
    "flash_attention_2": "flash-2",
    "fa2": "flash-2",
    "flash_attention_3": "flash-3",
    "sdpa": "sdpa",
}
"""Kernels by the values of these settings."""


_FUSED: Final = (
    *("torch_compile", "torch_compile_backend", "dynamo_backend", "use_liger_kernel", "enable_liger_kernel"),
)
"""Settings by which what lies between matrix products is one kernel."""


def _kernels(settings: Settings, draft: Draft) -> None:
    """Kernels of attention, of the optimizer, and of what lies between matrix products."""
    kept = [name for name, values in _KEEP_SCORES.items() if settings.take(name, str, "-") in values]
    said = [name for name in _KERNELS_OF_ATTENTION if settings.take(name, str, "False") not in ("False", "auto")]
    draft.put("training", "flash_attention", not kept, settings.origin(*kept, *said))
    named = [(name, _NAMED_KERNELS.get(settings.take(name, str, "") or "")) for name in said]
    for name, kernel in named if not kept else ():
        if kernel is not None:
            draft.put("training", "attention_kernel", kernel, settings.origin(name))
    for name in ("optim", "optimizer"):
        if settings.take(name, str, "adam") not in _PLAIN_OPTIMIZERS:
            settings.change(name, "the optimizer's state and work are counted as Adam's in 32 bit")
    fused = [name for name in _FUSED if str(settings.take(name, str, "no")).lower() not in ("false", "no", "none", "")]
    draft.put("training", "kernels", "fused" if fused else "eager", settings.origin(*fused))


def _fsdp_stage(settings: Settings) -> int | None:
    """Stage of ZeRO by the settings of FSDP: of Accelerate, of the Trainer (words), of its second version."""
    is_second = settings.take("fsdp_version", str, "") == "2"
    found = [settings.take(name, _words, "") for name in _STRATEGIES]
    strategy = next((text for text in found if text), "") or settings.take("fsdp", _words, "")
    if stages := [_STAGES[word] for word in strategy.upper().split() if word in _STAGES]:
        return stages[0]
    if not is_second:
        return None
    names = ("fsdp_reshard_after_forward", "reshard_after_forward")
    return 3 if all(settings.take(name, as_flag, default=True) for name in names) else 2


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _flag_or_auto(value: Any) -> bool:
    return value == "auto" or as_flag(value)


def _expect_next_tokens(settings: Settings) -> None:
    """Note what is trained otherwise than one pass over each sequence."""
    for name, plain in (("stage", ("pt", "sft")), ("rl", ())):
        if settings.take(name) not in (None, *plain):
            settings.change(name, "counted as one pass over each sequence")


_SWITCHES: Final = {
    "adapter": ("lora", "qlora"),
    "finetuning_type": ("lora",),
    "use_peft": ("True",),
    "use_lora": ("True",),
}
"""Settings that turn adapters on, with the values by which they do."""
_MODULES: Final = {
    **{name: name for parts in PARTS.values() for name in parts},
    **dict.fromkeys(("qkv_proj", "query_key_value", "c_attn"), "linear_qkv"),
    "gate_up_proj": "linear_fc1",
}
"""Linear maps of transformers' layers, by the names of a job."""
_OF_ADAPTERS: Final = (
    *("lora_r", "lora_rank", "lora_dropout", "lora_alpha", "lora_target_modules", "lora_target", "lora_target_linear"),
    *("use_dora", "use_rslora", "lora_target_parameters", "lora_rank_pattern", "loraplus_lr_ratio"),
)
"""Settings that nobody looks at where no adapters are trained."""
_ALL: Final = ("all", "all-linear")


def _adapters(settings: Settings, draft: Draft) -> None:
    """Low-rank adapters by the settings of peft, axolotl, LLaMA-Factory and trl, where these turn them on."""
    found = [name for name, values in _SWITCHES.items() if settings.take(name) in values]
    full = settings.take("finetuning_type")
    if full not in (None, "lora", "full"):
        settings.change("finetuning_type", "counted as training all weights")
    if not found:
        settings.ignore(*(name for name in settings.values if name in _OF_ADAPTERS))
        return
    lora: dict[str, Any] = {
        "rank": settings.take("lora_r", as_count) or settings.take("lora_rank", as_count, default=8),
        "dropout": settings.take("lora_dropout", float, default=0.0),
    }
    if targets := _targets(settings):
        lora["target_modules"] = targets
    if (alpha := settings.take("lora_alpha", float)) is not None:
        lora["alpha"] = alpha
    narrow = settings.flag("load_in_4bit"), settings.take("quantization_bit") == "4"
    if settings.take("adapter") == "qlora" or any(narrow):
        lora["base_weights"] = "nf4"
    for name, in_8_bit in (("load_in_8bit", "True"), ("quantization_bit", "8")):
        if settings.take(name) == in_8_bit:
            settings.change(name, "frozen weights are counted in 16 bit")
    draft.put("training", "lora", lora, settings.origin(*found))


def _targets(settings: Settings) -> list[str]:
    """The linear maps of a layer that get adapters, none for all; peft's default for a Llama where none are named."""
    names = settings.take("lora_target_modules", _names, default=[]) + settings.take("lora_target", _names, default=[])
    if settings.flag("lora_target_linear") or {*names} & {*_ALL}:
        return []
    settings.changes += [f"adapters of {name} are not counted" for name in names if name not in _MODULES]
    return [*dict.fromkeys(_MODULES[name] for name in names if name in _MODULES)] or ["q_proj", "v_proj"]


def _names(value: Any) -> list[str]:
    return [str(name).strip() for name in (value.split(",") if isinstance(value, str) else value)]
