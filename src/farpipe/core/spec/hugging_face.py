"""A Hugging Face ``config.json`` as a Model and back.

One reader for a folder that a training begins with and for a config that is imported: kinds that it does not know, and
variants of those that it knows, are refused, and so is a shape whose number of parameters is not that of the weights.
What changes neither bytes nor times is not looked at: the router's details, the format that weights are published in.
Of an imported Llama, Qwen2 or Mistral it is, for farpipe's own decoder computes these.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.spec.hugging_face_count import count_parameters, expect_count, narrow_weights
from farpipe.core.spec.hugging_face_keys import OPTIONAL, SHAPE, Config, Fields, Keys, mixture, windows
from farpipe.core.spec.hugging_face_kinds import shape_fields
from farpipe.core.spec.model import Model, RotaryScaling
from farpipe.core.strict import parse_json, read_text, validate

CONFIG_NAME: Final = "config.json"
MODEL_TYPES: Final = ("llama", "mistral", "qwen2")
"""Types that farpipe's own decoder computes."""
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
GUESSED: Final = " (guessed)"
"""End of the name of a guessed model."""
GUESS_HINT: Final = "[model] guess = true plans it as a plain decoder of its widths, and marks what follows as a guess"
_THEIR_NORM_EPSILON: Final = 1e-6
"""The epsilon that transformers takes where a config says nothing."""


def read_model(folder: Path | str, *, guess: bool = False) -> Model:
    """The model that the weights in `folder` are of; InputError names what is missing or not known.

    `guess`: a model that is not known is taken for a plain decoder of its widths, and marked.
    """
    path = Path(folder) / CONFIG_NAME
    if not path.parent.is_dir():
        raise InputError(f"{folder}: there is no such folder; a model of Hugging Face is a folder with {CONFIG_NAME}")
    config = _read(path)
    try:
        model = _checked(config, path, _computed_fields(config, str(path)))
    except InputError as error:
        if not guess:
            raise InputError(f"{error}\n{GUESS_HINT}") from None
        model = _guessed(config, path)
    else:
        if guess:
            raise InputError(
                f"{path}: nothing has to be guessed of this {config['model_type']}; leave out guess = true"
            )
    return model.model_copy(update={"hugging_face": str(folder)})


def read_config(path: Path | str) -> Model:
    """The shape in a config.json, for planning: without weights; InputError as `read_model`."""
    return model_of_config(_read(path), path)


def model_of_config(config: Config, path: Path | str) -> Model:
    """The shape in the `config` at `path`."""
    return _checked(config, Path(path), model_fields(config, str(path)))


def _checked(config: Config, path: Path, fields: Fields) -> Model:
    """The model of these fields; InputError where its weights, or transformers' class, have other parameters."""
    model = validate(Model, fields, str(path))
    expect_count(model, count_parameters(config, path, model), str(path))
    return model


def quantization_of(folder: Path | str) -> str:
    """The format of narrow weights in `folder`, "" where they are plain; InputError where there is no config."""
    table = narrow_weights(_read(Path(folder) / CONFIG_NAME))
    return str(table.get("quant_method", "few bits")) if table else ""


def balances_experts(folder: Path | str) -> bool:
    """True if the config in `folder` asks for the loss that balances experts; InputError where there is no config."""
    text = _text(_read(Path(folder) / CONFIG_NAME))
    return bool(text.get("output_router_logits")) and text.get("model_type") not in ("deepseek_v2", "deepseek_v3")


def type_of(folder: Path | str) -> str:
    """The ``model_type`` of the text model in `folder`, "" where none is said; InputError where there is no config."""
    return str(_text(_read(Path(folder) / CONFIG_NAME)).get("model_type", ""))


def _text(config: Config) -> Config:
    """The config of the language model in a config of several models."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _read(path: Path | str) -> dict[str, Any]:
    config = parse_json(read_text(path), str(path))
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected an object")
    return config


def model_fields(config: Config, source: str = CONFIG_NAME) -> Fields:
    """The fields of a Model that `config` describes, not yet checked; of a Llama all that our decoder computes."""
    fields = shape_fields(config, source) | _name_and_epsilon(config)
    if config["model_type"] not in MODEL_TYPES:
        return fields
    keys = Keys(config, source)
    keys.expect({"hidden_act": "silu", "pretraining_tp": 1, "partial_rotary_factor": 1.0})
    if fields.get("attention_bias"):
        raise InputError(f"{source}: attention_bias and mlp_bias: biases in attention alone are not known")
    if keys.take("attention_dropout"):
        raise InputError(f"{source}: attention_dropout: {config['attention_dropout']!r} is not supported, only 0")
    return fields | _rotary(config, source)


def _computed_fields(config: Config, source: str) -> Fields:
    """The fields of a Model that transformers computes."""
    fields = shape_fields(config, source) | _name_and_epsilon(config)
    if config["model_type"] in MODEL_TYPES:
        with suppress(InputError):  # positions that farpipe's own decoder does not know
            fields |= _rotary(config, source)
    return fields


def _name_and_epsilon(config: Config) -> Fields:
    name = Path(str(config.get("_name_or_path") or config.get("model_type"))).name[:60]
    return {"name": name, "norm_epsilon": config.get("rms_norm_eps", _THEIR_NORM_EPSILON)}


def _guessed(config: Config, path: Path) -> Model:
    """A plain decoder by the names that most configs have; what is special about it is left out."""
    text = _text(config)
    keys = Keys(text, str(path))
    fields: Fields = {"name": keys.kind[:50], "guess": True, "hugging_face": str(path.parent)}
    fields |= {ours: value for ours, theirs in (SHAPE | OPTIONAL).items() if (value := keys.take(*theirs)) is not None}
    fields |= {"ffn_hidden": fields.get("ffn_hidden") or 4 * keys.count(*SHAPE["hidden"])}
    for ours, theirs in SHAPE.items():
        fields.setdefault(ours, keys.need(*theirs) if ours != "ffn_hidden" else None)
    with suppress(InputError):
        fields |= windows(keys)
    for inner in ("moe_intermediate_size", "intermediate_size"):
        with suppress(InputError):
            fields = mixture(inner=inner)(keys) | fields
    model = validate(Model, fields, str(path))
    counted = count_parameters(config, path, model)
    return marked(model.model_copy(update={"counted_params": None if counted is None else counted[0]}))


def marked(model: Model) -> Model:
    """The model with a name that says so if it is guessed."""
    if not model.guess or model.name.endswith(GUESSED):
        return model
    return model.model_copy(update={"name": f"{model.name[:50]}{GUESSED}"})


def _rotary(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Base and scaling: in one table (since transformers 5) or as two keys."""
    table = config.get("rope_parameters")
    key = "rope_parameters" if table is not None else "rope_scaling"
    table = table if table is not None else config.get("rope_scaling") or {}
    if not isinstance(table, Mapping):
        raise InputError(f"{source}: {key}: expected a table, found {table!r}")
    fields: dict[str, Any] = {"rotary_base": table.get("rope_theta", config.get("rope_theta", 10000.0))}
    Keys(table, f"{source}: {key}").expect(_ROTARY_REFUSED)
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
    theirs = {names[0]: getattr(model, ours) for ours, names in (SHAPE | OPTIONAL).items()}
    return {
        **_KINDS[model.qkv_bias],
        **{key: value for key, value in theirs.items() if value is not None},
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling_of(model.rotary_scaling),
        **({} if model.qkv_bias else {"attention_bias": model.bias, "mlp_bias": model.bias}),
        "torch_dtype": dtype,
        "use_cache": True,
    }


def scaling_of(scaling: RotaryScaling | None) -> dict[str, Any] | None:
    """Their table of stretched rotary positions, without the base."""
    if scaling is None:
        return None
    found = {theirs: getattr(scaling, ours) for ours, theirs in _ROTARY[scaling.kind].items()}
    return {"rope_type": scaling.kind} | {key: value for key, value in found.items() if value is not None}
