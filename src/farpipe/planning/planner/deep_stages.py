"""Layouts with many stages on every rank, in the order in which they promise to be fast."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from farpipe.core.spec import Job, Site
from farpipe.planning.cost import Layout
from farpipe.planning.planner.candidates import Candidate, allows, interleaved, placed
from farpipe.planning.planner.evaluate import Evaluated
from farpipe.planning.planner.in_flight import pace_s
from farpipe.planning.planner.lattice import Estimate, Lattice

NEARLY: Final = 0.01
"""Relative distance of an estimate to the best step up to which a layout is tried."""


class _Known(NamedTuple):
    """A layout at one site, or with replicas at several, whose step is known, about."""

    layout: Layout
    order: Sequence[Site]
    step_s: float
    fill_s: float
    """Seconds of it that a rank waits."""
    each_s: float
    """Seconds that the slowest rank computes for a microbatch."""


def deep_candidates(
    job: Job, lattice: Lattice, estimates: Iterable[Estimate], evaluated: Iterable[Evaluated], best_s: float
) -> list[Candidate]:
    """Candidates with the degrees of what was evaluated or estimated, or with fewer ranks in more replicas, that many
    stages on every rank would bring near `best_s` or below it, the fastest by an estimate first."""
    # Neighbours in hill climbing have many stages of the best layout's ranks alone. Where microbatches are few, half or
    # a quarter of the ranks with as many stages each fill sooner: 405B in FP8 on 8,192 H100 took 32 x 2 in a V, and
    # 8 x 8 is 4 % faster. Between sites each stage more is another message, so pipelines over several are left out.
    known = [_simulated(one) for one in evaluated if one.candidate.kind != "pipelines"]
    known += [_estimated(one, lattice) for one in estimates if one.in_v and one.site_set.kind != "pipelines"]
    found: dict[tuple[str, Layout], tuple[float, _Known]] = {}
    for one in known:
        for layout in _layouts(job, one):
            seconds, key = _deep_s(one, layout), (one.order[0].name, layout)
            if seconds < best_s * (1 + NEARLY) and (key not in found or seconds < found[key][0]):
                found[key] = seconds, one
    ranked = sorted(found.items(), key=lambda pair: (pair[1][0], str(pair[0])))
    each = (placed(job, like.order, layout, in_v=False) for (_, layout), (_, like) in ranked)
    return [one for one in each if one is not None]


def _simulated(one: Evaluated) -> _Known:
    at, each_s = one.candidate.layout, pace_s(one.problem)
    waits_s = one.step_s - one.overhead_s - at.num_microbatches * each_s
    return _Known(at, one.candidate.sites[:1], one.step_s, waits_s, each_s)


def _estimated(one: Estimate, lattice: Lattice) -> _Known:
    from farpipe.planning.planner.lattice_kernel import V_BUBBLE  # here, for numba takes a third of a second to import

    at, order = one.layout, [lattice.sites[index] for index in one.site_set.order]
    idle = V_BUBBLE * (at.pipeline - 1)
    each_s = one.step_s / (at.num_microbatches + idle)
    return _Known(at, order, one.step_s, idle * each_s, each_s)


def _layouts(job: Job, like: _Known) -> Iterator[Layout]:
    for fewer in _fewer_ranks(like.layout):
        for layout in interleaved(job, fewer):
            if allows(job, like.order, layout):
                yield layout


def _fewer_ranks(layout: Layout) -> Iterator[Layout]:
    """The layout, and as many devices in replicas of half of its ranks, of a quarter, and so on."""
    yield layout
    while layout.pipeline % 2 == 0 and layout.num_microbatches % 2 == 0 and layout.pipeline > 2:
        ranks, count = layout.pipeline // 2, layout.num_microbatches // 2
        layout = replace(layout, pipeline=ranks, data=2 * layout.data, num_microbatches=count)
        yield layout


def _deep_s(known: _Known, layout: Layout) -> float:
    """About what a step takes with so many stages on every rank, whose pipeline fills and drains in (p - 1) / virtual
    microbatches (Megatron-LM, arXiv 2104.04473, section 2.2)."""
    each_s = known.each_s * known.layout.num_microbatches / layout.num_microbatches
    return known.step_s - max(0.0, known.fill_s - each_s * (layout.pipeline - 1) / layout.virtual)
