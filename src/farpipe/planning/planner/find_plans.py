"""Plans of a job: search its layouts, refine the best, explain it; `Planner` keeps costs for many requests."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast

from farpipe.core.errors import InfeasibleError, InputError, UsageError
from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.core.spec import Job, without_flash_attention
from farpipe.core.units import format_percent, format_seconds
from farpipe.planning.cost import JobCosts, Layout, Profile, busy_notes
from farpipe.planning.cost.chunk_profile import ChunkProfile
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.planner.candidates import expect_devices, largest_sites, left_out_note
from farpipe.planning.planner.changes import LIMIT_S, RunsOn, changes_that_help, still_helping
from farpipe.planning.planner.chunked import plan_documents
from farpipe.planning.planner.evaluate import Evaluated, Rejected
from farpipe.planning.planner.limits import limit_of, limits_in_words, trust_of
from farpipe.planning.planner.orders import AUTO, best_order, expect_known, find_order
from farpipe.planning.planner.plan import Plan, Strategy
from farpipe.planning.planner.quote import quote_of
from farpipe.planning.planner.refinement import best_refined, expected, predict, predicted, rank_robustly
from farpipe.planning.planner.search import Advance, search_stages_of_zero
from farpipe.planning.planner.strategies import LOCAL_STEPS, alike_at_identical_sites, strategies_of
from farpipe.planning.planner.why_not import explain_infeasible, other_sites, runners_up, use_of_sites
from farpipe.planning.search import SEARCHES, FoundOrder, Progress

MeasuredDevices = Sequence[Profile | ChunkProfile]
"""Profile of every measured device; ChunkProfile for a job with `data.packing`."""


def make_plan(job: Job, profiles: MeasuredDevices = (), progress: Advance | None = None) -> Plan:
    """The plan with the shortest predicted step, with the runners-up and why each lost.

    Estimates guide the search, see `search`. With `data.packing` the plan is of the first batch of the job's text,
    which is read for it. Raises InputError for an unknown schedule, InfeasibleError,
    with the binding constraint and the smallest change that would help, when no candidate works.
    """
    return find_plans(job, profiles, progress).plans[0]


@dataclass(frozen=True)
class FoundPlans:
    """The plans of a job, the fastest first, and what the strategies and changes of the first are worked out from."""

    plans: list[Plan]
    job: Job
    """Settled: no setting of it is open."""
    costs: JobCosts
    ranked: Sequence[Evaluated] = ()
    """The first plan, and the candidates behind it; empty where it has no strategies."""
    notes: Callable[[], tuple[str, ...]] = tuple
    """Makes further sentences for a plan without strategies, for which a person waits no longer than for these."""
    chunk_costs: tuple[ChunkCosts, ...] = ()
    """Costs of chunks, in groups of devices for each size; empty without `data.packing`."""

    def advised(
        self,
        local_steps: int | None,
        progress: Advance | None = None,
        limit_s: float = LIMIT_S,
        runs_on: Callable[[Plan], tuple[str, ...]] | None = None,
    ) -> Plan:
        """The first plan with its strategies and the cheapest changes, each within `limit_s`.

        `local_steps` is the interval of parameter averaging in the local-SGD strategy (None: LOCAL_STEPS), `progress`
        is of the changes, and `runs_on` names what could run a changed plan.
        """
        if not self.ranked:
            return self.plans[0].model_copy(update={"advice": (*self.plans[0].advice, *self.notes())})
        plan, job, costs = self.plans[0], self.job, self.costs
        strategies, unsearched = strategies_of(job, costs, self.ranked, local_steps or LOCAL_STEPS, limit_s)
        able = None if runs_on is None else _lost_by(plan, runs_on)
        changes, untried = changes_that_help(
            job, costs, self.ranked, plan.prediction.step_s, progress, limit_s, runs_on=able
        )
        left = {"Strategies that there was no time to search for": unsearched}
        left |= {"Changes that there was no time to try": untried}
        advice = (*plan.advice, *(f"{what}: {', '.join(names)}." for what, names in left.items() if names))
        advice = (*advice, *_faster_than(plan, strategies))
        update = {"strategies": tuple(strategies), "changes": tuple(changes), "advice": advice}
        return plan.model_copy(update=update)


WORTH_TELLING: Final = 0.01
"""Relative gain from which a strategy that no plan can be made of is told of."""


def _faster_than(plan: Plan, strategies: Sequence[Strategy]) -> Iterator[str]:
    """Sentence on the fastest strategy that trains as asked and beats the plan: its sites have layouts of their own."""
    same = [one for one in strategies if one.same_training]
    best = min(same, key=lambda one: one.step_s, default=None)
    if best is not None and best.step_s < plan.prediction.step_s * (1 - WORTH_TELLING):
        yield (
            f"Faster than this plan, at {format_seconds(best.step_s)} a step, but no plan can be made of it yet: "
            f"{best.kind} at {best.where} with a layout of its own at each site ({best.what})."
        )


def _lost_by(plan: Plan, runs_on: Callable[[Plan], tuple[str, ...]]) -> RunsOn:
    """`Change.runs_on` of a changed job: the programs left; None where all that run `plan` can."""
    own = set(runs_on(plan))

    def able(job: Job, best: Evaluated) -> tuple[str, ...] | None:
        names = runs_on(as_plan(job, best))
        return None if own <= set(names) else names

    return able


def find_plans(
    job: Job, profiles: MeasuredDevices = (), progress: Advance | None = None, num_plans: int = 1
) -> FoundPlans:
    """The plan of `make_plan`, and after it up to `num_plans` - 1 of the next best layouts, each as good as it gets.

    The bound that leaves candidates out may leave fewer than were asked for. Strategies and changes come later, by
    `FoundPlans.advised`: a person waits for the plan first. Errors as for `make_plan`.
    """
    _expect_kind(job, profiles)
    if job.data.packing is not None:
        plan, chunk_costs, better = plan_documents(job, cast("Sequence[ChunkProfile]", profiles))
        return FoundPlans([plan], job, JobCosts(job.model, job.training), notes=better, chunk_costs=chunk_costs)
    _expect_known_schedule(job)
    known = _by_device(job, cast("Sequence[Profile]", profiles))
    settled, costs, (evaluated, rejected) = search_stages_of_zero(largest_sites(job), known, progress)
    if not evaluated:
        raise InfeasibleError(explain_infeasible(settled, rejected, costs))
    evaluated, pairs = rank_robustly(settled, evaluated), []
    for first in evaluated[:num_plans]:
        ranked = [first, *(e for e in evaluated if e is not first)]
        named, best = best_refined(settled, ranked if num_plans == 1 else ranked[:1], costs)
        ranked = [expected(settled, e) for e in (best, *(e for e in ranked if e.candidate is not best.candidate))]
        best = ranked[0]
        ranked = [best, *(e for e in alike_at_identical_sites(settled, ranked) if e is not best)]
        pairs.append((_explained(settled, costs, named, ranked, rejected), ranked))
    pairs.sort(key=lambda pair: pair[0].prediction.step_s)
    notes = tuple(busy_notes(profiles))
    if job.layout.sites is None and (left_out := left_out_note(len(job.cluster.sites))):
        notes = (left_out, *notes)
    plans = [plan.model_copy(update={"advice": (*notes, *plan.advice)}) for plan, _ in pairs]
    return FoundPlans(plans, settled, costs, pairs[0][1])


def _explained(
    job: Job, costs: JobCosts, named: Evaluated, evaluated: list[Evaluated], rejected: list[Rejected]
) -> Plan:
    """The first of `evaluated` as a plan, which was `named` with a named order; the others are its runners-up."""
    best = evaluated[0]
    notes = (*_on_short_search(named, best), *_on_settings(job))
    plan = as_plan(job, best).model_copy(
        update={
            "runners_up": tuple(runners_up(best, evaluated, rejected)),
            "advice": (*notes, *other_sites(job, best, evaluated), *limits_in_words(job, best, costs)),
            **trust_of(costs, best.candidate.sites, best.candidate.layout),
        }
    )
    plan = reorder(plan, job.schedule) if job.schedule in SEARCHES else plan
    return plan.model_copy(
        update={"verdict": use_of_sites(job, best, evaluated), "limited_by": limit_of(best, costs, job.cluster)}
    )


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


def _on_settings(job: Job) -> list[str]:
    """Settings that would save memory or time and that the user has pinned to off."""
    better = {"zero": "1", "sequence_parallel": "true"}
    off = [f"training.{key} = {value}" for key, value in better.items() if not getattr(job.training, key)]
    lacking = without_flash_attention(site.device for site in job.cluster.sites) if job.training.flash_attention else ()
    return [
        *(f"Not used, as the job asks: {setting}." for setting in off),
        *(
            f"{device} has no FlashAttention 2; where attention keeps its scores, set training.flash_attention = false."
            for device in lacking
        ),
    ]


def _expect_kind(job: Job, profiles: MeasuredDevices) -> None:
    """InputError for profiles of chunks where microbatches are planned, or the other way round."""
    wanted = Profile if job.data.packing is None else ChunkProfile
    for profile in profiles:
        if not isinstance(profile, wanted):
            one, other = ("chunks", "microbatches") if wanted is Profile else ("microbatches", "chunks")
            raise InputError(
                f"the profile of {profile.device} is of {one}, and the job is planned on {other} (data.packing); "
                f"measure it with `farpipe profile{' --sequences' if other == 'chunks' else ''}`"
            )


def _expect_known_schedule(job: Job) -> None:
    try:
        expect_known(job.schedule or AUTO)
    except UsageError as error:
        raise InputError(f"schedule.method: {error}") from None


def _by_device(job: Job, profiles: Sequence[Profile]) -> dict[str, Profile]:
    expect_devices(job, profiles)
    for profile in profiles:
        _expect_same_job(job, profile)
    return {profile.device: profile for profile in profiles}


def _expect_same_job(job: Job, profile: Profile) -> None:
    """InputError where the profile is of another model, precision or length, whatever the layout."""
    device = next(site.device for site in job.cluster.sites if site.device.name == profile.device)
    training, tensor = job.training, job.layout.tensor or 1
    if training.recompute == "auto":  # then the planner chooses among the modes in the profile
        training = training.model_copy(update={"recompute": profile.recompute})
    layout = Layout(pipeline=1, data=1, tensor=tensor, virtual=1, microbatch_size=1, num_microbatches=1)
    profile.expect(job.model, training, layout, device)


def reorder(plan: Plan, method: str) -> Plan:
    """The same layout, placement and partition with the order of another method; errors as for `best_order`."""
    schedule, timeline = best_order(plan.problem, method)
    prediction = predict(plan.job, plan.problem, schedule, timeline, plan.prediction.overhead_s, plan.num_tokens)
    gone: dict[str, object] = dict.fromkeys(("runners_up", "advice", "strategies", "changes"), ())
    return plan.model_copy(
        update={"schedule": schedule, "prediction": prediction, "verdict": "", "limited_by": "", **gone}
    )


def refine(plan: Plan, time_limit_s: float, on_progress: Callable[[Progress], None] = lambda progress: None) -> Plan:
    """The same plan with the best order that a search of `time_limit_s` seconds finds, if that is faster.

    The advice says how near it is to the best there can be, and whether the clock cut the search.
    """
    found = find_order(plan.problem, time_limit_s=time_limit_s, on_progress=on_progress)
    advice = (*plan.advice, _on_search(plan, found))
    overhead_s, num_tokens = plan.prediction.overhead_s, plan.num_tokens
    prediction = predict(plan.job, plan.problem, found.schedule, found.timeline, overhead_s, num_tokens)
    if prediction.step_s >= plan.prediction.step_s:
        return plan.model_copy(update={"advice": advice})
    changes = still_helping(plan.changes, prediction.step_s / plan.prediction.step_s)
    update = {"schedule": found.schedule, "prediction": prediction, "advice": advice, "changes": changes}
    searched = plan.model_copy(update=update)
    return searched.model_copy(update={"strategies": _with_new_step(searched, plan)})


def _with_new_step(searched: Plan, before: Plan) -> tuple[Strategy, ...]:
    """The strategies `before` the search, with the new step in the plan's own one, the fastest first."""
    own = next((one for one in before.strategies if one.same_training and one.where == before.where), None)
    quote = quote_of(searched)
    new = {
        "step_s": quote.step_s,
        "tokens_per_s": quote.tokens_per_s,
        "usd_per_million_tokens": quote.per_million_tokens.total_usd,
    }
    strategies = [one.model_copy(update=new) if one is own else one for one in before.strategies]
    return tuple(sorted(strategies, key=lambda one: one.step_s))


def _on_search(plan: Plan, found: FoundOrder) -> str:
    makespan_s = min(found.timeline.makespan_s, plan.prediction.makespan_s)
    gain = 1 - makespan_s / plan.prediction.makespan_s
    gap = max(makespan_s / found.lower_bound_s - 1, 0.0) if found.lower_bound_s else 0.0
    end = "Search stopped at the time limit" if found.cut_by_clock else "Search finished"
    result = f"found an order that is {_gain(gain)} faster" if gain > 0 else "no faster order found"
    return f"{end}: {result}; {_gap(gap, is_proven=found.proven)}."


def _gap(gap: float, *, is_proven: bool) -> str:
    more = "" if is_proven else f"more than {format_percent(max(gap, 0.001))} "
    return f"no order of these stages can be {more}faster"


def _gain(share: float) -> str:
    return format_percent(share) if share >= 0.0005 else "less than 0.1 %"


def _on_short_search(named: Evaluated, best: Evaluated) -> list[str]:
    if best is named:
        return []
    gain = 1 - best.timeline.makespan_s / named.timeline.makespan_s
    gap = max(best.timeline.makespan_s / lower_bound_s(best.problem) - 1, 0.0)
    result = f"Order: a short search made the best named order, {named.schedule.method}, {_gain(gain)} faster"
    return [f"{result}; {_gap(gap, is_proven=gap < 1e-9)}."]
