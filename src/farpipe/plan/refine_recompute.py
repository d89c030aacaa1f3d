"""Better recomputation for a plan that is good already, stage by stage, with the simulator as the judge."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from farpipe.cost import JobCosts, Placement, step_cost
from farpipe.plan.evaluate import Evaluated, finish, staggered_like
from farpipe.plan.orders import try_quickly
from farpipe.plan.stage_modes import open_modes
from farpipe.schedule.bounds import lower_bound_s
from farpipe.spec import Job

MAX_ACTIONS: Final = 20_000


def refine_recomputation(job: Job, best: Evaluated, costs: JobCosts) -> Evaluated:
    """`best`, or the same with other recomputation where that is faster.

    One stage at a time recomputes in another mode, as long as that helps: less, where memory has room for it, or more,
    so that more microbatches can be under way. What a lower bound rules out is not simulated; steps of more than
    MAX_ACTIONS are left as they are.
    """
    if 3 * best.problem.num_stages * best.problem.num_microbatches > MAX_ACTIONS:
        return best
    for index in range(len(best.placements)):
        for placements in _changed(best, index, costs):
            if not _is_faster(best, index, placements, costs):
                continue
            step = staggered_like(best, step_cost(costs, best.candidate.layout, placements, job.cluster))
            if lower_bound_s(step.problem) + step.overhead_s >= best.step_s:
                continue
            found = try_quickly(best.schedule.method, step.problem, best.step_s - step.overhead_s)
            if found.timeline is not None and found.timeline.makespan_s + step.overhead_s < best.step_s * (1 - 1e-9):
                best = finish(best.candidate, placements, step, best.schedule.method)
    return best


def _is_faster(best: Evaluated, index: int, placements: tuple[Placement, ...], costs: JobCosts) -> bool:
    """False where the work of the changed stage's rank alone takes as long as the step does now."""
    at, ranks = best.candidate.layout, best.candidate.ranks
    site, last = best.candidate.sites[ranks[index]], at.num_stages - 1
    mine = [(stage, placements[stage]) for stage in range(at.num_stages) if ranks[stage] == ranks[index]]
    work_s = sum(
        costs.stage(at, site, p.num_layers, p.recompute, embedding=s == 0, head=s == last).seconds for s, p in mine
    )
    return at.num_microbatches * work_s + best.overhead_s < best.step_s


def _changed(best: Evaluated, index: int, costs: JobCosts) -> Iterator[tuple[Placement, ...]]:
    before = best.placements[index]
    for mode in open_modes(costs, best.candidate.sites):
        if mode != before.recompute and before.num_layers:
            other = replace(before, recompute=mode)
            yield (*best.placements[:index], other, *best.placements[index + 1 :])
