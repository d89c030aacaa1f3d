"""Keys of a Hugging Face config, taken one after the other, and readers of what several kinds of models have alike."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.spec.part import MAX_COUNT
from farpipe.core.strict import nearest

Config = Mapping[str, Any]
Fields = dict[str, Any]
MAX_LAYERS: Final = 1 << 14
"""Number of layers above which a config is refused; no model has as many."""
SHAPE: Final = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "ffn_hidden": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab_size": ("vocab_size",),
}
"""Our key and theirs, older ones behind today's; all of them have to be there."""
OPTIONAL: Final = {
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "max_sequence_length": ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length"),
    "tied_embeddings": ("tie_word_embeddings",),
}
_EXPERTS: Final = {
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "per_token": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k"),
}
SHARED: Final = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_WIDTH: Final = ("shared_expert_intermediate_size", "shared_intermediate_size")
_FIRST_DENSE: Final = ("first_k_dense_replace", "num_dense_layers")
_TOPK_METHODS: Final = {"deepseek_v2": "greedy"}
"""Method of the router where a config has no `topk_method`; else ``noaux_tc``, with a bias for every expert."""
MTP: Final = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys for modules of multi-token prediction, which transformers does not make."""
LOCAL: Final = "sliding_attention"
"""Kind of a layer with a window in a config's `layer_types`."""
_WHOLE_EVERY: Final = {"gpt_oss": 2, "gemma2": 2, "vaultgemma": 2, "gemma3_text": 6} | dict.fromkeys(
    ("cohere2", "olmo3", "exaone4", "exaone_moe"), 4
)
"""Types in which every n-th layer has no window unless the config says otherwise."""
WINDOWED: Final = (
    *_WHOLE_EVERY,
    *("mistral", "ministral", "ministral3", "mixtral", "phi3", "phimoe", "smollm3", "starcoder2", "minimax_m2"),
    *("cwm", "granite_swa", "granitemoe_swa", "mellum", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "dots1"),
)
"""Types that may have layers with windows; others that name one are variants of their own."""
_WINDOWS_LAST: Final = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "dots1")
"""Types whose later layers have windows, from `max_window_layers` on."""


class Keys:
    """A config whose keys are taken one after the other; `left` has the rest."""

    def __init__(self, config: Config, source: str) -> None:
        self.config, self.source = config, source
        self.kind = str(config.get("model_type"))
        self._taken: set[str] = set()

    def take(self, *names: str, default: Any = None) -> Any:
        """The value under the first of `names` that has one; InputError where two of them disagree."""
        self._taken |= {*names}
        found = {name: value for name in names if (value := self.config.get(name)) is not None}
        first = next(iter(found), "")
        for name, value in found.items():
            if value != found[first]:
                raise InputError(f"{self.source}: {first} and {name}: {found[first]!r} and {value!r:.60} for one thing")
        return found.get(first, default)

    def need(self, *names: str) -> Any:
        """The same; InputError where none of `names` has a value."""
        if (value := self.take(*names)) is None:
            raise InputError(f"{self.source}: {names[0]}: missing{nearest(names[0], {*self.config} - {*names})}")
        return value

    def count(self, *names: str, default: int | None = None) -> int:
        """The same, a whole number; `default`: where there is none."""
        value = self.need(*names) if default is None else self.take(*names, default=default)
        if type(value) is not int or not 0 <= value <= MAX_COUNT:
            name = next((name for name in names if self.config.get(name) is not None), names[0])
            raise InputError(f"{self.source}: {name}: expected a whole number, found {value!r:.60}")
        return value

    def layers(self) -> range:
        """The numbers of the layers."""
        number = self.count(*SHAPE["num_layers"])
        if number >= MAX_LAYERS:
            raise InputError(f"{self.source}: {SHAPE['num_layers'][0]}: {number} layers; no known model has that many")
        return range(number)

    def expect(self, wanted: Config) -> None:
        """InputError for a key of `wanted` with another value."""
        for key, value in wanted.items():
            if self.take(key, default=value) != value:
                raise InputError(f"{self.source}: {key}: {self.config[key]!r:.80} is not supported, only {value!r}")

    def left(self) -> dict[str, Any]:
        """Keys that were not used."""
        return {key: value for key, value in self.config.items() if key not in self._taken}


Reader = Callable[[Keys], Fields]


def biases(keys: Keys, fields: Fields) -> Fields:
    """Biases of linear layers, as kinds name them; some have them anyway."""
    everywhere = keys.take("use_bias", "enable_bias", "bias")
    inward = keys.take("qkv_bias", "use_qkv_bias", default=fields.get("qkv_bias", False))
    attention = keys.take("attention_bias", default=fields.get("attention_bias", False))
    mlp = keys.take("mlp_bias", default=False)
    if everywhere is not None:
        return {"bias": everywhere}
    if fields.get("bias") or fields.get("qkv_bias"):
        return {"qkv_bias": inward} if "qkv_bias" in fields else {}
    if mlp and not attention:
        raise InputError(f"{keys.source}: mlp_bias: biases of the MLP alone are not known")
    if mlp:
        return {"bias": True, "attention_bias": False}
    return {"attention_bias": attention} if attention or "attention_bias" in fields else {"qkv_bias": inward}


def query_norm(keys: Keys) -> Fields:
    return {"qk_norm": True} if keys.take("use_qk_norm", "qk_layernorm", "qk_norm") else {}


def windows(keys: Keys) -> Fields:
    """Attention over a window; a Qwen may name one that it does not use."""
    window, is_used = keys.take("sliding_window"), keys.take("use_sliding_window")
    kinds, every = keys.take("layer_types"), keys.take("sliding_window_pattern", default=_WHOLE_EVERY.get(keys.kind))
    first, num_layers = keys.take("max_window_layers", default=28), keys.take(*SHAPE["num_layers"])
    if not window or not (not keys.kind.startswith("qwen") if is_used is None else is_used):
        return {}
    num_listed = num_layers if isinstance(num_layers, int) and num_layers < MAX_LAYERS else 0
    if isinstance(kinds, list | tuple):
        listed = [int(found == LOCAL) for found in kinds[:num_listed]]
        every = _pattern(listed) if len(listed) == num_layers else listed
    elif keys.kind in _WINDOWS_LAST:
        every = _pattern([place >= first for place in range(num_listed)]) if isinstance(first, int) else first
    return {} if every == 1 else {"sliding_window": window, "window_attn_skip_freq": every}


def _pattern(is_local: Sequence[int]) -> int | list[int] | None:
    """`Model.window_attn_skip_freq` of layers that have a window or not: None where all have, 1 where none has."""
    if all(is_local):
        return None
    every = 1 + list(is_local).index(False)
    is_regular = all(local == bool((place + 1) % every) for place, local in enumerate(is_local))
    return every if is_regular or not any(is_local) else [int(local) for local in is_local]


def four_times(*own: str) -> Reader:
    """Reader of an MLP of four times the width, where a key of the kind's `own` says nothing else."""

    def read(keys: Keys) -> Fields:
        inner = 4 * keys.count(*SHAPE["hidden"])
        keys.expect({name: inner for name in SHAPE["ffn_hidden"] if name not in own})
        return {"ffn_hidden": keys.take(*own, default=inner)}

    return read


def falcon(keys: Keys) -> Fields:
    """Keys and values of one head, unless it is of the newer kind or says otherwise."""
    num_heads, is_new = keys.count(*SHAPE["num_heads"]), keys.take("new_decoder_architecture")
    if is_new:
        return {"num_kv_heads": keys.take(*OPTIONAL["num_kv_heads"], default=num_heads)}
    return {"num_kv_heads": 1 if keys.take("multi_query", default=True) else num_heads}


def one_key_head(keys: Keys) -> Fields:
    is_one = keys.take("multi_query", default=True)
    return {"num_kv_heads": 1 if is_one else keys.count(*SHAPE["num_heads"])}


def mpt(keys: Keys) -> Fields:
    attention = keys.take("attn_config", default={})
    kind = attention.get("attn_type", "multihead_attention") if isinstance(attention, Mapping) else attention
    if kind != "multihead_attention":
        raise InputError(
            f"{keys.source}: attn_config.attn_type: {kind!r:.60} is not supported, only multihead_attention"
        )
    keys.expect({"expansion_ratio": 4})
    return {}


def whole_heads(keys: Keys) -> Fields:
    """Heads that are as wide as the model together, for a class whose output map is square."""
    keys.expect({"head_dim": keys.count(*SHAPE["hidden"]) // max(1, keys.count(*SHAPE["num_heads"]))})
    return {}


def plain_heads(keys: Keys) -> Fields:
    """The same, and keys and values in as many heads, for classes that know nothing else."""
    keys.expect(dict.fromkeys(OPTIONAL["num_kv_heads"], keys.count(*SHAPE["num_heads"])))
    return whole_heads(keys)


def full_attention(keys: Keys) -> Fields:
    """Attention over all tokens in all layers, by MiniMax's name for it."""
    keys.expect({"attn_type_list": [1] * len(keys.layers())})
    return {}


def opt(keys: Keys) -> Fields:
    keys.expect({"word_embed_proj_dim": keys.count(*SHAPE["hidden"])})
    return {}


def latent(keys: Keys) -> Fields:
    """Keys and values from a narrow vector."""
    at = {
        "query_rank": keys.count("q_lora_rank", default=0),
        "kv_rank": keys.count("kv_lora_rank"),
        "nope_dim": keys.count("qk_nope_head_dim"),
        "rope_dim": keys.count("qk_rope_head_dim"),
        "value_dim": keys.count("v_head_dim"),
    }
    heads, width = keys.count(*SHAPE["num_heads"]), at["nope_dim"] + at["rope_dim"]
    if keys.take("head_dim", default=width) not in (width, at["rope_dim"]):
        raise InputError(f"{keys.source}: head_dim: neither the width of a head, {width}, nor of its rotary part")
    return {"latent_attention": at, "head_dim": width, "num_kv_heads": heads}


Dense = Callable[[Keys], int]
"""Number of layers that have a plain MLP."""


def mixture(
    dense: Dense | None = None, inner: str = "moe_intermediate_size", shared: tuple[str, ...] = SHARED, **more: Any
) -> Reader:
    """Reader of experts of the width `inner`; all layers have them, or all but those that `dense` counts.

    `shared`: keys for the number of experts that all tokens share, or for their width; the others are not the kind's.
    """

    def read(keys: Keys) -> Fields:
        num_dense = 0 if dense is None else dense(keys)
        if not keys.count(*_EXPERTS["num_experts"]) or num_dense == len(keys.layers()):
            return {}
        width = keys.count(inner)
        in_common = keys.count(*shared, default=0) * (width if shared == SHARED else 1) if shared else 0
        experts = {ours: keys.count(*theirs) for ours, theirs in _EXPERTS.items()}
        experts |= {"ffn_hidden": width, "shared_ffn_hidden": in_common, "num_dense_layers": num_dense} | more
        return {"experts": experts} | (
            {} if num_dense else {"ffn_hidden": keys.take(*SHAPE["ffn_hidden"], default=width)}
        )

    return read


def first_dense(keys: Keys) -> int:
    """The first layers are dense; a list of them has to say the same."""
    first = keys.count(*_FIRST_DENSE, default=0)
    number = listed_dense(keys)
    if number != min(first, len(keys.layers())):
        raise InputError(f"{keys.source}: mlp_layer_types: {number} dense layers, but {_FIRST_DENSE[0]} is {first}")
    return number


def listed_dense(keys: Keys) -> int:
    """The layers that a list calls dense, or else the first."""
    layers, listed, first = keys.layers(), keys.take("mlp_layer_types"), keys.count(*_FIRST_DENSE, default=0)
    if listed is None:
        return min(first, len(layers))
    if not isinstance(listed, list | tuple) or {*map(str, listed)} - {"dense", "sparse"} or len(listed) != len(layers):
        raise InputError(
            f"{keys.source}: mlp_layer_types: expected 'dense' or 'sparse' for each of {len(layers)} layers"
        )
    return list(listed).count("dense")


def dense_by_step(keys: Keys) -> int:
    """Every n-th layer has experts, except those that are listed."""
    step, dense = keys.count("decoder_sparse_step", default=1), keys.take("mlp_only_layers", default=[])
    if not isinstance(dense, list | tuple):
        raise InputError(f"{keys.source}: mlp_only_layers: expected a list of layers, found {dense!r:.60}")
    return sum(layer in dense or (layer + 1) % max(1, step) != 0 for layer in keys.layers())


def dense_outside(keys: Keys) -> int:
    """Every n-th layer of a range has experts."""
    layers, every = keys.layers(), keys.count("moe_layer_interval", default=1)
    first = keys.count("moe_layer_start_index", default=0)
    last = keys.take("moe_layer_end_index", default=-1)
    last = len(layers) - 1 if last == -1 else keys.count("moe_layer_end_index")
    return sum(not first <= layer <= last or (layer + 1) % max(1, every) != 0 for layer in layers)


def _router_bias(keys: Keys) -> Fields:
    """A bias for every expert, by the router's method."""
    method = keys.take("topk_method", default=_TOPK_METHODS.get(keys.kind, "noaux_tc"))
    return {"router_bias": 1 if method == "noaux_tc" else 0}


def _groups(keys: Keys) -> Fields:
    """The groups of experts of which a token has some."""
    return {"num_groups": keys.count("n_group", default=1), "group_topk": keys.count("topk_group", default=1)}


def deepseek(dense: Dense) -> Reader:
    """Reader of experts in groups, with biases by the router's method, and of latent attention."""

    def read(keys: Keys) -> Fields:
        fields = mixture(dense)(keys)
        if "experts" in fields:
            fields["experts"] |= _router_bias(keys) | _groups(keys)
        return fields | latent(keys)

    return read
