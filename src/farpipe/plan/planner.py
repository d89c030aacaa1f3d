"""From a job to the best plan: every layout that could still win is simulated, and every loser is told why."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from farpipe.cost import JobCosts, Layout, Profile, step_cost
from farpipe.errors import InfeasibleError, InputError, UsageError
from farpipe.plan.advice import advice, reason
from farpipe.plan.bandwidth import link_bytes
from farpipe.plan.candidates import Candidate, candidates
from farpipe.plan.evaluate import ROUNDING, Evaluated, Frontier, Node, Rejected, node, reject, staggered_like
from farpipe.plan.inter_site_traffic import inter_site_traffic_s
from farpipe.plan.orders import AUTO, best_order, expect_known, find_order
from farpipe.plan.plan import Choice, Plan, Prediction
from farpipe.plan.refine_recompute import refine_recomputation
from farpipe.plan.short_search import improve_order
from farpipe.plan.stage_modes import fastest_possible_s
from farpipe.plan.suggested_change import explain_infeasible
from farpipe.schedule import Schedule, peak_memory_bytes
from farpipe.schedule.bounds import lower_bound_s
from farpipe.search import SEARCHES, Found
from farpipe.search import Progress as Step
from farpipe.simulate import Timeline, simulate
from farpipe.spec import Job
from farpipe.step import Problem
from farpipe.strict import nearest

MAX_RUNNERS_UP = 8
MAX_ORDERS_TO_COMPARE = 12
MAX_RIVALS = 40
"""Candidates over several sites that are looked into for what is the best of their kind, though they can't be the best
of all; the most promising first."""

Progress = Callable[[int, int], None]
"""Called with (candidates looked at, candidates in all)."""


def make_plan(job: Job, profiles: Sequence[Profile] = (), progress: Progress | None = None) -> Plan:
    """The plan with the shortest predicted step, with the runners-up and why each lost.

    Those candidates are left out that a bound shows to be no faster than the best found: the answer is the best of all
    candidates. Raises InputError for an unknown schedule, InfeasibleError,
    with the binding constraint and the smallest change that would help, when no candidate works.
    """
    return make_plans(job, profiles, progress)[0]


def make_plans(
    job: Job, profiles: Sequence[Profile] = (), progress: Progress | None = None, num_plans: int = 1
) -> list[Plan]:
    """The plan of `make_plan`, and after it up to `num_plans` - 1 of the next best layouts, each as good as it gets.

    The bound that leaves candidates out may leave fewer than were asked for. Errors as for `make_plan`.
    """
    _expect_known_schedule(job)
    costs = JobCosts(job.model, job.training, _by_device(job, profiles))
    evaluated, rejected = search(job, costs, progress)
    if not evaluated:
        raise InfeasibleError(explain_infeasible(job, rejected, costs))
    others = evaluated[1:num_plans]
    plans = [
        _plan_of(job, costs, [first, *(e for e in evaluated if e is not first)], rejected)
        for first in (evaluated[0], *others)
    ]
    return sorted(plans, key=lambda plan: plan.prediction.step_s)


def _plan_of(job: Job, costs: JobCosts, evaluated: list[Evaluated], rejected: list[Rejected]) -> Plan:
    """The first of `evaluated` as a plan, its recomputation and its order refined; the others are its runners-up."""
    named = refine_recomputation(job, evaluated[0], costs)
    best = evaluated[0] = improve_order(named) if job.schedule in (None, AUTO) else named
    plan = Plan(
        job=job,
        layout=best.candidate.layout,
        placements=best.placements,
        problem=best.problem,
        schedule=best.schedule,
        prediction=predict(job, best.problem, best.schedule, best.timeline, best.overhead_s),
        runners_up=tuple(_runners_up(best, evaluated, rejected)),
        advice=(*_tell_short_search(named, best), *advice(job, best, evaluated)),
    )
    return reorder(plan, job.schedule) if job.schedule in SEARCHES else plan


def _expect_known_schedule(job: Job) -> None:
    try:
        expect_known(job.schedule or AUTO)
    except UsageError as error:
        raise InputError(f"schedule.method: {error}") from None


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
    end = "Search stopped at the time limit" if found.cut_by_clock else "Search finished"
    result = f"found an order that is {gain:.1%} faster" if gain > 0 else "no faster order found"
    proof = "none can be faster" if found.proven else "none can be more than"
    return (
        f"{end}: {result}; {proof} (gap {gap:.1%})." if found.proven else f"{end}: {result}; {proof} {gap:.1%} faster."
    )


def _tell_short_search(named: Evaluated, best: Evaluated) -> list[str]:
    if best is named:
        return []
    gain = 1 - best.timeline.makespan_s / named.timeline.makespan_s
    gap = max(best.timeline.makespan_s / lower_bound_s(best.problem) - 1, 0.0)
    return [
        f"Order: a short search made the best named order, {named.schedule.method}, {gain:.1%} faster; none can be "
        f"more than {gap:.1%} faster still."
    ]


def search(job: Job, costs: JobCosts, progress: Progress | None = None) -> tuple[list[Evaluated], list[Rejected]]:
    """The candidates worth telling of, the fastest first, and those that do not work.

    Orders of sites that are alike in everything but their names are searched once; the others of them get the best
    layout of the first.
    """
    known = [c for c in candidates(job) if job.layout.tensor is not None or _is_measured(c, costs.profiles)]
    groups = _alike(job, known)
    firsts = {alike[0] for alike in groups}
    found = _Search(costs)
    found.follow([_first_node(job, costs, c) for c in known if c.where in firsts], progress)
    pairs = [(found.best_of[first], other) for first, *others in groups if first in found.best_of for other in others]
    evaluated = list(found.evaluated.values())
    for best, where in pairs[: MAX_ORDERS_TO_COMPARE - len(found.best_of)]:
        evaluated += _transferred(job, costs, known, best, where)
    return sorted(evaluated, key=lambda e: e.step_s), found.rejected


class _Search:
    """Follows nodes, the lowest bound first: so only what could still be the best of its kind is ever simulated."""

    def __init__(self, costs: JobCosts) -> None:
        self._costs = costs
        self.evaluated: dict[Candidate, Evaluated] = {}
        self.best_of: dict[str, Evaluated] = {}
        """By `Candidate.where`."""
        self._obstacles: dict[Candidate, InfeasibleError | InputError] = {}
        self._looked_into: Counter[str] = Counter()

    def follow(self, first: Sequence[tuple[float, Node]], progress: Progress | None) -> None:
        """All of them, as far as they are worth it; given with about what they will take, seconds."""
        nodes, seen = Frontier(self._first_answers(first)), set[Candidate]()
        while (one := nodes.pop()) is not None:
            if progress is not None and one.candidate not in seen:
                progress(len(seen), len(first))
            seen.add(one.candidate)
            if one.bound_s < self._limit_s(one.candidate) * (1 - ROUNDING):
                nodes.push(self._narrow(one))

    def _first_answers(self, first: Sequence[tuple[float, Node]]) -> list[Node]:
        """Follow the most promising at every use of sites until one works, for with a good one early many others are
        spared; what is left of all."""
        left = []
        for _, one in sorted(first, key=lambda pair: pair[0]):
            nodes = Frontier([one])
            while self._limit_s(one.candidate) == math.inf and (narrower := nodes.pop()) is not None:
                nodes.push(self._narrow(narrower))
            left += nodes.rest
        return left

    def _narrow(self, one: Node) -> list[Node]:
        """What a node comes to; where that is a result, it is kept, and where it is nothing, why."""
        try:
            found = one.follow(self._limit_s(one.candidate))
        except (InfeasibleError, InputError) as error:
            self._obstacles[one.candidate] = error
            return []
        if not isinstance(found, Evaluated):
            return found
        self._keep(found)
        return []

    @property
    def rejected(self) -> list[Rejected]:
        """The candidates that came to nothing."""
        none = ((c, error) for c, error in self._obstacles.items() if c not in self.evaluated)
        return [reject(candidate, self._costs, error) for candidate, error in none]

    def _keep(self, found: Evaluated) -> None:
        def by_time(one: Evaluated) -> float:
            return one.step_s

        at, where = found.candidate, found.candidate.where
        self._looked_into[_kind(at)] += 1
        self.evaluated[at] = min(self.evaluated.get(at, found), found, key=by_time)
        self.best_of[where] = min(self.best_of.get(where, found), found, key=by_time)

    def _limit_s(self, candidate: Candidate) -> float:
        """What it has to beat: the best of its kind, or of all if many of its kind were looked into; the first at its
        sites has no limit.

        Kinds are each site alone, pipelines over several, and replicas at several: the user is told how they compare.
        The best that a site can do alone is what more sites are measured by, so it has to be right.
        """
        if candidate.where not in self.best_of and len(self.best_of) < MAX_ORDERS_TO_COMPARE:
            return math.inf
        kind = _kind(candidate)
        best_s = min((best.step_s for best in self.best_of.values()), default=math.inf)
        rivals = [best.step_s for best in self.best_of.values() if _kind(best.candidate) == kind]
        if not rivals or (len(candidate.order) > 1 and self._looked_into[kind] >= MAX_RIVALS):
            return best_s
        return min(rivals)


def _first_node(job: Job, costs: JobCosts, candidate: Candidate) -> tuple[float, Node]:
    """About what a candidate will take, and with what to begin: its bound is a step time that it can't beat.

    To the bound comes half of the idle time of 1F1B, and what still has to cross when the last microbatch is computed:
    its own message, or of replicas all gradients.
    """
    at, compute_s = candidate.layout, fastest_possible_s(costs, candidate)
    links_s = inter_site_traffic_s(costs, candidate, job.cluster)
    idle_s = compute_s * (at.pipeline - 1) / (2 * at.num_microbatches * at.virtual)
    hope_s = max(compute_s, links_s) + idle_s + links_s / (1 if at.replica_sites else at.num_microbatches)
    return hope_s, node(job, candidate, costs, max(compute_s, links_s))


def _alike(job: Job, known: Sequence[Candidate]) -> list[list[str]]:
    """Uses of sites (`Candidate.where`), grouped so that those of a group differ in the names of their sites alone."""
    groups: dict[str, list[str]] = {}
    for where, candidate in {c.where: c for c in known}.items():
        sites = [job.cluster.site(name).model_copy(update={"name": ""}) for name in candidate.order]
        links = [job.cluster.link(*ends) for ends in permutations(candidate.order, 2)]
        speeds = [link and (link.latency_s, link.bandwidth_bytes_per_s) for link in links]
        is_across = bool(candidate.layout.replica_sites)
        groups.setdefault(f"{is_across} {sites} {speeds}", []).append(where)
    return list(groups.values())


def _transferred(job: Job, costs: JobCosts, known: Sequence[Candidate], best: Evaluated, where: str) -> list[Evaluated]:
    """What `best` does at other sites that are alike."""
    same = [c for c in known if c.where == where and _shape(c) == _shape(best.candidate)]
    found = []
    for candidate in same[:1]:
        placements = tuple(replace(p, site=candidate.sites[p.rank].name) for p in best.placements)
        step = staggered_like(best, step_cost(costs, candidate.layout, placements, job.cluster))
        timeline = simulate(step.problem, best.schedule, checked=True)
        found.append(Evaluated(candidate, placements, step.problem, best.schedule, timeline, step.overhead_s))
    return found


def _shape(candidate: Candidate) -> tuple[Layout, bool]:
    return replace(candidate.layout, replica_sites=()), candidate.in_v


def _is_measured(candidate: Candidate, profiles: Mapping[str, Profile]) -> bool:
    """A profile tells of one device; with one, layers are not divided over several unless the job pins that."""
    return candidate.layout.tensor == 1 or not any(site.device.name in profiles for site in candidate.sites)


def _kind(candidate: Candidate) -> str:
    alone = len(candidate.order) == 1
    return candidate.where if alone else "replicas" if candidate.layout.replica_sites else "pipelines"


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
    told_of, told = {best.candidate.where}, {_likeness(best)}
    for other in evaluated[1:]:
        wanted = len(others) < MAX_RUNNERS_UP or other.candidate.where not in told_of
        if wanted and _likeness(other) not in told:
            others.append(other)
            told_of.add(other.candidate.where)
            told.add(_likeness(other))
    choices = [Choice(what=str(o), method=o.schedule.method, step_s=o.step_s, reason=reason(best, o)) for o in others]
    nearest = sorted(rejected, key=lambda r: r.missing_bytes)[: max(0, MAX_RUNNERS_UP - len(choices))]
    return choices + [Choice(what=str(r.candidate), method="", step_s=0.0, reason=r.reason) for r in nearest]


def _likeness(result: Evaluated) -> tuple[object, ...]:
    """Equal for candidates that differ only in the direction in which they visit equal sites."""
    return *_shape(result.candidate), frozenset(result.candidate.order), f"{result.step_s:.4g}"
