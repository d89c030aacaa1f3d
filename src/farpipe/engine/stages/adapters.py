"""Low-rank adapters beside the frozen weights of a stage (LoRA, arXiv 2106.09685), by the library peft.

A frozen linear map keeps no input and has no weight gradient; what is trained, summed over replicas and put into
checkpoints are the two matrices beside it.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from farpipe.core.errors import InputError
from farpipe.core.spec import Lora
from farpipe.engine.stages.slices import SliceModule

_ADAPTER: Final = "default"
"""peft's name for a model's only adapters."""
_QKV: Final = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "query", "key", "value")
_LINEAR: Final[Mapping[str, tuple[str, ...]]] = {
    "linear_qkv": tuple(f"{block}.{name}" for block in ("self_attn", "attention", "attn") for name in _QKV),
    "linear_proj": (
        *("self_attn.o_proj", "self_attn.dense", "self_attn.out_proj", "attention.dense"),
        *("attn.c_proj", "attention.output"),
    ),
    "linear_fc1": (
        *("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj", "mlp.fc1", "mlp.c_fc", "mlp.dense_h_to_4h"),
        *("mlp.gate", "mlp.up"),
    ),
    "linear_fc2": ("mlp.down_proj", "mlp.fc2", "mlp.c_proj", "mlp.dense_4h_to_h", "mlp.down"),
    "linear_q_proj": ("self_attn.q_proj",),
    "linear_q_down_proj": ("self_attn.q_a_proj",),
    "linear_q_up_proj": ("self_attn.q_b_proj",),
    "linear_kv_down_proj": ("self_attn.kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("self_attn.kv_b_proj",),
}
"""Ends of the names of a layer's linear maps, in classes of transformers and in farpipe's decoder, by Megatron-Core's
names. A layer has one or more of each line."""


def add_adapters(module: SliceModule, lora: Lora, seed: int, compute: torch.dtype) -> None:
    """Freeze the parameters of `module`, and put adapters beside the maps that `lora` names, in every layer.

    Frozen weights are kept in the dtype `compute`. The adapters' first values depend on `seed` and their names alone,
    so every partition starts with the same ones: their sum is zero (peft's distribution). InputError names a layer
    without such a map.
    """
    dtype = next((parameter.dtype for parameter in module.parameters()), compute)
    inject(module, lora)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.data = _first_values(name, parameter, seed).to(dtype)
        else:
            parameter.data = parameter.data.to(compute)


def inject(module: SliceModule, lora: Lora) -> None:
    """Freeze the parameters of `module`, and put adapters in, with whatever values peft gives them."""
    peft, names = import_peft(), adapted_names(module, lora)
    module.requires_grad_(False)
    if names:
        peft.inject_adapter_in_model(peft_config(lora, names, module), _inner(module))


def import_peft() -> Any:
    """The library; InputError where it is not installed."""
    try:
        import peft
    except ImportError:
        raise InputError("training.lora: needs peft: pip install 'farpipe[lora]'") from None
    return peft


def peft_config(lora: Lora, names: Iterable[str], module: nn.Module, **further: Any) -> Any:
    """peft's settings of the adapters beside the maps `names` of `module`, and `further` ones."""
    modules = dict(_inner(module).named_modules())
    return import_peft().LoraConfig(
        r=lora.rank,
        lora_alpha=lora.scaled,
        lora_dropout=lora.dropout,
        target_modules=sorted(names),
        fan_in_fan_out=any(type(modules[name]).__name__ == "Conv1D" for name in names),
        task_type="CAUSAL_LM",
        **further,
    )


def short_name(name: str) -> str:
    """The end of a linear map's name that all layers share, as ``self_attn.q_proj``."""
    return re.split(r"\.\d+\.", name)[-1]


def their_name(name: str) -> str:
    """The name in peft's files of an adapter's parameter in a model of transformers."""
    return "base_model.model." + name.replace(f".{_ADAPTER}.", ".")


def adapted_names(module: SliceModule, lora: Lora) -> list[str]:
    """Names, in the whole model, of the linear maps of a slice that get an adapter; InputError for one that a layer
    has not."""
    prefixes = {id(child): name for name, child in _inner(module).named_modules()}
    found: list[str] = []
    for layer in _layers(module):
        for target in lora.target_modules:
            own = [name for name, child in layer.named_modules() if _is_linear(child) and name in _LINEAR[target]]
            if not own:
                raise InputError(f"training.lora.target_modules: {_why_not(target, prefixes[id(layer)], layer)}")
            found += [f"{prefixes[id(layer)]}.{name}" for name in own]
    return found


def _why_not(target: str, layer_name: str, layer: nn.Module) -> str:
    if any("experts" in name for name, _ in layer.named_modules()) and target in ("linear_fc1", "linear_fc2"):
        return f"{target} of {layer_name} is that of experts, beside which adapters are planned only; leave it out"
    there = ", ".join(name for name, child in layer.named_modules() if _is_linear(child)) or "none"
    return f"{layer_name} has no {target}; its linear maps are {there}"


def _layers(module: SliceModule) -> list[nn.Module]:
    layers = getattr(_inner(module), "layers", None)
    return list(layers.values()) if isinstance(layers, nn.ModuleDict) else list(module.blocks)


def _inner(module: nn.Module) -> nn.Module:
    """The module whose names are those of the whole model."""
    inner = getattr(module, "inner", module)
    assert isinstance(inner, nn.Module)
    return inner


@cache
def _conv1d() -> type[nn.Module]:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and isinstance(module, _conv1d()))


def _first_values(name: str, like: Tensor, seed: int) -> Tensor:
    """Zeros for the second matrix of an adapter; the first is uniform within 1 / sqrt(its inputs), as peft has it."""
    if ".lora_A." not in name:
        return torch.zeros_like(like)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    numbers = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16])))
    bound = 1 / math.sqrt(like.shape[-1])
    return torch.from_numpy(numbers.uniform(-bound, bound, tuple(like.shape)).astype(np.float32)).to(like.device)
