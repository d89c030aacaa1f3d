"""Which layers each stage gets: exact, by dynamic programming."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farpipe.errors import InfeasibleError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StageRoom:
    """What one stage takes and holds, by its number of layers."""

    layer_s: float
    """Forward and backward of one layer for one microbatch."""
    extra_s: float = 0.0
    """The same of what the stage does besides layers: embedding, head."""
    most_layers: int | None = None
    """As many as its memory holds; None: any number."""


def divide_layers(num_layers: int, stages: Sequence[StageRoom], *, fewest: int = 1) -> list[int]:
    """Layers per stage that make the slowest stage as fast as possible, each stage at least `fewest`.

    Among partitions with the same slowest stage one with the smallest sum of squared stage times is taken. Exact, in
    O(stages x layers^2). Raises InfeasibleError when the stages can't hold all layers.
    """
    most = [num_layers if room.most_layers is None else min(num_layers, room.most_layers) for room in stages]
    if len(stages) * fewest > num_layers:
        raise InfeasibleError(f"{num_layers} layers are too few for {len(stages)} stages of at least {fewest}")
    if sum(most) < num_layers or min(most) < fewest:
        raise InfeasibleError(f"memory holds {sum(max(n, 0) for n in most)} of {num_layers} layers: {most} by stage")
    counts = np.arange(num_layers + 1)
    seconds = np.stack([room.extra_s + counts * room.layer_s for room in stages])
    seconds[(counts < fewest) | (counts > np.array(most)[:, None])] = np.inf
    slowest, _ = _cheapest(seconds, np.maximum)
    even = np.where(seconds <= slowest * (1 + 1e-9), seconds**2, np.inf)
    return _cheapest(even, np.add)[1]


def _cheapest(price: Floats, join: Callable[[Floats, Floats], Floats]) -> tuple[float, list[int]]:
    """The choice of counts that adds up to all layers with the lowest joint price: (price, counts).

    `price` [num_stages, num_layers + 1] is what a stage costs by its number of layers; `join` puts stages together.
    """
    num_stages, width = price.shape
    best, choice = price[0], np.zeros((num_stages, width), np.int64)
    choice[0] = np.arange(width)
    for stage in range(1, num_stages):
        joined = [join(best[total::-1], price[stage, : total + 1]) for total in range(width)]
        choice[stage] = [int(options.argmin()) for options in joined]
        best = np.array([options.min() for options in joined])
    counts, left = [], width - 1
    for stage in reversed(range(num_stages)):
        counts.append(int(choice[stage, left]))
        left -= counts[-1]
    return float(best[-1]), counts[::-1]
