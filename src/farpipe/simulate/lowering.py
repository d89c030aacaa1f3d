"""A Problem as flat arrays: what the compiled kernel reads besides the codes of a Schedule."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farpipe.simulate.timeline import MESSAGE_KINDS
from farpipe.step import Messages, Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

_, _, GATHER, REDUCE = range(len(MESSAGE_KINDS))


@dataclass(frozen=True)
class StepArrays:
    """A Problem as arrays; first axes: kind (of action or message), stage, microbatch."""

    duration_s: Floats
    """[4, S, M] by place in KINDS."""
    rank_of_stage: Ints
    """[S]"""
    messages: Messages
    """[2, S, M]: what stage s sends forward or backward."""
    collectives: Messages
    """[2, S]: the gather and the reduce of a stage."""
    opens_s: Floats
    """[S]: see `farpipe.step.Traffic`."""
    shared: NDArray[np.bool_]
    """[L]: whether messages may become ready out of the order in which one rank makes them."""
    num_ranks: int

    @property
    def tables(self) -> tuple[Any, ...]:
        """What the kernel reads, flat."""
        shape, flat = self.messages.link.shape[1:], (self.duration_s, self.rank_of_stage, *self.messages.figures)
        return (shape, *(a.reshape(-1) for a in flat), *self.collectives.figures, self.shared, self.opens_s)


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
        shared=_shared(rank_of_stage, messages.link, collectives.link, duration_s, len(problem.links)),
        num_ranks=problem.num_ranks,
    )


def _shared(rank_of_stage: Ints, link: Ints, sync_link: Ints, duration_s: Floats, num_links: int) -> NDArray[np.bool_]:
    """Links that several ranks feed, and those of stages with empty actions, whose messages can be ready together."""
    feeders: list[set[int]] = [set() for _ in range(num_links)]
    shared = np.zeros(num_links, np.bool_)
    for stage, rank in enumerate(rank_of_stage):
        used = np.unique(np.concatenate([link[:, stage].ravel(), sync_link[:, stage]]))
        for name in used[used >= 0]:
            feeders[name].add(int(rank))
            shared[name] |= not duration_s[:, stage].all()
    return shared | np.array([len(ranks) > 1 for ranks in feeders], np.bool_)
