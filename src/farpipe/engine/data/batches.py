"""Batches of a text as tensors: tokens, and as targets the tokens that follow them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from farpipe.core.spec import Data, Model
from farpipe.planning.documents.batches import WHOLE, Shape, Share, TextBatches, Windows
from farpipe.planning.documents.tokens import load_tokens, require_vocabulary

IGNORED: Final = -100
"""A target that does not count; what torch's cross entropy ignores as well."""


@dataclass(frozen=True)
class Batch:
    """One step of a replica: tokens and targets [num_microbatches, microbatch_size, sequence_length], int64."""

    tokens: Tensor
    targets: Tensor
    num_counted: int | None = None
    """Targets that count in the whole step, where other replicas have some of them."""

    @cached_property
    def num_target_tokens(self) -> int:
        """Targets that count, over the whole step and all replicas: what a loss is divided by."""
        return int((self.targets != IGNORED).sum()) if self.num_counted is None else self.num_counted

    def of_tokens(self, part: slice) -> "Batch":
        """A part of every sequence; what its loss is divided by is that of the whole."""
        return Batch(self.tokens[..., part], self.targets[..., part], self.num_target_tokens)


class Batches(TextBatches):
    """A replica's share of the batches of a run; nothing else of the text is read."""

    def batch(self, step: int) -> Batch:
        """Return the replica's batch in `step`: tokens, and as targets the tokens that follow them."""
        return _as_tensors(self.windows(step))

    def held_out_batch(self, index: int) -> Batch:
        """A batch for evaluation; where sequences run out, targets are IGNORED. InputError when there is none left."""
        return _as_tensors(self.held_out_windows(index))


def _as_tensors(found: Windows) -> Batch:
    whole = torch.from_numpy(found.tokens)
    tokens, targets = whole[..., :-1].clone(), whole[..., 1:].clone()
    if found.counted is not None:
        targets[~torch.from_numpy(found.counted)] = IGNORED
    return Batch(tokens, targets, found.num_counted)


def load_batches(data: Data, model: Model, shape: Shape, seed: int, share: Share = WHOLE) -> Batches:
    """The batches of `data` for `model`; InputError when they don't fit together."""
    tokens = load_tokens(data)
    require_vocabulary(tokens, model)
    return Batches(tokens, shape, seed, held_out=data.held_out, share=share)
