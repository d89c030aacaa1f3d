"""GPipe: every forward, then every backward (Huang et al., arXiv 1811.06965)."""

from farpipe.core.schedule.library.chained import chained
from farpipe.core.step import Action, Problem, Schedule


def gpipe(problem: Problem) -> Schedule:
    """All forwards of a rank, its stages ascending, then all backwards, its stages descending."""
    microbatches = range(problem.num_microbatches)
    ranks = tuple(
        tuple(Action(stage, "F", j) for stage in stages for j in microbatches)
        + tuple(Action(stage, "B", j) for stage in reversed(stages) for j in microbatches)
        for stages in problem.stages_of_rank
    )
    return chained(problem, Schedule(problem.num_microbatches, ranks, "gpipe"))
