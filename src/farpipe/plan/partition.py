"""Partition of the layers into stages, each with its recomputation: exact, by dynamic programming."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.errors import InfeasibleError
from farpipe.spec import Recompute

Floats = NDArray[np.float64]


MAX_KNOWN: Final = 4096
"""Largest number of divisions that are remembered: three in four of a plan's, of its strategies' and of its changes'
have the same stages as one before."""


class StageOption(NamedTuple):
    """One recompute mode of a stage: what it takes and holds, by its number of layers."""

    layer_s: float
    """Forward and backward of one layer for one microbatch."""
    extra_s: float = 0.0
    """The same of what the stage does besides layers: embedding, head."""
    most_layers: int | None = None
    """The largest number that its memory holds; None: any number."""
    recompute: Recompute = "none"

    def most_of(self, num_layers: int) -> int:
        """Largest number of `num_layers` layers that fit."""
        return num_layers if self.most_layers is None else min(num_layers, self.most_layers)


class Division(NamedTuple):
    """Layers and recomputation of every stage."""

    layers: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    slowest_s: float
    """Seconds of the slowest stage."""


def divide_layers(
    num_layers: int, stages: Sequence[Sequence[StageOption]], pinned: Sequence[int] | None = None
) -> Division:
    """The division that makes the slowest stage as fast as possible, each stage with a layer at least.

    `stages` has the options of every stage; for its number of layers it takes the fastest that holds them.
    `pinned` fixes the number of layers of every stage. Among divisions with the same slowest stage one with the
    smallest sum of squared stage times is taken. Exact, in O(stages x layers^2). Raises InfeasibleError when the stages
    can't hold all layers.
    """
    if pinned is None and len(stages) > num_layers:
        raise InfeasibleError(f"{num_layers} layers are too few for {len(stages)} stages of at least 1")
    most = [max(option.most_of(num_layers) for option in options) for options in stages]
    wanted = [1] * len(stages) if pinned is None else pinned
    if sum(most) < num_layers or any(n < w for n, w in zip(most, wanted, strict=True)):
        raise InfeasibleError(_out_of_memory(num_layers, most, wanted))
    return _divided(num_layers, tuple(map(tuple, stages)), None if pinned is None else tuple(pinned))


@lru_cache(MAX_KNOWN)
def _divided(num_layers: int, stages: tuple[tuple[StageOption, ...], ...], pinned: tuple[int, ...] | None) -> Division:
    """The division of layers that fit."""
    counts = np.arange(num_layers + 1)
    seconds, choice = _fastest(stages, counts)
    allowed = counts >= 1 if pinned is None else counts == np.array(pinned)[:, None]
    seconds = np.where(allowed, seconds, np.inf)
    slowest = _least_slowest(seconds) if pinned is None else float(seconds[:, pinned].diagonal().max())
    even = np.where(seconds <= slowest * (1 + 1e-9), seconds**2, np.inf)
    layers = _cheapest(even)
    recompute = tuple(
        options[choice[i, n]].recompute for i, (options, n) in enumerate(zip(stages, layers, strict=True))
    )
    return Division(tuple(layers), recompute, slowest)


def _out_of_memory(num_layers: int, most: Sequence[int], wanted: Sequence[int]) -> str:
    short = [index for index, (n, w) in enumerate(zip(most, wanted, strict=True)) if n < w]
    if not short:
        all_stages = f"all {len(most)} stages together hold" if len(most) > 1 else "its only stage holds"
        return f"out of memory: {all_stages} {sum(most)} of {num_layers} layers"
    first = short[0]
    holds = f"{most[first]} of its {wanted[first]} layers" if most[first] > 0 else "not a single layer"
    others = f", nor do {len(short) - 1} others what they should" if len(short) > 1 else ""
    return f"out of memory: stage {first} of {len(most)} holds {holds}{others}"


def _least_slowest(seconds: Floats) -> float:
    """The least time of the slowest stage, `seconds` [num_stages, num_layers + 1] by number of layers.

    A stage that may take longer never holds fewer layers, so the least time in which all together hold them all can be
    found by halving.
    """
    num_layers = seconds.shape[1] - 1
    times = np.unique(seconds[np.isfinite(seconds)])
    low, high = 0, times.size - 1
    while low < high:
        middle = (low + high) // 2
        holds = (seconds <= times[middle]).sum(axis=1)
        low, high = (low, middle) if holds.min() and holds.sum() >= num_layers else (middle + 1, high)
    return float(times[low])


def _fastest(stages: Sequence[Sequence[StageOption]], counts: NDArray[np.int64]) -> tuple[Floats, NDArray[np.int64]]:
    """Time of the fastest option that holds the layers, by stage and number of layers, and its index."""
    num_layers, most_options = int(counts[-1]), max(map(len, stages))
    nothing = StageOption(0.0, most_layers=-1)
    padded = [[*options, *[nothing] * (most_options - len(options))] for options in stages]
    figures = [
        [(option.extra_s, option.layer_s, option.most_of(num_layers)) for option in options] for options in padded
    ]
    extra_s, layer_s, most = np.moveaxis(np.array(figures), 2, 0)[:, :, :, None]
    seconds = np.where(counts <= most, extra_s + counts * layer_s, np.inf)
    return seconds.min(axis=1), seconds.argmin(axis=1)


def _cheapest(price: Floats) -> list[int]:
    """The counts that add up to all layers with the lowest sum of prices.

    `price` [num_stages, num_layers + 1] is what a stage costs by its number of layers; infinite where it can't have so
    many.
    """
    num_stages, width = price.shape
    most = int(np.isfinite(price).nonzero()[1].max()) + 1
    rest = np.arange(width)[:, None] - np.arange(most)
    outside = np.where(rest >= 0, 0.0, np.inf)
    best, choice = price[0], np.zeros((num_stages, width), np.int64)
    choice[0] = np.arange(width)
    for stage in range(1, num_stages):
        joined = best[rest] + price[stage, :most] + outside
        choice[stage] = joined.argmin(axis=1)
        best = joined.min(axis=1)
    counts, left = [], width - 1
    for stage in reversed(range(num_stages)):
        counts.append(int(choice[stage, left]))
        left -= counts[-1]
    return counts[::-1]
