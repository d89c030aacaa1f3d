"""Several stages on each rank: a plan for ranks becomes one for stages, with the best of the interleaved orders."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from farpipe.cost.chunks import ChunkCosts
from farpipe.search import search
from farpipe.sequences.chunk import Ints, SliceTable
from farpipe.sequences.pipelines import Pipeline

METHODS: Final = ("named", "greedy")


def interleaved(
    costs: ChunkCosts, batch: SliceTable, pipelines: Sequence[Pipeline], limit_s: float
) -> tuple[Pipeline, ...]:
    """The pipelines of a plan for ``costs.folded`` with the stages of `costs`; chunks and recomputed layers stay.

    Orders are the best of the named ones and of list scheduling that fit the ranks' memory. Wherever the plan for ranks
    fits, one sequence after the other does, so there always is one.
    """
    found = []
    for pipeline in pipelines:
        ends = {"gather": pipeline is pipelines[0], "reduce": pipeline is pipelines[-1]}
        found.append(_interleaved(costs, batch, pipeline, ends, limit_s / len(pipelines)))
    return tuple(found)


def _interleaved(
    costs: ChunkCosts, batch: SliceTable, folded: Pipeline, ends: dict[str, bool], limit_s: float
) -> Pipeline:
    begin, end = folded.chunks[0], folded.chunks[-1] + 1
    follows = [None if before is None else before - begin for before in batch.follows[begin:end]]
    layers = layers_of_stages(folded.recomputed, [stage.num_layers for stage in costs.stages])
    problem = costs.problem(batch.load.part(begin, end), follows, layers, **ends)
    found = search(problem, limit_s, methods=METHODS)
    return Pipeline(folded.chunks, layers, problem, found.schedule, found.timeline)


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
