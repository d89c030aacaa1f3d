"""From a job to the best plan: every layout that could still win is simulated, and every loser is told why."""

import math
from collections.abc import Callable, Mapping, Sequence

from farpipe.cost import Profile
from farpipe.errors import InfeasibleError
from farpipe.plan.advice import advice, reason
from farpipe.plan.candidates import Candidate, candidates
from farpipe.plan.evaluate import Evaluated, Rejected, evaluate, fastest_possible_s
from farpipe.plan.orders import best_order, find_order
from farpipe.plan.plan import Choice, Plan, Prediction
from farpipe.plan.remedy import explain_infeasible
from farpipe.problem import Problem
from farpipe.schedule import Schedule, peak_memory_bytes
from farpipe.search import Progress as Step
from farpipe.simulate import Timeline
from farpipe.spec import Job

MAX_RUNNERS_UP = 8
MAX_ORDERS_TO_COMPARE = 12

Progress = Callable[[int, int], None]
"""Called with (candidates looked at, candidates in all)."""


def make_plan(job: Job, profiles: Sequence[Profile] = (), progress: Progress | None = None) -> Plan:
    """The plan with the shortest predicted step, with the runners-up and why each lost.

    Candidates are simulated in the order of a bound that none of them can beat, until the bound is above the best
    found: the answer is the best of all candidates. Raises InfeasibleError, with the binding constraint and the
    smallest change that would help, when none works.
    """
    by_device = {profile.device: profile for profile in profiles}
    evaluated, rejected = search(job, by_device, progress)
    if not evaluated:
        raise InfeasibleError(explain_infeasible(job, rejected, by_device))
    best = evaluated[0]
    return Plan(
        job=job,
        layout=best.candidate.layout,
        placements=best.placements,
        problem=best.problem,
        schedule=best.schedule,
        prediction=predict(job, best.problem, best.schedule, best.timeline, best.overhead_s),
        runners_up=tuple(_runners_up(best, evaluated, rejected)),
        advice=tuple(advice(job, best, evaluated)),
    )


def reorder(plan: Plan, method: str) -> Plan:
    """The same layout, placement and partition with the order of another method; errors as for `best_order`."""
    schedule, timeline = best_order(plan.problem, method)
    prediction = predict(plan.job, plan.problem, schedule, timeline, plan.prediction.overhead_s)
    return plan.model_copy(update={"schedule": schedule, "prediction": prediction, "runners_up": (), "advice": ()})


def refine(plan: Plan, time_limit_s: float, on_progress: Callable[[Step], None] = lambda progress: None) -> Plan:
    """The same plan with the best order that a search of `time_limit_s` seconds finds, if that is faster."""
    found = find_order(plan.problem, time_limit_s=time_limit_s, on_progress=on_progress)
    if found.timeline.makespan_s >= plan.prediction.makespan_s:
        return plan
    prediction = predict(plan.job, plan.problem, found.schedule, found.timeline, plan.prediction.overhead_s)
    return plan.model_copy(update={"schedule": found.schedule, "prediction": prediction})


def search(
    job: Job, profiles: Mapping[str, Profile], progress: Progress | None = None
) -> tuple[list[Evaluated], list[Rejected]]:
    """The candidates worth telling of, the fastest first, and those that do not work."""
    known = [c for c in candidates(job) if job.layout.tensor is not None or _is_measured(c, profiles)]
    bounded = sorted(((fastest_possible_s(job, c, profiles), c) for c in known), key=lambda pair: pair[0])
    evaluated: list[Evaluated] = []
    rejected: list[Rejected] = []
    best_s: dict[tuple[str, ...], float] = {}
    for index, (bound_s, candidate) in enumerate(bounded):
        if progress is not None:
            progress(index, len(bounded))
        if not _worth_a_look(bound_s, candidate, best_s):
            continue
        result = evaluate(job, candidate, profiles)
        if isinstance(result, Rejected):
            rejected.append(result)
        else:
            evaluated.append(result)
            best_s[candidate.order] = min(result.step_s, best_s.get(candidate.order, math.inf))
    return sorted(evaluated, key=lambda e: e.step_s), rejected


def _is_measured(candidate: Candidate, profiles: Mapping[str, Profile]) -> bool:
    """A profile tells of one device; with one, layers are not divided over several unless the job pins that."""
    return candidate.layout.tensor == 1 or not any(site.device.name in profiles for site in candidate.sites)


def _worth_a_look(bound_s: float, candidate: Candidate, best_s: Mapping[tuple[str, ...], float]) -> bool:
    """Whether it may be the best of all, or of a single site, or is the first of its order of sites.

    The best that a site can do alone is what more sites are compared with, so it has to be right as well.
    """
    if candidate.order not in best_s:
        return len(best_s) < MAX_ORDERS_TO_COMPARE or bound_s < min(best_s.values())
    alone = len(candidate.order) == 1
    return bound_s < (best_s[candidate.order] if alone else min(best_s.values()))


def predict(job: Job, problem: Problem, schedule: Schedule, timeline: Timeline, overhead_s: float) -> Prediction:
    """What a simulated step says, and what it means for training."""
    step_s = timeline.makespan_s + overhead_s
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
        link_bytes=timeline.link_bytes(),
    )


def _runners_up(best: Evaluated, evaluated: list[Evaluated], rejected: list[Rejected]) -> list[Choice]:
    """The next best, at least one of every order of sites, and the rejected that came nearest to fitting."""
    others: list[Evaluated] = []
    orders, told = {best.candidate.order}, {_likeness(best)}
    for other in evaluated[1:]:
        wanted = len(others) < MAX_RUNNERS_UP or other.candidate.order not in orders
        if wanted and _likeness(other) not in told:
            others.append(other)
            orders.add(other.candidate.order)
            told.add(_likeness(other))
    choices = [
        Choice(what=str(o.candidate), method=o.schedule.method, step_s=o.step_s, reason=reason(best, o)) for o in others
    ]
    nearest = sorted(rejected, key=lambda r: r.missing_bytes)[: max(0, MAX_RUNNERS_UP - len(choices))]
    return choices + [Choice(what=str(r.candidate), method="", step_s=0.0, reason=r.reason) for r in nearest]


def _likeness(result: Evaluated) -> tuple[object, ...]:
    """Equal for candidates that differ only in the direction in which they visit equal sites."""
    return result.candidate.layout, frozenset(result.candidate.order), f"{result.step_s:.4g}"
