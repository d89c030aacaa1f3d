"""Token-level 1F1B: forwards slice by slice, backwards in reverse, one after the other once the pipeline is full.

As in Seq1F1B (arXiv 2406.03488) and InfiniPipe (arXiv 2509.21275, section 4.4). The last stage can begin the first
backward when it has done all slices of the first sequence, so the warm-up is longer by the slices of the longest
sequence less one; a hop that takes time adds chunks upstream of it, as `eager` does for microbatches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from farpipe.problem import Problem, Transfer
from farpipe.schedule import Action, Schedule
from farpipe.sequences.chunk import Ints


@dataclass(frozen=True)
class ChunkOrder:
    """The order of one pipeline: forwards 0, 1, ..., the backwards in reverse along every chain."""

    follows: tuple[int | None, ...]
    """For every chunk the one with the slice before it, always the chunk before it in this order."""
    warm_up: tuple[int, ...]
    """Forwards of every stage before its first backward, as many as there are at most."""

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
        """When every chunk has its backward: the inverse of `backwards`."""
        return np.argsort(self.backwards)

    @property
    def shift(self) -> Ints:
        """By how many chunks every stage begins its backwards later than the last one."""
        return np.asarray(self.warm_up) - self.warm_up[-1]

    def schedule(self, method: str = "chunk-1f1b") -> Schedule:
        """The orders of all ranks, stage s on rank s."""
        ranks = tuple(tuple(self._actions(stage)) for stage in range(len(self.warm_up)))
        return Schedule(self.num_chunks, ranks, method)

    def _actions(self, stage: int) -> list[Action]:
        count, backwards = self.num_chunks, self.backwards.tolist()
        ahead = min(self.warm_up[stage], count)
        order = [Action(stage, "F", j) for j in range(ahead)]
        for place, backward in enumerate(backwards):
            if ahead + place < count:
                order.append(Action(stage, "F", ahead + place))
            order.append(Action(stage, "B", backward))
        return order


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


def longest_chain(follows: Sequence[int | None]) -> int:
    """Slices of the sequence that is cut most, 1 where none is."""
    longest = run = 0
    for before in follows:
        run = 1 if before is None else run + 1
        longest = max(longest, run)
    return longest


def chunk_order(follows: Sequence[int | None], extra: Sequence[int]) -> ChunkOrder:
    """Stage p of P begins with P - 1 - p + `extra` [p] forwards, and those of the longest chain but its last."""
    num_stages, base = len(extra), longest_chain(follows) - 1
    count = len(follows)
    warm_up = [min(count - 1, base + num_stages - 1 - p + more) for p, more in enumerate(extra)]
    return ChunkOrder(tuple(follows), tuple(warm_up))


def extra_forwards(problem: Problem) -> tuple[int, ...]:
    """The extra warm-up of every stage that hides the hops: ceil(round trip / (F + B)) for each at or below it.

    F + B is the slowest stage's for a mean chunk.
    """
    pace_s = pace_of(problem)
    found = [0] * problem.num_stages
    for stage in reversed(range(problem.num_stages - 1)):
        trip_s = hop_seconds(problem, stage)
        wish = math.ceil(trip_s / pace_s - 1e-6) if pace_s > 0 else 0
        found[stage] = found[stage + 1] + min(wish, problem.num_microbatches)
    return tuple(found)


def pace_of(problem: Problem) -> float:
    """Forward and backward of a mean chunk on the slowest stage, seconds."""
    total = sum(problem.table(name) for name in ("forward_s", "input_grad_s", "weight_grad_s"))
    return float(np.asarray(total).mean(axis=1).max())


def hop_seconds(problem: Problem, stage: int) -> float:
    """There and back between a stage and the next for a mean chunk, seconds."""
    hop = problem.hops[stage]
    if hop is None or problem.stages[stage].rank == problem.stages[stage + 1].rank:
        return 0.0
    return _mean_seconds(problem, hop.forward) + _mean_seconds(problem, hop.backward)


def _mean_seconds(problem: Problem, transfer: Transfer | None) -> float:
    if transfer is None:
        return 0.0
    return sum(
        float(share.sum()) / problem.links[name].bandwidth_bytes_per_s + share.size * problem.links[name].latency_s
        for name, share in problem.shares(transfer)
    ) / problem.num_microbatches
