"""A Hugging Face ``config.json`` as a Model and back: Llama and Qwen2, and Mistral where it is the same.

Others, mixtures of experts and Qwen3, are read to plan them; a folder with weights may be of any causal model, for
transformers computes it. What changes neither bytes nor times is not looked at in these: rotary scaling, the router's
details, the format that weights are published in.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from farpipe.errors import InputError
from farpipe.spec.model import Model, RotaryScaling
from farpipe.strict import nearest, parse_json, read_text, shaped, validate

Config = Mapping[str, Any]
_TOPK_METHODS: Final = {"deepseek_v2": "greedy", "deepseek_v3": "noaux_tc", "kimi_k2": "noaux_tc"}
"""Method of the router where a config has no `topk_method`; ``noaux_tc`` has a bias for every expert."""
CONFIG_NAME: Final = "config.json"
MODEL_TYPES: Final = ("llama", "mistral", "qwen2")
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
_OLDER: Final = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions",),
}
"""Older names of keys."""
_GPT: Final = {"gated_mlp": False, "norm": "layernorm", "bias": True}
_KNOWN: Final[dict[str, dict[str, Any]]] = {
    "gpt2": _GPT | {"positions": "learned", "tied_embeddings": True},
    "starcoder2": _GPT | {"tied_embeddings": True},
    "phi": _GPT,
    "gpt_neox": _GPT,
    **{key: {"tied_embeddings": True} for key in ("gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "smollm3")},
}
"""Fields that go without saying in configs of these types."""
_LOCAL: Final = "sliding_attention"
"""Kind of a layer with a window in a config's `layer_types`."""
MAX_LAYERS: Final = 1 << 14
"""Layers from which on none is listed; no model has so many."""
_WHOLE_EVERY: Final = {"gpt_oss": 2, "gemma2": 2, "gemma3_text": 6, "cohere2": 4, "olmo3": 4}
"""Types of which every so many-th layer has no window, where a config says nothing else."""
_ROTARY: Final = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
        "original_length": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "factor",
        "low_frequency_factor": "beta_slow",
        "high_frequency_factor": "beta_fast",
        "original_length": "original_max_position_embeddings",
        "attention_factor": "attention_factor",
    },
}
"""Keys of rotary scaling, ours and theirs, by the type of theirs."""
_ROTARY_OPTIONAL: Final = ("beta_slow", "beta_fast", "attention_factor")
_ROTARY_REFUSED: Final = {"partial_rotary_factor": 1.0, "truncate": True, "mscale": None, "mscale_all_dim": None}
"""Keys of that table, and the only value that they may have."""
_KINDS: Final[dict[bool, dict[str, Any]]] = {
    False: {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    True: {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
}
"""Config entries of the kind that a model is exported as, by `Model.qkv_bias`."""
_THEIR_NORM_EPSILON: Final = 1e-6
"""The epsilon that transformers takes where a config says nothing."""


def planned_fields(config: Config, source: str) -> dict[str, Any]:
    """The fields of a Model beyond the plain shape; InputError where a key is missing or a variant is not known."""

    def need(key: str) -> Any:
        if config.get(key) is None:
            raise InputError(f"{source}: {key}: missing{nearest(key, config)}")
        return config[key]

    return READERS[config["model_type"]](config, need, source)


def _mixtral(config: Config, need: Callable[[str], Any], source: str) -> dict[str, Any]:
    inner = need("intermediate_size")
    return {"experts": _experts(need("num_local_experts"), need("num_experts_per_tok"), inner)}


def _qwen3(config: Config, need: Callable[[str], Any], source: str) -> dict[str, Any]:
    _expect(config, {"attention_bias": False}, source)
    return {"qk_norm": True}


def _qwen3_moe(config: Config, need: Callable[[str], Any], source: str) -> dict[str, Any]:
    _expect(config, {"mlp_only_layers": [], "decoder_sparse_step": 1}, source)
    experts = _experts(need("num_experts"), need("num_experts_per_tok"), need("moe_intermediate_size"))
    return {"experts": experts} | _qwen3(config, need, source)


def _deepseek(config: Config, need: Callable[[str], Any], source: str) -> dict[str, Any]:
    _expect(config, {"moe_layer_freq": 1, "attention_bias": False}, source)
    inner = need("moe_intermediate_size")
    experts = _experts(need("n_routed_experts"), need("num_experts_per_tok"), inner)
    experts |= {
        "shared_ffn_hidden": inner * (config.get("n_shared_experts") or 0),
        "num_dense_layers": config.get("first_k_dense_replace", 0),
        "router_bias": 1 if config.get("topk_method", _TOPK_METHODS[config["model_type"]]) == "noaux_tc" else 0,
    }
    latent = {
        "query_rank": config.get("q_lora_rank") or 0,
        "kv_rank": need("kv_lora_rank"),
        "nope_dim": need("qk_nope_head_dim"),
        "rope_dim": need("qk_rope_head_dim"),
        "value_dim": need("v_head_dim"),
    }
    width = latent["nope_dim"] + latent["rope_dim"]
    return {"experts": experts, "latent_attention": latent, "head_dim": width}


def _gpt_oss(config: Config, need: Callable[[str], Any], source: str) -> dict[str, Any]:
    experts = _experts(need("num_local_experts"), need("num_experts_per_tok"), need("intermediate_size"))
    experts |= {"router_bias": 1, "expert_bias": True}
    return {"experts": experts, "attention_bias": config.get("attention_bias", True), "attention_sinks": True}


def _experts(num_experts: int, per_token: int, ffn_hidden: int) -> dict[str, Any]:
    return {"num_experts": num_experts, "per_token": per_token, "ffn_hidden": ffn_hidden}


def _expect(config: Config, wanted: Config, source: str) -> None:
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise InputError(f"{source}: {key}: {config[key]!r} is not supported, only {value!r}")


READERS: Final[dict[str, Callable[[Config, Callable[[str], Any], str], dict[str, Any]]]] = {
    "mixtral": _mixtral,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "gpt_oss": _gpt_oss,
}
"""Readers of configs, by ``model_type``."""


def read_model(folder: Path | str) -> Model:
    """The model that the weights in `folder` are of; InputError names what is missing or not supported."""
    path = Path(folder) / CONFIG_NAME
    if not path.parent.is_dir():
        raise InputError(f"{folder}: there is no such folder; a model of Hugging Face is a folder with {CONFIG_NAME}")
    config = _read(path)
    _expect(config, {"quantization_config": None}, str(path))
    try:
        fields = model_fields(config, str(path))
    except InputError:  # transformers computes more than farpipe can describe; then times are rough
        fields = _plain_fields(config, str(path))
    return validate(Model, fields | {"hugging_face": str(folder)}, str(path))


def type_of(folder: Path | str) -> str:
    """The ``model_type`` of the text model in `folder`, "" where none is said; InputError where there is no config."""
    config = _read(Path(folder) / CONFIG_NAME)
    text = config.get("text_config")
    return str((text if isinstance(text, dict) else config).get("model_type", ""))


def _plain_fields(config: Config, source: str) -> dict[str, Any]:
    """The fields of any causal model, by the names that most configs have; what is special about it is left out."""

    def find(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    shape = {ours: find(theirs, *_OLDER.get(theirs, ())) for ours, theirs in _SHAPE.items()}
    if shape["ffn_hidden"] is None and isinstance(shape["hidden"], int):
        shape["ffn_hidden"] = 4 * shape["hidden"]
    for ours, value in shape.items():
        if value is None:
            raise InputError(f"{source}: {_SHAPE[ours]}: missing{nearest(_SHAPE[ours], config)}")
    kind = str(config.get("model_type", "custom"))
    fields: dict[str, Any] = {"name": kind[:60]} | _KNOWN.get(kind, {}) | shape
    fields |= {ours: value for ours, theirs in _OPTIONAL.items() if (value := find(theirs, *_OLDER.get(theirs, ())))}
    fields |= _windows(config, shape["num_layers"])
    fields["tied_embeddings"] = config.get("tie_word_embeddings", fields.get("tied_embeddings", False))
    num_experts, inner = find("num_local_experts", "num_experts", "n_routed_experts"), find("moe_intermediate_size")
    if num_experts and config.get("num_experts_per_tok"):
        fields["experts"] = _experts(num_experts, config["num_experts_per_tok"], inner or shape["ffn_hidden"])
    return fields


def read_config(path: Path | str) -> Model:
    """The shape in a config.json, for planning: without weights; InputError as `read_model`."""
    return validate(Model, model_fields(_read(path), str(path)), str(path))


def _read(path: Path | str) -> dict[str, Any]:
    config = parse_json(read_text(path), str(path))
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected an object")
    return config


def model_fields(config: Mapping[str, Any], source: str = CONFIG_NAME) -> dict[str, Any]:
    """The fields of a Model that `config` stands for, not yet checked."""
    with shaped(source, "a model's config.json"):
        return _fields(config, source)


def _fields(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    _check_supported(config, source)
    for theirs in _SHAPE.values():
        if theirs not in config:
            raise InputError(f"{source}: {theirs}: missing{nearest(theirs, config)}")
    fields = {ours: config[theirs] for ours, theirs in _SHAPE.items()}
    fields |= {ours: config[theirs] for ours, theirs in _OPTIONAL.items() if config.get(theirs) is not None}
    fields |= _windows(config, fields["num_layers"])
    kind = config["model_type"]
    name = Path(str(config.get("_name_or_path") or kind)).name[:60]
    epsilon = config.get("rms_norm_eps", _THEIR_NORM_EPSILON)
    if kind in READERS:
        return fields | {"name": name, "norm_epsilon": epsilon} | planned_fields(config, source)
    return fields | {
        "name": name,
        "bias": kind != "qwen2" and config.get("attention_bias", False),
        "qkv_bias": kind == "qwen2",
        "norm_epsilon": epsilon,
        **_rotary(config, source),
    }


def _check_supported(config: Mapping[str, Any], source: str) -> None:
    kind = config.get("model_type")
    if kind in READERS:
        return
    if kind not in MODEL_TYPES:
        known, planned = ", ".join(MODEL_TYPES), ", ".join(READERS)
        raise InputError(
            f"{source}: model_type: {kind!r} is not supported; farpipe reads {known}, and to plan only {planned}"
        )
    wanted: dict[str, Any] = {"hidden_act": "silu", "pretraining_tp": 1, "quantization_config": None}
    _expect(config, wanted | {"partial_rotary_factor": 1.0}, source)
    needed = {"mistral": ("sliding_window", "num_key_value_heads"), "qwen2": ("num_key_value_heads",)}
    for key in needed.get(kind, ()):  # what it takes where these say nothing is not what is taken here
        if key not in config:
            raise InputError(f"{source}: {key}: missing; a {kind} config has to say it")
    if kind != "qwen2" and config.get("attention_bias", False) != config.get("mlp_bias", False):
        raise InputError(f"{source}: attention_bias and mlp_bias: biases in attention alone or MLP alone are not known")
    if config.get("attention_dropout"):
        raise InputError(f"{source}: attention_dropout: {config['attention_dropout']!r} is not supported, only 0")
    kinds = config.get("layer_types")
    for place, found in enumerate(kinds if isinstance(kinds, list | tuple) else ()):
        if found not in ("full_attention", _LOCAL):
            known = f"only 'full_attention' and '{_LOCAL}'"
            raise InputError(f"{source}: layer_types[{place}]: {found!r} is not supported, {known}")
    if kind == "llama":
        _expect(config, {"sliding_window": None}, source)


def _windows(config: Config, num_layers: Any) -> dict[str, Any]:
    """The fields of a Model for attention over a window; a Qwen may name one that it does not use."""
    window, kind = config.get("sliding_window"), str(config.get("model_type"))
    if window is None or not config.get("use_sliding_window", not kind.startswith("qwen")):
        return {}
    kinds, every = config.get("layer_types"), config.get("sliding_window_pattern", _WHOLE_EVERY.get(kind))
    num_listed = num_layers if isinstance(num_layers, int) and num_layers < MAX_LAYERS else 0
    if isinstance(kinds, list | tuple):
        listed = [int(found == _LOCAL) for found in kinds[:num_listed]]
        every = _pattern(listed) if len(listed) == num_layers else listed
    elif kind.startswith("qwen"):
        first = config.get("max_window_layers", 28)
        every = _pattern([place >= first for place in range(num_listed)]) if isinstance(first, int) else first
    return {} if every == 1 else {"sliding_window": window, "window_attn_skip_freq": every}


def _pattern(is_local: Sequence[int]) -> int | list[int] | None:
    """`Model.window_attn_skip_freq` of layers that have a window or not: None where all have, 1 where none has."""
    if all(is_local):
        return None
    every = 1 + list(is_local).index(False)
    is_regular = all(local == bool((place + 1) % every) for place, local in enumerate(is_local))
    return every if is_regular or not any(is_local) else [int(local) for local in is_local]


def _rotary(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Base and scaling: in one table (since transformers 5) or as two keys."""
    table = config.get("rope_parameters")
    key = "rope_parameters" if table is not None else "rope_scaling"
    table = table if table is not None else config.get("rope_scaling") or {}
    if not isinstance(table, Mapping):
        raise InputError(f"{source}: {key}: expected a table, found {table!r}")
    fields: dict[str, Any] = {"rotary_base": table.get("rope_theta", config.get("rope_theta", 10000.0))}
    _expect(table, _ROTARY_REFUSED, f"{source}: {key}")
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return fields
    if kind not in _ROTARY:
        known = ", ".join(_ROTARY)
        raise InputError(f"{source}: {key}: rope type {kind!r} is not supported, only default, {known}")
    names = {ours: theirs for ours, theirs in _ROTARY[kind].items() if table.get(theirs) is not None}
    for theirs in _ROTARY[kind].values():
        if theirs not in (*names.values(), *_ROTARY_OPTIONAL):
            raise InputError(f"{source}: {key}: {theirs}: missing")
    return fields | {"rotary_scaling": {"kind": kind} | {ours: table[theirs] for ours, theirs in names.items()}}


def config_of(model: Model, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of `model`, weights in `dtype` (``float32``, ``bfloat16``).

    InputError for a model that is none of Hugging Face's Llama family.
    """
    different = {"gated_mlp": True, "norm": "rmsnorm", "positions": "rotary", "sliding_window": None}
    for key, value in different.items():
        if getattr(model, key) != value:
            raise InputError(f"model.{key}: {getattr(model, key)!r} can't be exported: a Llama has {value!r}")
    theirs = {name: getattr(model, ours) for ours, name in (_SHAPE | _OPTIONAL).items()}
    return {
        **_KINDS[model.qkv_bias],
        **{key: value for key, value in theirs.items() if value is not None},
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_scaling": _scaling_of(model.rotary_scaling),
        **({} if model.qkv_bias else {"attention_bias": model.bias, "mlp_bias": model.bias}),
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _scaling_of(scaling: RotaryScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    found = {theirs: getattr(scaling, ours) for ours, theirs in _ROTARY[scaling.kind].items()}
    return {"rope_type": scaling.kind} | {key: value for key, value in found.items() if value is not None}
