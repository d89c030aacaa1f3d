"""Neighbours of a candidate: what hill climbing tries after what estimates put first."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import Final

from farpipe.cost import Layout
from farpipe.plan.candidates import Candidate, allows, context_exchanges, placed, shapes
from farpipe.search import SEARCHES
from farpipe.spec import Job

MAX_VIRTUAL: Final = 8
"""Largest number of stages on a rank that is tried without a pin."""


def neighbours(job: Job, best: Candidate, everything: bool) -> Iterator[Candidate]:
    """Candidates of other shapes; with `everything` the sites in reverse, and other sizes of microbatches, degrees and
    methods of sharing a sequence too."""
    if everything and job.layout.sites is None and best.kind == "pipelines":
        reverse = placed(job, [job.cluster.site(name) for name in best.order[::-1]], best.layout, best.in_v)
        yield from [reverse] if reverse is not None else []
    order = [job.cluster.site(name) for name in best.order] if not best.layout.replica_sites else list(best.sites[:1])
    for virtual, in_v in shapes(job):
        same = replace(best.layout, virtual=virtual)
        for layout in _resized(job, same) if everything else [same]:
            candidate = placed(job, order, layout, in_v)
            if candidate is not None and (layout.pipeline > 1 or virtual == 1):
                yield candidate
    for layout in _interleaved(job, best.layout) if everything else []:
        candidate = placed(job, order, layout, in_v=False)
        if candidate is not None:
            yield candidate
    for layout in _traded(job, best.layout) if everything else []:
        candidate = placed(job, order, layout, best.in_v) if allows(job, order, layout) else None
        if candidate is not None and (layout.pipeline > 1 or not best.in_v):
            yield candidate


def _resized(job: Job, layout: Layout) -> Iterator[Layout]:
    for exchange in context_exchanges(job, layout.tensor, layout.context):
        yield replace(layout, context_exchange=exchange)
    if job.training.microbatch_size is not None or job.layout.num_microbatches is not None:
        return
    size, count = layout.microbatch_size, layout.num_microbatches
    if count % 2 == 0:
        yield replace(layout, microbatch_size=2 * size, num_microbatches=count // 2)
    if size % 2 == 0:
        yield replace(layout, microbatch_size=size // 2, num_microbatches=2 * count)


def _interleaved(job: Job, layout: Layout) -> Iterator[Layout]:
    """The same with more than two stages on every rank, as many layers in each, embedding and head aside or counted as
    one each."""
    pins, ranks, num_layers = job.layout, layout.pipeline, job.model.num_layers
    fixed = pins.virtual is not None or pins.layers is not None or layout.num_microbatches % ranks
    if fixed or ranks == 1 or not (job.schedule is None or job.schedule in (*SEARCHES, "interleaved")):
        return
    for virtual in range(3, MAX_VIRTUAL + 1):
        if 0 in (num_layers % (ranks * virtual), (num_layers + 2) % (ranks * virtual)):
            yield replace(layout, virtual=virtual)


def _traded(job: Job, layout: Layout) -> Iterator[Layout]:
    """Layouts of as many devices, with half of one degree and twice another one."""
    for less, more in permutations(("pipeline", "data", "tensor", "context"), 2):
        if getattr(layout, less) % 2:
            continue
        other = replace(layout, **{less: getattr(layout, less) // 2, more: 2 * getattr(layout, more)})
        share, size = job.training.global_batch // other.data, layout.microbatch_size
        for same in dict.fromkeys([size, size * layout.data // other.data]):
            if same and share % same == 0:
                yield replace(other, microbatch_size=same, num_microbatches=share // same)
