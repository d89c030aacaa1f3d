"""Which layers each stage gets: exact, by dynamic programming."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from farpipe.errors import InfeasibleError


_Partial = tuple[tuple[float, float], list[int]]
"""(slowest stage, sum of squares) and the layers of the stages so far."""


@dataclass(frozen=True)
class StageRoom:
    """What one stage costs by its number of layers."""

    layer_s: float
    """Forward and backward of one layer for one microbatch."""
    extra_s: float = 0.0
    """The same of what the stage does besides layers: embedding, head."""
    most_layers: int | None = None
    """As many as its memory holds; None: any number."""


def divide_layers(num_layers: int, stages: Sequence[StageRoom], *, fewest: int = 1) -> list[int]:
    """Layers per stage that make the slowest stage as fast as possible, each stage at least `fewest`.

    Among partitions with the same slowest stage the most even one is taken (smallest sum of squared stage times), and
    among those the one that gives the earlier stages more. Exact, in O(stages x layers^2).

    Raises InfeasibleError when the stages can't hold all layers.
    """
    most = [num_layers if room.most_layers is None else min(num_layers, room.most_layers) for room in stages]
    if len(stages) * fewest > num_layers:
        raise InfeasibleError(f"{num_layers} layers are too few for {len(stages)} stages of at least {fewest}")
    if sum(most) < num_layers or min(most) < fewest:
        raise InfeasibleError(f"memory holds {sum(most)} of {num_layers} layers: {most} by stage")
    best: list[_Partial | None] = [((0.0, 0.0), []), *[None] * num_layers]
    for room, limit in zip(stages, most, strict=True):
        best = [_extend(best, total, room, range(fewest, min(limit, total) + 1)) for total in range(num_layers + 1)]
    found = best[num_layers]
    assert found is not None, "a partition exists, for the stages hold all layers"
    return found[1]


def _extend(
    best: Sequence[_Partial | None], total: int, room: StageRoom, choices: range
) -> _Partial | None:
    """The best way to have given `total` layers once this stage has taken one of `choices`."""
    found: _Partial | None = None
    for count in choices:
        before = best[total - count]
        if before is None:
            continue
        (slowest, squares), layers = before
        seconds = room.extra_s + count * room.layer_s
        key = (max(slowest, seconds), squares + seconds * seconds)
        if found is None or _clearly_less(key, found[0]):
            found = (key, [*layers, count])
    return found


def _clearly_less(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Lexicographic order that takes what differs by rounding alone for equal."""
    for a, b in zip(one, other, strict=True):
        if not math.isclose(a, b, rel_tol=1e-9):
            return a < b
    return False
