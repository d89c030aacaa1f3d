"""Tokens as batches, the same on every rank and after every restart: what a step trains on follows from its number.

The text is cut into sequences. Every epoch goes through all of them in an order of its own; one optimizer step takes
the next ones. Neither order nor position is stored: both are computed from seed and step.

For training on chunks these are whole documents, cut where they are longer than `sequence_length`: each piece is a
sequence of its own, and one step takes the next `global_batch`.
"""

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError
from farpipe.core.spec import Data, Model, Training
from farpipe.planning.documents.tokens import Tokens, load_tokens, require_vocabulary

Shape = tuple[int, int, int]
"""num_microbatches (of all replicas together), microbatch_size, sequence_length: of one step."""
NUM_ROUNDS: Final = 6
_MIX: Final = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
"""Multipliers of MurmurHash3's finalizer, which spreads every bit over all others."""
_SHIFT: Final = np.uint64(33)
Ints = NDArray[np.int64]


class Share(NamedTuple):
    """Part of every batch that belongs to one of several replicas, which have as many microbatches each."""

    replica: int
    num_replicas: int
    first: int = 0
    """Sequences of a whole batch that sites before this one train on by themselves."""
    whole: int | None = None
    """Sequences of a whole batch; None: as many as the replicas have."""


WHOLE: Final = Share(0, 1)


class Windows(NamedTuple):
    """One step of a replica: sequences, each with the token behind it, and which of their targets count."""

    tokens: Ints
    """[num_microbatches, microbatch_size, sequence_length + 1]"""
    counted: NDArray[np.bool_] | None
    """[num_microbatches, microbatch_size, sequence_length]: targets that are trained on; None: all."""
    num_counted: int
    """Targets that count in the whole step, where other replicas have some of them."""


class SequenceSampler:
    """The sequences, as numbers from 0, of every training batch and every held-out batch; nothing of it is stored.

    Sequences spread over the whole text are held out, and training never sees them.
    """

    def __init__(self, num_all: int, global_batch: int, seed: int, held_out: float) -> None:
        self.global_batch, self._seed = global_batch, seed
        self.num_held_out = int(np.ceil(held_out * num_all))
        self.num_sequences = num_all - self.num_held_out
        """Number of sequences of one epoch."""
        self._spread = Permutation(max(1, num_all), "held out")

    def trained_on(self, step: int, mine: Ints) -> Ints:
        """The sequences at the places `mine` of the batch of `step`."""
        places = step * self.global_batch + mine
        found = np.empty_like(places)
        for epoch in np.unique(places // self.num_sequences):
            here = places // self.num_sequences == epoch
            found[here] = Permutation(self.num_sequences, self._seed, int(epoch))(places[here] % self.num_sequences)
        return self.held_out(self.num_held_out + found)

    def held_out(self, places: Ints) -> Ints:
        """The sequences at `places` of the text that is held out."""
        return self._spread(places)


class TextBatches:
    """A replica's share of the batches of a run, as numbers; nothing else of the text is read. Needs no torch."""

    def __init__(self, tokens: Tokens, shape: Shape, seed: int, *, held_out: float = 0.0, share: Share = WHOLE) -> None:
        """`shape`: of a whole step. InputError when there is not enough text for one."""
        self.tokens, self.seed = tokens, seed
        self._num_own = shape[0] * shape[1]
        self.global_batch = share.whole or self._num_own
        num_microbatches, rest = divmod(shape[0], share.num_replicas)
        assert rest == 0, "every replica has as many microbatches"
        self.shape = num_microbatches, *shape[1:]
        own = share.replica * num_microbatches * shape[1] + np.arange(num_microbatches * shape[1])
        self._own, self._mine = own, share.first + own
        """Places in the replicas' part of a batch, and in a whole one."""
        self._all = share.first + np.arange(self._num_own)
        length = shape[2]
        counts = [max(shard.size - 1, 0) // length for shard in tokens.shards]
        self._first_of_shard = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        self._sampler = SequenceSampler(int(self._first_of_shard[-1]), self.global_batch, seed, held_out)
        self.num_held_out, self.num_sequences = self._sampler.num_held_out, self._sampler.num_sequences
        self._require(length)

    def _require(self, length: int) -> None:
        if self.num_sequences < self.global_batch:
            needed = self.global_batch * length + 1
            rest = f" beside {self.num_held_out} that are held out" if self.num_held_out else ""
            raise InputError(
                f"data.source: the text has {self.tokens.num_tokens} tokens, but one step of {self.global_batch} "
                f"sequences x {length} tokens needs {needed}{rest}; give more text or make global_batch smaller"
            )

    def windows(self, step: int) -> Windows:
        """Return the replica's batch in `step`."""
        return self._windows(*(self._sampler.trained_on(step, places) for places in (self._mine, self._all)))

    @property
    def num_held_out_batches(self) -> int:
        """Batches as large as a step's in the text that is held out; the last one may be filled up."""
        return -(-self.num_held_out // self._num_own)

    def held_out_windows(self, index: int) -> Windows:
        """A batch for evaluation; where sequences run out, none counts. InputError when there is none left."""
        if not 0 <= index < self.num_held_out_batches:
            raise InputError(
                f"data.held_out: {self.num_held_out} sequences are held out, which is {self.num_held_out_batches} "
                f"batches of {self._num_own}; hold out more or evaluate on fewer batches"
            )
        places = index * self._num_own + self._own
        is_there = places < self.num_held_out
        num_there = min(self._num_own, self.num_held_out - index * self._num_own)
        there = self._sampler.held_out(index * self._num_own + np.arange(num_there))
        found = self._windows(self._sampler.held_out(np.where(is_there, places, 0)), there)
        counted = np.ones(self.shape, np.bool_) if found.counted is None else found.counted
        return found._replace(counted=counted & is_there.reshape(*self.shape[:2], 1))

    def _windows(self, sequences: Ints, all_sequences: Ints) -> Windows:
        """These sequences of the text; `all_sequences` count in the whole batch."""
        length = self.shape[2]
        whole = np.stack(self.tokens.read(*self._spans(sequences))).reshape(*self.shape[:2], length + 1)
        if not self.tokens.is_masked:
            return Windows(whole, None, all_sequences.size * length)
        counted = self._counted(sequences).reshape(self.shape)
        return Windows(whole, counted, max(1, int(self._counted(all_sequences).sum())))

    def _spans(self, sequences: Ints) -> tuple[Ints, Ints, Ints]:
        """(shard, first token, token behind the last target) of every sequence."""
        shards = np.searchsorted(self._first_of_shard, sequences, side="right") - 1
        starts = (sequences - self._first_of_shard[shards]) * self.shape[2]
        return shards, starts, starts + self.shape[2] + 1

    def _counted(self, sequences: Ints) -> NDArray[np.bool_]:
        """Targets that are trained on: [num_sequences, length]."""
        return np.stack(self.tokens.read_counted(*self._spans(sequences)))[:, 1:]

    @property
    def digest(self) -> bytes:
        """Equal where every step gets the same sequences of the same text, whatever the microbatches (SHA-256).

        `Tokens.digest` says how closely texts are compared.
        """
        part = "" if self._num_own == self.global_batch else f"{self._all[0]} {self._num_own} of "
        head = f"{part}{self.global_batch} {self.shape[2]} {self.seed} {self.num_held_out} ".encode()
        return hashlib.sha256(head + self.tokens.digest).digest()


class Permutation:
    """A shuffled order of ``0 .. size - 1`` without a list of it; the same for the same `key`.

    A Feistel network turns numbers of an even number of bits into each other one to one; a result that is too large
    goes through it again until it is not ("cycle walking", Black and Rogaway 2002): the order stays a permutation.
    """

    def __init__(self, size: int, *key: int | str) -> None:
        assert 1 <= size < 1 << 62
        self.size = size
        half_bits = max(1, -(-(size - 1).bit_length() // 2))
        self._half, self._mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
        digest = hashlib.shake_256(repr((size, key)).encode()).digest(8 * NUM_ROUNDS)
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the elements at `places`, which must be at least 0 and less than `size`: [...] -> [...]."""
        found = self._turn(places.astype(np.uint64))
        while (outside := found >= np.uint64(self.size)).any():
            found[outside] = self._turn(found[outside])
        return found.astype(np.int64)

    def _turn(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return (left << self._half) | right


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for factor in _MIX:
        numbers = (numbers ^ (numbers >> _SHIFT)) * factor
    return numbers ^ (numbers >> _SHIFT)


class Documents(NamedTuple):
    """Sequences of a batch."""

    tokens: Sequence[Ints]
    """Tokens of every sequence."""
    counted: Sequence[NDArray[np.bool_]] | None
    """Tokens of every sequence that are trained on; None: all."""


class DocumentBatches:
    """The sequences of every step; of the text nothing but these is read. Needs no torch."""

    def __init__(self, tokens: Tokens, longest: int, global_batch: int, seed: int, held_out: float = 0.0) -> None:
        """Sequences have up to `longest` tokens. InputError when there are not enough for one step."""
        self.tokens, self.longest, self.global_batch, self.seed = tokens, longest, global_batch, seed
        pieces = [_pieces(ends, longest) for ends in tokens.ends]
        self._shard = np.repeat(np.arange(len(pieces)), [starts.size for starts, _ in pieces])
        self._start = np.concatenate([starts for starts, _ in pieces])
        self._length = np.concatenate([lengths for _, lengths in pieces])
        self._sampler = SequenceSampler(self._length.size, global_batch, seed, held_out)
        self.num_sequences = self._sampler.num_sequences
        if self.num_sequences < global_batch:
            held = self._sampler.num_held_out
            beside = f" beside {held} that are held out" if held else ""
            raise InputError(
                f"data.source: the text has {self.num_sequences} sequences of up to {longest} tokens{beside}, but one "
                f"step takes {global_batch} (training.global_batch); give more text or make one of them smaller"
            )

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence of the whole text."""
        return int(self._length.max())

    def _numbers(self, step: int) -> Ints:
        """The sequences of `step`, as numbers of all."""
        return self._sampler.trained_on(step, np.arange(self.global_batch))

    def lengths(self, step: int) -> Ints:
        """Tokens of every sequence of `step`: [global_batch]."""
        return self._length[self._numbers(step)]

    def batch(self, step: int) -> Documents:
        """The sequences of `step`."""
        return self._documents(self._numbers(step))

    def _held_out_numbers(self, index: int) -> Ints:
        """The held-out sequences of batch `index`, after the last batch from the first on; all where they are few."""
        num_held_out = self._sampler.num_held_out
        begin = index % max(1, num_held_out // self.global_batch) * self.global_batch
        return self._sampler.held_out(np.arange(begin, min(begin + self.global_batch, num_held_out)))

    def held_out_lengths(self, index: int) -> Ints:
        """Tokens of every sequence of held-out batch `index`."""
        return self._length[self._held_out_numbers(index)]

    def held_out_batch(self, index: int) -> Documents:
        """The sequences of held-out batch `index`."""
        return self._documents(self._held_out_numbers(index))

    def _documents(self, numbers: Ints) -> Documents:
        starts = self._start[numbers]
        spans = self._shard[numbers], starts, starts + self._length[numbers]
        return Documents(self.tokens.read(*spans), self.tokens.read_counted(*spans) if self.tokens.is_masked else None)

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
