"""Interleaved 1F1B: several stages per rank, round robin (Narayanan et al., SC 2021, arXiv 2104.04473)."""

from farpipe.core.errors import InputError
from farpipe.core.schedule.library.chained import chained
from farpipe.core.schedule.library.one_f_one_b import one_f_one_b
from farpipe.core.schedule.library.placement import require_round_robin
from farpipe.core.step import Action, Problem, RankOrder, Schedule


def interleaved(problem: Problem) -> Schedule:
    """Microbatches go in groups of p through every stage of a rank; warm-up is 2(p - 1 - r) + (v - 1)p forwards.

    Defined for v stages per rank placed round robin and a number of microbatches that p divides. With one stage per
    rank it is 1F1B, of any number of microbatches, so that its name covers all that Megatron-LM runs.
    """
    if problem.num_stages == problem.num_ranks:
        return one_f_one_b(problem)
    ring = require_round_robin(problem, "interleaved")
    num_ranks, num_microbatches = problem.num_ranks, problem.num_microbatches
    if num_microbatches % num_ranks:
        raise InputError(
            f"schedule 'interleaved' needs a number of microbatches that {num_ranks} ranks divide, found "
            f"{num_microbatches}"
        )
    orders: list[RankOrder] = [()] * num_ranks
    for position, rank in enumerate(ring):
        orders[rank] = _rank_order(position, problem.stages_of_rank[rank], num_ranks, num_microbatches)
    return chained(problem, Schedule(num_microbatches, tuple(orders), "interleaved"))


def _rank_order(position: int, stages: tuple[int, ...], num_ranks: int, num_microbatches: int) -> RankOrder:
    groups = range(0, num_microbatches, num_ranks)
    forward = [Action(s, "F", g + j) for g in groups for s in stages for j in range(num_ranks)]
    backward = [Action(s, "B", g + j) for g in groups for s in reversed(stages) for j in range(num_ranks)]
    ahead = min(2 * (num_ranks - 1 - position) + (len(stages) - 1) * num_ranks, len(forward))
    steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return tuple(forward[:ahead] + steady + backward[len(forward) - ahead :])
