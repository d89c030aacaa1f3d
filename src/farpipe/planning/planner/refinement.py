"""Refinement of what a search has found: recomputation by stage, a short search for an order, and its prediction.

Where links lose packets or jitter, steps differ, and over a training only their mean counts: then layout and order are
chosen by the mean step over samples. Orders for late messages are made with all of them as late as nine of ten are.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from farpipe.core.schedule import check, peak_memory_bytes
from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.core.simulate import Timeline, simulate
from farpipe.core.spec import Job, Recompute
from farpipe.core.step import Problem, Schedule, exceeds, retimed
from farpipe.core.step.player import makespan_s, period_s
from farpipe.planning.cost import JobCosts, Placement, StageCost, place_stages, step_cost
from farpipe.planning.planner.bandwidth import link_bytes
from farpipe.planning.planner.evaluate import ROUNDING, Evaluated, finish, staggered_like, whole
from farpipe.planning.planner.orders import AUTO, try_orders, try_quickly
from farpipe.planning.planner.partition import StageModes
from farpipe.planning.planner.plan import Prediction
from farpipe.planning.planner.step_samples import StepSamples
from farpipe.planning.search.greedy import greedy_orders
from farpipe.planning.search.local import improve
from farpipe.planning.search.step import by_period, fits_memory, search_step, split_backwards, to_orders, to_schedule

MAX_RIVALS: Final = 3
"""Largest number of candidates besides the first whose order is improved too."""
NEARLY: Final = 0.03
"""Relative distance to the best up to which a candidate is a rival."""
REFINEMENT: Final = 0.01
"""Relative gain that refining recomputation may still bring to a candidate whose order was improved."""
NUM_SKETCHED: Final = 12
"""Number of greedy orders that say whether a candidate, slow in named orders, is a rival after all."""
SKETCHED_ACTIONS: Final = 20_000
"""Largest number of actions of all of them: 3 ms. Of long steps named orders are close to the best."""
WORTH_TRYING: Final = 0.005
"""Relative gain that the lower bound must leave to other recomputation or layers of a stage for an order to be made."""
WORTH: Final = 0.001
"""Relative gain for which another candidate is taken in place of the one whose estimate was best."""
MAX_REFINED_ACTIONS: Final = 20_000
"""Largest number of actions in a step whose recomputation and first and last stages are refined."""
MAX_IDLE: Final = 8
"""Number of stages of a site in a row that gain nothing by more recomputation after which its others are not tried."""
MAX_ACTIONS: Final = 40_000
"""Largest number of actions in a step that is searched; a greedy order of more takes too long without --time-limit."""
GREEDY_ACTIONS: Final = 200_000
"""Number of actions over all greedy orders together: about a tenth of a second."""
LOCAL_ACTIONS: Final = 6e6
"""Number of actions that the local search plays: about a tenth of a second."""
MAX_PLAYED: Final = 10_000
"""Largest number of orders that the local search plays."""
CLOSE: Final = 1e-4
"""Relative distance to the bound from which on nothing is searched."""
MAX_LAYOUTS: Final = 6
"""Largest number of layouts whose steps are sampled: the first of the search."""
MAX_ORDERS: Final = 10
"""Largest number of orders of one layout that are sampled."""


def best_refined(job: Job, found: Sequence[Evaluated], costs: JobCosts) -> tuple[Evaluated, Evaluated]:
    """`refined` of the first of `found`, the fastest first, or of the next one where its order comes out faster.

    The next one is the first that is nearly as fast and whose bound leaves room for it.
    """
    # The search ranks layouts by named orders; a short search of the order then gains up to 11 %, more for some layouts
    # than for others. Without rivals one of thirty frozen plans is 0.72 % slower. A rival has to gain WORTH: of nearly
    # equal layouts the one that the search found first stays, so that plans do not flip with the last digits of a cost.
    first = _, best = refined(job, found[0], costs)
    if StepSamples(job, best.problem).differ:
        return first
    most_s = best.step_s * (1 + REFINEMENT)
    others = [one for one in found[1:] if one.candidate.layout != found[0].candidate.layout]
    open_ones = [one for one in others if one.extrapolated_s is None and _may_take(one, most_s)]
    near_s, is_open = found[0].step_s * (1 + NEARLY), job.schedule in (None, AUTO)
    near = [one for one in open_ones if one.step_s <= near_s]
    hidden = _hidden([one for one in open_ones if one.step_s > near_s], most_s) if is_open else []
    rivals = [(one, improve_order(one)) for one in (*near[:MAX_RIVALS], *hidden)]
    able = (refined(job, one, costs, improved) for one, improved in rivals if improved.step_s < most_s)
    best_rival = min(able, key=lambda pair: pair[1].step_s, default=first)
    return best_rival if best_rival[1].step_s < best.step_s * (1 - WORTH) else first


def _may_take(one: Evaluated, most_s: float) -> bool:
    """False if a lower bound of the step is `most_s` or more."""
    return lower_bound_s(one.problem, most_s - one.overhead_s) + one.overhead_s < most_s


def _hidden(open_ones: Sequence[Evaluated], most_s: float) -> list[Evaluated]:
    """At most MAX_RIVALS candidates that are slow in named orders alone: a few greedy orders take less than `most_s`.

    Named orders know little of delays as long as those of a few microbatches over far links; stages in a V lose most.
    """
    # Of forty random jobs two were 1.2 and 1.6 % behind for want of this: named orders of what was best took 20 to 24 %
    # more than its short search's. Twelve greedy orders come within 2 % of that, in 2 to 5 ms.
    found = []
    for one in open_ones:
        step = search_step(one.problem)
        most = min(NUM_SKETCHED * step.num_actions, SKETCHED_ACTIONS)
        if step.num_actions <= SKETCHED_ACTIONS:
            sketched = greedy_orders(step, max_actions=most, target_s=most_s - one.overhead_s)[:1]
            found += [(makespan_s, one) for makespan_s, _ in sketched if makespan_s + one.overhead_s < most_s]
    return [one for _, one in sorted(found, key=lambda pair: pair[0] + pair[1].overhead_s)[:MAX_RIVALS]]


def refined(
    job: Job, found: Evaluated, costs: JobCosts, improved: Evaluated | None = None
) -> tuple[Evaluated, Evaluated]:
    """`found` with its best recomputation and a named order, and the same with the order that a plan gets.

    That is the short search's, unless the job names an order, and the one of the best merit where steps differ.
    `improved` is `improve_order` of `found`, where that is known.
    """
    even = refine_recomputation(job, whole(found), costs)
    named = refine_ends(job, even, costs)
    if job.schedule not in (None, AUTO):
        return named, choose_robustly(job, named)

    def improved_of(one: Evaluated) -> Evaluated:
        return improved if improved is not None and one is found else improve_order(one)

    best = improved_of(named)
    if named is not even and lower_bound_s(even.problem) + even.overhead_s < best.step_s * (1 - WORTH):
        named, best = min((named, best), (even, improved_of(even)), key=lambda pair: pair[1].step_s)
    return named, choose_robustly(job, best)


def refine_recomputation(job: Job, best: Evaluated, costs: JobCosts) -> Evaluated:
    """`best`, or the same with other recomputation where that is faster.

    One stage at a time recomputes in another mode, as long as that helps: less, where memory has room for it, or more,
    so that more microbatches can be under way. What a lower bound rules out is not simulated; steps of more than
    MAX_REFINED_ACTIONS are left as they are. After MAX_IDLE stages of a site that gain nothing by more, its others do
    not try that.
    """
    if _is_long(best):
        return best
    idle = Counter[str]()
    for index in range(len(best.placements)):
        best = _with_less(best, index, job, costs)
        site = best.placements[index].site
        if idle[site] < MAX_IDLE:
            before, best = best, _with_more(best, index, job, costs)
            idle[site] = 0 if best is not before else idle[site] + 1
    return best


def _is_long(best: Evaluated) -> bool:
    return 3 * best.problem.num_stages * best.problem.num_microbatches > MAX_REFINED_ACTIONS


def refine_ends(job: Job, best: Evaluated, costs: JobCosts) -> Evaluated:
    """`best`, or the same with a layer of the last stage in the first, or the other way round, where that is faster.

    Layers are divided by the slowest stage and then by squares, neither of which knows that a stage starts late.
    """
    if job.layout.layers is not None or best.candidate.layout.num_stages == 1 or _is_long(best):
        return best
    for less, more in ((-1, 0), (0, -1)):
        layers = [placement.num_layers for placement in best.placements]
        layers[less], layers[more] = layers[less] - 1, layers[more] + 1
        if layers[less]:
            sites = [site.name for site in best.candidate.sites]
            modes = [placement.recompute for placement in best.placements]
            placements = place_stages(best.candidate.ranks, sites, layers, modes)
            changed = {placements[less].rank, placements[more].rank}
            best = next(_placed_so(best, placements, changed, job, costs), best)
    return best


def _with_less(best: Evaluated, index: int, job: Job, costs: JobCosts) -> Evaluated:
    """`best`, or the same with less recomputation in stage `index`: the least that is faster."""
    return next(
        (found for mode in _modes(best, index, costs, less=True) for found in _tried(best, index, mode, job, costs)),
        best,
    )


def _with_more(best: Evaluated, index: int, job: Job, costs: JobCosts) -> Evaluated:
    """`best`, or the same with more recomputation in stage `index`, the best of those that are faster.

    None is, where its rank has memory for another microbatch, or where the stage would not make the step faster if it
    took as long as in the fastest of them and freed as much as in the one that frees most.
    """
    if _has_room(best, index):
        return best
    modes = _modes(best, index, costs, less=False)
    if not modes or not _could_help(best, index, modes, costs):
        return best
    for mode in modes:
        best = next(_tried(best, index, mode, job, costs), best)
    return best


def _modes(best: Evaluated, index: int, costs: JobCosts, *, less: bool) -> list[Recompute]:
    """The open modes in which the stage takes less time than in its own, or more; the fastest first."""
    if not best.placements[index].num_layers:
        return []
    stages, now = StageModes(costs, best.candidate), best.placements[index].recompute
    now_s = stages.of(index, now).layer_s
    seconds = {mode: stages.of(index, mode).layer_s for mode in stages.open}
    chosen = [mode for mode, mode_s in seconds.items() if (mode_s < now_s if less else mode_s > now_s)]
    return sorted(chosen, key=seconds.__getitem__)


def _has_room(best: Evaluated, index: int) -> bool:
    """True if the rank of stage `index` could hold the activations of another microbatch at its peak."""
    stage = best.problem.stages[index]
    peak_bytes = peak_memory_bytes(best.problem, best.schedule)[stage.rank]
    more = np.max(stage.activation_bytes)
    return not exceeds(peak_bytes + more, best.problem.ranks[stage.rank].memory_bytes)


def _could_help(best: Evaluated, index: int, modes: Sequence[Recompute], costs: JobCosts) -> bool:
    """True if the step would be faster with the times of the first and the bytes of the lightest of `modes`."""
    stages, limit_s = list(best.problem.stages), best.step_s * (1 - ROUNDING) - best.overhead_s
    fastest = _cost(best, index, modes[0], costs)
    best_times = {name: getattr(fastest, name) for name in ("forward_s", "input_grad_s", "weight_grad_s")}
    fewest = {"activation_bytes": min(_cost(best, index, mode, costs).activation_bytes for mode in modes)}
    stages[index] = stages[index].model_copy(update=best_times | fewest)
    problem = best.problem.model_copy(update={"stages": tuple(stages)})
    least_s = max(best.candidate.layout.num_microbatches * fastest.seconds, lower_bound_s(problem))
    if least_s >= limit_s * (1 - WORTH_TRYING):
        return False
    return try_quickly(best.schedule.method, problem, limit_s).makespan_s < limit_s


def _tried(best: Evaluated, index: int, mode: Recompute, job: Job, costs: JobCosts) -> Iterator[Evaluated]:
    """`best` with stage `index` in another mode, if that is faster."""
    other = replace(best.placements[index], recompute=mode)
    placements = (*best.placements[:index], other, *best.placements[index + 1 :])
    yield from _placed_so(best, placements, {other.rank}, job, costs)


def _placed_so(
    best: Evaluated, placements: tuple[Placement, ...], ranks: set[int], job: Job, costs: JobCosts
) -> Iterator[Evaluated]:
    """`best` with other `placements`, changed on `ranks`, if that is faster."""
    if not all(_is_faster(best, rank, placements, costs) for rank in ranks):
        return
    step = staggered_like(best, step_cost(costs, best.candidate.layout, placements, job.cluster), costs)
    worth_s = best.step_s * (1 - WORTH_TRYING) - step.overhead_s
    if lower_bound_s(step.problem, worth_s) >= worth_s:
        return
    found = try_quickly(best.schedule.method, step.problem, best.step_s - step.overhead_s)
    if found.makespan_s + step.overhead_s < best.step_s * (1 - ROUNDING):
        yield finish(best.candidate, placements, step, best.schedule.method)


def _is_faster(best: Evaluated, rank: int, placements: tuple[Placement, ...], costs: JobCosts) -> bool:
    """False where the work of a changed `rank` alone takes as long as the step does now."""
    at, last = best.candidate.layout, best.candidate.layout.num_stages - 1
    site, mine = best.candidate.sites[rank], [(s, p) for s, p in enumerate(placements) if p.rank == rank]
    costs_of = (
        costs.stage(
            *(at, site, p.num_layers, p.recompute),
            embedding=s == 0,
            head=s == last,
            dense_share=costs.model.dense_share(p.first_layer, p.end_layer),
        )
        for s, p in mine
    )
    work_s = sum(cost.seconds for cost in costs_of)
    return at.num_microbatches * work_s + best.overhead_s < best.step_s


def _cost(best: Evaluated, index: int, mode: Recompute, costs: JobCosts) -> StageCost:
    """Costs of stage `index` in `mode`."""
    at, candidate = best.placements[index], best.candidate
    ends = {"embedding": index == 0, "head": index == candidate.layout.num_stages - 1}
    dense_share = costs.model.dense_share(at.first_layer, at.end_layer)
    site = candidate.sites[at.rank]
    return costs.stage(candidate.layout, site, at.num_layers, mode, dense_share=dense_share, **ends)


def improve_order(best: Evaluated) -> Evaluated:
    """`best`, or the same with a faster order; the same `best` always gives the same answer.

    Without a barrier it is the period that gets shorter.
    """
    problem, now_s = best.problem, best.timeline.makespan_s
    if not problem.barrier:
        problem, _ = by_period(problem)
        now_s = makespan_s(problem, best.schedule)
    bound_s, step = lower_bound_s(problem), search_step(problem)
    if step.num_actions > MAX_ACTIONS or now_s <= bound_s * (1 + CLOSE):
        return best
    least_s = bound_s * (1 + ROUNDING)
    seeds = greedy_orders(step, max_actions=GREEDY_ACTIONS, target_s=least_s)[:1]
    named = split_backwards(to_orders(best.schedule))
    if fits_memory(step, named):
        seeds.append((now_s, named))
    seeds.sort(key=lambda pair: pair[0])
    if not seeds:
        return best
    found_s, orders = seeds[0]
    if found_s > least_s:
        most = min(MAX_PLAYED, int(LOCAL_ACTIONS / step.num_actions))
        found_s, orders = improve(step, seeds, num_evaluations=most, target_s=bound_s * (1 + CLOSE))
    if found_s >= now_s * (1 - ROUNDING):
        return best
    schedule = to_schedule(orders, best.problem.num_microbatches, "auto (short search)")
    if not best.problem.barrier and period_s(best.problem, schedule) >= period_s(best.problem, best.schedule):
        return best
    check(best.problem, schedule)
    return replace(best, schedule=schedule, timeline=simulate(best.problem, schedule, checked=True))


def rank_robustly(job: Job, evaluated: Sequence[Evaluated]) -> list[Evaluated]:
    """The most promising layouts in the order of their mean step over the samples, and then the others.

    Unchanged where no step differs from another.
    """
    first = [whole(one) for one in evaluated[:MAX_LAYOUTS]]
    samples = [StepSamples(job, one.problem) for one in first]
    if not any(one.differ for one in samples):
        return list(evaluated)
    means = [drawn.spread(one.schedule, one.overhead_s).mean_s for one, drawn in zip(first, samples, strict=True)]
    return [first[place] for place in np.argsort(means, kind="stable")] + list(evaluated[MAX_LAYOUTS:])


def expected(job: Job, one: Evaluated) -> Evaluated:
    """`one` with its mean step over the samples, as a plan of it has; unchanged where no step differs from another."""
    samples = StepSamples(job, one.problem)
    if one.extrapolated_s is not None or one.mean_s is not None or not samples.differ:
        return one
    return replace(one, mean_s=samples.spread(one.schedule, one.overhead_s).mean_s)


def choose_robustly(job: Job, best: Evaluated) -> Evaluated:
    """`best` with the order of the least mean step over the samples, of those made for it and of those made for late
    messages; unchanged where no step differs from another, or where the job names the order."""
    samples = StepSamples(job, best.problem)
    if not samples.differ or job.schedule not in (None, AUTO):
        return best
    least_s, chosen = math.inf, best.schedule
    for schedule in _orders(best, samples):
        found_s = samples.spread(schedule, best.overhead_s).mean_s
        if found_s < least_s * (1 - ROUNDING):
            least_s, chosen = found_s, schedule
    check(best.problem, chosen)
    return replace(best, schedule=chosen, timeline=simulate(best.problem, chosen, checked=True))


def _orders(best: Evaluated, samples: StepSamples) -> list[Schedule]:
    """Different orders that fit memory, at most MAX_ORDERS."""
    found = {best.schedule.codes.tobytes(): best.schedule}
    for problem in (late_problem(samples), best.problem):
        fitting = [
            replace(best, problem=problem, schedule=outcome.schedule, timeline=timeline)
            for outcome in try_orders(problem)
            if outcome.schedule is not None and (timeline := outcome.timeline(problem)) is not None
        ]
        for one in [*map(improve_order, fitting[:1]), *fitting[: MAX_ORDERS // 2 - 1]]:
            found.setdefault(one.schedule.codes.tobytes(), one.schedule)
    return list(found.values())[:MAX_ORDERS]


def late_problem(samples: StepSamples) -> Problem:
    """The step with every message between sites as late as nine of ten are, and as long on its link."""
    occupies_s, arrives_after_s = samples.message_quantiles(0.9)
    return retimed(samples.problem, occupies_s, arrives_after_s)


def predict(
    job: Job, problem: Problem, schedule: Schedule, timeline: Timeline, overhead_s: float, num_tokens: int | None = None
) -> Prediction:
    """Prediction from a simulated step of `num_tokens` (None: as many as sequences of one length have)."""
    samples = StepSamples(job, problem)
    spread = samples.spread(schedule, overhead_s) if samples.differ else None
    between_s = timeline.makespan_s if problem.barrier else period_s(problem, schedule)
    step_s = between_s + overhead_s if spread is None else spread.mean_s
    inter_site_s, intra_site_s = timeline.exposed_s.mean(axis=0)
    return Prediction(
        step_s=step_s,
        makespan_s=timeline.makespan_s,
        period_s=None if problem.barrier else between_s,
        overhead_s=overhead_s,
        bubble_ratio=timeline.bubble_ratio,
        tokens_per_s=(num_tokens or job.training.tokens_per_step) / step_s,
        exposed_inter_site_s=float(inter_site_s),
        exposed_intra_site_s=float(intra_site_s),
        peak_memory_bytes=tuple(peak_memory_bytes(problem, schedule)),
        link_bytes=link_bytes(problem, timeline),
        spread=spread,
    )


def predicted(job: Job, found: Evaluated) -> Prediction:
    """Prediction of an evaluated candidate."""
    return predict(job, found.problem, found.schedule, found.timeline, found.overhead_s)
