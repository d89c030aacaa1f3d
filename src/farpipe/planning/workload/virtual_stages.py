"""Several stages on each rank: a plan for ranks becomes one for stages, with the best of the interleaved orders."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from farpipe.core.errors import InfeasibleError
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.search import search
from farpipe.planning.workload.chunk import Ints, SliceTable
from farpipe.planning.workload.pipelines import ChunkPipeline

METHODS: Final = ("named", "greedy")
_MAX_MORE: Final = 3
"""Largest number of further layers that a rank recomputes of every chunk."""


def interleaved(
    costs: ChunkCosts, batch: SliceTable, pipelines: Sequence[ChunkPipeline], limit_s: float
) -> tuple[ChunkPipeline, ...]:
    """The pipelines of a plan for ``costs.folded`` with the stages of `costs`; chunks stay, recomputed layers may grow.

    Orders are the best of the named ones and of list scheduling that fit the ranks' memory. Wherever the plan for ranks
    fits, one sequence after the other does, so there always is one.
    """
    found = []
    for pipeline in pipelines:
        ends = {"gather": pipeline is pipelines[0], "reduce": pipeline is pipelines[-1]}
        found.append(_interleaved(costs, batch, pipeline, ends, limit_s / len(pipelines)))
    return tuple(found)


def _interleaved(
    costs: ChunkCosts, batch: SliceTable, folded: ChunkPipeline, ends: dict[str, bool], limit_s: float
) -> ChunkPipeline:
    """The fastest with as many recomputed layers as the plan for ranks has or a few more of every chunk.

    More, only as long as none is as fast as that plan: what it leaves free may let no other order in than one sequence
    after the other.
    """
    found: list[ChunkPipeline] = []
    for more in range(_MAX_MORE + 1):
        with suppress(InfeasibleError):  # more recomputed layers need working memory
            found.append(_recomputing(costs, batch, folded, more, ends, limit_s / (_MAX_MORE + 1)))
        if found and (found[-1].makespan_s <= folded.makespan_s or not folded.recomputed.any()):
            break
    if not found:
        raise InfeasibleError("no order of the stages of all ranks fits memory; take one stage for each rank")
    return min(found, key=lambda pipeline: pipeline.makespan_s)


def _recomputing(
    costs: ChunkCosts, batch: SliceTable, folded: ChunkPipeline, more: int, ends: dict[str, bool], limit_s: float
) -> ChunkPipeline:
    begin, end = folded.chunks[0], folded.chunks[-1] + 1
    num_layers = [stage.num_layers for stage in costs.stages]
    layers = layers_of_stages(folded.recomputed + more, num_layers)
    problem = costs.problem(batch.load.part(begin, end), batch.follows_within(begin, end), layers, **ends)
    found = search(problem, limit_s, methods=METHODS)
    return ChunkPipeline(folded.chunks, layers, problem, found.schedule, found.timeline)


def layers_of_stages(of_ranks: Ints, num_layers: Sequence[int]) -> Ints:
    """Recomputed layers of every stage, [num_stages, num_chunks], from those of every rank.

    A rank's first stages recompute first, for they hold a chunk longest.
    """
    num_ranks, left = len(of_ranks), of_ranks.copy()
    found = np.zeros((len(num_layers), of_ranks.shape[1]), np.int64)
    for stage, most in enumerate(num_layers):
        found[stage] = np.minimum(left[stage % num_ranks], most)
        left[stage % num_ranks] -= found[stage]
    return found
