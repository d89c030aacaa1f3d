"""Chunk: a microbatch made of slices of sequences, and the arrays that costs and orders are computed from.

A sequence that is longer than a chunk is *split* into slices; short ones are *batched* whole; a *hybrid* chunk has the
last slice of a split sequence (its tail) and short ones (InfiniPipe, arXiv 2509.21275, section 4). Every packed format
(cumulative lengths of queries and keys, positions, weights of the loss) follows from the slices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError
from farpipe.planning.cost.chunk_laws import Load

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Slice(NamedTuple):
    """Tokens `start` up to, not including, `start + length` of one sequence."""

    sequence: int
    start: int
    length: int
    sequence_length: int

    @property
    def end(self) -> int:
        """The token behind the last one."""
        return self.start + self.length

    @property
    def is_whole(self) -> bool:
        """True if it is all of its sequence."""
        return self.length == self.sequence_length

    @property
    def is_tail(self) -> bool:
        """True if it is the last slice of a split sequence."""
        return self.start > 0 and self.end == self.sequence_length


@dataclass(frozen=True)
class Chunk:
    """Slices that go through the pipeline together; at most one of them is part of a split sequence, the first."""

    slices: tuple[Slice, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all slices: the queries of attention."""
        return sum(part.length for part in self.slices)

    @property
    def split_sequence(self) -> int | None:
        """The sequence of which this chunk has one slice of several; None: all are whole."""
        first = self.slices[0]
        return None if first.is_whole else first.sequence

    @property
    def kind(self) -> Literal["split", "batched", "hybrid"]:
        """InfiniPipe's three kinds."""
        if self.split_sequence is None:
            return "batched"
        return "split" if len(self.slices) == 1 else "hybrid"

    @cached_property
    def runs(self) -> tuple[tuple[Slice, ...], ...]:
        """Slices that one call of attention takes: whole sequences of one length side by side, a split one alone."""
        keys = groupby(self.slices, key=lambda part: (part.is_whole, part.length if part.is_whole else part))
        return tuple(tuple(run) for _, run in keys)

    def to_data(self) -> list[dict[str, int]]:
        """The slices as JSON data."""
        return [part._asdict() for part in self.slices]

    @classmethod
    def from_data(cls, data: Any, source: str = "chunk") -> Self:
        """Read the same; InputError names what is wrong."""
        if not isinstance(data, list) or not data:
            raise InputError(f"{source}: expected a list of slices, found {str(data)[:60]}")
        return cls(tuple(_slice_of(part, f"{source}[{index}]") for index, part in enumerate(data)))


def _slice_of(data: Any, source: str) -> Slice:
    if not isinstance(data, dict) or set(data) != set(Slice._fields):
        raise InputError(f"{source}: expected an object with {', '.join(Slice._fields)}, found {str(data)[:80]}")
    numbers = [data[name] for name in Slice._fields]
    if not all(type(number) is int for number in numbers):
        raise InputError(f"{source}: expected integers, found {data}")
    part = Slice(*numbers)
    if part.sequence < 0 or part.start < 0 or part.length < 1 or part.end > part.sequence_length:
        raise InputError(f"{source}: {data} is no slice of a sequence of {part.sequence_length} tokens")
    return part


def followed(chunks: Sequence[Chunk]) -> tuple[int | None, ...]:
    """The chunk with the slice before of the same sequence, for every chunk: a Problem's `follows`.

    InputError when a sequence's slices are not in order, or leave a gap.
    """
    last_of: dict[int, tuple[int, int]] = {}
    found: list[int | None] = []
    for index, chunk in enumerate(chunks):
        first = chunk.slices[0]
        before, end = last_of.get(first.sequence, (None, 0))
        if first.start != end:
            raise InputError(f"chunks[{index}]: sequence {first.sequence} begins at {first.start}, expected {end}")
        found.append(before)
        if not first.is_whole:
            last_of[first.sequence] = index, first.end
    return tuple(found)


def as_load(sizes: Ints) -> Load:
    """Every sequence as a chunk of its own: [num]."""
    tokens, none = sizes.astype(np.float64), np.zeros(sizes.size)
    return Load(tokens, tokens**2 / 2, none > 0, none, none > 0, none, none)


def load_of(chunks: Sequence[Chunk]) -> Load:
    """Load that chunks put on a device."""
    slices = np.array([part for chunk in chunks for part in chunk.slices], np.int64).reshape(-1, 4)
    place = np.repeat(np.arange(len(chunks)), [len(chunk.slices) for chunk in chunks])
    return SliceTable(slices[:, 0], slices[:, 1], slices[:, 2], slices[:, 3], place).load


@dataclass(frozen=True)
class SliceTable:
    """The slices of a batch as columns, sorted by chunk, the slice of a split sequence first: [num_slices] each."""

    sequence: Ints
    start: Ints
    length: Ints
    sequence_length: Ints
    chunk: Ints

    @cached_property
    def first(self) -> Ints:
        """The first slice of every chunk: [num_chunks]."""
        return np.flatnonzero(np.diff(self.chunk, prepend=-1))

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return int(self.first.size)

    @property
    def num_slices(self) -> int:
        """Number of slices of the longest sequence."""
        return int((self.sequence == self.sequence[self.sequence_length.argmax()]).sum())

    @cached_property
    def follows(self) -> tuple[int | None, ...]:
        """The chunk before of the same sequence, for every chunk: slices of a sequence are in consecutive chunks."""
        return tuple(index - 1 if start else None for index, start in enumerate(self.start[self.first].tolist()))

    def follows_within(self, begin: int, end: int) -> tuple[int | None, ...]:
        """`follows` of the chunks [begin, end), counted from `begin`; no sequence begins outside."""
        return tuple(None if before is None else before - begin for before in self.follows[begin:end])

    @cached_property
    def load(self) -> Load:
        """Load that the chunks put on a device."""
        start, length = self.start.astype(np.float64), self.length.astype(np.float64)
        first = self.first
        is_split = self.length[first] != self.sequence_length[first]
        pairs = ((start + length) ** 2 - start**2) / 2
        is_last = is_split & (self.start[first] + self.length[first] == self.sequence_length[first])
        return Load(
            np.asarray(np.bincount(self.chunk, length), np.float64),
            np.asarray(np.bincount(self.chunk, pairs), np.float64),
            is_split,
            length[first] * is_split,
            is_last,
            pairs[first] * is_split,
            np.asarray(np.bincount(self.chunk, self._begins_run), np.float64) - 1,
        )

    @property
    def _begins_run(self) -> NDArray[np.bool_]:
        """True for slices that a call of attention begins with, as in `Chunk.runs`."""
        is_whole = self.length == self.sequence_length
        joins = (np.diff(self.chunk) == 0) & (np.diff(self.length) == 0) & is_whole[1:] & is_whole[:-1]
        return np.append(True, ~joins)

    def chunks(self) -> list[Chunk]:
        """The same as Chunks."""
        columns = (self.sequence, self.start, self.length, self.sequence_length)
        slices = list(map(Slice, *(column.tolist() for column in columns)))
        ends = [*self.first.tolist(), len(slices)]
        return [Chunk(tuple(slices[begin:end])) for begin, end in pairwise(ends)]
