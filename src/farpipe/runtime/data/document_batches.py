"""Whole documents as batches, for training on chunks: which ones a step trains on follows from its number.

Documents are cut where they are longer than `sequence_length`; each piece is a sequence of its own. Every epoch goes
through all of them in an order of its own, one step takes the next `global_batch`.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from farpipe.errors import InputError
from farpipe.runtime.data.permutation import Permutation
from farpipe.runtime.data.tokens import Tokens, load_tokens, require_vocabulary
from farpipe.spec import Data, Model, Training

Ints = NDArray[np.int64]


class DocumentBatches:
    """The sequences of every step; of the text nothing but these is read. Needs no torch."""

    def __init__(self, tokens: Tokens, longest: int, global_batch: int, seed: int, held_out: float = 0.0) -> None:
        """Sequences have up to `longest` tokens. InputError when there are not enough for one step."""
        self.tokens, self.longest, self.global_batch, self.seed = tokens, longest, global_batch, seed
        pieces = [_pieces(ends, longest) for ends in tokens.ends]
        self._shard = np.repeat(np.arange(len(pieces)), [starts.size for starts, _ in pieces])
        self._start = np.concatenate([starts for starts, _ in pieces])
        self._length = np.concatenate([lengths for _, lengths in pieces])
        num_held_out = int(np.ceil(held_out * self._length.size))
        self.num_sequences = self._length.size - num_held_out
        if self.num_sequences < global_batch:
            beside = f" beside {num_held_out} that are held out" if num_held_out else ""
            raise InputError(
                f"data.source: the text has {self.num_sequences} sequences of up to {longest} tokens{beside}, but one "
                f"step takes {global_batch} (training.global_batch); give more text or make one of them smaller"
            )
        spread = Permutation(self._length.size, "held out")
        self._trained_on = spread(np.arange(num_held_out, self._length.size))
        self._held_out = spread(np.arange(num_held_out))

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence of the whole text."""
        return int(self._length.max())

    def _numbers(self, step: int) -> Ints:
        """The sequences of `step`, as numbers of all."""
        places = step * self.global_batch + np.arange(self.global_batch)
        epochs, found = places // self.num_sequences, np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = Permutation(self.num_sequences, self.seed, int(epoch))(places[here] % self.num_sequences)
        return self._trained_on[found]

    def lengths(self, step: int) -> Ints:
        """Tokens of every sequence of `step`: [global_batch]."""
        return self._length[self._numbers(step)]

    def batch(self, step: int) -> Sequence[Ints]:
        """The tokens of every sequence of `step`."""
        return [self._tokens(number) for number in self._numbers(step).tolist()]

    def _held_out_numbers(self, index: int) -> Ints:
        """The held-out sequences of batch `index`, after the last batch from the first on; all where they are few."""
        num_batches = max(1, self._held_out.size // self.global_batch)
        begin = index % num_batches * self.global_batch
        return self._held_out[begin : begin + self.global_batch]

    def held_out_lengths(self, index: int) -> Ints:
        """Tokens of every sequence of held-out batch `index`."""
        return self._length[self._held_out_numbers(index)]

    def held_out_batch(self, index: int) -> Sequence[Ints]:
        """The tokens of every sequence of held-out batch `index`."""
        return [self._tokens(number) for number in self._held_out_numbers(index).tolist()]

    def _tokens(self, number: int) -> Ints:
        start = int(self._start[number])
        read = self.tokens.shards[self._shard[number]][start : start + int(self._length[number])]
        return np.asarray(read, np.int64)

    @property
    def digest(self) -> bytes:
        """Equal where every step gets the same sequences of the same text (SHA-256)."""
        head = f"documents {self.longest} {self.global_batch} {self.seed} {self.num_sequences} ".encode()
        ends = b"".join(ends.tobytes() for ends in self.tokens.ends)
        return hashlib.sha256(head + hashlib.sha256(ends).digest() + self.tokens.digest).digest()


def _pieces(ends: Ints, longest: int) -> tuple[Ints, Ints]:
    """(start, length) of every piece of the documents that end there; empty documents have none."""
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    counts = -(-(ends - starts) // longest)
    first = np.repeat(starts, counts)
    place = np.arange(first.size) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = first + place * longest
    return begin, np.minimum(longest, np.repeat(ends, counts) - begin)


def load_document_batches(data: Data, model: Model, training: Training) -> DocumentBatches:
    """The documents of `data` for `model`; InputError when they don't fit together."""
    tokens = load_tokens(data)
    require_vocabulary(tokens, model)
    return DocumentBatches(tokens, training.sequence_length, training.global_batch, training.seed, data.held_out)
