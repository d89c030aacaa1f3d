"""The choice of layout and order where steps differ: by the mean over samples, or by what nine of ten steps keep.

Lost packets and jitter change from step to step, and over a training only the mean counts. How far figures are off
does not change, and a plan is made once: then it is chosen by its 90 % step time. Orders for messages that are late are
made by having all of them late by as much as nine of ten are.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from farpipe.plan.evaluate import Evaluated, whole
from farpipe.plan.orders import AUTO, try_orders
from farpipe.plan.plan import Prediction, Spread
from farpipe.plan.short_search import improve_order
from farpipe.plan.step_samples import StepSamples
from farpipe.schedule import check
from farpipe.simulate import simulate
from farpipe.spec import Job
from farpipe.step import Problem, Schedule, retimed

MAX_LAYOUTS: Final = 6
MAX_ORDERS: Final = 10
"""Layouts, and orders of the chosen one, that are played on all samples: the most promising without them."""


def merit_s(job: Job, spread: Spread) -> float:
    """The figure to minimize."""
    return spread.p90_s if job.uncertainty else spread.mean_s


def is_better(job: Job, new: Prediction, old: Prediction) -> bool:
    """True if a prediction for the same step promises more than another."""
    if new.spread is not None and old.spread is not None:
        return merit_s(job, new.spread) < merit_s(job, old.spread)
    return new.makespan_s < old.makespan_s


def rank_robustly(job: Job, evaluated: Sequence[Evaluated]) -> list[Evaluated]:
    """The most promising layouts in the order of their merit over the samples, and then the others.

    Unchanged where no step differs from another.
    """
    first = [whole(one) for one in evaluated[:MAX_LAYOUTS]]
    samples = [StepSamples(job, one.problem) for one in first]
    if not any(one.differ for one in samples):
        return list(evaluated)
    merits = [
        merit_s(job, drawn.spread(one.schedule, one.overhead_s)) for one, drawn in zip(first, samples, strict=True)
    ]
    return [first[place] for place in np.argsort(merits, kind="stable")] + list(evaluated[MAX_LAYOUTS:])


def choose_robustly(job: Job, best: Evaluated) -> Evaluated:
    """`best` with the order of the best merit over the samples, of those made for it and of those made for late
    messages; unchanged where no step differs from another, or where the job names the order."""
    samples = StepSamples(job, best.problem)
    if not samples.differ or job.schedule not in (None, AUTO):
        return best
    least_s, chosen = math.inf, best.schedule
    for schedule in _orders(best, samples):
        found_s = merit_s(job, samples.spread(schedule, best.overhead_s))
        if found_s < least_s * (1 - 1e-9):
            least_s, chosen = found_s, schedule
    check(best.problem, chosen)
    return replace(best, schedule=chosen, timeline=simulate(best.problem, chosen, checked=True))


def _orders(best: Evaluated, samples: StepSamples) -> list[Schedule]:
    """Different orders that fit memory, at most MAX_ORDERS."""
    found = {best.schedule.codes.tobytes(): best.schedule}
    for problem in (late_problem(samples), best.problem):
        fitting = [
            replace(best, problem=problem, schedule=outcome.schedule, timeline=outcome.timeline)
            for outcome in try_orders(problem)
            if outcome.schedule is not None and outcome.timeline is not None
        ]
        for one in [*map(improve_order, fitting[:1]), *fitting[: MAX_ORDERS // 2 - 1]]:
            found.setdefault(one.schedule.codes.tobytes(), one.schedule)
    return list(found.values())[:MAX_ORDERS]


def late_problem(samples: StepSamples) -> Problem:
    """The step with every message between sites as late as nine of ten are, and as long on its link."""
    occupies_s, arrives_after_s = samples.message_quantiles(0.9)
    return retimed(samples.problem, occupies_s, arrives_after_s)
