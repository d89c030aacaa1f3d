"""What happened in one step: every rank's report of it, and the measured Timeline that they add up to."""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from farpipe.problem import Problem
from farpipe.runtime.executor import StepEvents, lower, received
from farpipe.runtime.run_spec import Ends
from farpipe.schedule import KINDS, Schedule
from farpipe.simulate.timeline import ACTION_DTYPE, MESSAGE_DTYPE, MESSAGE_KINDS, Timeline

_HEADER: Final = struct.Struct("<qqqddqq")


@dataclass(frozen=True)
class StepReport:
    """One rank's account of one step; stamps are its own clock's."""

    step: int
    begin_ns: int
    end_ns: int
    loss: float
    """NaN on ranks without the last stage."""
    grad_norm: float
    events: StepEvents
    sync: NDArray[np.int64]
    """[0 or 1, 5]: the tied weights' gradient that this rank received, as a row of `events.messages`."""

    def pack(self) -> bytes:
        """As bytes, for the way to rank 0."""
        actions, messages = self.events.actions, self.events.messages
        head = (self.step, self.begin_ns, self.end_ns, self.loss, self.grad_norm, len(actions), len(messages))
        return _HEADER.pack(*head) + actions.tobytes() + messages.tobytes() + self.sync.tobytes()

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """The inverse of `pack`."""
        step, begin_ns, end_ns, loss, grad_norm, num_actions, num_messages = _HEADER.unpack_from(payload)
        stamps = np.frombuffer(payload, np.int64, offset=_HEADER.size)
        actions, rest = stamps[: 2 * num_actions].reshape(-1, 2), stamps[2 * num_actions :].reshape(-1, 5)
        events = StepEvents(actions, rest[:num_messages])
        return cls(step, begin_ns, end_ns, loss, grad_norm, events, rest[num_messages:])


class Assembler:
    """Turns the reports of all ranks on one step into its Timeline."""

    def __init__(self, problem: Problem, schedule: Schedule, ends: Ends | None = None) -> None:
        """`ends`: between which ranks the gradient of tied weights is exchanged, if it is."""
        self.problem = problem
        orders = schedule.ranks
        actions = [(rank, a.stage, KINDS.index(a.kind), a.microbatch, 0, 0) for rank, o in enumerate(orders) for a in o]
        self._actions = np.array(actions, ACTION_DTYPE)
        rows, routes = [], []
        for rank in range(len(orders)):
            found = [*_message_rows(problem, schedule, rank), *_sync_rows(problem, rank, ends)]
            rows += [row for row, _ in found]
            routes += [(source, rank) for _, source in found]
        self._messages = np.array(rows, MESSAGE_DTYPE)
        self._senders, self._receivers = np.array(routes, np.int64).reshape(-1, 2).T

    def timeline(self, reports: Sequence[StepReport], offsets_ns: Sequence[int]) -> Timeline:
        """`reports` by rank; `offsets_ns` is subtracted from each rank's stamps. Time 0: the first action starts."""
        offsets = np.asarray(offsets_ns, np.int64)
        actions, messages = self._actions.copy(), self._messages.copy()
        stamps = np.concatenate([report.events.actions for report in reports]) - offsets[actions["rank"], None]
        zero = stamps.min() if stamps.size else 0
        actions["start_s"], actions["end_s"] = (stamps - zero).T * 1e-9
        table = np.concatenate([table for report in reports for table in (report.events.messages, report.sync)])
        sent = (table[:, :3] - offsets[self._senders, None] - zero) * 1e-9
        messages["ready_s"], messages["start_s"], messages["end_s"] = sent.T
        messages["arrival_s"] = (table[:, 3] - offsets[self._receivers] - zero) * 1e-9
        messages["bytes"] = table[:, 4]
        return Timeline("measured", self.problem.num_ranks, tuple(self.problem.links), actions, messages)


def _message_rows(problem: Problem, schedule: Schedule, rank: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """The messages that `rank` receives, in order, without their times, and who sends them."""
    places = {name: index for index, name in enumerate(problem.links)}
    for item in received(lower(schedule, rank), rank):
        microbatch = item.action.microbatch
        hop = problem.hops[min(item.producer, item.action.stage)]
        transfer = hop and (hop.forward if item.way == "forward" else hop.backward)
        names = transfer.link if transfer else None
        name = names[microbatch] if isinstance(names, tuple) else names
        link = -1 if name is None else places[name]
        kind = MESSAGE_KINDS.index(item.way)
        yield (link, kind, item.producer, microbatch, item.source, rank, 0, 0, 0, 0, 0), item.source


def _sync_rows(problem: Problem, rank: int, ends: Ends | None) -> Iterator[tuple[tuple[int, ...], int]]:
    """The tied weights' gradient that `rank` receives: in a Timeline it is the reduce of the stage that sends it."""
    if ends is None or rank not in (ends.first_rank, ends.last_rank):
        return
    to_first = rank == ends.first_rank
    source, link = (ends.last_rank, ends.link_back) if to_first else (ends.first_rank, ends.link_there)
    stage = problem.num_stages - 1 if to_first else 0
    place = [*problem.links].index(link) if link in problem.links else -1
    yield (place, MESSAGE_KINDS.index("reduce"), stage, -1, source, source, 0, 0, 0, 0, 0), source


def step_metrics(timeline: Timeline, reports: Sequence[StepReport], tokens: int) -> dict[str, Any]:
    """One line of ``metrics.jsonl``: figures of one step. `step_s` is from its start to the next step's, on rank 0."""
    step_s = (reports[0].end_ns - reports[0].begin_ns) * 1e-9
    losses = [report.loss for report in reports if math.isfinite(report.loss)]
    inter, intra = timeline.exposed_s.T
    return {
        "step": reports[0].step,
        "loss": losses[0] if losses else None,
        "grad_norm": reports[0].grad_norm if losses else None,
        "makespan_s": timeline.makespan_s,
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "bubble": timeline.bubble_ratio,
        "exposed_inter_site_s": float(inter.mean()),
        "exposed_inter_site_max_s": float(inter.max()),
        "exposed_intra_site_s": float(intra.mean()),
        "exposed_intra_site_max_s": float(intra.max()),
        "link_bytes": timeline.link_bytes(),
    }
