"""The shape of a decoder-only transformer and how many parameters it has."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from farpipe.core.spec.part import Count, Flag, Name, Natural, Part, Positive, Text, fault
from farpipe.core.units import format_large


def _even_share(known: dict[str, Any]) -> int:
    return max(1, int(known.get("hidden", 1)) // int(known.get("num_heads", 1)))


def _pattern(value: Any) -> Any:
    if isinstance(value, list | tuple) and value and all(type(one) is int and one in (0, 1) for one in value):
        return tuple(value)
    if value is None or (type(value) is int and value > 1):
        return value
    raise ValueError(
        f"every how many-th layer has no window, 2 or more, or a list with 1 or 0 for each layer, found {value!r}"
    )


WindowPattern = Annotated[int | tuple[int, ...] | None, BeforeValidator(_pattern)]
"""Layers without a window: every n-th, or 1 for each layer that has one and 0 for each that has none."""


class RotaryScaling(Part):
    """Stretching of rotary positions beyond the length that a model was first trained with."""

    kind: Literal["linear", "llama3", "yarn"]
    """``linear``: all frequencies are divided by the factor (arXiv 2306.15595); ``llama3``: the low ones are, the high
    ones are kept, those between are blended, as Llama 3.1 does; ``yarn``: so as well, blended by their number, and
    attention gets sharper (arXiv 2309.00071)."""
    factor: Positive
    low_frequency_factor: Positive = 1.0
    """A pair that turns less often within the original length is low (YaRN's beta_slow)."""
    high_frequency_factor: Positive = Field(default_factory=lambda known: 32.0 if known.get("kind") == "yarn" else 4.0)
    """One that turns more often is high (YaRN's beta_fast); 4 for ``llama3``, 32 for ``yarn``."""
    original_length: Count = 8192
    """Tokens; with the two factors before, the bound between low and high frequencies. Not for ``linear``."""
    attention_factor: Positive | None = None
    """Factor on queries and keys, for ``yarn``; None: 0.1 ln(factor) + 1, and 1 for factors below 1."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise fault(f"must be less than high_frequency_factor {self.high_frequency_factor}", "low_frequency_factor")
        if self.attention_factor is not None and self.kind != "yarn":
            raise fault(f"belongs to yarn, but the kind is {self.kind}", "attention_factor")
        return self


class Experts(Part):
    """A mixture of experts in place of the MLP: a token goes through `per_token` of them (arXiv 2401.04088)."""

    num_experts: Count
    per_token: Count
    ffn_hidden: Count
    """Inner width of one expert."""
    shared_ffn_hidden: Natural = 0
    """Inner width of what every token goes through besides; 0: nothing."""
    num_dense_layers: Natural = 0
    """The first layers, which have the model's plain MLP; every stage is taken to have its share of them."""
    router_bias: Natural = 0
    """Trained or corrected biases of the router for each expert: 1 where there is one."""
    expert_bias: Flag = False
    """True if the linear layers of the experts have biases."""
    num_groups: Annotated[Count, Field(exclude_if=lambda count: count == 1)] = 1
    """Groups of experts that lie next to each other; a token's are in `group_topk` of them (DeepSeek-V2, -V3)."""
    group_topk: Annotated[Count, Field(exclude_if=lambda count: count == 1)] = 1

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.per_token > self.num_experts:
            raise fault(f"{self.per_token} of {self.num_experts} experts", "per_token")
        if self.num_experts % self.num_groups:
            raise fault(f"{self.num_experts} experts are not divided evenly by {self.num_groups}", "num_groups")
        able = self.group_topk * (self.num_experts // self.num_groups)
        if self.group_topk > self.num_groups or able < self.per_token:
            raise fault(f"{self.group_topk} of {self.num_groups} groups, {able} experts for a token", "group_topk")
        return self


class LatentAttention(Part):
    """Multi-head latent attention: keys and values come from a narrow vector (DeepSeek-V2, arXiv 2405.04434)."""

    query_rank: Natural = 0
    """Width that queries are made from; 0: the residual stream itself."""
    kv_rank: Count
    nope_dim: Count
    """Width of a head's part without positions."""
    rope_dim: Count
    """Width of its part with rotary positions; the key's is shared by all heads."""
    value_dim: Count


class Model(Part):
    """A decoder-only transformer: `num_layers` equal layers between an embedding and a head."""

    name: Name = "custom"
    """Name of the model in reports; without one the preset's."""
    num_layers: Count
    """Transformer layers; a preset gives it."""
    hidden: Count
    """Width of the residual stream; a preset gives it."""
    num_heads: Count
    """Query heads; a preset gives it."""
    num_kv_heads: Count = Field(default_factory=lambda known: int(known.get("num_heads", 1)))
    """Key and value heads; divides `num_heads`. Fewer of them is grouped-query attention. Default: `num_heads`."""
    head_dim: Count = Field(default_factory=_even_share)
    """Width of one head; even with rotary positions. Default: `hidden / num_heads`."""
    ffn_hidden: Count
    """Inner width of the MLP; a preset gives it."""
    gated_mlp: Flag = True
    """Three matrices (SwiGLU) instead of two."""
    vocab_size: Count
    """Tokens in the vocabulary, at least 256; a preset gives it."""
    tied_embeddings: Flag = False
    """The head uses the embedding's matrix."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """`"rmsnorm"` or `"layernorm"`."""
    positions: Literal["rotary", "learned"] = "rotary"
    """`"rotary"` or `"learned"`."""
    max_sequence_length: Count | None = None
    """Rows of the learned position table, required with learned positions; with rotary positions only a note."""
    rotary_base: Positive = 10000.0
    """Base of rotary positions (theta): pair *i* of *d* turns by `base ** (-2i / d)` a token."""
    rotary_scaling: RotaryScaling | None = None
    """Stretches rotary positions: `{ kind = "linear", factor = 4.0 }`, or `kind = "llama3"` or `"yarn"`. These two also
    take `low_frequency_factor` (1), `high_frequency_factor` (4; `yarn` 32), both in turns within `original_length`
    (8192 tokens); `yarn` takes an `attention_factor` (0.1 ln `factor` + 1)."""
    norm_epsilon: Positive = 1e-5
    """Constant that norms add to the variance."""
    bias: Flag = False
    """The linear layers of attention and MLP have biases."""
    qkv_bias: Flag = False
    """Query, key and value have biases though nothing else has, as in Qwen2."""
    attention_bias: Flag = False
    """Query, key, value and output have biases though the MLP has none, as in GPT-OSS."""
    qk_norm: Flag = False
    """Queries and keys are normalised head by head, as in Qwen3."""
    attention_sinks: Flag = False
    """Every head has a learned logit beside its scores, as in GPT-OSS."""
    sliding_window: Annotated[Count | None, Field(exclude_if=lambda count: count is None)] = None
    """Tokens that a token attends to, itself among them, in a layer with a window (the name in transformers), as in
    GPT-OSS, Gemma and older Mistrals. Without flash attention the window is a mask and saves nothing. Default: all
    tokens before it."""
    window_attn_skip_freq: Annotated[WindowPattern, Field(exclude_if=lambda pattern: pattern is None)] = None
    """Layers without a window (the name in Megatron-Core): every n-th for a number n from 2, or a list with 1 for each
    layer that has a window and 0 for each that has none. Default: all layers have it."""
    experts: Experts | None = None
    """A mixture of experts in place of the MLP: `{ num_experts, per_token, ffn_hidden }`, and `shared_ffn_hidden` (0),
    `num_dense_layers` (0, the first ones), `router_bias` (0, biases of the router for each expert), `expert_bias`
    (false), `num_groups` and `group_topk` (1; a token's experts are in `group_topk` of the `num_groups`)."""
    latent_attention: LatentAttention | None = None
    """Keys and values from a narrow vector, as in DeepSeek-V3: `{ query_rank, kv_rank, nope_dim, rope_dim, value_dim
    }`."""
    mtp_num_layers: Annotated[Natural, Field(exclude_if=lambda count: count == 0)] = 0
    """Modules that predict one further token each behind the last layer (multi-token prediction; 1 in DeepSeek-V3).
    Each costs a layer and the head once more."""
    hugging_face: Text | None = None
    """A folder with `config.json` and safetensors, relative to where the run starts; it gives the shape and the first
    weights. Default: random weights."""
    guess: Annotated[Flag, Field(exclude_if=lambda on: not on)] = False
    """`true`: plan a `hugging_face` model that farpipe does not know as a plain decoder of its widths. Every result is
    marked, and `--json` has `model_guessed`. Refused where nothing needs guessing."""
    counted_params: Annotated[Count | None, Field(exclude_if=lambda count: count is None)] = None
    """Written by farpipe: parameters of a guessed model, as its weights or transformers' class have them."""
    module: Text | None = None
    """`"package.module:function"`, which builds the module of a stage; the shape above is then for planning."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if "head_dim" not in self.model_fields_set and self.hidden % self.num_heads:
            raise fault(f"{self.hidden} is not a multiple of num_heads {self.num_heads}; or give head_dim", "hidden")
        if self.num_heads % self.num_kv_heads:
            raise fault(f"{self.num_kv_heads} does not divide num_heads {self.num_heads}", "num_kv_heads")
        if self.positions == "rotary" and self.head_dim % 2:
            raise fault(f"rotary positions turn pairs, so it must be even, found {self.head_dim}", "head_dim")
        if self.positions == "learned" and self.max_sequence_length is None:
            raise fault("learned positions need a table of this many rows; give the number", "max_sequence_length")
        if self.module is not None and (self.hugging_face is not None or self.tied_embeddings):
            raise fault("it goes neither with hugging_face nor with tied_embeddings", "module")
        if self.mtp_num_layers and (self.hugging_face is not None or self.module is not None):
            raise fault("stages made from hugging_face or module predict one token; leave it out", "mtp_num_layers")
        if (self.guess or self.counted_params is not None) and self.hugging_face is None:
            raise fault("only a model of hugging_face is guessed", "guess")
        if self.bias and self.qkv_bias:
            raise fault("bias says so already; leave out one of them", "qkv_bias")
        if self.rotary_scaling and self.rotary_scaling.kind == "yarn" and self.rotary_base <= 1:
            raise fault(
                f"yarn needs frequencies that fall, so it must be above 1, found {self.rotary_base}", "rotary_base"
            )
        return self

    @model_validator(mode="after")
    def _possible_windows(self) -> Self:
        pattern = self.window_attn_skip_freq
        if pattern is not None and self.sliding_window is None:
            raise fault("says which layers have no window, but there is no sliding_window", "window_attn_skip_freq")
        if isinstance(pattern, tuple) and len(pattern) != self.num_layers:
            raise fault(f"{len(pattern)} entries for num_layers {self.num_layers}", "window_attn_skip_freq")
        return self

    def kinds(self) -> "tuple[tuple[float, Model], ...]":
        """Shares of the layers that are identical, and a model of each kind: those with experts, and the dense ones."""
        share = self.experts.num_dense_layers / self.num_layers if self.experts is not None else 0.0
        if not share:
            return ((1.0, self),)
        return ((1 - share, self), (share, self.model_copy(update={"experts": None})))

    def dense_share(self, first_layer: int, end_layer: int) -> float | None:
        """Share of these layers that are dense; None: in a model without dense layers before those with experts."""
        if self.experts is None or not self.experts.num_dense_layers or end_layer == first_layer:
            return None
        num_dense = max(0, min(end_layer, self.experts.num_dense_layers) - first_layer)
        return num_dense / (end_layer - first_layer)

    def with_dense_share(self, share: float | None) -> "Model":
        """The model with another share of dense layers, for costs in the mean of a stage's layers; None: itself."""
        if share is None or self.experts is None:
            return self
        experts = self.experts.model_copy(update={"num_dense_layers": share * self.num_layers})
        return self.model_copy(update={"experts": experts})

    @property
    def is_of_transformers(self) -> bool:
        """True if transformers' code computes it: the model of a folder, or one with experts that has no module."""
        return self.hugging_face is not None or (self.experts is not None and self.module is None)

    @property
    def windowed_share(self) -> float:
        """Share of the layers that attend over a window."""
        if self.sliding_window is None:
            return 0.0
        if isinstance(self.window_attn_skip_freq, tuple):
            return sum(self.window_attn_skip_freq) / self.num_layers
        every = self.window_attn_skip_freq
        return 1.0 if every is None else 1 - self.num_layers // every / self.num_layers

    def has_windows(self, sequence_length: int) -> bool:
        """True if a layer attends to fewer than all tokens of a sequence."""
        return self.windowed_share > 0 and (self.sliding_window or 0) < sequence_length

    @property
    def attention_hidden(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_hidden(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    def divides_heads(self, num_devices: int) -> bool:
        """True if this number of devices can have equally many whole heads each, of queries and of keys."""
        return self.num_heads % num_devices == 0 and self.num_kv_heads % num_devices == 0

    @property
    def num_attention_params(self) -> int:
        """Parameters of one layer's attention: query, key, value, output."""
        if self.latent_attention is not None:
            return self._num_latent_params(self.latent_attention)
        weights = 2 * self.hidden * (self.attention_hidden + self.kv_hidden)
        inward = self.attention_hidden + 2 * self.kv_hidden
        biases = (self.bias or self.attention_bias) * (inward + self.hidden) + self.qkv_bias * inward
        return weights + biases + self.qk_norm * 2 * self.head_dim + self.attention_sinks * self.num_heads

    def _num_latent_params(self, at: LatentAttention) -> int:
        width = self.num_heads * (at.nope_dim + at.rope_dim)
        query = at.query_rank * (self.hidden + width + 1) if at.query_rank else self.hidden * width
        key_value = self.hidden * (at.kv_rank + at.rope_dim) + at.kv_rank
        outward = at.kv_rank * self.num_heads * (at.nope_dim + at.value_dim)
        return query + key_value + outward + self.num_heads * at.value_dim * self.hidden

    @property
    def num_mlp_params(self) -> int:
        """Parameters of one layer's MLP, or of all its experts, their router and what they share."""
        return self.num_expert_params + self.num_shared_mlp_params

    @property
    def num_expert_params(self) -> int:
        """Parameters of all experts of one layer, which expert parallelism divides; 0 without experts."""
        if self.experts is None:
            return 0
        return self.experts.num_experts * self._num_plain_mlp_params(
            self.experts.ffn_hidden, bias=self.experts.expert_bias
        )

    @property
    def num_shared_mlp_params(self) -> int:
        """Parameters of one layer's MLP that every token goes through: all of them, without experts."""
        if self.experts is None:
            return self._num_plain_mlp_params(self.ffn_hidden, bias=self.bias)
        router = self.experts.num_experts * (self.hidden + self.experts.router_bias)
        shared = self.experts.shared_ffn_hidden
        return router + (self._num_plain_mlp_params(shared, bias=False) if shared else 0)

    def _num_plain_mlp_params(self, inner: int, *, bias: bool) -> int:
        num_inward = 2 if self.gated_mlp else 1
        return (num_inward + 1) * self.hidden * inner + bias * (num_inward * inner + self.hidden)

    @property
    def num_norm_params(self) -> int:
        """Parameters of one norm."""
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    @property
    def num_layer_params(self) -> int:
        """Parameters of one layer, its two norms included."""
        return self.num_attention_params + self.num_mlp_params + 2 * self.num_norm_params

    @property
    def num_embedding_params(self) -> int:
        """Parameters ahead of the first layer: tokens and, where learned, positions."""
        rows = self.vocab_size + ((self.max_sequence_length or 0) if self.positions == "learned" else 0)
        return rows * self.hidden

    @property
    def num_head_params(self) -> int:
        """Parameters after the last layer: the final norm and, unless tied, the output matrix; and what predicts
        further tokens."""
        matrix = 0 if self.tied_embeddings else self.vocab_size * self.hidden
        return self.num_norm_params + matrix + self.mtp_num_layers * self.num_mtp_params

    @property
    def num_mtp_params(self) -> int:
        """Parameters of one module of multi-token prediction: a layer, the map of two streams to one, three norms."""
        return self.num_layer_params + 2 * self.hidden**2 + 3 * self.num_norm_params

    @property
    def repeats_embedding(self) -> bool:
        """True if the last stage uses the embedding's matrix too: as a tied head, or to predict further tokens."""
        return self.tied_embeddings or self.mtp_num_layers > 0

    @property
    def num_params(self) -> int:
        """Parameters of the whole model; a tied matrix counts once."""
        layers = self.num_layers * self.num_layer_params
        if self.experts is not None:
            dense = self._num_plain_mlp_params(self.ffn_hidden, bias=self.bias)
            layers += self.experts.num_dense_layers * (dense - self.num_mlp_params)
        return self.num_embedding_params + layers + self.num_head_params

    @property
    def size_data(self) -> dict[str, Any]:
        """Figures for ``--json``: `num_parameters`, and those of `guess_data`."""
        return {"num_parameters": self.num_params} | self.guess_data

    @property
    def guess_data(self) -> dict[str, Any]:
        """Figures for ``--json`` of a guess: `model_guessed`, and the parameters that were counted."""
        return {"model_guessed": True, "counted_parameters": self.counted_params} if self.guess else {}

    @property
    def guess_note(self) -> str:
        """The sentence on what follows from a guess; empty where nothing is guessed."""
        if not self.guess:
            return ""
        return (
            f"~ a guess: {self.size_text}, planned as a plain decoder of its widths (model.guess), so times and sizes "
            "may be off by any factor."
        )

    @property
    def size_text(self) -> str:
        """Parameters in words; those that a token goes through, and for a guess those that were counted."""
        active = f", {format_large(self.num_active_params)} active" if self.experts is not None else ""
        counted = f", but {format_large(self.counted_params)} counted" if self.counted_params else ""
        return f"{format_large(self.num_params)} parameters{active}{counted}"

    @property
    def num_active_params(self) -> int:
        """Parameters that one token goes through; all of them without experts."""
        if self.experts is None:
            return self.num_params
        idle = self.experts.num_experts - self.experts.per_token
        each = self.num_expert_params // self.experts.num_experts
        num_layers = self.num_layers - self.experts.num_dense_layers + self.mtp_num_layers
        return self.num_params - num_layers * idle * each
