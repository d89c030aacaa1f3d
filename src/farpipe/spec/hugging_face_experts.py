"""Configs of Hugging Face that the cost model can plan and the engine can't train: mixtures of experts, and Qwen3.

What changes neither bytes nor times is not looked at: rotary scaling, the router's details, the format that weights are
published in. Attention over a window (GPT-OSS, Mixtral's first configs) is taken for whole: an upper bound.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from farpipe.errors import InputError
from farpipe.strict import nearest

Config = Mapping[str, Any]
_TOPK_METHODS: Final = {"deepseek_v2": "greedy", "deepseek_v3": "noaux_tc", "kimi_k2": "noaux_tc"}
"""Method of the router where a config has no `topk_method`; ``noaux_tc`` has a bias for every expert."""


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
"""By ``model_type``."""
