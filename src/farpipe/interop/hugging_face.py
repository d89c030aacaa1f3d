"""Settings of Hugging Face (config.json, Trainer, Accelerate, adapters of fine-tunings) and of DeepSpeed as a job."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from farpipe.catalog import model_names
from farpipe.interop.megatron_names import settings_by_path, settings_of_tables
from farpipe.interop.settings import Draft, Setting, Settings, as_count, as_flag
from farpipe.spec.hugging_face import model_of_config
from farpipe.spec.hugging_face_keys import MTP
from farpipe.spec.model import Model

_STAGES: Final = {"FULL_SHARD": 3, "1": 3, "SHARD_GRAD_OP": 2, "2": 2, "NO_SHARD": 0, "3": 0, "HYBRID_SHARD": 3}
"""Stage of ZeRO by FSDP's sharding strategy, by name or number."""
_WITHOUT_EFFECT_OF_DEEPSPEED: Final = (
    *("steps_per_print", "wall_clock_breakdown", "zero_allow_untested", "prescale", "dump_state", "flops_profiler"),
    *("tensorboard", "wandb", "csv_monitor", "comms_logger", "zero_force_ds", "monitor", "elasticity", "autotuning"),
    *("scheduler.", "optimizer.type", "optimizer.params.eps", "optimizer.params.torch_adam", "fp16.", "bf16."),
)
_WITHOUT_EFFECT_OF_TRAINER: Final = (
    *("output_dir", "overwrite", "logging", "save", "eval", "load_best", "metric", "report", "push", "hub", "run_name"),
    *("seed", "data_seed", "disable_tqdm", "remove_unused", "label", "do_", "per_device_eval", "dataloader", "resume"),
    *("lr_scheduler", "warmup", "optim", "log_level", "adam_epsilon", "num_train_epochs", "prediction", "greater"),
    *("ddp_timeout", "main_", "machine_rank", "rdzv", "same_network", "compute_environment", "debug", "use_cpu"),
    *("downcast_bf16", "enable_cpu_affinity", "tpu_", "distributed_type", "ddp_backend", "use_cache"),
    *(
        "chat_template",
        "dataset",
        "tokenizer",
        "model_revision",
        "attn_implementation",
        "preprocessing",
        "trust_remote",
    ),
    *("datasets", "wandb_", "special_tokens", "max_samples", "template", "plot_", "val_", "gradient_checkpointing_kw"),
    *(
        "deepspeed_hostfile",
        "deepspeed_multinode",
        "model_type",
        "tokenizer_type",
        "test_split",
        "num_epochs",
        "use_reentrant",
        "zero3_",
        *(f"fsdp_{name}" for name in ("auto_wrap", "state_dict", "sync_module", "use_orig", "cpu_ram", "transformer")),
        *("fsdp_backward_prefetch", "fsdp_forward_prefetch"),
    ),
)
"""Beginnings of names of what changes neither the seconds nor the bytes of a step."""


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


def read_deepspeed(data: Mapping[str, Any], source: str) -> Draft:
    """The training of a DeepSpeed JSON; it has no model, and degrees of its pipeline stand in the script."""
    settings, draft = settings_by_path(data, source), Draft("DeepSpeed")
    each = settings.take("train_micro_batch_size_per_gpu", _count_or_auto)
    steps = settings.take("gradient_accumulation_steps", _count_or_auto)
    whole = settings.take("train_batch_size", _count_or_auto)
    draft.put("training", "microbatch_size", each, settings.origin("train_micro_batch_size_per_gpu"))
    draft.put("training", "global_batch", whole, settings.origin("train_batch_size"))
    if whole is None and each is not None:
        origin = settings.origin("gradient_accumulation_steps", "train_micro_batch_size_per_gpu")
        draft.replica_batch = Setting(each * (steps or 1), origin)
    stage = settings.take("zero_optimization.stage", as_count, default=0)
    draft.put("training", "zero", stage, settings.origin("zero_optimization.stage"))
    draft.put("training", "precision", *_precision(settings))
    _optimizer(settings, draft, "optimizer.params.", "gradient_clipping")
    settings.take("zero_optimization.overlap_comm")
    for name in settings.values:
        if name.startswith("zero_optimization.offload") and name.endswith("device") and settings.take(name) != "none":
            settings.problems.append(f"{name}: state in host memory is not planned")
    draft.close(settings, _beginning(settings, _WITHOUT_EFFECT_OF_DEEPSPEED, ("zero_optimization.",)))
    return draft


def _count_or_auto(value: Any) -> int | None:
    """A count; ``auto`` is what the Trainer fills in."""
    return None if value == "auto" else as_count(value)


def _precision(settings: Settings) -> tuple[str, str]:
    """The precision, and where it stands; ``auto``, which the Trainer fills in, goes behind what other files say."""
    enabled = {kind: settings.take(f"{kind}.enabled", str, "False") for kind in ("bf16", "fp16")}
    for wanted in ("True", "auto"):
        if found := [kind for kind, value in enabled.items() if value == wanted]:
            return found[0], "default" if wanted == "auto" else settings.origin(f"{found[0]}.enabled")
    return "fp32", settings.origin("bf16.enabled", "fp16.enabled")


def _optimizer(settings: Settings, draft: Draft, place: str, clipping: str) -> None:
    for key, name in (("learning_rate", "lr"), ("weight_decay", "weight_decay"), ("betas", "betas")):
        if settings.values.get(place + name, Setting("auto", "")).value != "auto":
            draft.put("training", key, settings.take(place + name, lambda value: value), settings.origin(place + name))
        settings.has(place + name)
    clip = settings.take(clipping, lambda value: None if value == "auto" else float(value))
    draft.put("training", "clip_norm", "none" if clip == 0 else clip, settings.origin(clipping))


def read_trainer(data: Mapping[str, Any], source: str) -> Draft:
    """Arguments of transformers' Trainer (JSON or YAML) or an Accelerate configuration (YAML)."""
    settings, draft = settings_of_tables(data, source, {}), Draft("Hugging Face Trainer")
    _named_model(settings, draft)
    _trainer_sizes(settings, draft)
    _trainer_precision(settings, draft)
    same = {name: (name, float) for name in ("learning_rate", "weight_decay")}
    draft.copy(settings, "training", same)
    clip = settings.take("max_grad_norm", float)
    draft.put("training", "clip_norm", "none" if clip == 0 else clip, settings.origin("max_grad_norm"))
    full = [name for name in ("gradient_checkpointing", "fsdp_activation_checkpointing") if settings.flag(name)]
    draft.put("training", "recompute", "full" if full else "none", settings.origin(*full))
    _trainer_devices(settings, draft)
    _expect_next_tokens(settings)
    _adapters(settings, draft)
    draft.close(settings, _beginning(settings, _WITHOUT_EFFECT_OF_TRAINER, ()))
    return draft


_LENGTHS: Final = ("max_seq_length", "max_length", "model_max_length", "block_size", "cutoff_len", "sequence_len")
"""Names of the length of a sequence, the first that is there."""


def _trainer_sizes(settings: Settings, draft: Draft) -> None:
    """Sequences of a device and of a step, their length, and the number of steps."""
    sizes = ("per_device_train_batch_size", "micro_batch_size")
    each = next((n for n in [settings.take(name, as_count) for name in sizes] if n), None)
    steps = settings.take("gradient_accumulation_steps", _count_or_auto, default=1) or 1
    draft.put("training", "microbatch_size", each, settings.origin(*sizes))
    if each is not None:
        draft.replica_batch = Setting(each * steps, settings.origin("gradient_accumulation_steps"))
    for key, names in (("sequence_length", _LENGTHS), ("num_steps", ("max_steps",))):
        found = next((n for name in names if (n := settings.take(name, as_count)) and n > 0), None)
        draft.put("training", key, found, settings.origin(*names))


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
    if kind or "mixed_precision" in settings.values:
        origin = settings.origin("bf16", "fp16", "mixed_precision")
        draft.put("training", "precision", kind or ("bf16" if named == "fp8" else "fp32"), origin)
        draft.put("training", "matmul", "fp8" if named == "fp8" else None, origin)


def _trainer_devices(settings: Settings, draft: Draft) -> None:
    count = settings.take("num_processes", as_count)
    machines = settings.take("num_machines", as_count, default=1)
    if count is not None:
        draft.num_devices = Setting(count, settings.origin("num_processes"))
        if machines > 1 and count % machines == 0:
            draft.num_devices_per_machine = Setting(count // machines, settings.origin("num_machines"))
    origin = settings.origin("zero_stage", "fsdp_sharding_strategy", "fsdp", "fsdp_version")
    draft.put("training", "zero", settings.take("zero_stage", as_count, _fsdp_stage(settings)), origin)
    for name in ("fsdp_offload_params", "offload_params", "offload_optimizer_device", "offload_param_device"):
        if (place := settings.take(name)) not in (None, "False", "none"):
            settings.problems.append(f"{settings.origin(name)}: {place}: state in host memory is not planned")
    for key, name in (("tensor", "tp_degree"), ("pipeline", "pp_degree")):
        origin = settings.origin(f"megatron_lm_{name}", name)
        draft.put("layout", key, settings.take(f"megatron_lm_{name}", as_count), origin)


def _fsdp_stage(settings: Settings) -> int | None:
    """Stage of ZeRO by the settings of FSDP: of Accelerate, of the Trainer (words), of its second version."""
    strategy = settings.take("fsdp_sharding_strategy", str, "") or settings.take("fsdp", _words, "")
    if stages := [_STAGES[word] for word in strategy.upper().split() if word in _STAGES]:
        return stages[0]
    if settings.take("fsdp_version", str, "") != "2":
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
        if (kind := settings.take(name)) not in (None, *plain):
            settings.problems.append(f"{settings.origin(name)}: {kind}: counted as one pass over each sequence")


def _beginning(settings: Settings, beginnings: tuple[str, ...], more: tuple[str, ...]) -> list[str]:
    return [name for name in settings.values if name.startswith((*beginnings, *more))]


_SWITCHES: Final = {
    "adapter": ("lora", "qlora"),
    "finetuning_type": ("lora",),
    "use_peft": ("True",),
    "use_lora": ("True",),
}
"""Settings that turn adapters on, with the values by which they do."""
_MODULES: Final = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "linear_qkv"),
    "o_proj": "linear_proj",
    **dict.fromkeys(("gate_proj", "up_proj"), "linear_fc1"),
    "down_proj": "linear_fc2",
}
"""Linear maps of transformers' layers, by Megatron-Core's names."""
_ALL: Final = ("all", "all-linear")


def _adapters(settings: Settings, draft: Draft) -> None:
    """Low-rank adapters by the settings of peft, axolotl, LLaMA-Factory and trl, where these turn them on."""
    found = [name for name, values in _SWITCHES.items() if settings.take(name) in values]
    full = settings.take("finetuning_type")
    if full not in (None, "lora", "full"):
        settings.problems.append(f"{settings.origin('finetuning_type')}: {full}: counted as training all weights")
    if not found:
        return
    lora: dict[str, Any] = {
        "rank": settings.take("lora_r", as_count) or settings.take("lora_rank", as_count, default=8),
        "target_modules": _targets(settings),
        "dropout": settings.take("lora_dropout", float, default=0.0),
    }
    for name in ("lora_alpha", "lora_task_type"):
        settings.take(name)
    narrow = settings.flag("load_in_4bit"), settings.take("quantization_bit") == "4"
    if settings.take("adapter") == "qlora" or any(narrow):
        lora["base_weights"] = "nf4"
    if settings.flag("load_in_8bit"):
        settings.problems.append(f"{settings.origin('load_in_8bit')}: frozen weights are counted in 16 bit")
    draft.put("training", "lora", lora, settings.origin(*found))


def _targets(settings: Settings) -> list[str]:
    """The linear maps that get adapters; those of a layer only, and peft's default where none are named."""
    names = settings.take("lora_target_modules", _names, default=[]) + settings.take("lora_target", _names, default=[])
    if settings.flag("lora_target_linear") or {*names} & {*_ALL}:
        return [*dict.fromkeys(_MODULES.values())]
    settings.problems += [f"adapters of {name}" for name in names if name not in _MODULES]
    return [*dict.fromkeys(_MODULES[name] for name in names if name in _MODULES)] or ["linear_qkv"]


def _names(value: Any) -> list[str]:
    return [str(name).strip() for name in (value.split(",") if isinstance(value, str) else value)]
