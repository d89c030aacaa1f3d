"""A Problem as flat arrays: what the compiled player reads besides the codes of a Schedule."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.core.step.codes import BACKWARD, FORWARD
from farpipe.core.step.messages import FREE, NOTHING, Collectives, Messages, StepTraffic
from farpipe.core.step.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Played = tuple[Floats, Floats, Floats, Floats]
"""Times that a play finds: starts of actions [A], of messages and their arrivals [2SM], of collectives [C]."""


class Tables(NamedTuple):
    """Flat arrays of one step that compiled loops read.

    Figures of actions and messages have one row per stage with `width` entries: one per microbatch, or a single one
    where all microbatches are identical, so that the tables of a long step stay in the cache (`figure_place`).
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
    """[S]: see `farpipe.core.step.StepTraffic`."""
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

    def new_out(self, num_actions: int) -> Played:
        """New arrays for what a play finds; messages that are not sent start at zero."""
        num_messages = self.messages.link.size
        starts, arrivals = np.zeros(num_messages), np.empty(num_messages)
        return np.empty(num_actions), starts, arrivals, np.empty(self.collectives.link.size)


def step_arrays(problem: Problem) -> StepArrays:
    """The arrays of `problem`, kept with it."""
    return problem.kept(_step_arrays)


def _step_arrays(problem: Problem) -> StepArrays:
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
        shared=_shared(rank_of_stage, messages.link, collectives, duration_s, (len(problem.links), problem.num_ranks)),
        num_ranks=problem.num_ranks,
    )


def free_links(
    forward_s: Floats, backward_s: Floats, there_s: Floats, back_s: Floats, traffic: StepTraffic
) -> StepArrays:
    """The arrays of one stage per rank, joined backwards [S, M], and hops [S - 1] on which no message waits.

    For estimates of many steps without a Problem of each; `there_s` and `back_s` are from a producer's end to the
    arrival. `traffic`: of a Problem with the same collectives.
    """
    num_stages, num_microbatches = forward_s.shape
    link = np.full((2, num_stages, num_microbatches), FREE, np.int32)
    link[FORWARD, -1] = link[BACKWARD, 0] = NOTHING
    arrives_after_s, nothing = np.zeros(link.shape), np.zeros(link.shape)
    arrives_after_s[FORWARD, :-1], arrives_after_s[BACKWARD, 1:] = there_s[:, None], back_s[:, None]
    duration_s = np.stack([forward_s, backward_s, nothing[0], backward_s])
    rank_of_stage = np.arange(num_stages, dtype=np.int32)
    shape = len(traffic.copies), num_stages
    return StepArrays(
        duration_s=duration_s,
        rank_of_stage=rank_of_stage,
        messages=Messages(link, nothing, arrives_after_s, nothing, arrives_after_s),
        collectives=traffic.collectives,
        opens_s=traffic.opens_s,
        shared=_shared(rank_of_stage, link, traffic.collectives, duration_s, shape),
        num_ranks=num_stages,
    )


def _shared(
    rank_of_stage: Ints, link: Ints, collectives: Collectives, duration_s: Floats, shape: tuple[int, int]
) -> NDArray[np.bool_]:
    """Links that several ranks feed, and those of stages with empty actions, whose messages can be ready together.

    `shape`: numbers of links and of ranks.
    """
    feeds, has_empty = np.zeros(shape, np.bool_), (duration_s == 0).any(axis=(0, 2))
    shared = np.zeros(shape[0], np.bool_)
    stages = np.broadcast_to(np.arange(rank_of_stage.size)[:, None], link.shape)
    for links, senders in ((link, stages), (collectives.link, collectives.stage)):
        used, stage = links[links >= 0], senders[links >= 0]
        feeds[used, rank_of_stage[stage]] = True
        shared[used[has_empty[stage]]] = True
    return np.asarray(shared | (feeds.sum(axis=1) > 1))
