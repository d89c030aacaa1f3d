"""A slice of a decoder-only transformer as a PyTorch module: what one stage computes.

Llama-like (RMSNorm, rotary positions, grouped-query attention, SwiGLU) and GPT-like (layer norm, learned positions,
two-matrix MLP with GELU) models, as `farpipe.core.spec.Model` describes them.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from farpipe.core.errors import InputError, RunError
from farpipe.core.spec import Model, Precision, RotaryScaling
from farpipe.core.spec.recompute import Recompute, operations_of
from farpipe.engine.stages.chunk_attention import ChunkPass
from farpipe.engine.stages.recomputed import again, discarding
from farpipe.engine.stages.slices import SliceModule, StageSlice

INITIAL_STD: Final = 0.02
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values to what attention makes of them."""
_DTYPES: Final[dict[Precision, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compute_dtype(precision: Precision) -> torch.dtype:
    """The dtype of activations and messages; InputError for a precision that doesn't train here."""
    if precision not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise InputError(f"training.precision: {precision!r} needs loss scaling, which isn't there; use one of {known}")
    return _DTYPES[precision]


@dataclass(frozen=True)
class Numerics:
    """Number types and recomputation of a module."""

    parameters: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    recompute: Recompute = "none"
    """Parts computed again in the backward: ``full``, all of a layer but its input; ``selective``, its
    attention's scores and what is made of them, whatever kernel they come from; or names of operations."""


class Decoder(SliceModule):
    """One stage: tokens [b, s] or activations [b, s, hidden] in, activations or logits [b, s, vocab] out."""

    rotary: Tensor | None

    def __init__(
        self,
        model: Model,
        part: StageSlice,
        sequence_length: int,
        numerics: Numerics = Numerics(),
    ) -> None:
        super().__init__(part)
        self.model, self.numerics = model, numerics
        make = _Maker(model, numerics)
        if part.has_embedding:
            self.embedding = make.embedding(model.vocab_size)
            if model.positions == "learned":
                self.positions = make.embedding(_num_positions(model, sequence_length))
        self.layers = nn.ModuleDict({str(i): Layer(make) for i in range(part.first_layer, part.end_layer)})
        if part.has_head:
            self.norm = Norm(make)
            self.head = make.linear(model.hidden, model.vocab_size, bias=False)
        if self.is_tied_inside:
            self.head.weight = self.embedding.weight
        rotary = _rotary_table(model, sequence_length, numerics.compute) if model.positions == "rotary" else None
        self.register_buffer("rotary", rotary, persistent=False)

    @property
    def is_tied_inside(self) -> bool:
        """True if embedding and head are one matrix in this very stage."""
        return self.model.tied_embeddings and self.part.has_embedding and self.part.has_head

    def forward(self, x: Tensor) -> Tensor:
        """The stage's output for one microbatch."""
        if self.part.has_embedding:
            x = self.embed(x, torch.arange(x.shape[-1], device=x.device))
        for layer in self.layers.values():
            x = again(layer, x, self.rotary) if self.numerics.recompute == "full" else layer(x, self.rotary)
        return self.logits(x) if self.part.has_head else x

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens [b, s] at `positions` [s] of their sequences -> [b, s, hidden]."""
        x: Tensor = self.embedding(tokens)
        return x + self.positions(positions) if self.model.positions == "learned" else x

    @property
    def shared_names(self) -> dict[str, str]:
        """The name of the embedding's matrix by that of the head's, where they are one."""
        return {"head.weight": "embedding.weight"} if self.model.tied_embeddings else {}

    @property
    def end_weights(self) -> dict[str, nn.Parameter]:
        """The matrices of embedding and head that this slice has."""
        ends = {name: getattr(self, name) for name in ("embedding", "head") if hasattr(self, name)}
        return {name: end.weight for name, end in ends.items()}

    def prepare_chunks(self) -> None:
        """Do nothing: its layers take chunks as they are."""

    def on_chunk(self, x: Tensor, chunk: ChunkPass) -> Tensor:
        """[1, tokens] or [1, tokens, hidden] -> [1, tokens, hidden]; RunError for positions beyond the table."""
        x = self.embed(x, chunk.positions) if self.part.has_embedding else x
        rotary = None if self.rotary is None else _angles(self.rotary, chunk.positions)
        if rotary is not None:  # which layers that are computed again keep unseen by autograd
            chunk.count(rotary)
        for name, layer in self.layers.items():
            number = int(name)
            x = chunk.run(number, layer, x, {"rotary": rotary, "mix": partial(chunk.attend, number)})
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[b, s, hidden] -> [b, s, vocab]."""
        y: Tensor = self.head(self.norm(x))
        return y


class _Maker:
    """Arguments that every part of a module is made with."""

    def __init__(self, model: Model, numerics: Numerics) -> None:
        self.model, self.dtype, self.recompute = model, numerics.parameters, numerics.recompute

    def linear(self, in_features: int, out_features: int, *, bias: bool | None = None) -> "_Linear":
        return _Linear(in_features, out_features, self.model.bias if bias is None else bias, dtype=self.dtype)

    def embedding(self, num_rows: int) -> "_Embedding":
        return _Embedding(num_rows, self.model.hidden, dtype=self.dtype)


class _Linear(nn.Linear):
    """A linear layer whose first values come from `initialise`."""

    def reset_parameters(self) -> None:
        pass


class _Embedding(nn.Embedding):
    """A table whose first values come from `initialise`."""

    def reset_parameters(self) -> None:
        pass


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside the residual stream."""

    def __init__(self, make: _Maker) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(make), Attention(make)
        self.mlp_norm, self.mlp = Norm(make), Mlp(make)
        self.recomputed = frozenset(operations_of(make.recompute))

    def forward(self, x: Tensor, rotary: Tensor | None, mix: Mix | None = None) -> Tensor:
        """[b, s, hidden] -> [b, s, hidden]; `mix`: as of `Attention`, which plans what is recomputed by itself."""
        if mix is not None or not self.recomputed & {"layernorm", "mlp"}:
            x = x + self.attention(self.attention_norm(x), rotary, mix)
            return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]
        return self._sparing(x, rotary)

    def _sparing(self, x: Tensor, rotary: Tensor | None) -> Tensor:
        """The layer's forward with norms, MLP or both computed again in the backward."""
        if "layernorm" not in self.recomputed:
            x = x + self.attention(self.attention_norm(x), rotary)
            return x + again(self.mlp, self.mlp_norm(x))  # type: ignore[no-any-return]
        with discarding(self.attention_norm, x) as normed:
            mixed = self.attention(normed, rotary)
        x = x + mixed
        if "mlp" in self.recomputed:
            return x + again(lambda inner: self.mlp(self.mlp_norm(inner)), x)  # type: ignore[no-any-return]
        with discarding(self.mlp_norm, x) as normed:
            y = self.mlp(normed)
        return x + y  # type: ignore[no-any-return]


class Norm(nn.Module):
    """RMSNorm (a gain) or layer norm (a gain and a shift) over the last axis."""

    def __init__(self, make: _Maker) -> None:
        super().__init__()
        width, self.epsilon = make.model.hidden, make.model.norm_epsilon
        self.gain = nn.Parameter(torch.empty(width, dtype=make.dtype))
        has_shift = make.model.norm == "layernorm"
        self.shift = nn.Parameter(torch.empty(width, dtype=make.dtype)) if has_shift else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        if self.shift is None:
            return functional.rms_norm(x, self.gain.shape, self.gain, self.epsilon)
        return functional.layer_norm(x, self.gain.shape, self.gain, self.shift, self.epsilon)


class Attention(nn.Module):
    """Causal attention; with fewer key and value heads than query heads, each serves a group of queries."""

    def __init__(self, make: _Maker) -> None:
        super().__init__()
        model = make.model
        self.head_dim = model.head_dim
        self.is_grouped = model.num_kv_heads < model.num_heads
        bias = model.bias or model.qkv_bias
        self.query = make.linear(model.hidden, model.attention_hidden, bias=bias)
        self.key = make.linear(model.hidden, model.kv_hidden, bias=bias)
        self.value = make.linear(model.hidden, model.kv_hidden, bias=bias)
        self.output = make.linear(model.attention_hidden, model.hidden)
        self.is_recomputed = "core_attn" in operations_of(make.recompute)

    def forward(self, x: Tensor, rotary: Tensor | None, mix: Mix | None = None) -> Tensor:
        """[b, s, hidden] -> [b, s, hidden]; `rotary` has the angles of these s positions, or of more.

        `mix` takes queries, keys and values, [b, heads, s, head_dim] each; None: all s are one sequence's first tokens.
        """
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        if mix is not None:
            mixed = mix(query, key, value)
        else:
            mixed = again(self._mix, query, key, value) if self.is_recomputed else self._mix(query, key, value)
        y: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return y

    def _mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Three times [b, heads, s, head_dim] -> the same."""
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.is_grouped)

    def _heads(self, x: Tensor) -> Tensor:
        """[b, s, heads * head_dim] -> [b, heads, s, head_dim]."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class Mlp(nn.Module):
    """``down(silu(gate(x)) * up(x))`` where gated (SwiGLU, arXiv 2002.05202), ``down(gelu(up(x)))`` otherwise."""

    def __init__(self, make: _Maker) -> None:
        super().__init__()
        model = make.model
        self.gate = make.linear(model.hidden, model.ffn_hidden) if model.gated_mlp else None
        self.up = make.linear(model.hidden, model.ffn_hidden)
        self.down = make.linear(model.ffn_hidden, model.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] -> [b, s, hidden]."""
        inner = functional.gelu(self.up(x)) if self.gate is None else functional.silu(self.gate(x)) * self.up(x)
        y: Tensor = self.down(inner)
        return y


def _num_positions(model: Model, sequence_length: int) -> int:
    assert model.max_sequence_length is not None
    if sequence_length > model.max_sequence_length:
        raise InputError(
            f"training.sequence_length: {sequence_length} tokens, but the model's table of learned positions has "
            f"{model.max_sequence_length} rows (model.max_sequence_length)"
        )
    return model.max_sequence_length


def _rotary_table(model: Model, sequence_length: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines [2, s, head_dim / 2] of rotary positions (arXiv 2104.09864), worked out in float64."""
    frequency = model.rotary_base ** (-torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim)
    scaling, length = model.rotary_scaling, 1.0
    if scaling is not None:
        frequency = frequency * (1 - (1 - 1 / scaling.factor) * _lowness(frequency, scaling, model.rotary_base))
    if scaling is not None and scaling.kind == "yarn":
        length = scaling.attention_factor or 0.1 * math.log(max(scaling.factor, 1.0)) + 1
    angle = torch.outer(torch.arange(sequence_length, dtype=torch.float64), frequency)
    return (length * torch.stack([angle.cos(), angle.sin()])).to(dtype)


def _lowness(frequency: Tensor, scaling: RotaryScaling, base: float) -> Tensor:
    """Return for every frequency (in radians per token, falling) a weight from 0, it is kept, to 1, it is divided."""
    if scaling.kind == "linear":
        return torch.ones_like(frequency)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_length * frequency / (2 * math.pi)  # within the original length
    if scaling.kind == "llama3":
        return 1 - ((turns - low) / (high - low)).clamp(0, 1)
    last = 2 * len(frequency) - 1  # as everybody has it, though pairs are half as many
    place = [(turns[0] / bound).log() / math.log(base) * len(frequency) for bound in (high, low)]
    first, end = max(math.floor(place[0]), 0), min(math.ceil(place[1]), last)
    numbers = torch.arange(len(frequency), dtype=torch.float64)
    return ((numbers - first) / (end - first if end != first else 0.001)).clamp(0, 1)


def _angles(rotary: Tensor, positions: Tensor) -> Tensor:
    """The angles of these positions; RunError beyond the table."""
    if positions.numel() and int(positions.max()) >= rotary.shape[1]:
        raise RunError(
            f"a sequence has a token at {int(positions.max())}, but positions go to {rotary.shape[1] - 1}; "
            "training.sequence_length is where documents must be cut"
        )
    return rotary[:, positions]


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of [b, heads, s, head_dim] by the angle of their position."""
    cos, sin = rotary[:, : x.shape[-2]]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@torch.no_grad()
def initialise(module: Decoder, seed: int) -> None:
    """Fill the parameters from `seed` and their names alone, so that every partition starts with the same weights.

    Matrices are normal with a standard deviation of 0.02, divided by sqrt(2 num_layers) where they feed the residual
    stream (as GPT-2 does); gains are one, biases and shifts zero. The numbers come from NumPy's Philox generator,
    which gives the same ones on every machine.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            is_outward = name.endswith(("attention.output.weight", "mlp.down.weight"))
            num_layers = module.model.num_layers if is_outward else None
            parameter.copy_(normal(shared_name(name, module.model), parameter.shape, seed, num_layers))
        else:
            parameter.fill_(1.0 if name.endswith("gain") else 0.0)


def shared_name(name: str, model: Model) -> str:
    """A parameter's name, which embedding and head have in common where they are one matrix."""
    return "embedding.weight" if model.tied_embeddings and name == "head.weight" else name


def generator_of(seed: int, name: str) -> np.random.Generator:
    """Random numbers that depend on `seed` and a parameter's name alone."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16])))


def normal(name: str, shape: Iterable[int], seed: int, num_layers: int | None = None) -> Tensor:
    """Initial numbers of the matrix `name`, smaller where it feeds the residual stream of `num_layers` layers."""
    std = INITIAL_STD / (1.0 if num_layers is None else math.sqrt(2 * num_layers))
    numbers = generator_of(seed, name).standard_normal(tuple(shape), dtype=np.float32)
    return torch.from_numpy(numbers).mul_(std)
