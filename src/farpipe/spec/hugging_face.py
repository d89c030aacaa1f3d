"""A Hugging Face ``config.json`` as a Model and back: Llama, and Mistral where it is the same."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from farpipe.errors import InputError
from farpipe.spec.model import Model, RotaryScaling
from farpipe.strict import nearest, parse_json, read_text, validate

CONFIG_NAME: Final = "config.json"
MODEL_TYPES: Final = ("llama", "mistral")
_SHAPE: Final = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_hidden": "intermediate_size",
    "vocab_size": "vocab_size",
}
"""Our key and theirs; all of them have to be there."""
_OPTIONAL: Final = {
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_sequence_length": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
}
_ROTARY: Final = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
_THEIR_NORM_EPSILON: Final = 1e-6
"""What transformers takes where a config says nothing."""


def read_model(folder: Path | str) -> Model:
    """The model that the weights in `folder` are of; InputError names what is missing or not supported."""
    path = Path(folder) / CONFIG_NAME
    if not path.parent.is_dir():
        raise InputError(f"{folder}: there is no such folder; a model of Hugging Face is a folder with {CONFIG_NAME}")
    source = str(path)
    config = parse_json(read_text(path), source)
    if not isinstance(config, dict):
        raise InputError(f"{source}: expected an object")
    return validate(Model, model_fields(config, source) | {"hugging_face": str(folder)}, source)


def model_fields(config: Mapping[str, Any], source: str = CONFIG_NAME) -> dict[str, Any]:
    """The fields of a Model that `config` stands for, not yet checked."""
    _check_supported(config, source)
    for theirs in _SHAPE.values():
        if theirs not in config:
            raise InputError(f"{source}: {theirs}: missing{nearest(theirs, config)}")
    fields = {ours: config[theirs] for ours, theirs in _SHAPE.items()}
    fields |= {ours: config[theirs] for ours, theirs in _OPTIONAL.items() if config.get(theirs) is not None}
    name = Path(str(config.get("_name_or_path") or config["model_type"])).name[:60]
    return fields | {
        "name": name,
        "bias": config.get("attention_bias", False),
        "norm_epsilon": config.get("rms_norm_eps", _THEIR_NORM_EPSILON),
        **_rotary(config, source),
    }


def _check_supported(config: Mapping[str, Any], source: str) -> None:
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise InputError(f"{source}: model_type: {kind!r} is not supported; farpipe reads {known}")
    wanted: dict[str, Any] = {
        "hidden_act": "silu",
        "sliding_window": None,
        "pretraining_tp": 1,
        "quantization_config": None,
    }
    wanted["partial_rotary_factor"] = 1.0
    if kind == "mistral":  # what it takes where these say nothing is not what is taken here
        for key in ("sliding_window", "num_key_value_heads"):
            if key not in config:
                raise InputError(f"{source}: {key}: missing; a {kind} config has to say it")
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise InputError(f"{source}: {key}: {config[key]!r} is not supported, only {value!r}")
    if config.get("attention_bias", False) != config.get("mlp_bias", False):
        raise InputError(f"{source}: attention_bias and mlp_bias: biases in attention alone or MLP alone are not known")
    if config.get("attention_dropout"):
        raise InputError(f"{source}: attention_dropout: {config['attention_dropout']!r} is not supported, only 0")


def _rotary(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Base and scaling: in one table (since transformers 5) or as two keys."""
    table = config.get("rope_parameters")
    key = "rope_parameters" if table is not None else "rope_scaling"
    table = table if table is not None else config.get("rope_scaling") or {}
    if not isinstance(table, Mapping):
        raise InputError(f"{source}: {key}: expected a table, found {table!r}")
    fields: dict[str, Any] = {"rotary_base": table.get("rope_theta", config.get("rope_theta", 10000.0))}
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return fields
    if kind not in ("linear", "llama3"):
        raise InputError(f"{source}: {key}: rope type {kind!r} is not supported, only default, linear and llama3")
    for theirs in _ROTARY.values() if kind == "llama3" else ("factor",):
        if theirs not in table:
            raise InputError(f"{source}: {key}: {theirs}: missing")
    known = _ROTARY if kind == "llama3" else {"factor": "factor"}
    return fields | {"rotary_scaling": {"kind": kind} | {ours: table[theirs] for ours, theirs in known.items()}}


def config_of(model: Model, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of `model`, weights in `dtype` (``float32``, ``bfloat16``).

    InputError for a model that is none of Hugging Face's Llama family.
    """
    unlike = {"gated_mlp": True, "norm": "rmsnorm", "positions": "rotary"}
    for key, value in unlike.items():
        if getattr(model, key) != value:
            raise InputError(f"model.{key}: {getattr(model, key)!r} can't be exported: a Llama has {value!r}")
    theirs = {name: getattr(model, ours) for ours, name in (_SHAPE | _OPTIONAL).items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: value for key, value in theirs.items() if value is not None},
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_scaling": _scaling_of(model.rotary_scaling),
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _scaling_of(scaling: RotaryScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    known = _ROTARY if scaling.kind == "llama3" else {"factor": "factor"}
    return {"rope_type": scaling.kind} | {theirs: getattr(scaling, ours) for ours, theirs in known.items()}
