"""Layouts with many stages on every rank, in the order in which they promise to be fast."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from farpipe.core.spec import Job
from farpipe.planning.cost import Layout
from farpipe.planning.planner.candidates import Candidate, allows, interleaved, placed
from farpipe.planning.planner.evaluate import Evaluated
from farpipe.planning.planner.in_flight import pace_s

NEARLY: Final = 0.01
"""Relative distance of an estimate to the best step up to which a layout is tried."""


def deep_candidates(job: Job, evaluated: Iterable[Evaluated], best_s: float) -> list[Candidate]:
    """Candidates with the degrees of what was evaluated, or with fewer ranks in more replicas, that many stages on
    every rank would bring near `best_s` or below it, the fastest by an estimate first."""
    # Neighbours in hill climbing have many stages of the best layout's ranks alone. Where microbatches are few, half or
    # a quarter of the ranks with as many stages each fill sooner: 405B in FP8 on 8,192 H100 took 32 x 2 in a V, and
    # 8 x 8 is 4 % faster. Between sites each stage more is another message, so pipelines over several are left out.
    found: dict[tuple[tuple[str, ...], Layout], tuple[float, Candidate]] = {}
    for one in evaluated:
        for layout in _layouts(job, one.candidate) if one.candidate.kind != "pipelines" else ():
            seconds, key = _deep_s(one, layout), (one.candidate.order, layout)
            if seconds < min(best_s * (1 + NEARLY), found[key][0] if key in found else best_s * 2):
                found[key] = seconds, one.candidate
    ranked = sorted(found.items(), key=lambda pair: (pair[1][0], str(pair[0])))
    each = (placed(job, like.sites[:1], layout, in_v=False) for (_, layout), (_, like) in ranked)
    return [one for one in each if one is not None]


def _layouts(job: Job, like: Candidate) -> Iterator[Layout]:
    for fewer in _fewer_ranks(like.layout):
        for layout in interleaved(job, fewer):
            if allows(job, like.sites[:1], layout):
                yield layout


def _fewer_ranks(layout: Layout) -> Iterator[Layout]:
    """The layout, and as many devices in replicas of half of its ranks, of a quarter, and so on."""
    yield layout
    while layout.pipeline % 2 == 0 and layout.num_microbatches % 2 == 0 and layout.pipeline > 2:
        halves = {"pipeline": layout.pipeline // 2, "num_microbatches": layout.num_microbatches // 2}
        layout = replace(layout, data=2 * layout.data, **halves)
        yield layout


def _deep_s(found: Evaluated, layout: Layout) -> float:
    """About what a step takes with so many stages on every rank, whose pipeline fills and drains in (p - 1) / virtual
    microbatches (Megatron-LM, arXiv 2104.04473, section 2.2)."""
    at, each_s = found.candidate.layout, pace_s(found.problem)
    fill_s = found.step_s - found.overhead_s - at.num_microbatches * each_s
    wanted_s = each_s * at.num_microbatches / layout.num_microbatches * (layout.pipeline - 1) / layout.virtual
    return found.step_s - max(0.0, fill_s - wanted_s)
