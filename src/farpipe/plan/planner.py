"""From a job to the best plan: every layout that could still win is simulated, and every loser is told why."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations

from farpipe.cost import JobCosts, Profile
from farpipe.errors import InfeasibleError, InputError
from farpipe.plan.advice import advice, reason
from farpipe.plan.candidates import Candidate, candidates
from farpipe.plan.evaluate import Evaluated, Rejected, evaluate
from farpipe.plan.knee import link_bytes
from farpipe.plan.orders import best_order, find_order
from farpipe.plan.plan import Choice, Plan, Prediction
from farpipe.plan.polish import polish
from farpipe.plan.remedy import explain_infeasible
from farpipe.plan.stage_ways import fastest_possible_s
from farpipe.problem import Problem
from farpipe.schedule import Schedule, peak_memory_bytes
from farpipe.search import SEARCHES, Found
from farpipe.search import Progress as Step
from farpipe.simulate import Timeline
from farpipe.spec import Job
from farpipe.strict import nearest

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
    costs = JobCosts(job.model, job.training, _by_device(job, profiles))
    evaluated, rejected = search(job, costs, progress)
    if not evaluated:
        raise InfeasibleError(explain_infeasible(job, rejected, costs))
    best = evaluated[0] = polish(job, evaluated[0], costs)
    plan = Plan(
        job=job,
        layout=best.candidate.layout,
        placements=best.placements,
        problem=best.problem,
        schedule=best.schedule,
        prediction=predict(job, best.problem, best.schedule, best.timeline, best.overhead_s),
        runners_up=tuple(_runners_up(best, evaluated, rejected)),
        advice=tuple(advice(job, best, evaluated, costs)),
    )
    return reorder(plan, job.schedule) if job.schedule in SEARCHES else plan


def _by_device(job: Job, profiles: Sequence[Profile]) -> dict[str, Profile]:
    names = {site.device.name for site in job.cluster.sites}
    for profile in profiles:
        if profile.device not in names:
            raise InputError(
                f"profile of {profile.device!r}: no site of the job has this device{nearest(profile.device, names)}; "
                f"devices: {', '.join(sorted(names))}"
            )
    return {profile.device: profile for profile in profiles}


def reorder(plan: Plan, method: str) -> Plan:
    """The same layout, placement and partition with the order of another method; errors as for `best_order`."""
    schedule, timeline = best_order(plan.problem, method)
    prediction = predict(plan.job, plan.problem, schedule, timeline, plan.prediction.overhead_s)
    return plan.model_copy(update={"schedule": schedule, "prediction": prediction, "runners_up": (), "advice": ()})


def refine(plan: Plan, time_limit_s: float, on_progress: Callable[[Step], None] = lambda progress: None) -> Plan:
    """The same plan with the best order that a search of `time_limit_s` seconds finds, if that is faster.

    The advice says how near it is to the best there can be, and whether the clock cut the search.
    """
    found = find_order(plan.problem, time_limit_s=time_limit_s, on_progress=on_progress)
    advice = (*plan.advice, _tell_search(plan, found))
    if found.timeline.makespan_s >= plan.prediction.makespan_s:
        return plan.model_copy(update={"advice": advice})
    prediction = predict(plan.job, plan.problem, found.schedule, found.timeline, plan.prediction.overhead_s)
    return plan.model_copy(update={"schedule": found.schedule, "prediction": prediction, "advice": advice})


def _tell_search(plan: Plan, found: Found) -> str:
    makespan_s = min(found.timeline.makespan_s, plan.prediction.makespan_s)
    gain = 1 - makespan_s / plan.prediction.makespan_s
    gap = max(makespan_s / found.lower_bound_s - 1, 0.0) if found.lower_bound_s else 0.0
    result = f"found an order that is {gain:.1%} faster" if gain > 0 else "found no faster order"
    cut = "the clock (or Ctrl-C) cut it: another run may find another order"
    end = cut if found.cut_by_clock else "it went to its end"
    proof = "no order can be faster" if found.proven else f"no order can be more than {gap:.1%} faster"
    return f"The search {result}; {end}; {proof}."


def search(job: Job, costs: JobCosts, progress: Progress | None = None) -> tuple[list[Evaluated], list[Rejected]]:
    """The candidates worth telling of, the fastest first, and those that do not work.

    Orders of sites that are alike in everything but their names are searched once; the others of them get the best
    layout of the first.
    """
    known = [c for c in candidates(job) if job.layout.tensor is not None or _is_measured(c, costs.profiles)]
    groups = _alike(job, known)
    first_orders = {alike[0] for alike in groups}
    firsts = [c for c in known if c.order in first_orders]
    bounded = sorted(((fastest_possible_s(costs, c), c) for c in firsts), key=lambda pair: pair[0])
    evaluated: list[Evaluated] = []
    rejected: list[Rejected] = []
    best_of: dict[tuple[str, ...], Evaluated] = {}
    for index, (bound_s, candidate) in enumerate(bounded):
        if progress is not None:
            progress(index, len(bounded))
        limit_s = _limit_s(candidate, best_of)
        if bound_s >= limit_s:
            continue
        result = evaluate(job, candidate, costs, limit_s)
        if isinstance(result, Rejected):
            rejected.append(result)
        elif result is not None:
            evaluated.append(result)
            best_of[candidate.order] = min(result, best_of.get(candidate.order, result), key=lambda e: e.step_s)
    pairs = [(best_of[first], other) for first, *others in groups if first in best_of for other in others]
    for best, order in pairs[: MAX_ORDERS_TO_COMPARE - len(best_of)]:
        evaluated += _twin(job, costs, known, best, order)
    return sorted(evaluated, key=lambda e: e.step_s), rejected


def _alike(job: Job, known: Sequence[Candidate]) -> list[list[tuple[str, ...]]]:
    """Orders of sites, grouped so that those of a group differ in the names of their sites alone."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for order in dict.fromkeys(c.order for c in known):
        sites = [job.cluster.site(name).model_copy(update={"name": ""}) for name in order]
        links = [job.cluster.link(*ends) for ends in permutations(order, 2)]
        speeds = [link and (link.latency_s, link.bandwidth_bytes_per_s) for link in links]
        groups.setdefault(f"{sites} {speeds}", []).append(order)
    return list(groups.values())


def _twin(
    job: Job, costs: JobCosts, known: Sequence[Candidate], best: Evaluated, order: tuple[str, ...]
) -> list[Evaluated]:
    """What `best` would do over the sites of `order`."""
    same = [c for c in known if c.order == order and (c.layout, c.in_v) == (best.candidate.layout, best.candidate.in_v)]
    found = [evaluate(job, candidate, costs) for candidate in same]
    return [result for result in found if isinstance(result, Evaluated)]


def _is_measured(candidate: Candidate, profiles: Mapping[str, Profile]) -> bool:
    """A profile tells of one device; with one, layers are not divided over several unless the job pins that."""
    return candidate.layout.tensor == 1 or not any(site.device.name in profiles for site in candidate.sites)


def _limit_s(candidate: Candidate, best_of: Mapping[tuple[str, ...], Evaluated]) -> float:
    """What it has to beat: the best of all, of its site if that is a single one; the first of an order has no limit.

    The best that a site can do alone is what more sites are compared with, so it has to be right as well.
    """
    best_of_all = min((best.step_s for best in best_of.values()), default=math.inf)
    if candidate.order not in best_of:
        return math.inf if len(best_of) < MAX_ORDERS_TO_COMPARE else best_of_all
    return best_of[candidate.order].step_s if len(candidate.order) == 1 else best_of_all


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
        link_bytes=link_bytes(problem, timeline),
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
    choices = [Choice(what=str(o), method=o.schedule.method, step_s=o.step_s, reason=reason(best, o)) for o in others]
    nearest = sorted(rejected, key=lambda r: r.missing_bytes)[: max(0, MAX_RUNNERS_UP - len(choices))]
    return choices + [Choice(what=str(r.candidate), method="", step_s=0.0, reason=r.reason) for r in nearest]


def _likeness(result: Evaluated) -> tuple[object, ...]:
    """Equal for candidates that differ only in the direction in which they visit equal sites."""
    return result.candidate.layout, frozenset(result.candidate.order), f"{result.step_s:.4g}"
