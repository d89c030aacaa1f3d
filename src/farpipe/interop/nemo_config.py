"""A plan as YAML of Megatron-Bridge (NeMo): the tables of its ConfigContainer, from the options of Megatron-LM."""

import json
import shlex
from collections.abc import Iterator
from typing import Any, Final

from farpipe.interop.megatron_flags import megatron_flags
from farpipe.planning import Plan

_TABLES: Final = {
    "train": ("micro_batch_size", "global_batch_size", "train_iters"),
    "optimizer": ("lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "use_distributed_optimizer"),
    "ddp": (
        *("overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32"),
        *("num_distributed_optimizer_instances", "use_megatron_fsdp", "data_parallel_sharding_strategy"),
    ),
    "dist": ("use_tp_pp_dp_mapping",),
    "checkpoint": ("ckpt_format",),
}
"""Tables of the settings that are none of the model's."""
_OTHERWISE: Final[dict[str, tuple[str, Any]]] = {
    "swiglu": ("gated_linear_unit", True),
    "untie_embeddings_and_output_weights": ("share_embeddings_and_output_weights", False),
    "disable_bias_linear": ("add_bias_linear", False),
    "grad_reduce_in_bf16": ("grad_reduce_in_fp32", False),
}
"""Switches that have another name and value there."""
_NAMES: Final = {"num_experts": "num_moe_experts", "fp8_format": "fp8"}
_LEFT_OUT: Final = ("group_query_attention", "max_position_embeddings")
"""Options that follow from another setting there: groups from their number, rows of positions from ``seq_length``."""


def nemo_config(plan: Plan) -> str:
    """YAML to merge into a recipe of Megatron-Bridge; comments and errors as for `megatron_flags`."""
    text = megatron_flags(plan)
    tables: dict[str, dict[str, Any]] = {"model": {}, **{name: {} for name in _TABLES}}
    for name, value in _settings(text):
        table = next((table for table, names in _TABLES.items() if name in names), "model")
        tables[table][name] = value
    lines = [line for line in text.splitlines() if line.startswith("#")]
    for table, settings in ((table, settings) for table, settings in tables.items() if settings):
        lines += [f"{table}:", *(f"  {name}: {json.dumps(value)}" for name, value in settings.items())]
    return "\n".join(lines) + "\n"


def _settings(text: str) -> Iterator[tuple[str, Any]]:
    """Names and values of the options in `text`."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    options = [group for line in lines for group in f" {line}".split(" --")[1:]]
    for option in options:
        flag, *values = shlex.split(option)
        name = flag.replace("-", "_")
        if name in _OTHERWISE:
            yield _OTHERWISE[name]
        elif name == "recompute_modules":
            yield name, values
        elif name not in _LEFT_OUT:
            yield _NAMES.get(name, name), _value(values[0]) if values else True


def _value(text: str) -> Any:
    """A number where it is one, or a list of numbers."""
    if "," in text:
        return [int(part) for part in text.strip("[]").split(",")]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
