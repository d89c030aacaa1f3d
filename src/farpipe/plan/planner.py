"""From a job to the best plan: every layout that could still win is simulated, and every loser is told why."""

from collections.abc import Callable, Sequence

from farpipe.cost import JobCosts, Layout, Profile, profiles_of, tell_measured
from farpipe.errors import InfeasibleError, InputError, UsageError
from farpipe.plan.advice import advice, breakdown_s, reason
from farpipe.plan.advisor import advised
from farpipe.plan.decided import ZERO_STAGES, decided, largest_sites, tell_left_out
from farpipe.plan.evaluate import Evaluated, Rejected
from farpipe.plan.explore import search, shape_of
from farpipe.plan.grouped_plan import add_unlike, plan_pinned_groups
from farpipe.plan.improvements import still_helping
from farpipe.plan.orders import AUTO, best_order, expect_known, find_order
from farpipe.plan.plan import Arm, Choice, Plan
from farpipe.plan.quote import CHOSEN_SETTINGS, money_data
from farpipe.plan.refined import best_refined, predict, predicted
from farpipe.plan.robust import is_better, rank_robustly
from farpipe.plan.suggested_change import explain_infeasible
from farpipe.plan.trust import trust
from farpipe.schedule.bounds import lower_bound_s
from farpipe.search import SEARCHES, Found
from farpipe.search import Progress as Step
from farpipe.spec import Job
from farpipe.strict import nearest
from farpipe.units import format_percent

MAX_RUNNERS_UP = 8

Progress = Callable[[int, int], None]
"""Called with (candidates looked at, candidates in all)."""


def make_plan(job: Job, profiles: Sequence[Profile] = (), progress: Progress | None = None) -> Plan:
    """The plan with the shortest predicted step, with the runners-up and why each lost.

    On small clusters those candidates are left out that a bound shows to be no faster: the answer is the best of all.
    On larger ones estimates guide the search, see `guided`. Raises InputError for an unknown schedule, InfeasibleError,
    with the binding constraint and the smallest change that would help, when no candidate works.
    """
    return make_plans(job, profiles, progress)[0]


def make_plans(
    job: Job,
    profiles: Sequence[Profile] = (),
    progress: Progress | None = None,
    num_plans: int = 1,
    local_steps: int | None = None,
) -> list[Plan]:
    """The plan of `make_plan`, and after it up to `num_plans` - 1 of the next best layouts, each as good as it gets.

    The bound that leaves candidates out may leave fewer than were asked for. With `local_steps` the first has arms and
    changes too (see `advisor`), and so many steps between the exchanges of sites that go their own way. Errors as for
    `make_plan`.
    """
    _expect_known_schedule(job)
    if job.layout.replicas == "unlike":
        return _plans_with_unlike(job, profiles, progress, num_plans, local_steps)
    whole_job = job
    known = _by_device(job, profiles)
    known = {profile.key: profile for profile in profiles_of(job)} | known
    if job.layout.groups is not None:
        return [plan_pinned_groups(job, JobCosts(job.model, decided(job).training, known))]
    asked = job = largest_sites(job)
    for zero in ZERO_STAGES if asked.training.zero == "auto" else ZERO_STAGES[:1]:
        job = decided(asked, zero)
        costs = JobCosts(job.model, job.training, known)
        evaluated, rejected = search(job, costs, progress)
        if evaluated:
            evaluated = rank_robustly(job, evaluated)
            break
    else:
        raise InfeasibleError(explain_infeasible(job, rejected, costs))
    pairs = []
    for first in evaluated[:num_plans]:
        ranked = [first, *(e for e in evaluated if e is not first)]
        named, best = best_refined(job, ranked if num_plans == 1 else ranked[:1], costs)
        ranked = [best, *(e for e in ranked if e.candidate is not best.candidate)]
        pairs.append((_plan_of(job, costs, named, ranked, rejected), ranked))
    pairs.sort(key=lambda pair: pair[0].prediction.step_s)
    plans = [plan for plan, _ in pairs]
    if local_steps is not None:
        plans[0] = advised(plans[0], costs, pairs[0][1], local_steps)
    left_out = [] if asked is whole_job else [tell_left_out(len(whole_job.cluster.sites))]
    told = (*left_out, *tell_measured(whole_job, [profile.device for profile in profiles]))
    return [plan.model_copy(update={"advice": (*told, *plan.advice)}) for plan in plans]


def _plans_with_unlike(
    job: Job, profiles: Sequence[Profile], progress: Progress | None, num_plans: int, local_steps: int | None
) -> list[Plan]:
    """The usual plans, and before them one of groups that differ where that is faster, or where nothing else fits."""
    alike = job.model_copy(update={"layout": job.layout.model_copy(update={"replicas": None})})
    known = {profile.key: profile for profile in profiles_of(job)} | _by_device(job, profiles)
    try:
        usual = make_plans(alike, profiles, progress, num_plans, local_steps)
    except InfeasibleError as error:
        return add_unlike(job, JobCosts(job.model, decided(job).training, known), [], error)
    costs = JobCosts(job.model, decided(job).training, known)
    return add_unlike(job, costs, [plan.model_copy(update={"job": job}) for plan in usual])[:num_plans]


def _plan_of(job: Job, costs: JobCosts, named: Evaluated, evaluated: list[Evaluated], rejected: list[Rejected]) -> Plan:
    """The first of `evaluated` as a plan, which was `named` with a named order; the others are its runners-up."""
    best = evaluated[0]
    notes = (*_tell_short_search(named, best), *_tell_settings(job))
    told = (*notes, *advice(job, best, evaluated))
    residual, unmeasured = trust(costs, best.candidate.sites)
    plan = as_plan(job, best).model_copy(
        update={
            "runners_up": tuple(_runners_up(best, evaluated, rejected)),
            "advice": told,
            "residual": residual,
            "unmeasured": unmeasured,
        }
    )
    return reorder(plan, job.schedule) if job.schedule in SEARCHES else plan


def as_plan(job: Job, best: Evaluated) -> Plan:
    """The plan of an evaluated candidate, without runners-up and advice."""
    return Plan(
        job=job,
        layout=best.candidate.layout,
        placements=best.placements,
        problem=best.problem,
        schedule=best.schedule,
        prediction=predicted(job, best),
    )


def _tell_settings(job: Job) -> list[str]:
    """Settings that would save memory or time and that the user has pinned to off."""
    better = {"zero": "1", "sequence_parallel": "true"}
    off = [key for key in CHOSEN_SETTINGS if not getattr(job.training, key)]
    return [f"Not used, as the job says so: training.{key} = {better[key]}." for key in off]


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
    for profile in profiles:
        _expect_same_job(job, profile)
    return {profile.key: profile for profile in profiles}


def _expect_same_job(job: Job, profile: Profile) -> None:
    """InputError where the profile is of another model, precision or length, whatever the layout."""
    device = next(site.device for site in job.cluster.sites if site.device.name == profile.device)
    training, tensor = job.training, profile.tensor if job.layout.groups else job.layout.tensor or 1
    if training.recompute == "auto":  # then the planner chooses among those that the profile tells of
        training = training.model_copy(update={"recompute": profile.recompute})
    layout = Layout(pipeline=1, data=1, tensor=tensor, virtual=1, microbatch_size=1, num_microbatches=1)
    profile.expect(job.model, training, layout, device)


def reorder(plan: Plan, method: str) -> Plan:
    """The same layout, placement and partition with the order of another method; errors as for `best_order`."""
    schedule, timeline = best_order(plan.problem, method)
    prediction = predict(plan.job, plan.problem, schedule, timeline, plan.prediction.overhead_s)
    gone: dict[str, object] = dict.fromkeys(("runners_up", "advice", "arms", "changes"), ())
    return plan.model_copy(update={"schedule": schedule, "prediction": prediction, "limited_by": "", **gone})


def refine(plan: Plan, time_limit_s: float, on_progress: Callable[[Step], None] = lambda progress: None) -> Plan:
    """The same plan with the best order that a search of `time_limit_s` seconds finds, if that is faster.

    The advice says how near it is to the best there can be, and whether the clock cut the search.
    """
    found = find_order(plan.problem, time_limit_s=time_limit_s, on_progress=on_progress)
    advice = (*plan.advice, _tell_search(plan, found))
    prediction = predict(plan.job, plan.problem, found.schedule, found.timeline, plan.prediction.overhead_s)
    if not is_better(plan.job, prediction, plan.prediction):
        return plan.model_copy(update={"advice": advice})
    changes = still_helping(plan.changes, prediction.step_s / plan.prediction.step_s)
    update = {"schedule": found.schedule, "prediction": prediction, "advice": advice, "changes": changes}
    searched = plan.model_copy(update=update)
    return searched.model_copy(update={"arms": _arms_of(searched, plan)})


def _arms_of(searched: Plan, before: Plan) -> tuple[Arm, ...]:
    """The arms `before` the search, with the new step in the plan's own one, the fastest first."""
    own = next((arm for arm in before.arms if arm.same_training and arm.where == before.where), None)
    new = {
        "step_s": searched.prediction.step_s,
        "tokens_per_s": searched.prediction.tokens_per_s,
        "usd_per_million_tokens": money_data(searched)["per_million_tokens"]["total_usd"],
    }
    arms = [arm.model_copy(update=new) if arm is own else arm for arm in before.arms]
    return tuple(sorted(arms, key=lambda arm: arm.step_s))


def _tell_search(plan: Plan, found: Found) -> str:
    makespan_s = min(found.timeline.makespan_s, plan.prediction.makespan_s)
    gain = 1 - makespan_s / plan.prediction.makespan_s
    gap = max(makespan_s / found.lower_bound_s - 1, 0.0) if found.lower_bound_s else 0.0
    end = "Search stopped at the time limit" if found.cut_by_clock else "Search finished"
    result = f"found an order that is {_tell_gain(gain)} faster" if gain > 0 else "no faster order found"
    return f"{end}: {result}; {_tell_gap(gap, is_proven=found.proven)}."


def _tell_gap(gap: float, *, is_proven: bool) -> str:
    share = format_percent(gap)
    return f"none can be faster (gap {share})" if is_proven else f"none can be more than {share} faster"


def _tell_gain(share: float) -> str:
    return format_percent(share) if share >= 0.0005 else "less than 0.1 %"


def _tell_short_search(named: Evaluated, best: Evaluated) -> list[str]:
    if best is named:
        return []
    gain = 1 - best.timeline.makespan_s / named.timeline.makespan_s
    gap = max(best.timeline.makespan_s / lower_bound_s(best.problem) - 1, 0.0)
    told = f"Order: a short search made the best named order, {named.schedule.method}, {_tell_gain(gain)} faster"
    return [f"{told}; {_tell_gap(gap, is_proven=gap < 1e-9)}."]


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
    mine = breakdown_s(best) if others else {}
    choices = [
        Choice(what=str(o), method=o.schedule.method, step_s=o.step_s, reason=reason(best, mine, o)) for o in others
    ]
    nearest = sorted(rejected, key=lambda r: r.missing_bytes)[: max(0, MAX_RUNNERS_UP - len(choices))]
    return choices + [Choice(what=str(r.candidate), method="", step_s=0.0, reason=r.reason) for r in nearest]


def _likeness(result: Evaluated) -> tuple[object, ...]:
    """Equal for candidates that differ only in the direction in which they visit equal sites."""
    return *shape_of(result.candidate), frozenset(result.candidate.order), f"{result.step_s:.4g}"
