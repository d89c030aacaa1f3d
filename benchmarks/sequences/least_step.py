"""Lower bound of a batch's step on a site of equal devices: no plan under farpipe's cost model is faster.

A document is trained by P stages of d devices. Its slowest stage has at least ceil(L / P) of the L layers, and at least
the mean of all stages' work; where d does not divide the heads, the devices with most of them set the pace of
attention; Ulysses exchanges, or tensors are divided, whichever costs less. When the document's last slice begins its
backward, a stage holds all of it: what exceeds the device's memory, less its share of the state (18 bytes a parameter
over all devices), is recomputed at what all but attention takes, and saves what all of a layer does.

The bound is the least device-seconds of all documents over the devices, each document on the P and d that suit it, but
not less than the time of any one document. Nothing idles, no chunk has a fixed time, pipelines fill for nothing, and
what is exchanged between stages takes no time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from benchmarks.sequences.sequences_paper import NUM_DEVICES, a800, job
from farpipe.core.spec import Cluster, Model
from farpipe.planning.cost import JobCosts, Layout, place_evenly
from farpipe.planning.cost.chunk_laws import Law
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.cost.job_chunks import job_chunk_costs

_HARDEST = 4
"""Longest documents whose own time bounds the step."""
STATE_BYTES = 18
"""Of a parameter: weights and gradients in 16 bit, the optimizer's in 32."""


@dataclass(frozen=True)
class Shared:
    """The least that `degree` devices take and hold for a token, however they divide the model."""

    degree: int
    layer: Law
    ends: Law
    """Embedding and head."""
    again_s: float
    """Of a recomputed layer without its attention."""
    layer_bytes: float
    saved_bytes: float
    overhead_s: float


def least_step(model: Model, lengths: Any, *, most_stages: int = NUM_DEVICES) -> float:
    """Seconds that a step takes at least on `sequences_paper`'s machines, in no more than `most_stages`."""
    tokens, rows = lengths.astype(np.float64), []
    room = a800().plannable_bytes - STATE_BYTES * model.num_params / NUM_DEVICES
    every = [shared_least(model, degree) for degree in range(1, NUM_DEVICES + 1)]
    for one in every:
        for stages in range(1, min(NUM_DEVICES // one.degree, model.num_layers, most_stages) + 1):
            seconds = max(stage_seconds(one, model.num_layers, stages, tokens, room), key=lambda row: float(row.sum()))
            rows.append((stages * one.degree, seconds))
    devices = np.array([count for count, _ in rows])[:, None]
    seconds = np.stack([row for _, row in rows])
    least = (devices * seconds).min(axis=0)
    found = least.sum() / NUM_DEVICES
    for index in np.argsort(-tokens)[:_HARDEST].tolist():
        beside = (least.sum() - least[index] + devices[:, 0] * seconds[:, index]) / NUM_DEVICES
        found = max(found, float(np.maximum(beside, seconds[:, index]).min()))
    return float(found + min(one.overhead_s for one in every))


def stage_seconds(one: Shared, num_layers: int, stages: int, tokens: Any, room: float) -> Iterator[Any]:
    """Seconds of every document on the stage with most layers, and on the mean of all stages."""
    most = math.ceil(num_layers / stages)
    yield most * seconds_of(one.layer, tokens) + again_seconds(one, most, tokens, room)
    mean = num_layers / stages
    of_ends = seconds_of(one.ends, tokens) / stages
    yield mean * seconds_of(one.layer, tokens) + of_ends + again_seconds(one, mean, tokens, room)


def seconds_of(law: Law, tokens: Any) -> Any:
    """What a document takes, without fixed times."""
    return law.token_s * tokens + law.pair_s * tokens**2 / 2


def again_seconds(one: Shared, layers: float, tokens: Any, room: float) -> Any:
    """The least recomputation of every document on a stage of so many layers; infinite where it does not fit."""
    again = np.maximum(0.0, tokens * layers * one.layer_bytes - room) / one.saved_bytes  # tokens times layers
    return np.where(again <= layers * tokens, again * one.again_s, np.inf)


@cache
def shared_least(model: Model, degree: int) -> Shared:
    """The least of every figure over the tensor degrees that are possible."""
    every = [
        _figures(model, _costs(model, tensor, degree // tensor), degree)
        for tensor in range(1, min(degree, a800().devices_per_machine) + 1)
        if degree % tensor == 0 and model.divides_heads(tensor)
    ]
    laws = [
        Law(token_s=min(law.token_s for law in kind), pair_s=min(law.pair_s for law in kind))
        for kind in ([one.layer for one in every], [one.ends for one in every])
    ]
    again_s, layer_bytes, overhead_s = (
        min(getattr(one, name) for one in every) for name in ("again_s", "layer_bytes", "overhead_s")
    )
    return Shared(degree, *laws, again_s, layer_bytes, max(one.saved_bytes for one in every), overhead_s)


def _costs(model: Model, tensor: int, context: int) -> ChunkCosts:
    costs, cluster = JobCosts(model, job(model, 1).training), Cluster(sites=(a800(),))
    placed = place_evenly(["a"], [model.num_layers])
    return job_chunk_costs(costs, Layout(1, 1, tensor, 1, 1, 1), placed, cluster, 262144, context)


def _figures(model: Model, costs: ChunkCosts, degree: int) -> Shared:
    stage = costs.stages[0]
    layer = Law(token_s=stage.layer.total.token_s, pair_s=stage.layer.total.pair_s)
    ends = Law(token_s=max(0.0, stage.laws.total.token_s - model.num_layers * layer.token_s))
    again_s = stage.layer_forward.token_s
    return Shared(degree, layer, ends, again_s, stage.working_bytes, stage.saved_bytes, costs.overhead_s)
