"""1F1B: after a warm-up that fills the pipeline, one forward and one backward in turn (PipeDream-Flush, 2006.09503)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from farpipe.core.schedule.library.chained import chained
from farpipe.core.schedule.library.placement import require_one_stage_per_rank
from farpipe.core.step import Problem, Schedule
from farpipe.core.step.codes import B, F, encode


def one_f_one_b(problem: Problem) -> Schedule:
    """1F1B with the fewest warm-up forwards: p - 1 - i on stage i."""
    require_one_stage_per_rank(problem, "1f1b")
    last = problem.num_stages - 1
    return with_warm_up(problem, [last - stage for stage in range(problem.num_stages)], "1f1b")


def with_warm_up(problem: Problem, warm_up: Sequence[int], method: str) -> Schedule:
    """1F1B in which stage i begins with ``warm_up[i]`` forwards; these must not grow downstream."""
    count = problem.num_microbatches
    stage_of = {spec.rank: stage for stage, spec in enumerate(problem.stages)}
    stages = [stage_of.get(rank) for rank in range(problem.num_ranks)]
    orders = [_stage_codes(s, count, min(warm_up[s], count)) for s in stages if s is not None]
    begin = np.cumsum([0, *(0 if stage is None else 2 * count for stage in stages)])
    return chained(problem, Schedule.from_codes(count, np.concatenate(orders), begin, method))


def _stage_codes(stage: int, num_microbatches: int, ahead: int) -> NDArray[np.int64]:
    """Codes of a stage: `ahead` forwards, a forward and a backward in turn, the backwards that are left."""
    slots = stage * num_microbatches + np.arange(num_microbatches)
    forwards, backwards = encode(F, slots), encode(B, slots)
    joined = np.stack([forwards[ahead:], backwards[: num_microbatches - ahead]], axis=1)
    return np.concatenate([forwards[:ahead], joined.reshape(-1), backwards[num_microbatches - ahead :]])
