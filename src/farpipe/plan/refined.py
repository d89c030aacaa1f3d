"""The last part of planning: recomputation and order of what a search has found, refined, and what that promises."""

from collections.abc import Sequence
from itertools import islice
from typing import Final

from farpipe.cost import JobCosts
from farpipe.plan.bandwidth import link_bytes
from farpipe.plan.evaluate import Evaluated, whole
from farpipe.plan.orders import AUTO
from farpipe.plan.plan import Prediction
from farpipe.plan.refine_recompute import refine_recomputation
from farpipe.plan.robust import choose_robustly
from farpipe.plan.short_search import improve_order
from farpipe.plan.step_samples import StepSamples
from farpipe.schedule import peak_memory_bytes
from farpipe.schedule.bounds import lower_bound_s
from farpipe.simulate import Timeline
from farpipe.spec import Job
from farpipe.step import Problem, Schedule

MAX_RIVALS: Final = 1
NEARLY: Final = 0.03
"""Relative distance to the best up to which another candidate is refined too."""


def best_refined(job: Job, found: Sequence[Evaluated], costs: JobCosts) -> tuple[Evaluated, Evaluated]:
    """`refined` of the first of `found`, the fastest first, or of the next one where its order comes out faster.

    The next one is the first that is nearly as fast and whose bound leaves room for it.
    """
    first = named, best = refined(job, found[0], costs)
    if best is named or StepSamples(job, best.problem).differ:
        return first
    near = [one for one in found[1:] if one.step_s <= found[0].step_s * (1 + NEARLY) and one.extrapolated_s is None]
    open_ones = (one for one in near if lower_bound_s(one.problem) + one.overhead_s < best.step_s)
    rivals = [one for one in islice(open_ones, MAX_RIVALS) if improve_order(one).step_s < best.step_s]
    return min([first, *(refined(job, one, costs) for one in rivals)], key=lambda pair: pair[1].step_s)


def refined(job: Job, found: Evaluated, costs: JobCosts) -> tuple[Evaluated, Evaluated]:
    """`found` with its best recomputation and a named order, and the same with the order that a plan gets.

    That is the short search's, unless the job names an order, and the one of the best merit where steps differ.
    """
    named = refine_recomputation(job, whole(found), costs)
    best = improve_order(named) if job.schedule in (None, AUTO) else named
    return named, choose_robustly(job, best)


def predict(job: Job, problem: Problem, schedule: Schedule, timeline: Timeline, overhead_s: float) -> Prediction:
    """Prediction from a simulated step: its figures, and those of the training."""
    samples = StepSamples(job, problem)
    spread = samples.spread(schedule, overhead_s) if samples.differ else None
    step_s = spread.mean_s if spread is not None and samples.lossy else timeline.makespan_s + overhead_s
    inter_site_s, intra_site_s = timeline.exposed_s.mean(axis=0)
    return Prediction(
        step_s=step_s,
        makespan_s=timeline.makespan_s,
        overhead_s=overhead_s,
        bubble_ratio=timeline.bubble_ratio,
        tokens_per_s=job.training.tokens_per_step / step_s,
        exposed_inter_site_s=float(inter_site_s),
        exposed_intra_site_s=float(intra_site_s),
        peak_memory_bytes=tuple(peak_memory_bytes(problem, schedule)),
        link_bytes=link_bytes(problem, timeline),
        spread=spread,
    )


def predicted(job: Job, found: Evaluated) -> Prediction:
    """The same of what was evaluated."""
    return predict(job, found.problem, found.schedule, found.timeline, found.overhead_s)
