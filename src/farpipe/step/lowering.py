"""A Problem as flat arrays: what the compiled player reads besides the codes of a Schedule."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.step.messages import Collectives, Messages
from farpipe.step.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


class Tables(NamedTuple):
    """Flat arrays of one step that compiled loops read.

    Figures of actions and messages have one row per stage with `width` entries: one per microbatch, or a single one
    where all microbatches are alike, so that the tables of a long step stay in the cache (`figure_place`).
    """

    shape: tuple[int, int]
    """Numbers of stages S and of microbatches M."""
    width: int
    """Figures per stage: M, or 1 where all microbatches have the same ones."""
    duration_s: Floats
    """[4 S width] by kind."""
    rank_of_stage: Ints
    """[S]"""
    link: Ints
    """[2 S width] by direction, as the next two: see `Messages`."""
    occupies_s: Floats
    arrives_after_s: Floats
    collective_link: Ints
    """[C], as the next two: see `Collectives`."""
    collective_occupies_s: Floats
    collective_arrives_after_s: Floats
    collective_begin: NDArray[np.int64]
    """[S + 1]: the collectives that wait for the last backward of stage s are at `[s]` to `[s + 1]`."""
    shared: NDArray[np.bool_]
    """[L]: whether messages may become ready out of the order in which one rank makes them."""
    opens_s: Floats
    """[S], as the next two: see `Opening`."""
    link_opens_s: Floats
    """[L]"""
    gather_s: Floats
    """[number of gathers]"""


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

    @cached_property
    def tables(self) -> Tables:
        """The arrays that compiled loops read, flat."""
        rows: tuple[NDArray[Any], ...] = (self.duration_s, *self.messages.figures)
        _, num_stages, num_microbatches = self.duration_s.shape
        width = 1 if all(bool((row == row[..., :1]).all()) for row in rows) else num_microbatches
        duration_s, *messages = [row[..., :width].ravel() for row in rows]
        collectives = (*self.collectives.figures, self.collectives.begin)
        opening = self.collectives.opening(self.opens_s, self.shared.size)
        others: tuple[Any, ...] = (self.rank_of_stage, *messages, *collectives, self.shared, *opening)
        return Tables((num_stages, num_microbatches), width, duration_s, *others)


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
