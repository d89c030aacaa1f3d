"""Better recomputation for a plan that is good already, stage by stage, with the simulator as the judge."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from farpipe.cost import JobCosts, Placement, StageCost, step_cost
from farpipe.plan.evaluate import Evaluated, finish, staggered_like
from farpipe.plan.orders import try_quickly
from farpipe.plan.stage_modes import StageModes
from farpipe.schedule import peak_memory_bytes
from farpipe.schedule.bounds import lower_bound_s
from farpipe.schedule.check import exceeds
from farpipe.spec import Job, Recompute

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
        best = _with_less(best, index, job, costs)
        best = _with_more(best, index, job, costs)
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
    stages, limit_s = list(best.problem.stages), best.step_s * (1 - 1e-9) - best.overhead_s
    fastest = _cost(best, index, modes[0], costs)
    best_times = {name: getattr(fastest, name) for name in ("forward_s", "input_grad_s", "weight_grad_s")}
    fewest = {"activation_bytes": min(_cost(best, index, mode, costs).activation_bytes for mode in modes)}
    stages[index] = stages[index].model_copy(update=best_times | fewest)
    problem = best.problem.model_copy(update={"stages": tuple(stages)})
    if best.candidate.layout.num_microbatches * fastest.seconds >= limit_s or lower_bound_s(problem) >= limit_s:
        return False
    found = try_quickly(best.schedule.method, problem, limit_s)
    return found.timeline is not None and found.timeline.makespan_s < limit_s


def _tried(best: Evaluated, index: int, mode: Recompute, job: Job, costs: JobCosts) -> Iterator[Evaluated]:
    """`best` with stage `index` in another mode, if that is faster."""
    other = replace(best.placements[index], recompute=mode)
    placements = (*best.placements[:index], other, *best.placements[index + 1 :])
    if not _is_faster(best, index, placements, costs):
        return
    step = staggered_like(best, step_cost(costs, best.candidate.layout, placements, job.cluster))
    if lower_bound_s(step.problem) + step.overhead_s >= best.step_s:
        return
    found = try_quickly(best.schedule.method, step.problem, best.step_s - step.overhead_s)
    if found.timeline is not None and found.timeline.makespan_s + step.overhead_s < best.step_s * (1 - 1e-9):
        yield finish(best.candidate, placements, step, best.schedule.method)


def _is_faster(best: Evaluated, index: int, placements: tuple[Placement, ...], costs: JobCosts) -> bool:
    """False where the work of the changed stage's rank alone takes as long as the step does now."""
    at, ranks = best.candidate.layout, best.candidate.ranks
    site, last = best.candidate.sites[ranks[index]], at.num_stages - 1
    mine = [(stage, placements[stage]) for stage in range(at.num_stages) if ranks[stage] == ranks[index]]
    work_s = sum(
        costs.stage(at, site, p.num_layers, p.recompute, embedding=s == 0, head=s == last).seconds for s, p in mine
    )
    return at.num_microbatches * work_s + best.overhead_s < best.step_s


def _cost(best: Evaluated, index: int, mode: Recompute, costs: JobCosts) -> StageCost:
    """Costs of stage `index` in `mode`."""
    at, candidate = best.placements[index], best.candidate
    ends = {"embedding": index == 0, "head": index == candidate.layout.num_stages - 1}
    return costs.stage(candidate.layout, candidate.sites[at.rank], at.num_layers, mode, **ends)
