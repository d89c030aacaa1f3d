"""Matrix products of a transformer, and the FLOPs that follow from them.

Every product is counted in full: attention as a full s x s matrix, not its causal half, as Megatron's publications and
torchtitan's MFU do; `causal_share` is what is left with the causal mask. A pair of tokens that a window leaves out
counts as nothing.
For the shapes of GPT the sum over a step is 72 B L s h^2 (1 + s/6h + V/12hL) (Korthikanti et al. 2022,
arXiv 2205.05198, appendix A), exactly.
"""

import math
from dataclasses import dataclass
from typing import Final

from farpipe.core.spec import Model
from farpipe.core.spec.model import LatentAttention

BLOCK: Final = 128
"""Queries, and keys, of a block of flash attention, which skips those outside a window (`get_n_block_min_max`)."""


@dataclass(frozen=True)
class Product:
    """`count` matrix products [rows, depth] x [depth, columns]; sizes may be fractions under tensor parallelism."""

    rows: float
    columns: float
    depth: float
    count: float = 1.0

    @property
    def flops(self) -> float:
        """A multiplication and an addition for each of rows x columns x depth."""
        return 2 * self.count * self.rows * self.columns * self.depth

    @property
    def elements(self) -> float:
        """Numbers read and written once each: both factors and the result."""
        return self.count * (self.rows * self.depth + self.depth * self.columns + self.rows * self.columns)

    def input_grad(self) -> "Product":
        """The product that makes the gradient of the left factor."""
        return Product(self.rows, self.depth, self.columns, self.count)

    def weight_grad(self) -> "Product":
        """The product that makes the gradient of the right factor."""
        return Product(self.depth, self.columns, self.rows, self.count)


def attention_linear(model: Model, tokens: float, tensor: int = 1) -> tuple[Product, ...]:
    """Query, key and value in one, and the output, on one of `tensor` devices (Megatron-LM, arXiv 1909.08053)."""
    if model.latent_attention is not None:
        return _latent_linear(model, model.latent_attention, tokens, tensor)
    inward = (model.attention_hidden + 2 * model.kv_hidden) / tensor
    return (
        Product(tokens, inward, model.hidden),
        Product(tokens, model.hidden, model.attention_hidden / tensor),
    )


def _latent_linear(model: Model, at: LatentAttention, tokens: float, tensor: int) -> tuple[Product, ...]:
    """Linear maps of latent attention (DeepSeek-V2, arXiv 2405.04434): narrow ones whole, those with heads divided."""
    *query, keys = latent_up(model, at, tokens, tensor)
    narrow = (Product(tokens, at.query_rank, model.hidden),) if at.query_rank else ()
    return (
        *narrow,
        *query,
        Product(tokens, at.kv_rank + at.rope_dim, model.hidden),
        keys,
        Product(tokens, model.hidden, model.num_heads / tensor * at.value_dim),
    )


def latent_up(model: Model, at: LatentAttention, tokens: float, tensor: int = 1) -> tuple[Product, ...]:
    """The maps to queries, and to keys and values, last; queries come from the residual stream where none is narrow."""
    heads = model.num_heads / tensor
    return (
        Product(tokens, heads * (at.nope_dim + at.rope_dim), at.query_rank or model.hidden),
        Product(tokens, heads * (at.nope_dim + at.value_dim), at.kv_rank),
    )


def mlp_linear(
    model: Model, tokens: float, tensor: int = 1, expert: int = 1, expert_tensor: int | None = None
) -> tuple[Product, ...]:
    """The MLP's input projection (gate and up in one, where gated) and output projection, on one of `tensor` devices.

    With experts: the router, what all tokens share, and the device's own of the experts, spread over `expert` devices,
    each with an equal share of the tokens of all of them. `expert_tensor` devices divide each expert, `tensor` if not
    given; where they are fewer, each device has its own share of the tokens.
    """
    if model.experts is None:
        return _plain_mlp(model, tokens, model.ffn_hidden / tensor)
    at = model.experts
    divided = expert_tensor or tensor
    rows = tokens * divided / tensor * at.per_token * expert / at.num_experts
    own = _plain_mlp(model, rows, at.ffn_hidden / divided, max(1.0, at.num_experts / expert))
    return (Product(tokens, at.num_experts, model.hidden), *shared_experts(model, tokens, tensor), *own)


def shared_experts(model: Model, tokens: float, tensor: int = 1) -> tuple[Product, ...]:
    """Both maps of the experts that all tokens share; () where there are none."""
    at = model.experts
    return _plain_mlp(model, tokens, at.shared_ffn_hidden / tensor) if at is not None and at.shared_ffn_hidden else ()


def _plain_mlp(model: Model, tokens: float, inner: float, count: float = 1.0) -> tuple[Product, ...]:
    return (
        Product(tokens, inner * (2 if model.gated_mlp else 1), model.hidden, count),
        Product(tokens, model.hidden, inner, count),
    )


def attention_core(
    model: Model, sequences: float, sequence_length: int, tensor: int = 1, context: int = 1
) -> tuple[Product, ...]:
    """Scores and context of `sequences`, one pair of products for every query head on the device.

    Of `context` devices each has an equal share of the queries, and meets all keys.
    """
    heads, rows = sequences * model.num_heads / tensor, sequence_length / context
    at = model.latent_attention
    depth, width = (model.head_dim,) * 2 if at is None else (at.nope_dim + at.rope_dim, at.value_dim)
    return (
        Product(rows, sequence_length, depth, heads),
        Product(rows, width, sequence_length, heads),
    )


def window_share(model: Model, sequence_length: int, block: int = 1) -> float:
    """Share of a causal sequence's pairs of tokens that windows leave, in the mean of all layers; 1 without any.

    Of s (s + 1) / 2 pairs a window of w tokens leaves w s - w (w - 1) / 2. A kernel computes whole blocks of `block`
    queries and as many keys, of which a window reaches into one more than it is long.
    """
    if model.sliding_window is None:
        return 1.0
    num_blocks = math.ceil(sequence_length / block)
    width = min(num_blocks, math.ceil((model.sliding_window - 1) / block) + 1)
    kept = (2 * num_blocks - width + 1) * width / (num_blocks * (num_blocks + 1))
    return 1 - model.windowed_share * (1 - kept)


def _core_flops(model: Model, sequence_length: int, sequences: float) -> float:
    """FLOPs of scores and context of one layer, in the mean of all layers."""
    core = attention_core(model, sequences, sequence_length)
    return window_share(model, sequence_length) * sum(product.flops for product in core)


def head_linear(model: Model, tokens: float, tensor: int = 1) -> tuple[Product, ...]:
    """The logits, the vocabulary divided over `tensor` devices."""
    return (Product(tokens, model.vocab_size / tensor, model.hidden),)


def mtp_linear(model: Model, tokens: float, tensor: int = 1) -> tuple[Product, ...]:
    """The map of a token's two streams to one ahead of the layer that predicts a further token."""
    return (Product(tokens, model.hidden / tensor, 2 * model.hidden),)


def layer_flops(model: Model, sequence_length: int, sequences: float = 1.0) -> float:
    """FLOPs of one layer's forward; the two gradients take twice as many together."""
    tokens = sequences * sequence_length
    products = (*attention_linear(model, tokens), *mlp_linear(model, tokens))
    return sum(product.flops for product in products) + _core_flops(model, sequence_length, sequences)


def head_flops(model: Model, tokens: float) -> float:
    """FLOPs of the head's forward, and of the heads and maps that predict further tokens, without their layers."""
    once = sum(product.flops for product in head_linear(model, tokens))
    return once + model.mtp_num_layers * (once + sum(product.flops for product in mtp_linear(model, tokens)))


def step_flops(model: Model, sequence_length: int, sequences: float, *, frozen: bool = False) -> float:
    """FLOPs that one optimizer step over `sequences` needs: forward and both gradients, nothing computed twice.

    `frozen` weights have no gradient; adapters beside them are left out.
    """
    num_layers = model.num_layers + model.mtp_num_layers
    layers = num_layers * layer_flops(model, sequence_length, sequences)
    whole = layers + head_flops(model, sequences * sequence_length)
    core = _core_flops(model, sequence_length, sequences)
    return 2 * whole + num_layers * core if frozen else 3 * whole


def causal_share(model: Model, sequence_length: int, *, frozen: bool = False) -> float:
    """Share of `step_flops` that is left where attention counts only the pairs of tokens that its causal mask keeps."""
    core = _core_flops(model, sequence_length, 1)
    masked = (model.num_layers + model.mtp_num_layers) * core * (1 - 1 / sequence_length) / 2
    return 1 - 3 * masked / step_flops(model, sequence_length, 1, frozen=frozen)
