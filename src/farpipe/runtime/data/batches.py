"""Tokens as batches, the same on every rank and after every restart: what a step trains on follows from its number.

The text is cut into sequences. Every epoch goes through all of them in an order of its own; one optimizer step takes
the next ones. Neither order nor position is stored: both are computed from seed and step.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farpipe.errors import InputError
from farpipe.runtime.data.permutation import Permutation
from farpipe.runtime.data.tokens import Tokens, load_tokens, require_vocabulary
from farpipe.spec import Data, Model

IGNORED: Final = -100
"""A target that does not count; what torch's cross entropy ignores as well."""
Shape = tuple[int, int, int]
"""num_microbatches (of all replicas together), microbatch_size, sequence_length: of one step."""


class Share(NamedTuple):
    """Part of every batch that belongs to one of several replicas, which have as many microbatches each."""

    replica: int
    num_replicas: int


WHOLE: Final = Share(0, 1)


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


class Batches:
    """A replica's share of the batches of a run; nothing else of the text is read.

    Some of the sequences, spread over the whole text, are held out; training never sees them.
    """

    def __init__(self, tokens: Tokens, shape: Shape, seed: int, *, held_out: float = 0.0, share: Share = WHOLE) -> None:
        """`shape`: of a whole step. InputError when there is not enough text for one."""
        self.tokens, self.seed = tokens, seed
        self.global_batch = shape[0] * shape[1]
        num_microbatches, rest = divmod(shape[0], share.num_replicas)
        assert rest == 0, "every replica has as many microbatches"
        self.shape = num_microbatches, *shape[1:]
        self._mine = share.replica * num_microbatches * shape[1] + np.arange(num_microbatches * shape[1])
        """Places in a whole batch."""
        length = shape[2]
        counts = [max(shard.size - 1, 0) // length for shard in tokens.shards]
        self._first_of_shard = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        num_sequences = int(self._first_of_shard[-1])
        self.num_held_out = int(np.ceil(held_out * num_sequences))
        self.num_sequences = num_sequences - self.num_held_out
        self._require(length)
        self._spread = Permutation(num_sequences, "held out")

    def _require(self, length: int) -> None:
        if self.num_sequences < self.global_batch:
            needed = self.global_batch * length + 1
            rest = f" beside {self.num_held_out} that are held out" if self.num_held_out else ""
            raise InputError(
                f"data.source: the text has {self.tokens.num_tokens} tokens, but one step of {self.global_batch} "
                f"sequences x {length} tokens needs {needed}{rest}; give more text or make global_batch smaller"
            )

    def batch(self, step: int) -> Batch:
        """Return the replica's batch in `step`: tokens, and as targets the tokens that follow them."""
        places = step * self.global_batch + self._mine
        order = np.empty_like(places)
        for epoch in np.unique(places // self.num_sequences):
            here = places // self.num_sequences == epoch
            shuffled = Permutation(self.num_sequences, self.seed, int(epoch))
            order[here] = shuffled(places[here] % self.num_sequences)
        return self._batch(self._spread(self.num_held_out + order), self.global_batch)

    @property
    def num_held_out_batches(self) -> int:
        """Batches as large as a step's in the text that is held out; the last one may be filled up."""
        return -(-self.num_held_out // self.global_batch)

    def held_out_batch(self, index: int) -> Batch:
        """A batch for evaluation; where sequences run out, targets are IGNORED. InputError when there is none left."""
        if not 0 <= index < self.num_held_out_batches:
            raise InputError(
                f"data.held_out: {self.num_held_out} sequences are held out, which is {self.num_held_out_batches} "
                f"batches of {self.global_batch}; hold out more or evaluate on fewer batches"
            )
        places = index * self.global_batch + self._mine
        is_there = places < self.num_held_out
        num_there = min(self.global_batch, self.num_held_out - index * self.global_batch)
        batch = self._batch(self._spread(np.where(is_there, places, 0)), num_there)
        batch.targets[torch.from_numpy(~is_there).view(self.shape[:2])] = IGNORED
        return batch

    def _batch(self, sequences: NDArray[np.int64], num_counted: int) -> Batch:
        """These sequences of the text; so many count in the whole batch."""
        length = self.shape[2]
        windows = np.empty((sequences.size, length + 1), np.int64)
        shards = np.searchsorted(self._first_of_shard, sequences, side="right") - 1
        for row, (shard, sequence) in enumerate(zip(shards, sequences, strict=True)):
            start = (sequence - self._first_of_shard[shard]) * length
            windows[row] = self.tokens.shards[shard][start : start + length + 1]
        whole = torch.from_numpy(windows).view(*self.shape[:2], length + 1)
        return Batch(whole[..., :-1].clone(), whole[..., 1:].clone(), num_counted * length)

    @property
    def digest(self) -> bytes:
        """Equal where every step gets the same sequences of the same text, whatever the microbatches (SHA-256).

        How closely texts are told apart is said at `Tokens.digest`.
        """
        head = f"{self.global_batch} {self.shape[2]} {self.seed} {self.num_held_out} ".encode()
        return hashlib.sha256(head + self.tokens.digest).digest()


def load_batches(data: Data, model: Model, shape: Shape, seed: int, share: Share = WHOLE) -> Batches:
    """The batches of `data` for `model`; InputError when they don't fit together."""
    tokens = load_tokens(data)
    require_vocabulary(tokens, model)
    return Batches(tokens, shape, seed, held_out=data.held_out, share=share)
