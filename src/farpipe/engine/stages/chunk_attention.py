"""Attention of a chunk: its slice of a split sequence sees the slices before it, packed sequences see only themselves.

Keys and values of split sequences stay on their stage, in a store, from a slice's forward to its own backward. What the
slices behind it add to their gradients waits there as well, from the sequence's first backward on. Autograd sees
neither: one Function reads the store and writes to it, so recomputation, I and W, and chunks of several sequences are
no special cases. It computes the attention once more in the backward, as flash attention does, and keeps queries only.
A recomputed layer may keep its attention's results instead, which neither forward nor backward then compute again.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from farpipe.engine.stages.recomputed import again
from farpipe.planning.workload import Chunk, Slice

ROWS_AT_ONCE: Final = 1024
"""Queries of one call, so that no mask gets large."""
_FLASH: Final[Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The kernel of scaled_dot_product_attention on a CPU, which gives the logarithms of the sums as well."""
_FLASH_BACKWARD: Final[Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
KERNELS: Final[frozenset[Any]] = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
)
"""Kernels of scaled_dot_product_attention whose backward takes their output and the logarithms of the sums."""


class HeldBytes:
    """Counts the storages that autograd keeps, each once however many tensors share it; parameters don't count."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._owned = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._holders: dict[int, int] = {}
        self.now = self.peak = 0

    def counting(self) -> AbstractContextManager[Any]:
        """Context in which what autograd saves is counted, until it lets go of it."""
        return saved_tensors_hooks(lambda tensor: Held(self, tensor), lambda held: held.tensor)

    def note(self, more: int = 0) -> None:
        """Remember the most that was held, with so many bytes that somebody else counts."""
        self.peak = max(self.peak, self.now + more)

    def take(self, storage: torch.UntypedStorage) -> None:
        """One more holder of it."""
        place = storage.data_ptr()
        if place in self._owned:
            return
        self._holders[place] = self._holders.get(place, 0) + 1
        self.now += storage.nbytes() if self._holders[place] == 1 else 0

    def give(self, storage: torch.UntypedStorage) -> None:
        """One holder less."""
        place = storage.data_ptr()
        if place in self._owned:
            return
        self._holders[place] -= 1
        if not self._holders[place]:
            del self._holders[place]
            self.now -= storage.nbytes()


class Held:
    """A tensor that is counted as long as this lives."""

    def __init__(self, counter: HeldBytes, tensor: Tensor) -> None:
        self._counter, self.tensor = counter, tensor
        counter.take(tensor.untyped_storage())

    def __del__(self) -> None:
        self._counter.give(self.tensor.untyped_storage())


class KeptResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Results of one layer's attention for one chunk, left by its first forward to the one that its backward does.

    As a context it does so for every kernel of scaled_dot_product_attention (as torch's selective checkpointing, which
    would watch all operations of the layer).
    """

    def __init__(self, counter: HeldBytes | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter, self._left = counter, deque[tuple[Any, list[Held]]]()
        self.is_complete = False
        """True behind the first forward."""

    def once(self, work: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Results of ``work()`` in the first forward, and the same without work in the second."""
        if self.is_complete:
            return self._left.popleft()[0]  # type: ignore[no-any-return]
        found = work()
        kept = [one.detach() if isinstance(one, Tensor) else one for one in found]
        counted = [Held(self._counter, one) for one in kept if self._counter and isinstance(one, Tensor)]
        self._left.append((tuple(kept), counted))
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KERNELS:
            return self.once(lambda: func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


@dataclass
class Kept:
    """Keys and values [heads, tokens, head_dim] of one slice in one layer, and what has come of their gradients."""

    key: Tensor
    value: Tensor
    key_grad: Tensor | None = None
    value_grad: Tensor | None = None
    counted: tuple[Held, ...] = ()

    def add(self, key_grad: Tensor, value_grad: Tensor) -> None:
        """Sum up in float32 at least."""
        wide = torch.float64 if key_grad.dtype == torch.float64 else torch.float32
        if self.key_grad is None or self.value_grad is None:
            self.key_grad, self.value_grad = key_grad.to(wide, copy=True), value_grad.to(wide, copy=True)
        else:
            self.key_grad += key_grad
            self.value_grad += value_grad


@dataclass
class KeyValueStore:
    """Keys and values of split sequences on one stage, by layer and sequence, in the order of the slices."""

    kept: dict[tuple[str, int], list[Kept]] = field(default_factory=dict)
    counter: HeldBytes | None = None
    """Counts the keys and values as well."""

    def of(self, layer: str, part: Slice, key: Tensor, value: Tensor, *, is_copied: bool = False) -> list[Kept]:
        """The slices of `part`'s sequence up to `part` itself, which is kept unless it is there (recomputation).

        A copy is kept where nobody else keeps the rest of the tensors that `key` and `value` are parts of.
        """
        found = self.kept.setdefault((layer, part.sequence), [])
        if sum(one.key.shape[-2] for one in found) == part.start:
            key, value = (key.clone(), value.clone()) if is_copied else (key, value)
            counted = () if self.counter is None else (Held(self.counter, key), Held(self.counter, value))
            found.append(Kept(key.detach(), value.detach(), counted=counted))
        return found

    def release(self, part: Slice) -> None:
        """The slice's backward is done on this stage: forget it."""
        for place in [place for place in self.kept if place[1] == part.sequence]:
            self.kept[place].pop()
            if not self.kept[place]:
                del self.kept[place]

    def forget(self, part: Slice) -> None:
        """Forget all slices of the sequence, of which there will be no backward."""
        for place in [place for place in self.kept if place[1] == part.sequence]:
            del self.kept[place]

    @property
    def grad_bytes(self) -> int:
        """Bytes of the gradients that wait."""
        grads = [t for kept in self.kept.values() for k in kept for t in (k.key_grad, k.value_grad)]
        return sum(grad.nbytes for grad in grads if grad is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that the store keeps alive."""
        every = [t for kept in self.kept.values() for k in kept for t in (k.key, k.value, k.key_grad, k.value_grad)]
        return sum(tensor.nbytes for tensor in every if tensor is not None)


def attend(query: Tensor, key: Tensor, value: Tensor, *, is_grouped: bool) -> Tensor:
    """Causal attention of the last queries.shape[-2] tokens of the keys: [b, heads, s, d] -> the same.

    PyTorch aligns a causal mask to the first key, so the mask is given where there are more keys than queries.
    """
    num, context = query.shape[-2], key.shape[-2] - query.shape[-2]
    if context == 0:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
    parts = []
    for begin in range(0, num, ROWS_AT_ONCE):
        end = min(num, begin + ROWS_AT_ONCE)
        seen = context + end
        mask = torch.ones(end - begin, seen, dtype=torch.bool, device=query.device).tril(context + begin)
        rows = (query[..., begin:end, :], key[..., :seen, :], value[..., :seen, :])
        parts.append(functional.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=is_grouped))
    return torch.cat(parts, dim=-2)


def attend_in_parts(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """`attend` on a CPU, and the logarithms of its sums [b, heads, s], without a mask.

    What comes before the queries is seen whole and their own keys causally, by kernels that are faster without a mask
    (forward by 1.4 to 1.7 times); the two are joined by their sums, as in ring attention (arXiv 2310.01889).
    """
    context = key.shape[-2] - query.shape[-2]
    out, sums = _FLASH(query, key[..., context:, :], value[..., context:, :], is_causal=True)
    if context == 0:
        return out, sums
    before, its_sums = _FLASH(query, key[..., :context, :], value[..., :context, :])
    both = torch.logaddexp(sums, its_sums)
    joined = out * (sums - both).exp()[..., None] + before * (its_sums - both).exp()[..., None]
    return joined.to(query.dtype), both


def _grads_in_parts(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend_in_parts`: of each part with the output and the sums of both, so they add up."""
    context = key.shape[-2] - query.shape[-2]
    rest = (out, sums, 0.0)
    q, k, v = _FLASH_BACKWARD(grad, query, key[..., context:, :], value[..., context:, :], *rest, True)
    if context == 0:
        return q, k, v
    more_q, its_k, its_v = _FLASH_BACKWARD(grad, query, key[..., :context, :], value[..., :context, :], *rest, False)
    return q + more_q, torch.cat([its_k, k], -2), torch.cat([its_v, v], -2)


def _grads(
    grad: Tensor, inputs: Sequence[Tensor], results: Sequence[Tensor] = (), *, is_grouped: bool
) -> Sequence[Tensor]:
    """Gradients of queries, keys and values; attention is computed once more for them, on a CPU unless its `results`
    are given."""
    if grad.device.type == "cpu":
        return _grads_in_parts(grad, *inputs, *(results or attend_in_parts(*inputs)))
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        out = attend(*leaves, is_grouped=is_grouped)
    return torch.autograd.grad(out, leaves, grad)


class _SplitAttention(torch.autograd.Function):
    """Attention of one slice of a split sequence; what comes before it is in the store."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, at: "ChunkAttention") -> Tensor:
        ctx.at = at
        is_copied = at.is_recomputed and len(at.chunk.slices) > 1
        kept = at.store.of(at.layer, at.part, key, value, is_copied=is_copied)

        def results() -> Sequence[Tensor]:
            rows = (query, *_joined(kept))
            return attend_in_parts(*rows) if query.device.type == "cpu" else (attend(*rows, is_grouped=at.is_grouped),)

        found = results() if at.results is None else at.results.once(results)
        ctx.save_for_backward(query, *(() if at.results is None else found))
        return found[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        at: ChunkAttention = ctx.at
        kept = at.store.kept[at.layer, at.part.sequence]
        query, *results = ctx.saved_tensors
        query_grad, key_grad, value_grad = _grads(grad, (query, *_joined(kept)), results, is_grouped=at.is_grouped)
        sizes = [one.key.shape[-2] for one in kept]
        pieces = zip(kept, torch.split(key_grad, sizes, -2), torch.split(value_grad, sizes, -2), strict=True)
        for one, key_piece, value_piece in pieces:
            one.add(key_piece, value_piece)
        own = kept[-1]
        assert own.key_grad is not None
        assert own.value_grad is not None
        return query_grad, own.key_grad.to(grad.dtype), own.value_grad.to(grad.dtype), None


def _joined(kept: list[Kept]) -> tuple[Tensor, Tensor]:
    return torch.cat([one.key for one in kept], -2), torch.cat([one.value for one in kept], -2)


@dataclass(frozen=True)
class ChunkAttention:
    """The attention of one layer for one chunk, in place of that of a whole sequence."""

    store: KeyValueStore
    layer: str
    chunk: Chunk
    is_grouped: bool
    is_recomputed: bool = False
    """True if the layer is computed again, so that the store alone keeps keys and values until then."""
    results: KeptResults | None = None
    """Place for the attention's results where a layer that is computed again keeps them."""

    @property
    def part(self) -> Slice:
        """The first slice, the only one that may be of a split sequence."""
        return self.chunk.slices[0]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Three times [1, heads, tokens, head_dim] -> the same; no sequence sees another."""
        runs = self.chunk.runs
        tokens = [len(run) * run[0].length for run in runs]
        found = []
        for run, *rows in zip(runs, *(torch.split(t, tokens, -2) for t in (query, key, value)), strict=True):
            if run[0].is_whole:
                with self.results or nullcontext():
                    found.append(self._whole(len(run), rows))
            else:
                found.append(_SplitAttention.apply(*rows, self))  # type: ignore[no-untyped-call]
        if self.results is not None:
            self.results.is_complete = True
        return torch.cat(found, dim=-2)

    def _whole(self, num: int, rows: Sequence[Tensor]) -> Tensor:
        """One call for `num` whole sequences of one length, side by side as a batch."""
        if num == 1:
            return attend(rows[0], rows[1], rows[2], is_grouped=self.is_grouped)
        query, key, value = (t[0].view(t.shape[1], num, -1, t.shape[3]).transpose(0, 1) for t in rows)
        return attend(query, key, value, is_grouped=self.is_grouped).transpose(0, 1).flatten(1, 2)[None]


@dataclass
class ChunkPass:
    """One chunk on its way through the layers of a stage."""

    chunk: Chunk
    positions: Tensor
    """[tokens here]: places of this process's tokens in their sequences."""
    store: KeyValueStore
    held: HeldBytes
    recomputed: range
    """Layers that are computed again in the backward, by their numbers in the model."""
    keeps_attention: bool
    """True if recomputed layers keep the results of their attention."""
    attend_here: Callable[[ChunkAttention, Tensor, Tensor, Tensor], Tensor]
    """The attention of the processes that share the chunk, out of this one's."""
    counted: list[Held] = field(default_factory=list)
    """What is kept until the backward and autograd does not see."""
    _results: dict[int, KeptResults] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[1, heads, tokens here, head_dim] each -> the same, in layer number `layer` of the model."""
        is_grouped, results = query.shape[1] > key.shape[1], self._results.get(layer)
        at = ChunkAttention(self.store, str(layer), self.chunk, is_grouped, layer in self.recomputed, results)
        return self.attend_here(at, query, key, value)

    def run(self, layer: int, forward: Callable[..., Any], x: Tensor, options: dict[str, Any]) -> Any:
        """``forward(x, **options)`` of a layer, computed again in the backward where the plan says so."""
        if layer not in self.recomputed:
            return forward(x, **options)
        self.count(x)
        if self.keeps_attention and torch.is_grad_enabled():
            self._results[layer] = KeptResults(self.held)
        return again(forward, x, **options)

    def count(self, tensor: Tensor) -> None:
        """Count a tensor that is kept until the backward and that autograd does not see."""
        self.counted.append(Held(self.held, tensor))
