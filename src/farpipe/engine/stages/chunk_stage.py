"""Executes the actions of a stage on chunks of sequences: slices with what comes before them, and packed sequences."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any

import torch
from torch import Tensor

from farpipe.core.errors import InputError
from farpipe.engine.data.batches import IGNORED
from farpipe.engine.stages.chunk_attention import ChunkAttention, ChunkPass, Held, HeldBytes, KeyValueStore
from farpipe.engine.stages.slices import SliceModule
from farpipe.engine.stages.stage import Boundary, TorchStage
from farpipe.planning.workload import Chunk


@dataclass(frozen=True)
class ChunkBatch:
    """The chunks of one step with their tokens and targets, [1, tokens of the chunk] each."""

    chunks: tuple[Chunk, ...]
    tokens: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    num_counted: int | None = None
    """Targets that count in the whole step, at least 1; None: all of these chunks."""
    groups: tuple[tuple[int, int], ...] = ()
    """Processes that share each chunk, as `StepPlan.groups`."""

    @cached_property
    def num_target_tokens(self) -> int:
        """Targets that count, over the whole step: what a loss is divided by."""
        if self.num_counted is not None:
            return self.num_counted
        return max(1, sum(int((targets != IGNORED).sum()) for targets in self.targets))

    def on(self, device: torch.device) -> "ChunkBatch":
        """The batch with its tokens and targets on `device`."""
        if device.type == "cpu":
            return self
        tokens, targets = (tuple(row.to(device) for row in rows) for rows in (self.tokens, self.targets))
        return replace(self, tokens=tokens, targets=targets)


def chunk_batch(
    chunks: Sequence[Chunk], documents: Sequence[Tensor], counted: Sequence[Tensor] | None = None
) -> ChunkBatch:
    """The documents (token numbers, [length] each) in chunks; a token's target is the next one of its document.

    The chunks may have some of the documents only, where other replicas have the others.

    Targets are those of whole documents, so a slice's last token is trained on the first of the next slice; a
    document's last token has none. `counted`: of every document, the tokens that are trained on; None: all.
    """
    targets = [torch.cat([document[1:], document.new_full((1,), IGNORED)]) for document in documents]
    for row, marks in zip(targets, counted or (), strict=False):
        row[:-1][~marks[1:]] = IGNORED

    def packed(rows: Sequence[Tensor], chunk: Chunk) -> Tensor:
        return torch.cat([rows[part.sequence][part.start : part.end] for part in chunk.slices])[None]

    return ChunkBatch(
        tuple(chunks),
        tuple(packed(documents, chunk) for chunk in chunks),
        tuple(packed(targets, chunk) for chunk in chunks),
        max(1, sum(int((row != IGNORED).sum()) for row in targets)),
    )


class WholeChunks:
    """What processes share of chunks, where one process has the stage: nothing, all chunks are its own."""

    def begin(self, batch: ChunkBatch) -> None:
        """Take the step's chunks."""

    def acting(self, microbatch: int, chunk: Chunk) -> AbstractContextManager[bool]:
        """Context of an action on a chunk: true if this process has a part of it."""
        return nullcontext(True)

    def tokens(self, chunk: Chunk) -> slice:
        """Tokens of a chunk that this process computes."""
        return slice(0, chunk.num_tokens)

    def attend(self, at: ChunkAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[1, heads, tokens here, head_dim] each -> the same."""
        return at(query, key, value)


def _where_shared(act: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """The action; nothing is done for a chunk that other processes share."""

    @wraps(act)
    def acting(stage: "ChunkStage", microbatch: int, x: Tensor | None, **options: Any) -> Tensor | None:
        with stage.sharing.acting(microbatch, stage.chunk(microbatch)) as is_shared:
            return act(stage, microbatch, x, **options) if is_shared else None

    return acting


class ChunkStage(TorchStage):
    """A TorchStage whose microbatches are chunks; of a sequence, forwards come slice by slice, backwards in reverse.

    `recomputed` [microbatch]: how many of its layers, the first ones, are computed again in the backward, all of them
    or, where the plan keeps attention's results, all but attention. The head is a part of the last stage's backward, so
    that no logits are kept.
    """

    def __init__(
        self,
        module: SliceModule,
        boundary: Boundary,
        device: torch.device | str = "cpu",
        sharing: WholeChunks | None = None,
    ) -> None:
        """`sharing`: the processes that share its chunks. InputError for a module that can't compute chunks."""
        super().__init__(module, boundary, device)
        if module.balancing is not None:
            raise InputError(
                "data.packing: chunks can't be trained with the loss that balances experts; say output_router_logits "
                "= false in the model's config.json, or leave data.packing out"
            )
        module.prepare_chunks()
        self.sharing = sharing or WholeChunks()

    def begin_chunks(
        self, batch: ChunkBatch, recomputed: Sequence[int] | None = None, *, keeps_attention: bool = False
    ) -> None:
        """Take the step's chunks; all stages need them, the first and the last also their tokens and targets."""
        self.sharing.begin(batch)
        self._saved.clear()
        self._losses.clear()
        self._keeps_attention = keeps_attention
        self._chunks, self._again = batch.on(self.device), tuple(recomputed or [0] * len(batch.chunks))
        self.held = HeldBytes(self.module.parameters())
        self._counted: dict[int, list[Held]] = {}
        self.keys_and_values = KeyValueStore(counter=self.held)

    @_where_shared
    def forward(self, microbatch: int, x: Tensor | None, *, in_parts: bool = True) -> Tensor | None:
        self.store.forward_begins(microbatch, in_parts=in_parts)
        x = self._input(microbatch, x)
        with self.held.counting():
            y = self._compute(microbatch, x)
        self._saved[microbatch] = (x, y)
        self._counted[microbatch] += [Held(self.held, tensor) for tensor in (x, y)]
        self._note()
        return None if self.module.part.has_head else y.detach()

    @_where_shared
    @torch.no_grad()
    def evaluate(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Forward that keeps nothing; the keys and values of a sequence are let go behind its last slice."""
        y, first = self._compute(microbatch, self._input(microbatch, x)), self.chunk(microbatch).slices[0]
        if first.is_tail:
            self.keys_and_values.forget(first)
        if not self.module.part.has_head:
            return y
        self._losses.append(self._loss(microbatch, self.module.logits(y)))
        return None

    @_where_shared
    def backward(self, microbatch: int, gy: Tensor | None) -> Tensor | None:
        """Gradient of the input and of the weights; the keys and values of the chunk's slice are let go."""
        self.store.backward_begins(microbatch)
        if self.module.part.has_head:
            gy = self._head_grad(microbatch, self._saved[microbatch][1])
        else:
            gy = self._boundary(microbatch).expect(gy, "gradient").to(self.device)
        x, y = self._saved.pop(microbatch)
        torch.autograd.backward(y, gy)
        self._note()
        del y, self._counted[microbatch]
        first = self.chunk(microbatch).slices[0]
        if not first.is_whole:
            self.keys_and_values.release(first)
        return x.grad

    def _note(self) -> None:
        self.held.note(self.keys_and_values.grad_bytes + self.store.num_bytes)

    def _head_grad(self, microbatch: int, y: Tensor) -> Tensor:
        """The loss of a chunk from what the layers have made of it, and its gradient there."""
        leaf = y.detach().requires_grad_()
        loss = self._loss(microbatch, self.module.logits(leaf))
        self._losses.append(loss.detach())
        torch.autograd.backward(loss)
        assert leaf.grad is not None
        return leaf.grad

    def tokens_here(self, microbatch: int) -> slice:
        """Tokens of a chunk that this process computes."""
        return self.sharing.tokens(self.chunk(microbatch))

    def _boundary(self, microbatch: int) -> Boundary:
        here, (_, _, hidden) = self.tokens_here(microbatch), self.boundary.shape
        return Boundary((1, here.stop - here.start, hidden), self.boundary.dtype)

    def chunk(self, microbatch: int) -> Chunk:
        """The chunk that is a microbatch of this step."""
        return self._chunks.chunks[microbatch]

    def _tokens(self, microbatch: int) -> Tensor:
        return self._chunks.tokens[microbatch][:, self.tokens_here(microbatch)]

    def _targets(self, microbatch: int) -> tuple[Tensor, int]:
        targets = self._chunks.targets[microbatch][:, self.tokens_here(microbatch)]
        return targets, self._chunks.num_target_tokens

    def _compute(self, microbatch: int, x: Tensor) -> Tensor:
        chunk, first = self.chunk(microbatch), self.module.part.first_layer
        every = torch.cat([torch.arange(part.start, part.end, device=x.device) for part in chunk.slices])
        here = ChunkPass(
            chunk,
            every[self.tokens_here(microbatch)],
            self.keys_and_values,
            self.held,
            range(first, first + self._again[microbatch]),
            self._keeps_attention,
            self.sharing.attend,
        )
        self._counted[microbatch] = here.counted
        return self.module.on_chunk(x, here)
