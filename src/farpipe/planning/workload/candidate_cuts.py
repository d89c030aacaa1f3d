"""Cuts of a batch that are worth planning, with an estimate of their step each: targets of time and slices of each."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from farpipe.core.errors import InfeasibleError
from farpipe.planning.cost.chunk_laws import Law, Load
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.workload.batch_options import BatchOptions
from farpipe.planning.workload.checkpointing import unrecomputed_tokens
from farpipe.planning.workload.chunk import Floats, Ints, SliceTable, as_load
from farpipe.planning.workload.cut import Cut, Measure, cut_batch, fill_limits, num_slices_within, slice_offsets
from farpipe.planning.workload.order import chunk_order, extra_forwards, makespan_s
from farpipe.planning.workload.pipelines import Grouping

MAX_CHUNKS_PER_STAGE: Final = 40
"""Most chunks per stage that are tried; more only added fixed times in all batches tried."""
_TARGETS_PER_DOUBLING: Final = 3
_FEW_SLICES: Final = 4
"""Most slices for which targets between those of equal slices are tried, too: a slice more is much there."""


class EstimatedCut(NamedTuple):
    """A cut of the batch, and about how long its step takes if memory does not matter."""

    seconds: float
    cut: Cut
    batch: SliceTable
    trips: tuple[Floats, Floats]
    """Seconds of a mean chunk over every hop, there and back."""


def estimated_cuts(costs: ChunkCosts, sizes: Ints, limit: int, options: BatchOptions) -> Iterator[EstimatedCut]:
    """Every cut that is different from those before it, with an estimate."""
    law = cut_law(total_law(costs, as_load(sizes)), sizes, options.equal)
    seen: set[tuple[int, int]] = set()
    each = (replace(cut, equal=options.equal) for cut in _candidates(costs, sizes, limit, options, law))
    for cut in dict.fromkeys(each):  # targets below one slice are the same
        batch = cut_batch(sizes, cut, law)
        key = (batch.num_chunks, num_slices_within(int(sizes.max()), cut, law))
        if key in seen:
            continue
        seen.add(key)
        trips = mean_trips(costs, batch)
        extra = next(hiding_warm_ups(costs, batch.load, trips, options))
        yield EstimatedCut(estimate_s(costs, batch, Grouping(extra, shrinks=options.shrinks), trips), cut, batch, trips)


def _candidates(costs: ChunkCosts, sizes: Ints, limit: int, options: BatchOptions, law: Law) -> Iterator[Cut]:
    """Targets from as many chunks as stages to many times that, as equal slices of the longest sequence.

    Before them the fewest slices: a whole sequence has no keys and values to wait for, and may fit where slices don't.
    Whole ones are packed to the longest one's tokens, too: short ones in its time have more, and would be recomputed.
    """
    seconds = law.pair_s * sizes.astype(np.float64) ** 2 / 2 + law.token_s * sizes
    total_s, longest_s, longest = float(seconds.sum()), float(seconds.max()), int(sizes.max())
    cut_s = law.of_slices.pair_s * float(longest) ** 2 / 2 + law.token_s * longest
    counts = range(round(_TARGETS_PER_DOUBLING * math.log2(MAX_CHUNKS_PER_STAGE)) + 1)
    targets = [total_s / (costs.num_stages * 2 ** (power / _TARGETS_PER_DOUBLING)) for power in counts]
    if (options.num_slices or 1) > longest:
        raise InfeasibleError(
            f"{options.num_slices} slices: the longest sequence has {longest} tokens, and a slice at least one; "
            f"take at most {longest}"
        )
    if costs.num_stages == 1 and options.packs_to_memory and longest <= limit:
        yield from (Cut(total_s, limit, fill_limit=most) for most in fill_limits(sizes, unrecomputed_tokens(costs)))
    for wanted_s in (longest_s, *targets):
        slices = options.num_slices or max(1, math.ceil(longest_s / wanted_s * (1 - 1e-9)))
        cut = Cut(max(wanted_s, longest_s) if slices == 1 else cut_s / slices, limit, options.rule)
        slices = num_slices_within(longest, cut, law)
        if options.num_slices not in (None, slices):
            first = int(slice_offsets(longest, min(options.num_slices or 1, longest), law)[0])
            raise InfeasibleError(
                f"{options.num_slices} slices of {longest} tokens have up to {first} tokens, and a chunk of more than "
                f"{limit} does not fit; take {slices} slices"
            )
        yield cut if slices == 1 else Cut(cut_s / slices, limit, options.rule)
        if slices == 1 and longest < limit and options.rule == "best-fit":
            yield replace(cut, token_limit=longest)
        if 1 < slices <= _FEW_SLICES and options.num_slices is None:
            yield Cut(wanted_s, limit, options.rule)


def total_law(costs: ChunkCosts, load: Load) -> Law:
    """Forward and backward of the stage that is slowest over these chunks."""
    laws = [stage.laws.total for stage in costs.stages]
    return max(laws, key=lambda law: float(law.of_load(load).sum()))


def cut_law(law: Law, sizes: Ints, equal: Measure) -> Law:
    """Law that measures slices and chunks: time, or tokens at the time of the batch's mean token.

    Tokens, too, where chunks take only a fixed time, as measured ones of a tiny model may.
    """
    if equal == "time" and law.pair_s + law.token_s > 0:
        return law
    load = as_load(sizes)
    return Law(token_s=float(law.of_load(load).sum() / load.tokens.sum()) or 1.0)


def mean_trips(costs: ChunkCosts, batch: SliceTable) -> tuple[Floats, Floats]:
    return costs.trips(float(batch.length.sum()) / batch.num_chunks)


def hiding_warm_ups(
    costs: ChunkCosts, load: Load, trips: tuple[Floats, Floats], options: BatchOptions
) -> Iterator[tuple[int, ...]]:
    """Extra warm-up that hides links wholly, nearly, by half, not at all: the less, the less memory."""
    if options.hide_links:
        pace_s = max(float(law.of_load(load).mean()) for law in {stage.laws.total for stage in costs.stages})
        whole = extra_forwards(*trips, pace_s, load.tokens.size)
        yield whole
        yield extra_forwards(*trips, pace_s, load.tokens.size, whole=False)
        yield tuple(-(-more // 2) for more in whole)
    yield (0,) * costs.num_stages


def estimate_s(costs: ChunkCosts, batch: SliceTable, grouping: Grouping, trips: tuple[Floats, Floats]) -> float:
    """The step in one pipeline that recomputes nothing, if no message waits for its link."""
    load, order = batch.load, chunk_order(batch.follows, grouping.extra, shrinks=grouping.shrinks)
    forward, input_grad, weight_grad = costs.seconds(load)
    return makespan_s(order, forward, input_grad + weight_grad, trips, costs.base.traffic) + costs.overhead_s
