"""Token-level 1F1B: forwards slice by slice, backwards in reverse, one after the other once the pipeline is full.

As in Seq1F1B (arXiv 2406.03488) and InfiniPipe (arXiv 2509.21275, section 4.4). The last stage can begin the first
backward when it has done all slices of the first sequence, so the warm-up is longer by the slices of the longest
sequence less one; a hop that takes time adds chunks upstream of it, as `eager` does for microbatches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from farpipe.core.step import Schedule, hiding_forwards, upstream_sums
from farpipe.core.step.arrays import free_links
from farpipe.core.step.chains import Chains, chains
from farpipe.core.step.codes import B, F, encode
from farpipe.core.step.messages import StepTraffic
from farpipe.core.step.player import Player
from farpipe.planning.workload.chunk import Floats, Ints

_SHORT_TRIP: Final = 0.05


@dataclass(frozen=True, eq=False)
class ChunkOrder:
    """The order of one pipeline: forwards 0, 1, ..., the backwards in reverse along every chain."""

    chains: Chains
    """Chains of consecutive chunks."""
    warm_up: tuple[int, ...]
    """Forwards of every stage before its first backward, as many as there are at most."""
    shrinks: bool = False
    """True if chunks in flight get fewer, by backwards in a row, when the longest chains are over."""

    @property
    def num_chunks(self) -> int:
        """Chunks of the pipeline."""
        return int(self.chains.first.size)

    @cached_property
    def backward_place(self) -> Ints:
        """Place of every chunk's backward: the inverse of `Chains.backwards`."""
        return np.argsort(self.chains.backwards)

    @property
    def shift(self) -> Ints:
        """Chunks by which every stage begins its backwards later than the last one."""
        return np.asarray(self.warm_up) - self.warm_up[-1]

    @cached_property
    def forwards_before(self) -> Ints:
        """Forwards of every stage before the backward at every place, ascending: [num_stages, num_chunks]."""
        spare = self._spare if self.shrinks else 0
        wanted = np.arange(1, self.num_chunks + 1) + np.array(self.warm_up)[:, None] - spare
        return np.asarray(np.minimum(np.maximum.accumulate(wanted, axis=1), self.num_chunks))

    @cached_property
    def backwards_before(self) -> Ints:
        """Backwards of every stage before the forward of every chunk: [num_stages, num_chunks]."""
        chunks = np.arange(self.num_chunks)
        return np.stack([np.searchsorted(before, chunks, side="right") for before in self.forwards_before])

    @property
    def _spare(self) -> Ints:
        """Slices that the longest chain has more than the longest one that is left, at every place."""
        left = np.maximum.accumulate(self.chains.lengths[::-1])[::-1]
        return np.asarray(left[0] - left)

    def schedule(self) -> Schedule:
        """The orders of all ranks, stage s on rank s."""
        num_stages, count = self.forwards_before.shape
        first = count * np.arange(num_stages)[:, None]
        is_forward = np.ones(2 * num_stages * count, np.bool_)
        is_forward[2 * first + np.arange(count) + self.forwards_before] = False
        codes = np.empty(is_forward.size, np.int32)
        codes[is_forward] = encode(F, np.arange(num_stages * count))
        codes[~is_forward] = encode(B, first + self.chains.backwards).ravel()
        return Schedule.from_codes(count, codes, np.arange(num_stages + 1) * 2 * count, "chunk-1f1b")


def chunk_order(follows: Sequence[int | None], extra: Sequence[int], *, shrinks: bool = False) -> ChunkOrder:
    """Stage p of P begins with P - 1 - p + `extra` [p] forwards, and those of the longest chain but its last.

    `shrinks`: so many more only as long as chains of that length are left. ValueError where a chunk follows another one
    than the one before it.
    """
    of_chunks, num_stages, count = chains(follows, len(follows)), len(extra), len(follows)
    if (np.diff(of_chunks.first) < 0).any():
        raise ValueError("a chunk follows another one than the one before it")
    base = int(of_chunks.lengths.max()) - 1
    warm_up = [min(count - 1, base + num_stages - 1 - p + more) for p, more in enumerate(extra)]
    return ChunkOrder(of_chunks, tuple(warm_up), shrinks)


def extra_forwards(
    there_s: Floats, back_s: Floats, pace_s: float, num_chunks: int, *, whole: bool = True
) -> tuple[int, ...]:
    """The extra warm-up of every stage that hides the hops: ceil(round trip / `pace_s`) for each at or below it.

    The pace is forward and backward of a mean chunk on the slowest stage. Hops of less than a twentieth of it are not
    worth the memory of a chunk. Not `whole`: rounded down, which hides most of a hop with one chunk less.
    """
    trips_s = there_s + back_s
    wanted = hiding_forwards(trips_s, pace_s, num_chunks, whole=whole)
    return tuple(upstream_sums(np.where((trips_s < _SHORT_TRIP * pace_s) | (pace_s == 0), 0, wanted)))


def makespan_s(
    order: ChunkOrder,
    forward_s: Floats,
    backward_s: Floats,
    trips: tuple[Floats, Floats],
    traffic: StepTraffic,
) -> float:
    """Makespan of the order if no message waits for another on its link; seconds of [num_stages, num_chunks].

    `trips` [num_stages - 1]: from a producer's end to the arrival, there and back. `traffic`: see `free_links`.
    """
    schedule = order.schedule()
    return Player(free_links(forward_s, backward_s, *trips, traffic)).makespan_s((schedule.codes, schedule.begin))
