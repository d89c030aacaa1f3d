"""Settings of a torchtitan job as a job: TOML up to version 0.2, then the JSON of a run or a module in Python."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from farpipe.core.catalog import model_row
from farpipe.core.errors import InputError
from farpipe.interop.kinds import as_count, as_flag, as_size
from farpipe.interop.known_options import known_options, says_shape
from farpipe.interop.megatron_names import settings_by_path
from farpipe.interop.settings import Draft, Plain, Setting, Settings
from farpipe.interop.torchtitan_python import tables_of_python

FORM: Final = "torchtitan"
PRESETS: Final = {
    ("llama3", "8b"): "llama-3-8b",
    ("llama3", "70b"): "llama-3-70b",
    ("llama3", "405b"): "llama-3-405b",
    ("qwen3", "30b-a3b"): "qwen3-30b-a3b",
    ("qwen3", "235b-a22b"): "qwen3-235b-a22b",
    ("deepseek_v3", "671b"): "deepseek-v3",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
}
"""Models of torchtitan that the catalogue has, by name and flavor."""
_QWEN3: Final = {
    "debugmodel": (8, 256, 16, 8, 3072, 2048),
    "0.6b": (28, 1024, 16, 8, 3072, 151936),
    "1.7b": (28, 2048, 16, 8, 6144, 151936),
    "4b": (36, 2560, 32, 8, 9728, 151936),
    "8b": (36, 4096, 32, 8, 12288, 151936),
    "14b": (40, 5120, 40, 8, 17408, 151936),
    "32b": (64, 5120, 64, 8, 25600, 151936),
}
"""Layers, width, heads, key heads, MLP width, vocabulary (torchtitan 0.2.2, models/qwen3)."""
_TIED: Final = ("debugmodel", "0.6b", "1.7b", "4b")
_LLAMA_DEBUG: Final = (6, 256, 16, 16, 768, 2048)
_SCHEDULES: Final = {
    "1f1b": ("1f1b", 1),
    "gpipe": ("gpipe", 1),
    "interleaved1f1b": ("interleaved", 2),
    "interleavedzerobubble": ("interleaved", 2),
    "zbvzerobubble": ("zbv", 2),
}
"""farpipe's schedule, and the stages on a rank where nothing else says so."""
_CONVERTERS: Final = {"float8": "fp8", "mx": "mxfp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
_TRAINING: Final[Plain] = {
    "num_steps": ("training.steps", as_count),
    "learning_rate": ("optimizer.lr", float),
    "clip_norm": ("training.max_norm", float),
}


EARLIER: Final = {
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    **{
        f"training.{name}": f"parallelism.{name}"
        for name in ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")
    },
    **{
        f"experimental.{name}": f"parallelism.{name}"
        for name in (
            "pipeline_parallel_degree",
            "pipeline_parallel_schedule",
            "pipeline_parallel_microbatches",
            "context_parallel_degree",
            "enable_async_tensor_parallel",
        )
    },
}
"""Names of 2024 and early 2025, in whose place their settings have those of later versions."""


SWITCHES: Final = (
    "parallelism.enable_async_tensor_parallel",
    *(f"float8.enable_{name}" for name in ("float8_linear", "fsdp_float8_all_gather")),
)
"""Switches that are off by default."""
_ON: Final = Setting(True, "")


def read_torchtitan(data: Mapping[str, Any], source: str) -> Draft:
    """The job of a torchtitan TOML, already parsed."""
    settings = settings_by_path(data, source)
    for earlier, name in EARLIER.items():
        if earlier in settings.values:
            found = settings.values.pop(earlier)
            if str(settings.values.setdefault(name, found).value) != str(found.value):
                settings.rivals[name] = [found]
    for name in SWITCHES:
        if settings.values.get(name, _ON).value is False:
            del settings.values[name]
    draft = Draft(FORM)
    _layout(settings, draft)
    _model(settings, draft)
    _stages(settings, draft)
    _training(settings, draft)
    draft.close(settings, known_options("torchtitan"))
    return draft


def read_saved_torchtitan(data: Mapping[str, Any], source: str) -> Draft:
    """The job of the JSON that torchtitan 0.3 writes with ``--debug.save_config_file``, already parsed."""
    spec, optimizer = _table(data, "model_spec", source), _table(data, "optimizer", source)
    tables: dict[str, Any] = {
        name: {key: value for key, value in _table(data, name, source).items() if value not in (None, "")}
        for name in ("parallelism", "training", "compile")
    }
    for key in ("first_stage_less_layers", "last_stage_less_layers"):
        tables["parallelism"].pop(f"pipeline_parallel_{key}", None)  # the cut that farpipe chooses has none
    has_graphs = not tables["training"].pop("disable_cuda_graphs", True)
    tables["model"] = {key: spec[key] for key in ("name", "flavor") if key in spec}
    with suppress(LookupError, TypeError):
        tables["optimizer"] = {"lr": optimizer["param_groups"][0]["optimizer_kwargs"]["lr"]}
    saved = data.get("activation_checkpoint")
    mode = _saved_recompute(_table(data, "activation_checkpoint", source)) if saved else "none"
    tables["activation_checkpoint"] = {"mode": mode}
    if not tables["training"].get("enable_cpu_offload"):
        tables["training"].pop("enable_cpu_offload", None)
    draft = read_torchtitan(tables, source)
    if has_graphs:
        draft.notes.append("CUDA graphs, which torchtitan 0.3 takes without a pipeline, are not counted")
    return draft


def _table(data: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    found = data.get(name, {})
    if not isinstance(found, Mapping):
        raise InputError(f"{source}: {name}: expected a table, found {found!r:.60}")
    return found


def _saved_recompute(settings: Mapping[str, Any]) -> str:
    """The mode of activation checkpointing by the settings of its kind: only selective ones name products."""
    return "selective" if {"force_recompute_mm_shapes_by_fqns", "memory_budget"} & {*settings} else "full"


def read_python_of_torchtitan(text: str, source: str, wanted: str | None = None) -> Draft:
    """The job of a module of configurations; `wanted` names the function where there are several."""
    tables, unread = tables_of_python(text, source, wanted)
    draft = read_torchtitan(tables, source)
    for text in unread:  # such as "tensor_parallel_degree = int(environ['TP']) (line 7)"
        if says_shape(name := text.partition(" ")[0]):
            draft.shapes[name] = text
        else:
            draft.not_understood.insert(0, text)
    return draft


def _layout(settings: Settings, draft: Draft) -> None:
    names = {
        "pipeline": "pipeline_parallel_degree",
        "tensor": "tensor_parallel_degree",
        "context": "context_parallel_degree",
        "expert": "expert_parallel_degree",
    }
    for key, name in names.items():
        place = f"parallelism.{name}"
        draft.put("layout", key, settings.take(place, as_size, default=1), settings.origin(place))
    place, tensor = "parallelism.expert_tensor_parallel_degree", draft.degree("tensor")
    if settings.take(place, as_size, default=tensor) != tensor and draft.degree("expert") > 1:
        settings.change(place, "experts are divided over as many tensor-parallel devices as the layers")
    replicate = settings.take("parallelism.data_parallel_replicate_degree", as_size, default=1)
    shard = settings.take("parallelism.data_parallel_shard_degree", as_count, default=-1)
    reshard = settings.take("parallelism.fsdp_reshard_after_forward", str, "default")
    origin = settings.origin("parallelism.data_parallel_shard_degree")
    if shard > 0:
        draft.put("layout", "data", replicate * shard, origin)
    always = reshard == "always" or (reshard == "default" and draft.degree("pipeline") == 1)
    draft.put("training", "zero", 0 if shard == 1 and replicate > 1 else 3 if always else 1, origin)
    if replicate > 1 and shard > 1:
        draft.put("training", "zero_group_size", shard * draft.degree("context"), origin)


def _parts(value: Any) -> list[list[str]]:
    return [[str(module) for module in part] for part in value]


def _stages(settings: Settings, draft: Draft) -> None:
    name = settings.take("parallelism.pipeline_parallel_schedule", str, "1F1B")
    parts = settings.take("parallelism.module_fqns_per_model_part", _parts)
    each = settings.take("parallelism.pipeline_parallel_layers_per_stage", as_size)
    pipeline = draft.degree("pipeline")
    if pipeline == 1:
        return
    method, virtual = _SCHEDULES.get(name.lower().removeprefix("schedule"), ("", 1))
    origin = settings.origin("parallelism.pipeline_parallel_schedule")
    if each and (num_layers := _num_layers(draft)):
        # The embedding and the head count as a layer each (torchtitan/distributed/pipeline_parallel.py).
        virtual, origin = (
            max(1, -(-(num_layers + 2) // each) // pipeline),
            "parallelism.pipeline_parallel_layers_per_stage",
        )
    if parts:
        virtual = max(1, len(parts) // pipeline)
        layers = [sum(module.startswith("layers.") for module in part) for part in parts]
        draft.put("layout", "layers", layers, "parallelism.module_fqns_per_model_part")
    draft.put("layout", "virtual", virtual, origin)
    if method:
        draft.put("schedule", "method", method, origin)
    elif settings.has("parallelism.pipeline_parallel_schedule_csv"):
        draft.notes.append("the order of actions is in a file of its own: farpipe import it with --format torch-csv")
    else:
        settings.problems.append(f"{origin}: {name} is not known")
    if name.lower() == "interleavedzerobubble":
        draft.notes.append("InterleavedZeroBubble is planned as interleaved 1F1B")


def _num_layers(draft: Draft) -> int | None:
    preset = draft.value("model", "preset")
    found = draft.value("model", "num_layers") if preset is None else model_row(preset).shape["num_layers"]
    return None if found is None else int(found)


def _model(settings: Settings, draft: Draft) -> None:
    name, flavor = settings.take("model.name", str, ""), str(settings.take("model.flavor", str, "")).lower()
    origin = settings.origin("model.flavor", "model.name")
    if settings.take("model.norm_type", str, "rmsnorm").endswith("layernorm"):
        draft.put("model", "norm", "layernorm", "model.norm_type")
    plain = re.sub(r"_(flex|varlen)(_attn)?$", "", flavor)
    if (name, plain) in PRESETS:
        draft.put("model", "preset", PRESETS[name, plain], origin)
    elif name == "qwen3" and plain in _QWEN3:
        _put_shape(draft, _QWEN3[plain], origin)
        extra = {"head_dim": 128, "qk_norm": True, "rotary_base": 1e6, "tied_embeddings": plain in _TIED}
        for key, value in extra.items():
            draft.put("model", key, value, origin)
    elif name == "llama3" and plain == "debugmodel":
        _put_shape(draft, _LLAMA_DEBUG, origin)
        draft.put("model", "rotary_base", 5e5, origin)
    else:
        settings.problems.append(f"{origin}: the model {name} {flavor} is not known; write its shape under [model]")


def _put_shape(draft: Draft, shape: tuple[int, ...], origin: str) -> None:
    keys = ("num_layers", "hidden", "num_heads", "num_kv_heads", "ffn_hidden", "vocab_size")
    for key, value in zip(keys, shape, strict=True):
        draft.put("model", key, value, origin)


def _training(settings: Settings, draft: Draft) -> None:
    draft.copy(settings, "training", _TRAINING)
    names = ("training.seq_len", "training.max_context_length")
    length = settings.first(names, as_size) or 2048
    draft.put("training", "sequence_length", length, settings.origin(*names))
    _batch(settings, draft)
    by_tokens = settings.take("parallelism.enable_sequence_parallel", as_flag, default=True)
    tensor = draft.degree("tensor") > 1 and by_tokens
    draft.put("training", "sequence_parallel", tensor, settings.origin("parallelism.tensor_parallel_degree"))
    _precision(settings, draft)
    converters = settings.take("model.converters", lambda found: [found] if isinstance(found, str) else [*found], [])
    narrow = next((_CONVERTERS[part] for text in converters for part in text.split(".") if part in _CONVERTERS), None)
    if settings.flag("float8.enable_float8_linear"):  # until 2025
        narrow = "fp8"
    recipes = [settings.take(f"{table}float8.recipe_name", str, "") for table in ("", "quantize.linear.")]
    if narrow == "fp8" and any(recipe.startswith("rowwise") for recipe in recipes):
        narrow = "fp8_rowwise"
        if any(recipe.endswith("gw_hp") for recipe in recipes):
            settings.notes.append("rowwise_with_gw_hp: gradients of weights are counted in 8 bit, as with rowwise")
    draft.put("training", "matmul", narrow, settings.origin("model.converters", "float8.enable_float8_linear"))
    unknown = [text for text in converters if not {*text.split(".")} & _CONVERTERS.keys()]
    if unknown:
        settings.shapes["model.converters"] = f"model.converters: {', '.join(unknown)}"
    if settings.take("optimizer.name", str, "AdamW").lower() not in ("adam", "adamw"):
        settings.change("optimizer.name", "the optimizer's state and work are counted as Adam's")
    if not settings.flag("compile.enable"):
        draft.put("training", "kernels", "eager", settings.origin("compile.enable"))
    draft.put("training", "attention_kernel", "sdpa", "torchtitan")
    draft.put("training", "framework", "pytorch", "torchtitan")
    _recompute(settings, draft)


def _precision(settings: Settings, draft: Draft) -> None:
    origin = settings.origin("training.mixed_precision_param")
    is_wide = settings.take("training.mixed_precision_param", str, "bfloat16") == "float32"
    draft.put("training", "precision", "fp32" if is_wide else "bf16", origin)
    if settings.take("training.mixed_precision_reduce", str, "float32") == "bfloat16" and not is_wide:
        draft.put("training", "grad_reduce_in_fp32", value=False, origin="training.mixed_precision_reduce")
    if settings.take("training.dtype", str, "float32") != "float32":
        settings.change("training.dtype", "weights and Adam's state are counted in float32")


def _batch(settings: Settings, draft: Draft) -> None:
    """Batches: without a pipeline a device takes its local batch at once, else in microbatches."""
    if settings.has("training.num_tokens_per_microbatch_per_dp_rank"):
        _batch_of_tokens(settings, draft)
        return
    local = settings.take("training.local_batch_size", as_size, default=8)
    whole = settings.take("training.global_batch_size", as_count, default=-1)
    each = settings.take("parallelism.pipeline_parallel_microbatch_size", as_size, default=1)
    origin, pipeline = settings.origin("training.local_batch_size"), draft.degree("pipeline")
    if settings.origin("parallelism.pipeline_parallel_degree").startswith("experimental"):  # until 2025
        count = settings.take("parallelism.pipeline_parallel_microbatches", as_size, default=pipeline)
        each = max(1, local // count)
    draft.put("training", "microbatch_size", each if pipeline > 1 else local, origin)
    if whole > 0:
        draft.put("training", "global_batch", whole, settings.origin("training.global_batch_size"))
    else:
        draft.replica_batch = Setting(local, origin)


def _batch_of_tokens(settings: Settings, draft: Draft) -> None:
    """Batches as later versions count them, in tokens of a microbatch and of a step."""
    length = draft.value("training", "sequence_length")
    name, whole = "training.num_tokens_per_microbatch_per_dp_rank", "training.num_tokens_per_train_step"
    each = settings.take(name, as_count, default=16384) // length
    draft.put("training", "microbatch_size", max(1, each), settings.origin(name))
    count = settings.take("parallelism.num_pp_microbatches", as_size, default=1)
    if (tokens := settings.take(whole, as_count, default=-1)) > 0:
        draft.put("training", "global_batch", tokens // length, settings.origin(whole))
    else:
        draft.replica_batch = Setting(
            max(1, each) * (count if draft.degree("pipeline") > 1 else 1), settings.origin(name)
        )


def _recompute(settings: Settings, draft: Draft) -> None:
    mode = settings.take("activation_checkpoint.mode", str, "selective")
    option = settings.take("activation_checkpoint.selective_ac_option", str, "2")
    settings.take("activation_checkpoint.early_stop", as_flag)
    origin = settings.origin("activation_checkpoint.mode")
    by_op = mode == "selective" and option == "op" and not draft.value("model", "experts")
    if mode == "selective" and not by_op:
        draft.notes.append(f"selective checkpointing by {option!r} is counted as recomputing norms alone")
    known = {"none": "none", "full": "full"} | ({"selective": "op"} if by_op else {})
    draft.put("training", "recompute", known.get(mode, "layernorm"), origin)
