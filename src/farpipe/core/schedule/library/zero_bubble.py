"""ZB-H1 and ZB-H2: 1F1B with split backwards and W put off (Qi et al., arXiv 2401.10241).

Bubble of the longest rank and peak activations, for F, I, W the times of a stage: (p - 1)(F + I - W) and those of
1F1B's first rank, p, for ZB-H1; (p - 1)(F + I - 2W) and 2p - 1 for ZB-H2. Both where W is no longer
than F and I, and with enough microbatches: p for ZB-H1, 2p - 1 for ZB-H2.
"""

import numpy as np
from numpy.typing import NDArray

from farpipe.core.schedule.library.chained import chained
from farpipe.core.schedule.library.placement import require_one_stage_per_rank
from farpipe.core.step import Problem, Schedule
from farpipe.core.step.codes import F, I, W, encode


def zb_h1(problem: Problem) -> Schedule:
    """Stage i does p - 1 - i forwards ahead and puts each W off by i microbatches."""
    require_one_stage_per_rank(problem, "zb-h1")
    return _handcrafted(problem, 1, "zb-h1")


def zb_h2(problem: Problem) -> Schedule:
    """Stage i does 2(p - 1 - i) forwards ahead and puts each W off by 2i microbatches."""
    require_one_stage_per_rank(problem, "zb-h2")
    return _handcrafted(problem, 2, "zb-h2")


def _handcrafted(problem: Problem, factor: int, method: str) -> Schedule:
    count, last = problem.num_microbatches, problem.num_stages - 1
    stages = [mine[0] for mine in problem.stages_of_rank]
    codes = [_stage_codes(stage, factor * (last - stage), factor * stage, count) for stage in stages]
    begin = 3 * count * np.arange(problem.num_ranks + 1)
    return chained(problem, Schedule.from_codes(count, np.concatenate(codes), begin, method))


def _stage_codes(stage: int, ahead: int, put_off: int, num_microbatches: int) -> NDArray[np.int64]:
    """Codes of rounds: an F, the I that is `ahead` microbatches behind it, the W that is `put_off` behind that."""
    microbatches, kinds = np.arange(num_microbatches), np.array([F, I, W])
    rounds = microbatches[:, None] + [0, ahead, ahead + put_off]
    codes = encode(kinds, (stage * num_microbatches + microbatches)[:, None])
    return np.asarray(codes.ravel()[np.argsort((3 * rounds + kinds).ravel())])
