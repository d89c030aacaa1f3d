"""ZB-H1 and ZB-H2: 1F1B with split backwards and W put off (Qi et al., arXiv 2401.10241).

Bubble of the longest rank and peak activations, for F, I, W the times of a stage: (p - 1)(F + I - W) and those of
1F1B's first rank, p, for ZB-H1; (p - 1)(F + I - 2W) and 2p - 1 for ZB-H2. Both where W is no longer
than F and I, and with enough microbatches: p for ZB-H1, 2p - 1 for ZB-H2.
"""

from farpipe.schedule.library.chained import chained
from farpipe.schedule.library.placement import require_one_stage_per_rank
from farpipe.step import Action, Kind, Problem, RankOrder, Schedule


def zb_h1(problem: Problem) -> Schedule:
    """Stage i does p - 1 - i forwards ahead and puts each W off by i microbatches."""
    require_one_stage_per_rank(problem, "zb-h1")
    return _handcrafted(problem, 1, "zb-h1")


def zb_h2(problem: Problem) -> Schedule:
    """Stage i does 2(p - 1 - i) forwards ahead and puts each W off by 2i microbatches."""
    require_one_stage_per_rank(problem, "zb-h2")
    return _handcrafted(problem, 2, "zb-h2")


def _handcrafted(problem: Problem, factor: int, method: str) -> Schedule:
    orders: list[RankOrder] = [()] * problem.num_ranks
    last = problem.num_stages - 1
    for stage, spec in enumerate(problem.stages):
        ahead, put_off = factor * (last - stage), factor * stage
        orders[spec.rank] = _stage_order(stage, ahead, put_off, problem.num_microbatches)
    return chained(problem, Schedule(problem.num_microbatches, tuple(orders), method))


def _stage_order(stage: int, ahead: int, put_off: int, num_microbatches: int) -> RankOrder:
    """In every round one F, the I that is `ahead` microbatches behind it, the W that is `put_off` behind that."""
    order = []
    behind: tuple[tuple[Kind, int], ...] = (("F", 0), ("I", ahead), ("W", ahead + put_off))
    for turn in range(num_microbatches + ahead + put_off):
        for kind, late in behind:
            microbatch = turn - late
            if 0 <= microbatch < num_microbatches:
                order.append(Action(stage, kind, microbatch))
    return tuple(order)
