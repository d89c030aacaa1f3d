"""Low-rank adapters beside the frozen weights of a stage (LoRA, arXiv 2106.09685), by the library peft.

A frozen linear map keeps no input and has no weight gradient; what is trained, summed over replicas and put into
checkpoints are the two matrices beside it.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from farpipe.core.errors import InputError
from farpipe.core.spec import Lora
from farpipe.core.spec.lora import PARTS
from farpipe.engine.stages.decoder import generator_of
from farpipe.engine.stages.slices import SliceModule

_ADAPTER: Final = "default"
"""peft's name for a model's only adapters."""
_UP: Final = ("mlp.fc1", "mlp.c_fc", "mlp.dense_h_to_4h")
_LINEAR: Final[Mapping[str, tuple[str, ...]]] = {
    "q_proj": ("self_attn.q_proj", "attn.q_proj", "attention.query"),
    "k_proj": ("self_attn.k_proj", "attn.k_proj", "attention.key"),
    "v_proj": ("self_attn.v_proj", "attn.v_proj", "attention.value"),
    "o_proj": (
        *("self_attn.o_proj", "self_attn.dense", "self_attn.out_proj", "attn.c_proj", "attn.out_proj"),
        *("attention.dense", "attention.output"),
    ),
    "gate_proj": ("mlp.gate_proj", "mlp.gate"),
    "up_proj": ("mlp.up_proj", "mlp.up", *_UP),
    "down_proj": ("mlp.down_proj", "mlp.fc2", "mlp.c_proj", "mlp.dense_4h_to_h", "mlp.down"),
    "linear_qkv": ("self_attn.qkv_proj", "attention.query_key_value", "attn.c_attn"),
    "linear_fc1": ("mlp.gate_up_proj", *_UP),
    "linear_q_proj": ("self_attn.q_proj",),
    "linear_q_down_proj": ("self_attn.q_a_proj",),
    "linear_q_up_proj": ("self_attn.q_b_proj",),
    "linear_kv_down_proj": ("self_attn.kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("self_attn.kv_b_proj",),
}
"""Names of a layer's linear maps, in classes of transformers and in farpipe's decoder, by those of a job. Of each line
a layer has one at most."""
_ALIKE: Final = {"linear_proj": "o_proj", "linear_fc2": "down_proj"}
"""Maps that have two names in a job."""


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
    return [f"{prefixes[id(layer)]}.{name}" for layer in _layers(module) for name in _adapted(layer, prefixes, lora)]


def _adapted(layer: nn.Module, prefixes: Mapping[int, str], lora: Lora) -> Iterator[str]:
    """Names in their layer of the maps that get an adapter; InputError where it has none of a kind."""
    linear = [name for name, child in layer.named_modules() if _is_linear(child)]
    known = {name for names in _LINEAR.values() for name in names}
    has_experts = any("experts" in name for name, _ in layer.named_modules())
    if lora.target_modules is None and not has_experts and (every := [name for name in linear if name in known]):
        yield from every
        return
    for target in lora.target_modules or ("up_proj",):
        own = [name for name in linear if name in _LINEAR[_ALIKE.get(target, target)]]
        if not own or (has_experts and own[0].startswith("mlp.")):
            why = _why_not(target, prefixes[id(layer)], linear, has_experts=has_experts)
            raise InputError(f"training.lora.target_modules: {why}")
        yield from own


def _why_not(target: str, layer: str, linear: Sequence[str], *, has_experts: bool) -> str:
    if has_experts and target in (*PARTS["linear_fc1"], *PARTS["linear_fc2"], "linear_fc1", "linear_fc2"):
        return f"the MLP of {layer} is one of experts, beside which adapters are planned only; name those of attention"
    return f"{layer} has no {target}; its linear maps are {', '.join(linear) or 'none'}"


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
    bound = 1 / math.sqrt(like.shape[-1])
    numbers = generator_of(seed, name).uniform(-bound, bound, tuple(like.shape))
    return torch.from_numpy(numbers.astype(np.float32)).to(like.device)
