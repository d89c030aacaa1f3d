"""1F1B: after a warm-up that fills the pipeline, one forward and one backward in turn (PipeDream-Flush, 2006.09503)."""

from collections.abc import Sequence

from farpipe.schedule.library.chained import chained
from farpipe.schedule.library.placement import require_one_stage_per_rank
from farpipe.step import Action, Problem, RankOrder, Schedule


def one_f_one_b(problem: Problem) -> Schedule:
    """1F1B with the fewest warm-up forwards: p - 1 - i on stage i."""
    require_one_stage_per_rank(problem, "1f1b")
    last = problem.num_stages - 1
    return with_warm_up(problem, [last - stage for stage in range(problem.num_stages)], "1f1b")


def with_warm_up(problem: Problem, warm_up: Sequence[int], method: str) -> Schedule:
    """1F1B in which stage i begins with ``warm_up[i]`` forwards; these must not grow downstream."""
    orders: list[RankOrder] = [()] * problem.num_ranks
    for stage, spec in enumerate(problem.stages):
        orders[spec.rank] = _stage_order(stage, warm_up[stage], problem.num_microbatches)
    return chained(problem, Schedule(problem.num_microbatches, tuple(orders), method))


def _stage_order(stage: int, warm_up: int, num_microbatches: int) -> RankOrder:
    ahead = min(warm_up, num_microbatches)
    order = [Action(stage, "F", j) for j in range(ahead)]
    for j in range(num_microbatches - ahead):
        order += [Action(stage, "F", ahead + j), Action(stage, "B", j)]
    return tuple(order + [Action(stage, "B", j) for j in range(num_microbatches - ahead, num_microbatches)])
