"""Models with experts that are given by numbers, as configs of transformers' classes, which compute them.

A model with latent attention is a DeepSeek-V3, one whose router has biases a GLM-4.5, one with normalised queries and
keys a Qwen3-MoE, any other a Mixtral. Weights of the chosen experts are normalised in all of them.
"""

from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.spec.hugging_face import scaling_of
from farpipe.core.spec.hugging_face_keys import OPTIONAL, SHAPE
from farpipe.core.spec.model import Model

_CLASSES: Final = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
_HAS: Final = {
    "deepseek_v3": ("latent_attention", "router_bias", "shared_ffn_hidden", "num_dense_layers", "num_groups"),
    "glm4_moe": ("qk_norm", "qkv_bias", "router_bias", "shared_ffn_hidden", "num_dense_layers", "num_groups"),
    "qwen3_moe": ("qk_norm", "num_dense_layers"),
    "mixtral": (),
}
"""What models of a class may have beside experts of one width in every layer."""
_USUAL: Final = {"gated_mlp": True, "norm": "rmsnorm", "positions": "rotary", "num_groups": 1}
"""Values of what a model may have, where it is not nothing."""
_OF_MODEL: Final = (
    *("gated_mlp", "norm", "positions", "bias", "qkv_bias", "attention_bias", "qk_norm", "attention_sinks"),
    *("sliding_window", "latent_attention", "mtp_num_layers"),
)
_OF_EXPERTS: Final = ("shared_ffn_hidden", "num_dense_layers", "router_bias", "expert_bias", "num_groups")


def kind_of(model: Model) -> str:
    """The ``model_type`` of a model with experts that is given by numbers; InputError where no class is like it."""
    at = model.experts
    assert at is not None
    kind = "qwen3_moe" if model.qk_norm else "mixtral"
    kind = "deepseek_v3" if model.latent_attention is not None else "glm4_moe" if at.router_bias else kind
    places = {key: f"model.{key}" for key in _OF_MODEL} | {key: f"model.experts.{key}" for key in _OF_EXPERTS}
    values = {key: getattr(model, key) for key in _OF_MODEL} | {key: getattr(at, key) for key in _OF_EXPERTS}
    special = [key for key, value in values.items() if (value != _USUAL[key] if key in _USUAL else value)]
    others = [places[key] for key in special if key not in _HAS[kind]]
    if kind == "deepseek_v3" and not at.router_bias:
        others.append("model.experts.router_bias = 0")
    if at.shared_ffn_hidden % at.ffn_hidden:
        others.append("model.experts.shared_ffn_hidden, which is no multiple of ffn_hidden")
    if others:
        raise InputError(f"model.experts: {_CLASSES[kind]} of transformers, which is most like it, has no {others[0]}")
    return kind


def config_with_experts(model: Model) -> dict[str, Any]:
    """The ``config.json`` of such a model; InputError where no class of transformers is like it."""
    kind, at = kind_of(model), model.experts
    assert at is not None
    theirs = {names[0]: getattr(model, ours) for ours, names in (SHAPE | OPTIONAL).items()}
    config = {key: value for key, value in theirs.items() if value is not None}
    config |= {"model_type": kind, "architectures": [_CLASSES[kind]], "rms_norm_eps": model.norm_epsilon}
    rotary = {"rope_type": "default"} | (scaling_of(model.rotary_scaling) or {})
    config |= {"rope_parameters": rotary | {"rope_theta": model.rotary_base, "partial_rotary_factor": 1.0}}
    config |= {"num_experts_per_tok": at.per_token, "hidden_act": "silu", "sliding_window": None}
    if kind == "mixtral":
        return config | {"num_local_experts": at.num_experts, "intermediate_size": at.ffn_hidden}
    config |= {"moe_intermediate_size": at.ffn_hidden, "norm_topk_prob": True, "attention_bias": model.qkv_bias}
    if kind == "qwen3_moe":
        dense = list(range(at.num_dense_layers))
        return config | {"num_experts": at.num_experts, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    config |= {"n_routed_experts": at.num_experts, "n_shared_experts": at.shared_ffn_hidden // at.ffn_hidden}
    config |= {"first_k_dense_replace": at.num_dense_layers, "n_group": at.num_groups, "topk_group": at.group_topk}
    if kind == "glm4_moe":
        return config | {"use_qk_norm": model.qk_norm}
    narrow = model.latent_attention
    assert narrow is not None
    return config | {
        "q_lora_rank": narrow.query_rank or None,
        "kv_lora_rank": narrow.kv_rank,
        "qk_nope_head_dim": narrow.nope_dim,
        "qk_rope_head_dim": narrow.rope_dim,
        "v_head_dim": narrow.value_dim,
        "head_dim": narrow.rope_dim,
        "num_key_value_heads": model.num_heads,
    }
