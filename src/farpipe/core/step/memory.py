"""Bytes that every action takes and frees: the one place that knows how long a step holds which bytes."""

import math
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from farpipe.core.step.codes import NUM_KINDS, B, F, I, W
from farpipe.core.step.problem import Problem

ROUNDING: Final = 1e-9
"""Relative excess of memory that counts as rounding of sums."""

Floats = NDArray[np.float64]
Array = TypeVar("Array", float, Floats)


def byte_tables(problem: Problem) -> tuple[Floats, Floats]:
    """(taken, freed): bytes that an action takes when it starts and frees when it ends; both [S x M x 4], by its code.

    An activation is held from the start of F to the end of I or B; the stash of its weight gradient from the end of I
    to the end of W; the gradients of keys and values of a chain from the start of its first backward, each to the end
    of the own I or B.
    """
    return problem.kept(_byte_tables)


def _byte_tables(problem: Problem) -> tuple[Floats, Floats]:
    activation, stash, chain = map(problem.table, ("activation_bytes", "weight_stash_bytes", "chain_bytes"))
    taken, freed = (np.zeros((*activation.shape, NUM_KINDS)) for _ in range(2))
    taken[..., F] = activation
    taken[..., I] = taken[..., B] = np.where(problem.chains.is_last, problem.chains.sums(chain), 0.0)
    freed[..., I] = activation - stash + chain
    freed[..., W] = stash
    freed[..., B] = activation + chain
    return taken.reshape(-1), freed.reshape(-1)


def need_tables(problem: Problem) -> tuple[Floats, Floats]:
    """(needed, released): as `byte_tables`, for whoever checks memory when an action starts; both [S x M x 4].

    Where a stash is larger than its activation, an I needs at its end what it does not take at its start.
    """
    return problem.kept(_need_tables)


def _need_tables(problem: Problem) -> tuple[Floats, Floats]:
    taken, freed = byte_tables(problem)
    needed = np.maximum(taken, taken - freed)
    return needed, needed - taken + freed


def headroom_bytes(problem: Problem) -> Floats:
    """Memory that the activations of every rank may take, infinity without a limit: [R].

    What rounding can add to sums is forgiven.
    """
    has = [np.inf if r.memory_bytes is None else forgiving(r.memory_bytes) - r.static_bytes for r in problem.ranks]
    return np.array(has)


def forgiving(num_bytes: Array) -> Array:
    """A limit with what rounding can add to the sums that are held against it."""
    return num_bytes * (1 + ROUNDING)


def exceeds(used: float, limit: float | None) -> bool:
    """True if `used` bytes are over a limit, forgiving what rounding of sums can do."""
    return limit is not None and used > forgiving(limit)


def num_fitting(headroom: float, size: float) -> int:
    """Largest number of things of `size` bytes that fit the headroom; rounding is forgiven."""
    return math.floor(max(headroom, 0.0) / size * (1 + ROUNDING))


def levels(taken: Floats, freed: Floats) -> Floats:
    """Bytes held while each of consecutive actions of a rank runs, given what each takes and frees: [..., actions]."""
    return np.asarray(np.cumsum(taken, axis=-1) - (np.cumsum(freed, axis=-1) - freed))


def peaks(taken: Floats, freed: Floats, begin: NDArray[np.int32]) -> Floats:
    """Most bytes that every rank ever holds: [R]; `taken` and `freed` of all actions, rank by rank from `begin`."""
    if not taken.size:
        return np.zeros(begin.size - 1)
    held = taken.copy()
    held[1:] -= freed[:-1]
    held = np.append(np.cumsum(held), 0.0)  # every rank begins with what the one before it kept: nothing
    return np.where(np.diff(begin), np.maximum.reduceat(held, begin[:-1]), 0.0)


def held_over_time(taken: Floats, freed: Floats, start_s: Floats, end_s: Floats) -> tuple[Floats, Floats]:
    """(times in seconds [N], bytes held from then on [N]) of actions that take bytes at their start and free at their
    end; bytes that are freed go before those that are taken at the same time."""
    times, change = np.concatenate([start_s, end_s]), np.concatenate([taken, -freed])
    moves = np.lexsort((change, times))
    moves = moves[change[moves] != 0]
    return times[moves], np.cumsum(change[moves])


class Holding(NamedTuple):
    """One kind of bytes as spans of time: from the start of an action to the end of another, of the same stage."""

    size: Floats
    """[S, M]"""
    taken_by: int
    """The kind of the action that takes them: F, or I for what either I or B takes."""
    taker: NDArray[np.int64]
    """[M]: its microbatch."""
    freed_by: int
    """The kind of the action that frees them, of the same microbatch: I or W; where the backward is joined, B."""


def holdings(problem: Problem) -> tuple[Holding, ...]:
    """The bytes of `byte_tables` as spans, less where a stash is larger than its activation."""
    activation, stash, chain = map(problem.table, ("activation_bytes", "weight_stash_bytes", "chain_bytes"))
    stash, own = np.minimum(stash, activation), np.arange(problem.num_microbatches)
    return (
        Holding(activation - stash, F, own, I),
        Holding(stash, F, own, W),
        Holding(chain, I, problem.chains.last, I),
    )


def least_activation_bytes(problem: Problem) -> Floats:
    """The least that every rank needs for activations, whatever the order: [R].

    When a stage begins with the backward of a chain, it and the earlier stages of its rank hold all of that chain, and
    its gradients of keys and values are taken. One chain after the other, stage after stage, needs no more (with B's: a
    stash that is larger than its activation is never there).
    """
    activation, chain = (problem.chains.sums(problem.table(name)) for name in ("activation_bytes", "chain_bytes"))
    needs = [activation[list(mine)].cumsum(axis=0) + chain[list(mine)] for mine in problem.stages_of_rank]
    return np.array([need.max(initial=0.0) for need in needs])
