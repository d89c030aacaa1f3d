"""SlimPipe's attention, shared out between stages: at any time the stages of a pool have equally many pairs to do.

A stage can take over attention only of chunks that other stages work on at the same time. In token-level 1F1B forwards
and backwards alternate, so neighbours are half a chunk apart then, and a whole one where there are forwards only or
backwards only. A chunk's pairs on a stage are therefore the mean over the chunks that the stages of its pool have at
that time; stages that have none at the ends help, too. No exchange takes time here but that of `exposed_bytes`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.sequences.sequences_paper import NICS
from farpipe.core.spec import Model
from farpipe.planning.cost.chunk_laws import Floats, Laws, Load
from farpipe.planning.cost.chunks import ChunkCosts, Ints
from farpipe.planning.planner import batches
from farpipe.planning.workload.layout import ChunkLayout


@dataclass(frozen=True)
class SharedAttention(ChunkCosts):
    """Costs of chunks of which each pool of stages shares the attention out evenly; not for several stages a rank."""

    pools: tuple[range, ...] = ()

    def seconds(self, load: Load, recomputed: Ints | None = None) -> tuple[Floats, Floats, Floats]:
        forward, backward = shared_pairs(load, self.pools)
        rows = [
            [
                law.of_load(load._replace(pairs=pairs[index]))
                for law, pairs in zip(stage.laws, (forward, backward, backward), strict=True)
            ]
            for index, stage in enumerate(self.stages)
        ]
        first, input_grad, weight_grad = (np.stack(kind) for kind in zip(*rows, strict=True))
        return first, input_grad + (0 if recomputed is None else recomputed * self.again_s(load)), weight_grad

    def again_s(self, load: Load) -> Floats:
        _, backward = shared_pairs(load, self.pools)
        rows = zip(self.stages, backward, strict=True)
        return np.stack([stage.layer_forward.of_load(load._replace(pairs=pairs)) for stage, pairs in rows])


def shared_pairs(load: Load, pools: tuple[range, ...]) -> tuple[Floats, Floats]:
    """Pairs of every chunk's forward and backward on every stage, [num_stages, num_chunks] each."""
    count, num_stages = load.pairs.size, pools[-1].stop
    begins = ~load.is_split | np.append(True, ~load.is_split[:-1] | load.is_last[:-1])
    first = np.maximum.accumulate(np.where(begins, np.arange(count), 0))
    length = np.bincount(first, minlength=count)[first]
    place = 2 * first + length - 1 - np.arange(count)  # of the backward: in reverse along a chain
    of_places = load.pairs[np.argsort(place)]
    forward, backward = np.empty((num_stages, count)), np.empty((num_stages, count))
    for pool in pools:
        for stage in pool:
            warm_up = length.max() - 1 + num_stages - 1 - stage
            apart = np.where(np.arange(count) < warm_up, 1.0, 0.5)
            forward[stage] = _mean(load.pairs, [np.arange(count) + apart * (stage - other) for other in pool])
            apart = np.where(place >= count - warm_up, 1.0, 0.5)
            backward[stage] = _mean(of_places, [place + apart * (other - stage) for other in pool])
    return forward, backward


def _mean(pairs: Floats, places: list[Floats]) -> Floats:
    """Mean over `places`, none beyond the ends; between two chunks the mean of both."""
    padded = np.concatenate([[0.0], pairs, [0.0]])
    return np.asarray(np.mean([np.interp(place, np.arange(-1, pairs.size + 1), padded) for place in places], axis=0))


def shared_out(costs: ChunkCosts, exposed_bytes: float, *, over_sites: bool = False) -> SharedAttention:
    """The same costs with attention shared inside each site, or `over_sites`; `exposed_bytes` of a token cross a
    device's link in every layer, forward and backward."""
    link_s = exposed_bytes / costs.context / NICS[0]

    def waits(laws: Laws, layers: int) -> Laws:
        return Laws(*(replace(law, token_s=law.token_s + layers * link_s) for law in laws[:2]), laws[2])

    stages = tuple(
        replace(stage, laws=waits(stage.laws, stage.num_layers), layer=waits(stage.layer, 1)) for stage in costs.stages
    )
    far = [i + 1 for i, hop in enumerate(costs.base.hops) if not over_sites and hop and _is_far(costs, hop)]
    pools = tuple(range(begin, end) for begin, end in pairwise([0, *far, costs.num_stages]))
    return SharedAttention(stages, costs.base, costs.context, costs.overhead_s, pools)


def exchanged_bytes(model: Model) -> float:
    """Queries and outputs of half of the tokens, 16 bit: bytes of a token and layer."""
    return 2 * model.hidden * 2 / 2


def _is_far(costs: ChunkCosts, hop: Any) -> bool:
    return bool(hop.forward is not None and costs.base.between_sites[hop.forward.link])


@contextmanager
def planning_with(change: Any) -> Iterator[None]:
    """Layouts of the planner of batches have ``change(costs)`` as costs."""
    plain = batches.placed_layout

    def layout(*given: Any) -> ChunkLayout:
        found = plain(*given)
        return found._replace(costs=change(found.costs))

    batches.placed_layout = layout  # type: ignore[attr-defined]
    try:
        yield
    finally:
        batches.placed_layout = plain  # type: ignore[attr-defined]
