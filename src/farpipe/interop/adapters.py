"""Low-rank adapters by the settings of fine-tunings of Hugging Face: peft, axolotl, LLaMA-Factory, trl."""

from typing import Any, Final

from farpipe.interop.settings import Draft, Settings, as_count

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


def put_adapters(settings: Settings, draft: Draft) -> None:
    """Put the adapters of a fine-tuning into `draft`, where its settings turn them on."""
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
