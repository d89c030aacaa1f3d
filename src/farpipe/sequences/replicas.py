"""Sequences of a batch shared out over replicas: balanced by time, not by count."""

import heapq

import numpy as np

from farpipe.cost.chunks import ChunkCosts
from farpipe.errors import InfeasibleError
from farpipe.sequences.chunk import Ints


def shares(costs: ChunkCosts, lengths: Ints, num_replicas: int) -> list[Ints]:
    """Numbers of the sequences of every replica, ascending; each has at least one.

    The longest first, each to the replica that has least to do (Graham's LPT, at most 4/3 of the best); a sequence
    takes what it takes on the rank that is slowest over all. InfeasibleError for fewer sequences than replicas.
    """
    if lengths.size < num_replicas:
        raise InfeasibleError(f"{num_replicas} replicas can't share {lengths.size} sequences; each needs one")
    if num_replicas == 1:
        return [np.arange(lengths.size)]
    seconds = sequence_seconds(costs, lengths)
    found: list[list[int]] = [[] for _ in range(num_replicas)]
    busy = [(0.0, 0, replica) for replica in range(num_replicas)]
    for index in np.argsort(-seconds, kind="stable").tolist():
        total_s, count, replica = heapq.heappop(busy)
        found[replica].append(index)
        heapq.heappush(busy, (total_s + float(seconds[index]), count + 1, replica))
    return [np.array(sorted(mine), np.int64) for mine in found]


def sequence_seconds(costs: ChunkCosts, lengths: Ints) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Forward and backward of every sequence, without fixed times, on the rank that is slowest over all: [num]."""
    tokens = lengths.astype(np.float64)
    pairs = tokens**2 / 2
    laws = [stage.laws.total for stage in costs.folded.stages]
    rows = [law.seconds(tokens, pairs) - law.fixed_s for law in laws]
    return max(rows, key=lambda row: float(row.sum()))
