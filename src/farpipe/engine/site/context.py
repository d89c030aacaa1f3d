"""Context parallelism of transformers' models by Ulysses (arXiv 2309.14509): a process has a part of every sequence.

All but attention is computed token by token, with the positions that these tokens have in the whole sequence. Around
attention processes exchange tokens for heads: each attends to all of the sequence with its part of the heads, by the
function that the model would call anyhow. Weights are the same on all processes, so FSDP2 divides them and sums their
gradients, as it does for replicas.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from farpipe.core.errors import InputError
from farpipe.engine.data.batches import Batch
from farpipe.engine.stages.balancing import Balance
from farpipe.engine.stages.hugging_face import HuggingFaceSlice
from farpipe.engine.stages.stage import WholeSequences

_ATTENTION: Final = "farpipe_context"
"""Name in transformers' registry of attention over sequences that processes share."""
_HEADS: Final = 1
_LEAST_BLOCK: Final = 512
"""Queries that attend at once where a window is shorter than this."""
_TOKENS: Final = 2
"""Dimensions of queries, keys and values [batch, heads, tokens, width]."""


class _Shared(NamedTuple):
    """Processes that share a sequence, and the function by which one of them attends to all of it."""

    group: dist.ProcessGroup
    attend: Any


class DividedTokens(WholeSequences):
    """Whole sequences whose tokens tensor-parallel processes have in parts between attention and MLP."""

    def __init__(self, twins: Sequence[dist.ProcessGroup]) -> None:
        """`twins`: groups of the processes that see different tokens of a microbatch, one for each way to divide."""
        self._twins = twins

    def summed(self, balance: Balance) -> Balance:
        for group in self._twins:
            for numbers in balance:
                dist.all_reduce(numbers, group=group)
        return balance


class SharedSequences(DividedTokens):
    """One of equally long parts of every sequence; other processes have the rest."""

    def __init__(
        self,
        module: HuggingFaceSlice,
        group: dist.ProcessGroup,
        part: slice,
        device: torch.device | str,
        twins: Sequence[dist.ProcessGroup],
    ) -> None:
        """`part`: this process's tokens; those of `group` are in its order. `twins` as of DividedTokens. InputError
        where nothing can be put around the attention of `module`.
        """
        super().__init__(twins)
        kind = module.inner.config._attn_implementation
        functions: Any = AttentionInterface()  # type: ignore[no-untyped-call]
        if kind not in functions:
            raise InputError(
                f"layout.context: attention of {type(module.inner).__name__} is of kind {kind!r}, around which "
                "processes can't exchange tokens; say layout.context = 1"
            )
        functions.register(_ATTENTION, _attention)
        module.inner.set_attn_implementation(_ATTENTION)
        self._part, self.num_processes = part, group.size()
        positions = torch.arange(part.start, part.stop, device=device)[None]
        shared = _Shared(group, functions[kind])
        self.options = {"position_ids": positions, "attention_mask": None, "farpipe_context": shared}

    def share(self, batch: Batch) -> Batch:
        return batch.of_tokens(self._part)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    farpipe_context: _Shared,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[batch, heads, tokens / n, width] each -> [batch, tokens / n, heads, width], over sequences of all tokens.

    Heads of queries and of keys divide by the n processes that share a sequence.
    """
    group, attend = farpipe_context
    lengths = [query.shape[_TOKENS]] * group.size()
    query, key, value = (tokens_for_heads(x, group, lengths) for x in (query, key, value))
    parts_of_y = [
        attend(module, query[:, :, here], key[:, :, seen], value[:, :, seen], mask, **options)[0]
        for here, seen, mask in _windows(query, sliding_window)
    ]
    y = parts_of_y[0] if len(parts_of_y) == 1 else torch.cat(parts_of_y, dim=_HEADS)
    return heads_for_tokens(y, group, lengths, heads=_TOKENS, tokens=_HEADS), None  # dimensions the other way round


def _windows(query: Tensor, length: int | None) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield blocks of queries, the keys that they see, and the mask of both [1, 1, queries, keys].

    A token sees itself and those before it, in all `length`. One block without a mask where it sees all tokens before
    it, of which attention knows; else of so few tokens that no mask of the whole sequence is needed.
    """
    num_tokens = query.shape[_TOKENS]
    if length is None or length >= num_tokens:
        yield slice(None), slice(None), None
        return
    at = torch.arange(num_tokens, device=query.device)
    size = max(length, _LEAST_BLOCK)
    for start in range(0, num_tokens, size):
        here, seen = slice(start, start + size), slice(max(0, start - length + 1), min(start + size, num_tokens))
        before = at[here, None] - at[seen]
        yield here, seen, ((before >= 0) & (before < length))[None, None]


def tokens_for_heads(
    x: Tensor, group: dist.ProcessGroup, lengths: Sequence[int], num_heads: Sequence[int] | None = None
) -> Tensor:
    """[batch, heads, own tokens, width] -> [batch, own heads, all tokens, width], by an all-to-all.

    Process p of `group` has ``lengths[p]`` tokens, and afterwards the next ``num_heads[p]`` heads; None: equal parts.
    """
    heads = num_heads or parts(x.shape[_HEADS], group.size())
    return _Exchange.apply(x, group, _Split(_HEADS, heads), _Split(_TOKENS, lengths))  # type: ignore


def heads_for_tokens(
    x: Tensor,
    group: dist.ProcessGroup,
    lengths: Sequence[int],
    num_heads: Sequence[int] | None = None,
    *,
    heads: int = _HEADS,
    tokens: int = _TOKENS,
) -> Tensor:
    """The way back: [batch, own heads, all tokens, width] -> [batch, heads, own tokens, width].

    `heads`, `tokens`: the dimensions that they are.
    """
    sizes = num_heads or [x.shape[heads]] * group.size()
    return _Exchange.apply(x, group, _Split(tokens, lengths), _Split(heads, sizes))  # type: ignore


def parts(number: int, count: int) -> list[int]:
    """`number` divided into parts that differ by one at most, the larger first."""
    each, rest = divmod(number, count)
    return [each + (place < rest) for place in range(count)]


class _Split(NamedTuple):
    """Sizes along one dimension, of every process of a group."""

    dim: int
    sizes: Sequence[int]


class _Exchange(torch.autograd.Function):
    """An all-to-all of parts that are divided along one dimension and joined along another; its backward goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, divided: _Split, joined: _Split) -> Tensor:
        ctx.reverse = group, joined, divided
        return _all_to_all(x, group, divided, joined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gy, *ctx.reverse), None, None, None


def _all_to_all(x: Tensor, group: dist.ProcessGroup, divided: _Split, joined: _Split) -> Tensor:
    sent = [part.flatten() for part in torch.split(x, list(divided.sizes), divided.dim)]
    shapes = [_sized(x.shape, divided.dim, divided.sizes[group.rank()], joined.dim, size) for size in joined.sizes]
    counts = [math.prod(shape) for shape in shapes]
    received = x.new_empty(sum(counts))
    dist.all_to_all_single(received, torch.cat(sent), counts, [part.numel() for part in sent], group=group)
    return torch.cat(
        [part.view(shape) for part, shape in zip(torch.split(received, counts), shapes, strict=True)], joined.dim
    )


def _sized(shape: torch.Size, dim: int, size: int, other_dim: int, other_size: int) -> list[int]:
    """`shape` with other sizes along two dimensions."""
    found = list(shape)
    found[dim], found[other_dim] = size, other_size
    return found
