"""One microbatch after the other: the order that fits memory wherever any does."""

import numpy as np

from farpipe.step import Action, Problem, Schedule


def one_by_one(problem: Problem) -> Schedule:
    """One sequence after the other, its backwards one stage after the other."""
    first = problem.chains.first
    sequences = [np.flatnonzero(first == j).tolist() for j in np.unique(first)]

    def rank_order(stages: tuple[int, ...], slices: list[int]) -> list[Action]:
        forwards = [Action(stage, "F", j) for j in slices for stage in stages]
        return forwards + [Action(stage, "B", j) for stage in reversed(stages) for j in reversed(slices)]

    ranks = (
        tuple(action for slices in sequences for action in rank_order(stages, slices))
        for stages in problem.stages_of_rank
    )
    return Schedule(problem.num_microbatches, tuple(ranks), "one by one")
