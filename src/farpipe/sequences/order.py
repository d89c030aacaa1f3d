"""Token-level 1F1B: forwards slice by slice, backwards in reverse, one after the other once the pipeline is full.

As in Seq1F1B (arXiv 2406.03488) and InfiniPipe (arXiv 2509.21275, section 4.4). The last stage can begin the first
backward when it has done all slices of the first sequence, so the warm-up is longer by the slices of the longest
sequence less one; a hop that takes time adds chunks upstream of it, as `eager` does for microbatches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np

from farpipe.sequences.chunk import Floats, Ints
from farpipe.step import Action, Schedule

_SHORT_TRIP: Final = 0.05


@dataclass(frozen=True)
class ChunkOrder:
    """The order of one pipeline: forwards 0, 1, ..., the backwards in reverse along every chain."""

    follows: tuple[int | None, ...]
    """For every chunk the one with the slice before it, always the chunk before it in this order."""
    warm_up: tuple[int, ...]
    """Forwards of every stage before its first backward, as many as there are at most."""
    shrinks: bool = False
    """True if chunks in flight get fewer, by backwards in a row, when the longest chains are over."""

    @property
    def num_chunks(self) -> int:
        """Chunks of the pipeline."""
        return len(self.follows)

    @cached_property
    def backwards(self) -> Ints:
        """The chunks in the order of their backwards."""
        return backward_order(self.follows)

    @cached_property
    def backward_place(self) -> Ints:
        """Place of every chunk's backward: the inverse of `backwards`."""
        return np.argsort(self.backwards)

    @property
    def shift(self) -> Ints:
        """By how many chunks every stage begins its backwards later than the last one."""
        return np.asarray(self.warm_up) - self.warm_up[-1]

    def forwards_before(self, stage: int) -> Ints:
        """Forwards of a stage before the backward at every place: ascending, [num_chunks]."""
        places = np.arange(self.num_chunks)
        spare = self._spare if self.shrinks else 0
        return np.minimum(np.maximum.accumulate(places + 1 + self.warm_up[stage] - spare), self.num_chunks)

    @cached_property
    def _spare(self) -> Ints:
        """Slices that the longest chain has more than the longest one that is left, at every place."""
        lengths = np.array(chain_lengths(self.follows))
        left = np.maximum.accumulate(lengths[::-1])[::-1]
        return np.repeat(left[0] - left, lengths)

    def schedule(self) -> Schedule:
        """The orders of all ranks, stage s on rank s."""
        ranks = tuple(tuple(self._actions(stage)) for stage in range(len(self.warm_up)))
        return Schedule(self.num_chunks, ranks, "chunk-1f1b")

    def entries(self, stage: int) -> Ints:
        """The order of one stage: j for the forward of chunk j, j + the number of chunks for its backward."""
        count, places = self.num_chunks, np.arange(self.num_chunks)
        before = self.forwards_before(stage)
        found = np.empty(2 * count, np.int64)
        found[places + before] = count + self.backwards
        found[places + np.searchsorted(before, places, side="right")] = places
        return found

    def _actions(self, stage: int) -> list[Action]:
        backward, chunk = np.divmod(self.entries(stage), self.num_chunks)
        return [Action(stage, "FB"[b], j) for b, j in zip(backward.tolist(), chunk.tolist(), strict=True)]  # type: ignore[arg-type]


def backward_order(follows: Sequence[int | None]) -> Ints:
    """Chunks in the order of their backwards: chains one after the other, each from its last slice to its first."""
    found: list[int] = []
    chain: list[int] = []
    for index, before in enumerate(follows):
        if before is None:
            found += reversed(chain)
            chain = []
        elif before != index - 1:
            raise ValueError(f"chunk {index} follows {before}, not the one before it")
        chain.append(index)
    return np.array([*found, *reversed(chain)], np.int64)


def chain_lengths(follows: Sequence[int | None]) -> list[int]:
    """Slices of every chain, 1 where there is no other."""
    begins = [index for index, before in enumerate(follows) if before is None]
    return [end - begin for begin, end in pairwise([*begins, len(follows)])]


def chunk_order(follows: Sequence[int | None], extra: Sequence[int], *, shrinks: bool = False) -> ChunkOrder:
    """Stage p of P begins with P - 1 - p + `extra` [p] forwards, and those of the longest chain but its last.

    `shrinks`: so many more only as long as chains of that length are left.
    """
    num_stages, base = len(extra), max(chain_lengths(follows)) - 1
    count = len(follows)
    warm_up = [min(count - 1, base + num_stages - 1 - p + more) for p, more in enumerate(extra)]
    return ChunkOrder(tuple(follows), tuple(warm_up), shrinks)


def extra_forwards(
    there_s: Floats, back_s: Floats, pace_s: float, num_chunks: int, *, whole: bool = True
) -> tuple[int, ...]:
    """The extra warm-up of every stage that hides the hops: ceil(round trip / `pace_s`) for each at or below it.

    The pace is forward and backward of a mean chunk on the slowest stage. Hops of less than a twentieth of it are not
    worth the memory of a chunk. Not `whole`: rounded down, which hides most of a hop with one chunk less.
    """
    ratio = (there_s + back_s) / pace_s if pace_s > 0 else np.zeros_like(there_s)
    rounded = np.ceil(ratio - 1e-6) if whole else np.floor(ratio)
    wanted = np.where(ratio < _SHORT_TRIP, 0, np.minimum(rounded, num_chunks))
    return tuple(int(wanted[stage:].sum()) for stage in range(wanted.size + 1))


def makespan_s(order: ChunkOrder, forward_s: Floats, backward_s: Floats, there_s: Floats, back_s: Floats) -> float:
    """Makespan of the order if no message waits for another on its link; seconds of [num_stages, num_chunks].

    `there_s` and `back_s` [num_stages - 1]: from a producer's end to the arrival.
    """
    from farpipe.sequences import order_kernel  # here, for numba takes a third of a second to import

    entries = np.stack([order.entries(stage) for stage in range(len(order.warm_up))])
    kernel: Any = order_kernel.makespan
    duration_s = np.concatenate([forward_s, backward_s], axis=1)
    return float(kernel(duration_s, entries, np.concatenate([[0.0], there_s]), np.concatenate([back_s, [0.0]])))
