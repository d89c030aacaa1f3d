"""Microbatches in flight on each stage: what orders need, and what hides the links' delay.

More of them keep a far pipeline busy and take more memory, which recomputation can free. So a plan begins with a target
here; the division of layers and recomputation follows from it, and the simulator judges what comes out.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from farpipe.core.step import Problem
from farpipe.planning.cost import Layout
from farpipe.planning.planner.candidates import Candidate

InFlight = tuple[int, ...]
"""Microbatches in flight by stage."""
LONG: Final = 256
"""Number of microbatches beyond which tables of all take longer than a part of the step."""


def minimum_in_flight(candidate: Candidate) -> InFlight:
    """The number that the most frugal named order needs: (interleaved) 1F1B, or V-Min (arXiv 2405.15362) in a V."""
    full = _filling(candidate.layout)
    return _scaled(full, candidate.layout, 1 / 3, 1) if candidate.in_v else full


def in_flight_targets(candidate: Candidate, problem: Problem) -> list[InFlight]:
    """Targets from few to many: to fill the pipeline, to hide delays half and whole, twice as many with that.

    What hides the delays is GeoPipe's closed form (arXiv 2510.12064): a round trip of a hop over the time that the
    slowest rank takes for a microbatch, rounded up, for every stage upstream of it. Twice as many is what zero-bubble
    orders use (arXiv 2401.10241). Two stages in a V also come in a third and in half of the memory (2405.15362).
    """
    layout = candidate.layout
    full, extra = _filling(layout), _hiding(layout, problem)
    found = [full, _joined(full, [math.ceil(e / 2) for e in extra]), _joined(full, extra)]
    found.append(_joined([2 * n - 1 for n in full], extra))
    if candidate.in_v:
        found = [minimum_in_flight(candidate), _scaled(full, layout, 1 / 2, 1), *found]
    return list(dict.fromkeys(_within(layout, target) for target in found))


def _filling(layout: Layout) -> InFlight:
    """One microbatch for every stage from here to the end, and no more than (interleaved) 1F1B keeps.

    That goes round the ranks with as many microbatches as there are ranks, so stages between a rank's first and its
    last keep one for each rank (Megatron-LM, arXiv 2104.04473, section 2.2).
    """
    ranks, stages = layout.pipeline, layout.num_stages
    return _within(layout, [min(stages - index, max(ranks, 2 * ranks - index)) for index in range(stages)])


def _hiding(layout: Layout, problem: Problem) -> list[int]:
    """Extra ones by stage: the sum over the hops downstream, for the last microbatch, whose messages find warm
    connections."""
    if problem.num_microbatches > LONG:
        problem = problem.part(slice(-1, None))
    names = ("forward_s", "input_grad_s", "weight_grad_s")
    each_s = _busiest_s(problem, sum(problem.table(name)[:, -1] for name in names))
    hops = [math.ceil(_round_trip_s(problem, hop) / each_s - 1e-9) for hop in range(len(problem.hops))]
    return [min(layout.num_microbatches, sum(hops[stage:])) for stage in range(problem.num_stages)]


def pace_s(problem: Problem) -> float:
    """Seconds that the slowest rank computes for one microbatch, in the mean."""
    names = ("forward_s", "input_grad_s", "weight_grad_s")
    return _busiest_s(problem, sum(problem.table(name).mean(axis=1) for name in names))


def _busiest_s(problem: Problem, stages_s: Any) -> float:
    """The most of these seconds of stages that any rank has: [S]."""
    return max(float(np.take(stages_s, stages).sum()) for stages in problem.stages_of_rank)


def _round_trip_s(problem: Problem, index: int) -> float:
    """A message over a hop and one back, alone on their links; a plan's hops have one link and one size."""
    there_s, back_s = problem.traffic.messages.arrives_after_s[:, [index, index + 1], -1]
    return float(there_s[0] + back_s[1])


def _scaled(full: Sequence[int], layout: Layout, factor: float, more: int) -> InFlight:
    return _within(layout, [math.ceil(number * factor) + more for number in full])


def _joined(full: Iterable[int], extra: Iterable[int]) -> InFlight:
    return tuple(a + b for a, b in zip(full, extra, strict=True))


def _within(layout: Layout, target: Iterable[int]) -> InFlight:
    return tuple(min(layout.num_microbatches, number) for number in target)
