"""Settings of DeepSpeed (JSON) as a job, and of GPT-NeoX (YAML), which has Megatron's and DeepSpeed's in one file."""

from collections.abc import Mapping
from typing import Any, Final

from farpipe.interop.kinds import as_count, as_flag, as_size
from farpipe.interop.known_options import known_options
from farpipe.interop.megatron import job_of_settings
from farpipe.interop.megatron_names import ALIASES, settings_by_path, settings_of_tables
from farpipe.interop.settings import Draft, Setting, Settings

_PLAIN_OPTIMIZERS: Final = ("adam", "adamw", "fusedadam", "auto", "cpuadam", "deepspeedcpuadam")
"""Optimizers that keep two numbers of 32 bit for a parameter."""


def read_deepspeed(data: Mapping[str, Any], source: str) -> Draft:
    """The training of a DeepSpeed JSON; it has no model, and degrees of its pipeline stand in the script."""
    settings, draft = settings_by_path(data, source), Draft("DeepSpeed")
    each = settings.take("train_micro_batch_size_per_gpu", _size_or_auto)
    draft.put("training", "microbatch_size", each, settings.origin("train_micro_batch_size_per_gpu"))
    whole = settings.take("train_batch_size", _size_or_auto)
    draft.put("training", "global_batch", whole, settings.origin("train_batch_size"))
    if steps := settings.take("gradient_accumulation_steps", _size_or_auto):
        draft.accumulation = Setting(steps, settings.origin("gradient_accumulation_steps"))
    stage = settings.take("zero_optimization.stage", as_count, default=0)
    draft.put("training", "zero", stage, settings.origin("zero_optimization.stage"))
    draft.put("training", "precision", *_precision(settings))
    _optimizer(settings, draft)
    _messages(settings, draft)
    _degrees(settings, draft)
    off = [name.removesuffix("enabled") for name, found in settings.values.items() if _switches_off(name, found.value)]
    settings.ignore(*(name for name in settings.values if name.startswith(tuple(off))))
    draft.close(settings, known_options("deepspeed"))
    return draft


def _size_or_auto(value: Any) -> int | None:
    """A count; ``auto`` is what the Trainer fills in."""
    return None if value == "auto" else as_size(value)


def _switches_off(name: str, value: Any) -> bool:
    return name.endswith(".enabled") and value is False


def _precision(settings: Settings) -> tuple[str, str]:
    """The precision, and where it stands; ``auto``, which the Trainer fills in, goes behind what other files say."""
    enabled = {kind: settings.take(f"{kind}.enabled", str, "False") for kind in ("bf16", "fp16")}
    for wanted in ("True", "auto"):
        if found := [kind for kind, value in enabled.items() if value == wanted]:
            return found[0], "default" if wanted == "auto" else settings.origin(f"{found[0]}.enabled")
    return "fp32", settings.origin("bf16.enabled", "fp16.enabled")


def _optimizer(settings: Settings, draft: Draft) -> None:
    place = "optimizer.params."
    for key, name in (("learning_rate", "lr"), ("weight_decay", "weight_decay"), ("betas", "betas")):
        if settings.values.get(place + name, Setting("auto", "")).value != "auto":
            draft.put("training", key, settings.take(place + name, lambda value: value), settings.origin(place + name))
        settings.ignore(place + name)
    clip = settings.take("gradient_clipping", lambda value: None if value == "auto" else float(value))
    draft.put("training", "clip_norm", "none" if clip == 0 else clip, settings.origin("gradient_clipping"))
    if settings.take("optimizer.type", str, "adam").lower() not in _PLAIN_OPTIMIZERS:
        settings.change("optimizer.type", "the optimizer's state, work and messages are counted as Adam's")


def _messages(settings: Settings, draft: Draft) -> None:
    """Overlap of collectives, and the numbers in which gradients are summed."""
    overlap, kind = "zero_optimization.overlap_comm", "communication_data_type"
    draft.put("training", "overlap", settings.take(overlap, _flag_or_auto), settings.origin(overlap))
    in_32_bit = {"fp32": True, "fp16": False, "bf16": False, "bfp16": False, "auto": None}
    draft.put("training", "grad_reduce_in_fp32", settings.take(kind, in_32_bit.__getitem__), settings.origin(kind))


def _flag_or_auto(value: Any) -> bool | None:
    return None if value == "auto" else as_flag(value)


def _degrees(settings: Settings, draft: Draft) -> None:
    """Tensor parallelism of AutoTP, and sequences divided by Ulysses."""
    names = ("tensor_parallel.autotp_size", "tensor_parallel.tp_size", "tensor_parallel.tp.tp_size")
    if tensor := settings.first(names, as_count):
        draft.put("layout", "tensor", tensor, settings.origin(*names))
    context = settings.take("sequence_parallel_size", as_size)
    draft.put("layout", "context", context, settings.origin("sequence_parallel_size"))
    draft.put("layout", "context_exchange", "ulysses" if context else None, settings.origin("sequence_parallel_size"))


_NEOX: Final = {
    "num_kv_heads": "num_key_value_heads",
    "norm": "normalization",
    "pos_emb": "position_embedding_type",
    "no_weight_tying": "untie_embeddings_and_output_weights",
    "use_qk_layernorm": "qk_layernorm",
    "use_bias_in_mlp": "add_bias_linear",
    "rotary_emb_base": "rotary_base",
    "moe_num_experts": "num_experts",
    "moe_top_k": "moe_router_topk",
    "global_num_gpus": "world_size",
}
"""Names of GPT-NeoX for Megatron-LM's options (megatron/neox_arguments/neox_args.py)."""
_GATED: Final = ("swiglu", "geglu", "reglu", "bilinear", "glu")
_OF_DEEPSPEED: Final = frozenset(
    (
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        *("optimizer", "scheduler", "fp32_allreduce", "prescale_gradients", "gradient_predivide_factor", "amp"),
        *("sparse_gradients", "fp16", "bf16", "zero_optimization", "curriculum_learning", "steps_per_print"),
        *("wall_clock_breakdown", "dump_state", "flops_profiler", "communication_data_type", "autotuning"),
        *("activation_checkpointing", "sparse_attention", "data_efficiency", "tensorboard", "wandb", "csv_monitor"),
        *("elasticity", "comms_logger", "compression_training", "checkpoint", "data_types"),
        *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "tensor_parallel"),
    )
)
"""Keys at the top of a file of GPT-NeoX that it hands on to DeepSpeed."""


def is_neox(data: Mapping[Any, Any]) -> bool:
    """True for a file with settings of GPT-NeoX: a model by Megatron's names beside DeepSpeed's."""
    keys = {_plain(key) for key in data}
    return "pipe_parallel_size" in keys or ("num_layers" in keys and not keys.isdisjoint(_OF_DEEPSPEED))


def _plain(key: Any) -> str:
    return str(key).lstrip("-").replace("-", "_")


def read_neox(data: Mapping[str, Any], source: str) -> tuple[Draft, Draft]:
    """The model and the degrees of a file of GPT-NeoX, and what it hands on to DeepSpeed."""
    names = {_plain(key): value for key, value in data.items()}
    handed_on = {name: value for name, value in names.items() if name in _OF_DEEPSPEED}
    if isinstance(half := handed_on.get("fp16"), Mapping) and half.get("type") == "bfloat16":  # version 1
        handed_on |= {"fp16": {}, "bf16": {"enabled": half.get("enabled", True)}}
    model = {key: value for key, value in data.items() if _plain(key) not in _OF_DEEPSPEED}
    settings = settings_of_tables(model, source, {**ALIASES, **_NEOX})
    _widths(settings)
    _attention(settings)
    for name in ("attention_dropout", "hidden_dropout"):
        settings.values.setdefault(name, Setting(0.0, "default of GPT-NeoX"))
    if str(settings.values.get("precision", Setting("", "")).value) == "bfloat16":
        settings.values["precision"] = Setting("bf16", "precision")
    if settings.values.get("pipeline_model_parallel_size", Setting(1, "")).value == 0:  # no pipeline
        del settings.values["pipeline_model_parallel_size"]
    draft = job_of_settings(settings, "GPT-NeoX", "megatron", "neox")
    draft.own_method = "1f1b"
    return draft, read_deepspeed(handed_on, source)


def _widths(settings: Settings) -> None:
    """Width of the MLP: one with a gate takes a third of ``intermediate_size`` for each of its two halves, for as many
    parameters as without (megatron/model/transformer.py)."""
    is_gated = settings.take("activation", str, "gelu") in _GATED
    hidden, given = settings.take("hidden_size", as_size), settings.take("intermediate_size", as_size)
    factor, multiple = settings.take("expansion_factor", float), settings.take("mlp_multiple_of", as_size, default=1)
    if hidden is None:
        return
    whole = given or int((factor or 4) * hidden)
    each = int(whole * 2 / 3) // 2 if is_gated else whole
    origin = settings.origin("intermediate_size", "expansion_factor", "activation")
    settings.values["ffn_hidden_size"] = Setting(-(-each // multiple) * multiple, origin)
    if is_gated:
        settings.values["swiglu"] = Setting(True, settings.origin("activation"))


def _attention(settings: Settings) -> None:
    """``[[["flash"], 24]]``: attention by kernels; ``global``, which is the default, keeps the scores."""
    kinds = settings.take("attention_config", lambda value: {str(kind) for group in value for kind in group[0]})
    if settings.has("attention_config") and not (kinds and kinds <= {"flash", "global"}):
        place = settings.values["attention_config"]
        settings.shapes["attention_config"] = f"{place.origin}: {place.value}: other attention than flash and global"
    settings.values["attention_backend"] = Setting(
        "flash" if kinds == {"flash"} else "unfused", settings.origin("attention_config")
    )
