"""Every kind of config against transformers' own class: within 1 % of its parameters, or refused by a name."""

import contextlib
import json

import pytest

from chosen import chosen
from farpipe.core.errors import InputError
from farpipe.core.spec import Model
from farpipe.core.spec.hugging_face import model_fields
from farpipe.core.spec.hugging_face_count import TOLERANCE
from farpipe.core.spec.hugging_face_kinds import KINDS, shape_fields
from farpipe.core.strict import validate

transformers = pytest.importorskip("transformers")
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "ffn_hidden_size": 2048,
    "ffn_dim": 1536,
    "vocab_size": 1000,
    "moe_topk": 2,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 256,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 512,
    "shared_intermediate_size": 0,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 48,
    "v_head_dim": 48,
    "qk_rope_head_dim": 16,
    "word_embed_proj_dim": 512,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_end_index": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of small models, by the names of transformers; norms and biases are below 1 % of their layers."""
MADE = sorted(KINDS.keys() - {"kimi_k2"})
"""Kinds that transformers has a class for."""
MAIN = ("bloom", "deepseek_v3", "ernie4_5_moe", "gemma3_text", "gpt2", "gpt_oss", "llama", "mixtral", "qwen3_moe")
FEW = chosen(MADE, *(MADE.index(kind) for kind in MAIN))


def written(kind, **sizes):
    """What a config.json of that kind holds."""
    made = transformers.CONFIG_MAPPING[kind]
    own = made().to_dict()
    named = {made.attribute_map.get(name, name): size for name, size in sizes.items()}
    return json.loads(
        made(**{name: size for name, size in named.items() if name in own}).to_json_string(use_diff=False)
    )


def counted(config):
    from farpipe.engine.stages.count_parameters import count_parameters

    return count_parameters(config)


def is_right(config):
    """True if the config is read as transformers makes it, or refused; None where transformers makes nothing of it."""
    try:
        fields = shape_fields(config, "config.json")
        planned = Model.model_validate(fields).num_params
    except (InputError, ValueError):
        return True
    try:
        return abs(planned / counted(config) - 1) <= TOLERANCE
    except Exception:
        return None


def test_types_that_are_not_known_are_refused_by_name():
    """Encoders, encoders with decoders, vision, audio, state spaces: all that transformers has."""
    for kind in transformers.CONFIG_MAPPING.keys() - KINDS.keys():
        with pytest.raises(InputError, match=f"model_type: '{kind}' is not supported"):
            shape_fields({"model_type": kind, "hidden_size": 8}, "config.json")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW)
def test_default_configs_are_counted_as_transformers_makes_them(kind):
    assert is_right(written(kind)) is not False


@pytest.mark.slow
@pytest.mark.parametrize("kind", MADE)
def test_a_kind_that_is_known_is_read(kind):
    config = written(kind, **SMALL)
    planned = Model.model_validate(shape_fields(config, "config.json")).num_params
    assert planned == pytest.approx(counted(config), rel=TOLERANCE / 2)


FOREIGN = {
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 1),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "first_k_dense_replace", "decoder_sparse_step"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "shared_expert_intermediate_size", "moe_intermediate_size"), 700),
    **dict.fromkeys(("attention_bias", "qk_norm", "use_bias", "multi_query", "tie_word_embeddings"), True),
    "head_dim": 128,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"],
}
"""Keys of other kinds, which a class may not know."""


def variants(config):
    """The config with each whole number doubled, each switch turned, each key left out, and keys of other kinds."""
    for key, value in FOREIGN.items():
        yield f"{key} added", config | {key: value}
    for key, value in config.items():
        if key.endswith("token_id") or key == "model_type":
            continue
        if isinstance(value, int):
            yield key, config | {key: not value if isinstance(value, bool) else 2 * value or 2}
        if key in SMALL or isinstance(value, bool | list):
            yield f"{key} left out", {name: other for name, other in config.items() if name != key}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW)
def test_no_variant_of_a_known_kind_is_read_as_another_model(kind):
    wrong = [what for what, config in variants(written(kind, **SMALL)) if is_right(config) is False]
    assert not wrong


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts", 8), ("num_local_experts", 8), ("moe_num_experts", 8), ("moe_layer_freq", 2),
        ("multi_query", True), ("attn_layer_period", 8), ("mamba_d_state", 16), ("ssm_cfg", {"d_state": 16}),
        ("hybrid_override_pattern", "M*-"), ("conv_L_cache", 3), ("kv_lora_rank", 64), ("sliding_window", 4096),
        ("layer_types", ["linear_attention", "linear_attention", "linear_attention", "linear_attention"]),
        ("num_shared_experts", 1), ("cross_attention_layers", [1]), ("ffn_dim_multiplier", 1.3),
        ("vision_config", {"a": 1}), ("attention_type", "linear"), ("per_layer_head_counts", [8, 4]),
        ("block_configs", [{}]), ("altup_num_inputs", 4), ("num_kv_shared_layers", 2), ("index_topk", 64),
        ("intermediate_size_mlp", 64), ("mlp_bias", True), ("is_encoder_decoder", True),
        ("add_cross_attention", True), ("is_causal", False), ("d_model", 256),
        ("architectures", ["LlamaForSequenceClassification"]), ("use_bidirectional_attention", True),
    ],
)  # fmt: skip
def test_a_key_that_says_another_shape_stops_and_is_named(key, value):
    with pytest.raises(InputError, match=f"config.json: .*{key}"):
        shape_fields(LLAMA | {key: value}, "config.json")


@pytest.mark.parametrize(
    "harmless",
    [
        {"num_experts": None, "moe_layer_freq": 1, "multi_query": False, "pretraining_tp": 1, "pruned_heads": {}},
        {"torch_dtype": "bfloat16", "rope_theta": 1e4, "initializer_range": 0.02, "attention_dropout": 0.0},
        {"hidden_act": "silu", "num_labels": 2, "num_beams": 1, "num_return_sequences": 1, "is_decoder": False},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}, "auto_map": {"AutoConfig": "x"}, "head_dim": None},
        {
            "output_hidden_states": True,
            "use_cache": True,
            "bos_token_id": 1,
            "unsloth_fixed": True,
            "hidden_dropout": 0.1,
        },
    ],
)
def test_keys_that_change_nothing_stop_nothing(harmless):
    assert shape_fields(LLAMA | harmless, "config.json") == shape_fields(LLAMA, "config.json")


@pytest.mark.parametrize("value", ["x", "3", "", [], [1], {"a": 1}, -1, 0, 1.5, 10**30, True, [None]], ids=repr)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3", "falcon", "mpt", "gemma3_text", "ernie4_5_moe"])
def test_values_of_the_wrong_kind_are_input_errors(kind, value):
    config = written(kind, **SMALL)
    for key in [*config, "rope_scaling", "architectures", "mlp_only_layers", "sliding_window", "quantization_config"]:
        with contextlib.suppress(InputError):
            validate(Model, model_fields(config | {key: value}), "config.json")


PUBLISHED = {
    "bloom": {"n_embed": 1024, "n_layer": 24, "skip_bias_add": True, "skip_bias_add_qkv": False, "offset_alibi": 100,
              "masked_softmax_fusion": True, "seq_length": 2048, "hidden_size": 1024},
    "gpt_oss": {"experts_per_token": 2, "initial_context_length": 4096, "swiglu_limit": 7.0},
    "minimax_m2": {"attn_type_list": [1] * 4, "use_qk_norm": True, "qk_norm_type": "per_layer", "num_mtp_modules": 3,
                   "mtp_transformer_layers": 1, "use_mtp": True, "use_routing_bias": True, "scoring_func": "sigmoid"},
    "ernie4_5_moe": {"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True},
    "cohere2": {"order_of_interleaved_layers": "local_attn_first", "use_gated_activation": True, "layer_switch": 4,
                "use_parallel_block": True, "use_embedding_sharing": True, "position_embedding_type": "rope_gptj"},
    "deepseek_v3": {"ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001, "moe_layer_freq": 1,
                    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1},
    "smollm3": {"pretraining_tp": 2}, "internlm3": {"bias": False, "qkv_bias": False},
    "gemma2": {"cache_implementation": "hybrid"},
    "mpt": {"init_config": {"name": "kaiming"}, "verbose": 0, "norm_type": "low_precision_layernorm"},
    "gptj": {"rotary": True, "scale_attn_weights": True, "gradient_checkpointing": False},
}  # fmt: skip
"""Keys that published configs of these kinds have besides those of transformers' class."""


@pytest.mark.parametrize("kind", PUBLISHED)
def test_keys_of_published_configs_stop_nothing(kind):
    config = written(kind, **SMALL)
    if kind == "bloom":
        config |= {"hidden_size": 1024, "n_layer": 24}
    both = [shape_fields(one, "config.json") for one in (config, config | PUBLISHED[kind])]
    plain, published = (Model.model_validate(fields).model_dump() for fields in both)
    assert plain == published


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        ({"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
          "multi_query": True, "parallel_attn": True, "bias": False, "vocab_size": 65024}, 6.92),
        ({"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
          "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_local_experts": 128,
          "num_experts_per_tok": 8, "moe_intermediate_size": 768, "vocab_size": 151936}, 30.5),
        ({"model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
          "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128,
          "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
          "vocab_size": 151552, "attention_bias": True, "num_nextn_predict_layers": 1}, 106.9),
        ({"model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
          "num_attention_heads": 24, "num_key_value_heads": 2, "vocab_size": 49152, "use_bias": True}, 3.03),
    ],
    ids=["falcon-7b", "qwen3-30b-a3b", "glm-4.5-air", "starcoder2-3b"],
)  # fmt: skip
def test_published_models_have_their_published_number_of_parameters(config, billions):
    assert Model.model_validate(model_fields(config)).num_params / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("changes", "num_dense"),
    [
        ({}, 0),
        ({"decoder_sparse_step": 2}, 24),
        ({"mlp_only_layers": [0, 1, 2]}, 3),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, 25),
    ],
)
def test_layers_without_experts_are_counted_by_step_and_by_list(changes, num_dense):
    config = {
        "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 48,
        "num_attention_heads": 8, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "vocab_size": 1000,
    }  # fmt: skip
    assert shape_fields(config | changes, "config.json")["experts"]["num_dense_layers"] == num_dense
