"""Looped breadth-first: all microbatches through a stage of a rank before its next (Lamy-Poirier, arXiv 2211.05953)."""

from farpipe.core.errors import InputError
from farpipe.core.schedule.library.gpipe import gpipe
from farpipe.core.schedule.library.placement import require_round_robin
from farpipe.core.step import Problem, Schedule


def breadth_first(problem: Problem) -> Schedule:
    """GPipe's order on stages that are placed round robin, several per rank."""
    require_round_robin(problem, "bfs")
    if problem.num_stages == problem.num_ranks:
        raise InputError("schedule 'bfs' needs several stages on every rank (for one: 'gpipe')")
    return gpipe(problem).renamed("bfs")
