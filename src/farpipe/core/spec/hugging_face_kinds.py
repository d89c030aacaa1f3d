"""Kinds of models by the ``model_type`` of their config: which of its keys say the shape, and what they mean.

A config of a kind that is not here is refused, and so is one of a known kind with a key that may say a shape and is not
read: a variant without a description here. ``tests/core/spec/test_hugging_face_kinds.py`` holds every kind against
transformers' own classes.
"""

import re
from dataclasses import dataclass, field
from typing import Final

from farpipe.core.errors import InputError
from farpipe.core.spec.hugging_face_keys import (
    LOCAL,
    OPTIONAL,
    SHAPE,
    SHARED,
    SHARED_WIDTH,
    WINDOWED,
    Config,
    Fields,
    Keys,
    Reader,
    biases,
    deepseek,
    dense_by_step,
    dense_outside,
    falcon,
    first_dense,
    four_times,
    full_attention,
    latent,
    listed_dense,
    mixture,
    mpt,
    one_key_head,
    opt,
    plain_heads,
    query_norm,
    whole_heads,
    windows,
)
from farpipe.core.strict import nearest

_SHAPED: Final = re.compile(
    r"(^|_)(experts?|moe|heads?|layers?|hidden|intermediate|inner|ffn|mlp|feed|states?|ssm|mamba|conv|attn|attention|"
    r"window|sparse|dense|rank|lora|shared|dim|size|sizes|width|kv|qk|query|multi|parallel|depth|loops?|recurr\w*|"
    r"blocks?|memory|adapter|proj|projection|embed\w*|gates?|gated|cross|encoder|decoder|vision|audio|image|codebooks?|"
    r"pattern|index\w*|compress\w*|bias|ratio|num|n|nb|layout|local|global|linear|lr|hash|altup|laurel|config)(_|$)"
)
"""Words in a key that may say a shape."""
_HARMLESS: Final = re.compile(
    r"token_id|dropout|pdrop|droppath|layerdrop|eps(ilon)?$|eps_|init|^rope|rotary|^no_rope|dtype|scal(e|ing)|softcap|"
    r"coef|_loss|jitter|precision|fp32|^_|^use_cache|^rms_|^output_|^num_(labels|beam|return|logits)|^(summary|classifier|"
    r"generation|quantization|compression_config|neuron|unsloth|auto|id2label|label2id|problem|task|tokenizer)_?|"
    r"^(hidden_act\w*|activation\w*|afn|attn_implementation|attn_config|n_ctx|n_group|num_expert_group|topk_group|"
    r"max_window_layers|(attention|embedding|residual|logits|key)_multiplier|query_pre_attn_scalar|is_decoder|"
    r"chunk_size_feed_forward|\w*ngram_size|(diversity|repetition|length)_penalty|parallel_attn|use_parallel_residual|"
    r"num_ln_in_parallel_attn|apply_residual_connection_post_layernorm|(input|post|use_post)_norm|ep_size|"
    r"original_max_position_embeddings|qk_head_dim|do_layer_norm_before|init_device|no_bias|embedding_fraction|learned_pos_emb|norm_bias|lm_head_bias|"
    r"attention_out_bias|layer_norm_elementwise_affine|layer_rope_theta|_?sliding_window_pattern|enable_moe_fp32_combine|max_seq_length|seq_length|router_\w+|scoring_func|"
    r"moe_(capacity|gate|use_\w+|aux_\w+|norm_min)|skip_bias_add\w*|order_of_interleaved_layers|use_gated_activation|"
    r"use_embedding_sharing|use_parallel_(block|embedding)|position_embedding_type|layer_switch|qk_norm_type|"
    r"use_routing_bias|num_mtp_modules|mtp_transformer_layers|use_mtp|expert_selection_fn|unpadded_vocab_size|dim_model_base|num_nextn_predict_layers|num_mtp_layers|use_flash_attn\w*|flash_attn\w*|use_attn_mask\w*)$"
)
"""Keys with such words that change neither bytes nor seconds of a step by a percent."""
_STEPS: Final = re.compile(r"(^|_)(freq|interval|step|period|every|tp)(_|$)")
"""Words in a key whose 1 is as if it were not there."""
_LAYERS: Final = ("full_attention", LOCAL)
_NOT_ALONE: Final = {
    "is_encoder_decoder": "an encoder and a decoder",
    "add_cross_attention": "attention to an encoder",
    "use_bidirectional_attention": "an encoder, whose tokens attend to later ones",
    "is_encoder": "an encoder",
}
"""Switches by which a model is no decoder alone, and what it is then."""


@dataclass(frozen=True)
class Kind:
    """Meaning of configs of one ``model_type``: fields that go without saying, and readers of the rest."""

    fields: Fields = field(default_factory=dict)
    """Fields of a Model by their usual values for this kind."""
    needs: tuple[str, ...] = ()
    """Keys that a config has to have: transformers' class has numbers of its own where one is missing."""
    only: Config = field(default_factory=dict)
    """Keys with the one value that is known."""
    more: tuple[Reader, ...] = ()
    """Readers of further fields."""


_KV, _HEAD, _WINDOW, _RANK = "num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank"
_TIED: Final = {"tied_embeddings": True}
_QKV: Final = {"qkv_bias": True}
_NORMED: Final = {"qk_norm": True}
_PLAIN: Final = {"gated_mlp": False}
_LAYERNORM: Final = {"norm": "layernorm"}
_GPT: Final = {"gated_mlp": False, "norm": "layernorm", "bias": True}
_LEARNED: Final = _GPT | {"positions": "learned", "tied_embeddings": True}
_WHOLE: Final = mixture(inner="intermediate_size", shared=())
_SHARING: Final = mixture(inner="intermediate_size", shared=SHARED_WIDTH[1:])
_OF_DEEPSEEK: Final = Kind(
    needs=("first_k_dense_replace", "n_shared_experts", _RANK),
    only={"moe_layer_freq": 1, "attention_bias": False},
    more=(deepseek(first_dense),),
)

KINDS: Final[dict[str, Kind]] = {
    **dict.fromkeys(("llama", "phi3", "olmo", "granite", "hyperclovax"), Kind()),
    "hunyuan_v1_dense": Kind(_NORMED),
    **dict.fromkeys(("mistral", "ministral"), Kind(needs=(_KV, _WINDOW))),
    **dict.fromkeys(("ministral3", "internlm3", "iquestcoder"), Kind(needs=(_KV, _HEAD))),
    "helium": Kind(needs=(_KV, _HEAD), more=(whole_heads,)),
    "qwen2": Kind(_QKV, needs=(_KV,)),
    "qwen3": Kind(_NORMED, needs=(_KV, _HEAD)),
    "smollm3": Kind(_TIED, needs=(_KV,)),
    "gemma": Kind(_TIED, needs=(_KV, _HEAD)),
    **dict.fromkeys(("gemma2", "vaultgemma"), Kind(_TIED, needs=(_KV, _HEAD, _WINDOW))),
    "gemma3_text": Kind(_TIED | _NORMED, needs=(_KV, _HEAD, _WINDOW)),
    "cohere": Kind(_TIED),
    "cohere2": Kind(_TIED, needs=(_WINDOW,)),
    "cwm": Kind(needs=(_KV, _HEAD, _WINDOW)),
    "ernie4_5": Kind(_TIED, needs=(_KV, _HEAD)),
    "exaone4": Kind(_NORMED, needs=(_KV, _WINDOW)),
    **dict.fromkeys(("glm", "glm4", "seed_oss"), Kind({"attention_bias": True}, needs=(_KV, _HEAD))),
    "granite_swa": Kind(_TIED, needs=(_KV, _WINDOW)),
    "olmo2": Kind(_NORMED),
    "olmo3": Kind(_NORMED, needs=(_WINDOW,)),
    "bitnet": Kind(needs=(_KV,)),
    "stablelm": Kind(_LAYERNORM, needs=(_KV,), more=(whole_heads,)),
    "apertus": Kind(_PLAIN | _NORMED),
    "arcee": Kind(_PLAIN),
    "nanochat": Kind(_PLAIN | _NORMED),
    "nemotron": Kind(_PLAIN | _LAYERNORM),
    **dict.fromkeys(("jais2", "phi"), Kind(_GPT)),
    **dict.fromkeys(("persimmon", "gpt_neox"), Kind(_GPT, more=(plain_heads,))),
    "starcoder2": Kind(_GPT | _TIED, needs=(_KV,)),
    **dict.fromkeys(("gpt2", "gpt-sw3"), Kind(_LEARNED, more=(four_times("n_inner"), plain_heads))),
    "openai-gpt": Kind(_LEARNED, more=(four_times(), plain_heads)),
    "gpt_bigcode": Kind(_LEARNED, more=(four_times("n_inner"), one_key_head, whole_heads)),
    **dict.fromkeys(("gptj", "codegen"), Kind(_PLAIN | _LAYERNORM, more=(four_times("n_inner"), plain_heads))),
    "bloom": Kind(_GPT | _TIED, more=(four_times(), plain_heads)),
    "falcon": Kind(_PLAIN | _LAYERNORM | _TIED, more=(four_times("ffn_hidden_size"), falcon, whole_heads)),
    "mpt": Kind(_PLAIN | _LAYERNORM | _TIED, more=(mpt, four_times(), plain_heads)),
    "opt": Kind(_LEARNED, more=(opt, plain_heads)),
    "biogpt": Kind(_LEARNED, more=(plain_heads,)),
    "mixtral": Kind(needs=(_KV,), more=(_WHOLE,)),
    "qwen2_moe": Kind(_QKV, needs=(_KV, SHARED_WIDTH[0]), more=(mixture(dense_by_step, shared=SHARED_WIDTH[:1]),)),
    "qwen3_moe": Kind(_NORMED, needs=(_KV,), only={"attention_bias": False}, more=(mixture(dense_by_step, shared=()),)),
    **dict.fromkeys(("olmoe", "flex_olmo"), Kind(_NORMED, more=(_WHOLE,))),
    "granitemoe": Kind(more=(_WHOLE,)),
    "granitemoeshared": Kind(more=(_SHARING,)),
    "aria_text": Kind(needs=(SHARED[2],), more=(mixture(inner="intermediate_size"),)),
    "granitemoe_swa": Kind(needs=(_WINDOW,), more=(_SHARING,)),
    "phimoe": Kind(_LAYERNORM, needs=(_KV,), more=(_WHOLE,)),
    "minimax_m2": Kind(
        _NORMED, needs=(_KV, _HEAD), more=(mixture(inner="intermediate_size", shared=(), router_bias=1), full_attention)
    ),
    "ernie4_5_moe": Kind(_TIED, needs=(_KV, SHARED[2], "moe_layer_start_index"), more=(mixture(dense_outside),)),
    "dots1": Kind(_NORMED, needs=(_KV,), more=(mixture(first_dense),)),
    "glm4_moe": Kind(needs=(_KV, SHARED[0], "first_k_dense_replace"), more=(mixture(first_dense),)),
    "exaone_moe": Kind(_NORMED, needs=(_KV, _WINDOW, SHARED[1]), more=(mixture(listed_dense),)),
    "hy_v3": Kind(_NORMED, needs=(_KV, _HEAD, SHARED[1], "mlp_layer_types"), more=(mixture(listed_dense),)),
    "solar_open": Kind(needs=(_KV, _HEAD, SHARED[0]), more=(mixture(),)),
    "mellum": Kind(_NORMED, needs=(_KV, _HEAD, _WINDOW), more=(mixture(listed_dense, shared=()),)),
    "gpt_oss": Kind(
        {"attention_bias": True, "attention_sinks": True},
        needs=(_KV, _HEAD, _WINDOW),
        more=(mixture(inner="intermediate_size", shared=(), router_bias=1, expert_bias=True),),
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _OF_DEEPSEEK),
    **dict.fromkeys(
        ("axk1", "glm4_moe_lite"), Kind(needs=("mlp_layer_types", SHARED[0], _RANK), more=(deepseek(listed_dense),))
    ),
    **dict.fromkeys(("minicpm3", "youtu"), Kind(_TIED, needs=(_RANK,), more=(latent,))),
}
"""Kinds by ``model_type``."""
_BEST_KNOWN: Final = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
)


def shape_fields(config: Config, source: str) -> Fields:
    """The fields of a Model that `config` says, not yet checked; InputError names what is not known or missing."""
    keys = Keys(config, source)
    kind = _kind_of(keys)
    _expect_decoder(keys)
    keys.expect(kind.only)
    for name in kind.needs:
        if name not in config:
            raise InputError(f"{source}: {name}: missing; a {keys.kind} config has to say it")
    fields = dict(kind.fields)
    for ours, theirs in (SHAPE | OPTIONAL).items():
        if (value := keys.take(*theirs)) is not None:
            fields[ours] = value
    fields |= biases(keys, fields) | query_norm(keys) | (windows(keys) if keys.kind in WINDOWED else {})
    for read in kind.more:
        fields |= read(keys)
    for ours, theirs in SHAPE.items():
        if ours not in fields:
            keys.need(*theirs)
    _expect_known_layers(keys)
    _expect_nothing_else(keys)
    return fields


def _kind_of(keys: Keys) -> Kind:
    if (kind := KINDS.get(keys.kind)) is not None:
        return kind
    inner = [key for key in ("text_config", "llm_config", "language_config", "decoder") if key in keys.config]
    if inner:
        parts = ", ".join(key for key in keys.config if key.endswith("_config") and key not in inner)
        raise InputError(
            f"{keys.source}: model_type: {keys.kind!r} is not supported: besides a language model ({inner[0]}) it has "
            f"{parts or 'other parts'}, which are not planned; a config.json of {inner[0]} alone may be"
        )
    raise InputError(
        f"{keys.source}: model_type: {keys.config.get('model_type')!r} is not supported{nearest(keys.kind, KINDS)}; "
        f"farpipe reads {', '.join(_BEST_KNOWN)} and {len(KINDS) - len(_BEST_KNOWN)} more types"
    )


def _expect_decoder(keys: Keys) -> None:
    """InputError for what is not a decoder that predicts the next token."""
    for key, what in _NOT_ALONE.items():
        if keys.take(key):
            raise InputError(f"{keys.source}: {key}: {what} is not planned, only a decoder")
    if keys.take("is_causal", default=True) is False:
        raise InputError(f"{keys.source}: is_causal: an encoder is not planned, only a decoder")
    names = keys.take("architectures", default=[])
    for name in names if isinstance(names, list | tuple) else [names]:
        if "For" in str(name) and not str(name).endswith("ForCausalLM"):
            raise InputError(f"{keys.source}: architectures: {name!r:.80} is no causal language model")


def _expect_known_layers(keys: Keys) -> None:
    found = keys.take("layer_types", default=[])
    for place, kind in enumerate(found if isinstance(found, list | tuple) else ()):
        if kind not in _LAYERS:
            known = " and ".join(map(repr, _LAYERS))
            raise InputError(f"{keys.source}: layer_types[{place}]: {kind!r:.60} is not supported, only {known}")


def _expect_nothing_else(keys: Keys) -> None:
    """InputError for a key that may say a shape and was not read."""
    for key, value in keys.left().items():
        if not value or (value == 1 and value is not True and _STEPS.search(key)):
            continue
        if _SHAPED.search(key) and not _HARMLESS.search(key):
            raise InputError(
                f"{keys.source}: {key}: {value!r:.80} may say a shape that is not known of a {keys.kind}; leave it out "
                "if it changes nothing"
            )
