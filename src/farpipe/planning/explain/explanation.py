"""Explanation of a plan, made from what was found beside it: verdict, runners-up, advice, strategies, changes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.core.spec import Job, without_flash_attention
from farpipe.core.spec.cluster import RESERVED_FRACTION
from farpipe.core.units import format_bytes, format_percent, format_seconds
from farpipe.planning.cost import busy_notes
from farpipe.planning.cost.trust import Trust, trust_of
from farpipe.planning.explain.changes import LIMIT_S, RunsOn, changes_that_help, still_helping
from farpipe.planning.explain.goodput import on_failures
from farpipe.planning.explain.limits import (
    BETWEEN_SITES,
    breakdown_s,
    how_sure,
    limit_of,
    limits_in_words,
    parts_of,
)
from farpipe.planning.explain.strategies import strategies_of
from farpipe.planning.explain.trained import fastest_by_train, marked, obstacles_of
from farpipe.planning.explain.why_not import other_sites, runners_up, ties, use_of_sites
from farpipe.planning.planner.candidates import left_out_note
from farpipe.planning.planner.evaluate import Evaluated
from farpipe.planning.planner.find import Planned, as_plan
from farpipe.planning.planner.plan import ByTrain, Explanation, Plan, PlanDocument, Strategy
from farpipe.planning.planner.quote import quote_of
from farpipe.planning.planner.search import Advance
from farpipe.planning.search import SEARCHES, FoundOrder


def explain(planned: Planned) -> Explanation:
    """The explanation of a plan without what takes a search: its alternatives (`with_alternatives`), and the fastest
    plan that `train` runs (`with_fastest`)."""
    job, costs, busy = planned.found.job, planned.found.costs, tuple(busy_notes(planned.profiles))
    if planned.batch is not None:
        from farpipe.planning.explain.first_batch import on_batch, trust_of_batch  # here, as other jobs need none of it

        told = tuple(on_batch(job, planned.batch))
        instead = obstacles_of(planned.plan)
        more = _of_batch(planned.plan, trust_of_batch(job, planned.batch)) | _mark("", planned.plan, instead)
        return Explanation(advice=(*busy, *told), **more)
    ranked, named = planned.ranked, planned.named
    best = ranked[0]
    assert named is not None
    parts = parts_of(best)
    links_s = parts[BETWEEN_SITES]
    sure = how_sure(trust_of(costs, best.candidate.sites, best.candidate.layout), best.problem, links_s, best.step_s)
    left_out = left_out_note(planned.num_sites) if job.layout.sites is None else ""
    notes = (*((left_out,) if left_out else ()), *busy)
    first = Explanation(
        limited_by=limit_of(best, costs, job.cluster, parts),
        advice=notes,
        **sure,
        **_mark(use_of_sites(job, best, ranked), planned.plan, obstacles_of(planned.plan)),
    )
    if job.schedule in SEARCHES:  # the others have named orders, with which this one can't be compared
        return first
    said = (*_on_short_search(named, best), *_on_memory(planned.plan, job), *_on_settings(job))
    more = {
        "runners_up": tuple(runners_up(best, parts, ranked, planned.found.rejected)),
        **ties(best, ranked, links_s),
        "advice": (*notes, *said, *other_sites(job, best, ranked), *limits_in_words(job, best, costs)),
    }
    return first.model_copy(update=more)


def _mark(verdict: str, plan: Plan, instead: ByTrain | None) -> dict[str, Any]:
    return {"verdict": marked(verdict, plan, instead), "by_train": instead}


def _of_batch(plan: Plan, trusted: Trust) -> dict[str, Any]:
    """How far the plan of a batch can be trusted."""
    expected = plan.prediction
    crosses = any(plan.problem.between_sites.values())
    parts = breakdown_s(plan.problem, plan.schedule, plan.timeline, expected.overhead_s) if crosses else {}
    return how_sure(trusted, plan.problem, parts.get(BETWEEN_SITES, 0.0), expected.step_s)


def explained(planned: Planned, *, searches: bool = True) -> PlanDocument:
    """The plan with its explanation, as it is saved; unless it `searches`, without the fastest plan that `train` runs
    instead."""
    document = PlanDocument(plan=planned.plan, explanation=explain(planned))
    return with_fastest(document, planned) if searches else document


def with_fastest(document: PlanDocument, planned: Planned) -> PlanDocument:
    """The same with the fastest plan that `train` runs, in the verdict too, where it can't run this one."""
    why, plan = document.explanation, planned.plan
    if why.by_train is None:
        return document
    found = fastest_by_train(why.by_train, plan, planned.found.costs, planned.profiles)
    verdict = use_of_sites(planned.found.job, planned.ranked[0], planned.ranked) if planned.batch is None else ""
    update = _mark(verdict, plan, found)
    return document.model_copy(update={"explanation": why.model_copy(update=update)})


def with_alternatives(
    explanation: Explanation,
    planned: Planned,
    progress: Advance | None = None,
    limit_s: float = LIMIT_S,
    runs_on: Callable[[Plan], tuple[str, ...]] | None = None,
) -> Explanation:
    """The same with strategies and the cheapest changes, each within `limit_s`; on chunks with a better layout's pins.

    `progress` is of the changes, and `runs_on` names what could run a changed plan.
    """
    plan, (job, costs, *_) = planned.plan, planned.found
    if planned.batch is not None:
        from farpipe.planning.explain.first_batch import better_layout

        told = better_layout(plan, planned.batch)
        return explanation.model_copy(update={"advice": (*explanation.advice, *told)})
    strategies, unsearched = strategies_of(job, costs, planned.ranked, limit_s)
    able = None if runs_on is None else _lost_by(plan, runs_on)
    changes, untried = changes_that_help(
        job, costs, planned.ranked, plan.prediction.step_s, progress, limit_s, runs_on=able
    )
    left = {"Strategies that there was no time to search for": unsearched}
    left |= {"Changes that there was no time to try": untried}
    advice = (*explanation.advice, *(f"{what}: {', '.join(names)}." for what, names in left.items() if names))
    advice = (*advice, *_faster_than(plan, strategies), *on_failures(job, strategies, plan.where))
    update = {"strategies": tuple(strategies), "changes": tuple(changes), "advice": advice}
    return explanation.model_copy(update=update)


def after_search(explanation: Explanation, before: Plan, after: Plan, found: FoundOrder) -> Explanation:
    """The explanation of `before`, for the plan that a search of its order has made of it.

    The advice says how near it is to the best there can be, and whether the clock cut the search.
    """
    advice = (*explanation.advice, _on_search(before, found))
    if after is before:
        return explanation.model_copy(update={"advice": advice})
    changes = still_helping(explanation.changes, after.prediction.step_s / before.prediction.step_s)
    strategies = _with_new_step(explanation.strategies, before, after)
    return explanation.model_copy(update={"advice": advice, "changes": changes, "strategies": strategies})


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


def _on_memory(plan: Plan, job: Job) -> Iterator[str]:
    """Warning where a device has less memory left than a run may lose to libraries and fragmentation."""
    sites = {placement.rank: job.cluster.site(placement.site) for placement in plan.placements}
    free = [site.device.memory_bytes - plan.prediction.peak_memory_bytes[rank] for rank, site in sites.items()]
    shares = [left / site.device.memory_bytes for left, site in zip(free, sites.values(), strict=True)]
    if min(shares) < RESERVED_FRACTION:
        tight = shares.index(min(shares))
        site = list(sites.values())[tight]
        whole, usual = site.device.memory_bytes, RESERVED_FRACTION * site.device.memory_bytes
        yield (
            f"Memory is tight: {format_bytes(free[tight])} of {format_bytes(whole)} stay free on {site.name}, for the "
            "driver, communication libraries and fragmentation. Set PyTorch's expandable_segments:True, or "
            f'memory_reserve = "{format_bytes(usual)}".'
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


def _with_new_step(strategies: Sequence[Strategy], before: Plan, after: Plan) -> tuple[Strategy, ...]:
    """The strategies with the new step in the plan's own one, the fastest first."""
    own = next((one for one in strategies if one.same_training and one.where == before.where), None)
    quote = quote_of(after)
    new = {
        "step_s": quote.step_s,
        "tokens_per_s": quote.tokens_per_s,
        "usd_per_million_tokens": quote.per_million_tokens.total_usd,
    }
    updated = [one.model_copy(update=new) if one is own else one for one in strategies]
    return tuple(sorted(updated, key=lambda one: one.step_s))


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
