"""Chains: the microbatches that are slices of one sequence, and in which order their actions have to come."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
NOBODY = -1


@dataclass(frozen=True, eq=False)  # arrays: Problems are compared by their fields
class Chains:
    """Every microbatch belongs to one chain; without `Problem.follows` each is a chain of its own.

    On every stage the forwards of a chain come in ascending order, its backwards in descending order: the gradient of
    a slice's keys and values is complete when all later slices have added to it.
    """

    previous: Indices
    """[M]: the slice before, or NOBODY."""
    next: Indices
    """[M]: the slice after, or NOBODY."""
    first: Indices
    """[M]: the first slice of the chain: the same number for all of its slices."""
    last: Indices
    """[M]: the last slice of the chain, whose backward comes first."""
    backwards: Indices
    """[M]: the microbatches in the order in which orders by index do their backwards: 0, 1, 2, ... without chains."""

    @property
    def any(self) -> bool:
        """True if any chain has more than one slice."""
        return bool((self.previous != NOBODY).any())

    @property
    def lengths(self) -> Indices:
        """[M]: slices from the first to the last one of the own chain, where these are consecutive microbatches."""
        return np.asarray(self.last - self.first + 1)

    @property
    def is_last(self) -> NDArray[np.bool_]:
        """[M]: whether the backward of the chain begins with this slice."""
        return np.asarray(self.next == NOBODY)

    def sums(self, figure: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums of `figure` [S, M] over the chain of every stage and microbatch."""
        total = np.zeros_like(figure)
        np.add.at(total.T, self.first, figure.T)
        return np.asarray(total[:, self.first])

    def forwards_needed(self) -> Indices:
        """[M]: minimum number of forwards before the k-th backward of `backwards`, in the order of their index."""
        return np.maximum.accumulate(self.backwards) + 1


def chains(follows: Sequence[int | None] | None, num_microbatches: int) -> Chains:
    """The chains that `follows` describes; chains end in the order of their last slices."""
    own = np.arange(num_microbatches)
    previous, next_, first = np.full(num_microbatches, NOBODY), np.full(num_microbatches, NOBODY), own.copy()
    if follows is None:
        return Chains(previous, next_, first, own, own)
    for slice_, before in enumerate(follows):
        if before is not None:
            previous[slice_], next_[before], first[slice_] = before, slice_, first[before]
    ends = np.zeros(num_microbatches, np.int64)
    np.maximum.at(ends, first, own)
    last = ends[first]
    return Chains(previous, next_, first, last, np.lexsort((-own, last)))


def expect_chains(follows: Sequence[int | None], num_microbatches: int) -> None:
    """ValueError with the key path unless every slice follows an earlier one that no other slice follows."""
    if len(follows) != num_microbatches:
        raise ValueError(f"follows: expected one entry per microbatch, {num_microbatches}, found {len(follows)}")
    followed_by: dict[int, int] = {}
    for index, before in enumerate(follows):
        if before is None:
            continue
        if not 0 <= before < index:
            raise ValueError(
                f"follows[{index}]: expected null or an earlier microbatch, 0 to {index - 1}, found {before}"
            )
        if before in followed_by:
            raise ValueError(
                f"follows[{index}]: microbatch {before} is followed by {followed_by[before]} already; slices of one "
                "sequence follow each other one by one"
            )
        followed_by[before] = index
