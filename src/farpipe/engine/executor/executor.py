"""Runs one rank's order of actions: takes what an action needs, runs it on its stage, passes on what it made.

The order is the only authority. Which messages are sent and received follows from it and from which rank each
stage is on; sends never wait, so the only waits are for inputs that have not arrived yet.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from farpipe.core.errors import FarpipeError, fault_in
from farpipe.core.step import Action, Schedule, awaited, handed_to
from farpipe.engine.executor.peers import MessageRow, Messenger
from farpipe.engine.executor.staging import HostStamps, Stamps
from farpipe.engine.processes import end_fork_of
from farpipe.engine.stages.stage import PipelineStage
from farpipe.engine.transport import Tag

Direction = Literal["forward", "backward"]

NOBODY: Final = -1
_WORDS: Final = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
"""Actions in words, by their letter."""


class Instruction(NamedTuple):
    """An action with where its input comes from and where its output goes."""

    action: Action
    direction: Direction
    """The direction of its messages."""
    producer: int
    """The stage that makes its input; NOBODY if it needs none."""
    source: int
    """The rank of that stage; NOBODY if there is none."""
    target: int
    """The rank that consumes its output; NOBODY if there is none."""
    waiting_for: str
    """Input in words, for errors."""


def stage_ranks(schedule: Schedule) -> list[int]:
    """Ranks by stage: the one whose order has its actions."""
    ranks = {action.stage: rank for rank, order in enumerate(schedule.ranks) for action in order}
    return [ranks[stage] for stage in range(len(ranks))]


def instructions(schedule: Schedule, rank: int) -> tuple[Instruction, ...]:
    """The order of `rank` with the messages that follow from it."""
    ranks = stage_ranks(schedule)
    return tuple(_instruction(action, ranks) for action in schedule.ranks[rank])


def _instruction(action: Action, ranks: Sequence[int]) -> Instruction:
    """Return the instruction of `action`: inputs and receivers by `core.step`'s rules, here with their ranks."""
    need, target = awaited(action, len(ranks)), handed_to(action, len(ranks))
    what = "activation" if action.kind == "F" else "gradient"
    return Instruction(
        action=action,
        direction="forward" if action.kind == "F" else "backward",
        producer=NOBODY if need is None else need[0],
        source=NOBODY if need is None else ranks[need[0]],
        target=NOBODY if target is None else ranks[target],
        waiting_for="" if need is None else f"the {what} of microbatch {need[2]} from stage {need[0]} for {action}",
    )


def received(program: tuple[Instruction, ...], rank: int) -> list[Instruction]:
    """The instructions whose input comes from another rank, in order: one message each."""
    return [item for item in program if item.source not in (NOBODY, rank)]


class Performed(NamedTuple):
    """A step whose actions have been handed over: stamps of them, messages, and the CPU time of the thread in them."""

    stamps: list[tuple[int, int]]
    messages: list[MessageRow]
    cpu_ns: int


@dataclass(frozen=True)
class StepEvents:
    """Times of events on one rank in one step, in ns of this rank's clock."""

    actions: NDArray[np.int64]
    """[num_actions, 2]: start and end, in the rank's order."""
    messages: NDArray[np.int64]
    """[num_received, 5]: ready, start, end, arrival and bytes, in the order of `received`."""
    cpu_share: float = math.nan
    """Share of the actions' time for which this thread had the CPU."""


def _nothing(step: int, stage: int) -> None:
    """Do nothing."""


class Executor:
    """One rank's part of the pipeline."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, PipelineStage],
        peers: Messenger,
        stage_done: Callable[[int, int], None] = _nothing,
        stage_begins: Callable[[int, int], None] = _nothing,
        stamps: Stamps | None = None,
    ) -> None:
        """`stages`: those of this rank by number; `peers`: the ranks of the pipeline, by their position in it.

        ``stage_begins(step, stage)`` is called before a stage's first action, ``stage_done`` after its last. `stamps`
        None: an action has ended when its call returns.
        """
        self.rank, self.peers, self._stage_done, self._stage_begins = peers.rank, peers, stage_done, stage_begins
        self._stamps = stamps or HostStamps(peers.clock)
        self.program = instructions(schedule, peers.rank)
        last = {item.action.stage: item for item in self.program}
        first = {item.action.stage: item for item in reversed(self.program)}
        parted = {(stage, m) for stage, kind, m in schedule.ranks[self.rank] if kind == "I"}
        self._calls = [
            (item, _call(stages[stage], item.action, in_parts=(stage, microbatch) in parted), *ends)
            for item in self.program
            for stage, _, microbatch in [item.action]
            for ends in [(item is first[stage], item is last[stage])]
        ]
        self._local: dict[tuple[Direction, int, int], Tensor] = {}
        self._process = os.getpid()

    def run(self, step: int) -> StepEvents:
        """Run the whole order once: `perform` and `timed`."""
        return self.timed(self.perform(step))

    def perform(self, step: int) -> Performed:
        """Run the whole order once; RunError names the action at which it broke, and so does a note on other errors.

        On a GPU its actions may still be computed when this returns.
        """
        actions: list[tuple[int, int]] = []
        cpu_ns = 0
        messages: list[MessageRow] = []
        # Nothing is decided here. An action starts when its input has arrived, even if a later action of the order is
        # ready first: every rank has proved the same order free of deadlock, and the prediction plays exactly this
        # order. Overtaking would gain a little on a late message, and lose the bound on memory and the comparison of
        # predicted and measured times.
        stamp = self._stamps.take
        for item, call, is_first, is_last in self._calls:
            x = self._input(item, step, messages)
            if is_first:
                self._stage_begins(step, item.action.stage)
            cpu_ns -= time.thread_time_ns()
            start = stamp()
            try:
                y = call(x)
            except FarpipeError as error:
                end_fork_of(self._process, error)
                raise type(error)(f"rank {self.rank}: {item.action}: {error}") from None
            except BaseException as error:
                end_fork_of(self._process, error)
                error.add_note(_where(item.action, error))
                raise
            end_fork_of(self._process)
            actions.append((start, stamp()))
            cpu_ns += time.thread_time_ns()
            if item.target != NOBODY:
                self._pass_on(item, step, y)
            if is_last:
                self._stage_done(step, item.action.stage)
        return Performed(actions, messages, cpu_ns)

    def timed(self, performed: Performed) -> StepEvents:
        """The times of a step's actions; waits until a GPU has computed them. At most one step is waiting for this."""
        stamps = self._stamps.in_ns(np.array(performed.stamps, np.int64).reshape(-1, 2))
        wall_ns = int(stamps[:, 1].sum() - stamps[:, 0].sum())
        share = min(1.0, performed.cpu_ns / wall_ns) if wall_ns else math.nan
        return StepEvents(stamps, message_table(performed.messages), share)

    def _input(self, item: Instruction, step: int, messages: list[MessageRow]) -> Tensor | None:
        if item.source == NOBODY:
            return None
        microbatch = item.action.microbatch
        if item.source == self.rank:
            return self._local.pop((item.direction, item.producer, microbatch))
        tag = Tag(step, item.producer, microbatch)
        message = self.peers.receive(item.source, item.direction, tag, waiting_for=item.waiting_for)
        messages.append(message.row)
        return message.tensor

    def _pass_on(self, item: Instruction, step: int, y: Tensor | None) -> None:
        assert y is not None, f"{item.action} made nothing"
        stage, _, microbatch = item.action
        if item.target == self.rank:
            self._local[item.direction, stage, microbatch] = y
        else:
            self.peers.send(item.target, item.direction, Tag(step, stage, microbatch), y)


def _where(action: Action, error: BaseException) -> str:
    """The action in which the user's module broke, and the error with its place, in words."""
    what = f"the {_WORDS[action.kind]} of microbatch {action.microbatch} on stage {action.stage} ({action})"
    return f"{what}: {fault_in(error)}"


def _call(stage: PipelineStage, action: Action, *, in_parts: bool) -> Callable[[Tensor | None], Tensor | None]:
    """The action as a function of its input; `in_parts`: the backward of its microbatch comes as I and W."""
    microbatch = action.microbatch
    if action.kind == "F":
        return lambda x: stage.forward(microbatch, x, in_parts=in_parts)
    if action.kind == "I":
        return lambda gy: stage.input_grad(microbatch, gy)
    if action.kind == "B":
        return lambda gy: stage.backward(microbatch, gy)
    return lambda _: stage.weight_grad(microbatch)


def message_table(rows: Sequence[MessageRow]) -> NDArray[np.int64]:
    """Rows of messages as an array [num_messages, 5]."""
    return np.array(rows, np.int64).reshape(-1, 5)
