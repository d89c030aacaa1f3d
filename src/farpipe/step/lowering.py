"""A Problem as flat arrays: what the compiled player reads besides the codes of a Schedule."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farpipe.step.messages import Collectives, Messages
from farpipe.step.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class StepArrays:
    """A Problem as arrays; first axes: kind (of action or message), stage, microbatch."""

    duration_s: Floats
    """[4, S, M] by place in KINDS."""
    rank_of_stage: Ints
    """[S]"""
    messages: Messages
    """[2, S, M]: what stage s sends forward or backward."""
    collectives: Collectives
    """[C]"""
    opens_s: Floats
    """[S]: see `farpipe.step.Traffic`."""
    shared: NDArray[np.bool_]
    """[L]: whether messages may become ready out of the order in which one rank makes them."""
    num_ranks: int

    @property
    def tables(self) -> tuple[Any, ...]:
        """The arrays that the player reads, flat."""
        shape, flat = self.messages.link.shape[1:], (self.duration_s, self.rank_of_stage, *self.messages.figures)
        opening = self.collectives.opening(self.opens_s, self.shared.size)
        collectives = (*self.collectives.figures, self.collectives.begin)
        return (shape, *(a.reshape(-1) for a in flat), *collectives, self.shared, *opening)


def lower(problem: Problem) -> StepArrays:
    """The arrays of `problem`."""
    forward, input_grad, weight_grad = map(problem.table, ("forward_s", "input_grad_s", "weight_grad_s"))
    messages, collectives = problem.traffic.messages, problem.traffic.collectives
    duration_s = np.stack([forward, input_grad, weight_grad, input_grad + weight_grad])
    rank_of_stage = np.array([stage.rank for stage in problem.stages], np.int32)
    return StepArrays(
        duration_s=duration_s,
        rank_of_stage=rank_of_stage,
        messages=messages,
        collectives=collectives,
        opens_s=problem.traffic.opens_s,
        shared=_shared(rank_of_stage, messages.link, collectives, duration_s, len(problem.links)),
        num_ranks=problem.num_ranks,
    )


def _shared(
    rank_of_stage: Ints, link: Ints, collectives: Collectives, duration_s: Floats, num_links: int
) -> NDArray[np.bool_]:
    """Links that several ranks feed, and those of stages with empty actions, whose messages can be ready together."""
    feeders: list[set[int]] = [set() for _ in range(num_links)]
    shared = np.zeros(num_links, np.bool_)
    for stage, rank in enumerate(rank_of_stage):
        used = np.unique(np.concatenate([link[:, stage].ravel(), collectives.link[collectives.stage == stage]]))
        for name in used[used >= 0]:
            feeders[name].add(int(rank))
            shared[name] |= not duration_s[:, stage].all()
    return shared | np.array([len(ranks) > 1 for ranks in feeders], np.bool_)
