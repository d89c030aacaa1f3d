"""Reports of one step: every rank's, the measured Timeline that they add up to, and the events of links.

Actions and messages are reported of all steps, or of every k-th where their records are large. Whole steps are left
out, not parts of one, so that what is there is a Timeline like any other.
"""

import json
import math
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from farpipe.core.simulate.events import OuterArrival
from farpipe.core.simulate.timeline import ACTION_DTYPE, MESSAGE_DTYPE, MESSAGE_KINDS, Timeline
from farpipe.core.step import KINDS, Problem, Schedule
from farpipe.engine.executor.executor import StepEvents, instructions, received
from farpipe.engine.figures.metrics import event_sentence
from farpipe.engine.replicas.places import Places
from farpipe.engine.run_spec import Ends, RunSpec, collective_link, collectives_of

_HEADER: Final = struct.Struct("<qqqqddddqqqqqqq")
_NONE: Final = np.zeros(0, np.int64)
RECORD_BYTES: Final = 1 << 20
"""Bytes of all processes' records that are allowed per step on average: they go through the control plane to rank 0."""
ACTION_BYTES: Final = 16
MESSAGE_BYTES: Final = 40


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
    """[num, 5], rows as in `events.messages`: the collectives of the rank's stages (see `collectives_of`); with one
    replica the tied weights' gradient that this rank received, if it did."""
    pause_ns: int = 0
    """Time from the end of this step to the begin of the next: evaluation, the snapshot of a checkpoint."""
    evaluation_loss: float = math.nan
    """Loss on text that is held out; NaN where and when there is none."""
    cpu_share: float = math.nan
    """Share of its actions' time for which this rank had the CPU; NaN where the CPU does not compute."""
    rss_bytes: int = 0
    """Memory of the process."""
    cuda_peak_bytes: int = 0
    """The most that torch has had on the GPU at one time."""
    held_bytes: int = 0
    """Peak that the stages of this rank held for backwards at one time; 0 where it is not counted."""
    link_bytes: NDArray[np.int64] = field(default_factory=lambda: _NONE)
    """[num links of the Problem], empty with one replica: what this rank has put for the other replicas, and for the
    tied weights, on each link between sites."""

    link_events: tuple[dict[str, Any], ...] = ()
    """Outages, reconnections and retransmissions on this rank's links since its last report; see LinkEvent.to_data."""

    def pack(self) -> bytes:
        """The report as bytes, for rank 0."""
        link_events = json.dumps(self.link_events).encode() if self.link_events else b""
        actions, messages = self.events.actions, self.events.messages
        stamps = (self.step, self.begin_ns, self.end_ns, self.pause_ns)
        memory = (self.rss_bytes, self.cuda_peak_bytes, self.held_bytes)
        figures = (self.loss, self.grad_norm, self.evaluation_loss, self.cpu_share, *memory)
        return (
            _HEADER.pack(*stamps, *figures, len(actions), len(messages), len(self.link_bytes), len(link_events))
            + actions.tobytes()
            + messages.tobytes()
            + self.sync.tobytes()
            + self.link_bytes.tobytes()
            + link_events
        )

    def without_record(self) -> Self:
        """The same without actions and messages, for steps that are left out (see `is_recorded`)."""
        events = StepEvents(_NONE.reshape(0, 2), _NONE.reshape(0, 5))
        return replace(self, events=events, sync=_NONE.reshape(0, 5))

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """The inverse of `pack`."""
        step, begin_ns, end_ns, pause_ns, *figures, num_actions, num_messages, num_links, num_bytes = (
            _HEADER.unpack_from(payload)
        )
        end = len(payload) - num_bytes
        loss, grad_norm, evaluation_loss, cpu_share, *memory = figures
        stamps = np.frombuffer(payload, np.int64, (end - _HEADER.size) // 8, _HEADER.size)
        actions, rest, link_bytes = np.split(stamps, (2 * num_actions, len(stamps) - num_links))
        rows = rest.reshape(-1, 5)
        events, sync = StepEvents(actions.reshape(-1, 2), rows[:num_messages]), rows[num_messages:]
        link_events = tuple(json.loads(payload[end:])) if num_bytes else ()
        further = (pause_ns, evaluation_loss, cpu_share, *memory, link_bytes, link_events)
        return cls(step, begin_ns, end_ns, loss, grad_norm, events, sync, *further)


class Came(NamedTuple):
    """A message from other sites, as the process saw it that used it; times on that one's clock."""

    what: str
    sites: tuple[str, ...]
    num_bytes: int
    arrival_ns: int
    needed_ns: int

    def facts(self) -> dict[str, Any]:
        """Its entry in the line of the step."""
        slack_s = round((self.needed_ns - self.arrival_ns) * 1e-9, 6)
        return {"what": self.what, "from": [*self.sites], "bytes": self.num_bytes, "slack_s": slack_s}

    def since(self, zero_ns: int) -> OuterArrival:
        """Its entry in the Timeline of the step that begins at `zero_ns`."""
        arrival_s, needed_s = ((stamp - zero_ns) * 1e-9 for stamp in (self.arrival_ns, self.needed_ns))
        return OuterArrival(self.what, " and ".join(self.sites), float(self.num_bytes), arrival_s, needed_s)


class Assembler:
    """Turns the reports of all processes on one step into its Timeline.

    Replicas of the pipeline do the same at about the same time, and a Timeline has one of them: every action and
    message is that of the replica that was done with it last, from its start to its end, so actions of a rank may
    overlap a little. What they send over a link that they share counts together, as in the Problem. So it is with the
    twins of a replica, which send their parts of a message side by side; of twins that share chunks in groups, the
    Timeline is that of the one that was done last, where others' chunks take no time.
    """

    def __init__(self, run: RunSpec, replica: int | None = None) -> None:
        """`replica`: the only one that did this; None: all did the same."""
        self.problem, self.places, self._in_groups = run.plan.problem, run.places, bool(run.group_costs)
        self._replicas = range(run.places.num_replicas) if replica is None else (replica,)
        orders = run.plan.schedule.ranks
        actions = [(rank, a.stage, KINDS.index(a.kind), a.microbatch, 0, 0) for rank, o in enumerate(orders) for a in o]
        self._actions = np.array(actions, ACTION_DTYPE)
        rows, routes = [], []
        for rank in range(len(orders)):
            found = [*_message_rows(run.plan.problem, run.plan.schedule, rank), *_collective_rows(run, rank)]
            found += _tied_rows(run.plan.problem, rank, run.ends) if run.num_replicas == 1 else []
            rows += [row for row, _ in found]
            routes += [(source, rank) for _, source in found]
        self._messages = np.array(rows, MESSAGE_DTYPE)
        self._routes = np.array(routes, np.int64).reshape(-1, 2)
        between = np.array([*run.plan.problem.between_sites.values(), False])  # the last for no link
        staggered = np.array([*run.plan.problem.traffic.copies, 1]) > 1
        link, is_collective = self._messages["link"], self._messages["microbatch"] < 0
        self._is_shared = between[link] & (is_collective | ~staggered[link])
        self._is_staggered = staggered[link] & ~is_collective

    def timeline(
        self,
        reports: Sequence[StepReport],
        offsets_ns: Sequence[int],
        *,
        all_replicas: bool = False,
        came: Sequence[Came] = (),
    ) -> Timeline:
        """`reports` by process; `offsets_ns` is subtracted from each one's stamps. Time 0: the first of all actions.

        `all_replicas`: where replicas are staggered on a link, with the messages of all of them, to learn from them
        what the link does. `came`: what rank 0 has used of other sites.
        """
        offsets = np.asarray(offsets_ns, np.int64)
        stamps, tables = zip(*(self._replica(r, reports, offsets) for r in self._replicas), strict=True)
        stamps_ns, table = _latest(np.array(stamps), end=1), _latest(np.array(tables), end=3)
        table[:, 1:3] = self._merged_passage(np.array(tables), table)
        table[self._is_shared, 4] = np.sum(tables, axis=0)[self._is_shared, 4]
        zero = np.min(stamps) if stamps_ns.size else 0
        actions, messages = self._actions.copy(), self._timed(table, zero)
        actions["start_s"], actions["end_s"] = (stamps_ns - zero).T * 1e-9
        copies = self.problem.traffic.copies
        if all_replicas and self._is_staggered.any():
            replicas = [self._timed(of_replica, zero)[self._is_staggered] for of_replica in tables]
            messages, copies = np.concatenate([messages[~self._is_staggered], *replicas]), ()
        between = tuple(self.problem.between_sites.values())
        links, outer = tuple(self.problem.links), tuple(one.since(int(zero)) for one in came)
        return Timeline("measured", self.problem.num_ranks, links, actions, messages, copies, between, outer)

    def _timed(self, table: NDArray[np.int64], zero: int) -> NDArray[np.void]:
        """The messages with the stamps (ns) and bytes of `table` [num, 5]; time 0 is at the stamp `zero`."""
        messages = self._messages.copy()
        for column, name in enumerate(("ready_s", "start_s", "end_s", "arrival_s")):
            messages[name] = (table[:, column] - zero) * 1e-9
        messages["bytes"] = table[:, 4]
        return messages

    def _replica(
        self, replica: int, reports: Sequence[StepReport], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(actions [num, 2], messages [num, 5]) of one replica on the common clock, of the slowest twin each."""
        found = [self._twin(replica, twin, reports, offsets) for twin in range(self.places.num_twins)]
        if self._in_groups:
            return max(found, key=lambda twin: int(twin[0].max()))
        stamps, tables = (np.array(part) for part in zip(*found, strict=True))
        table = _latest(tables, end=3)
        table[:, 4] = tables[:, :, 4].sum(axis=0)
        return _latest(stamps, end=1), table

    def twin_skew_s(self, reports: Sequence[StepReport], offsets_ns: Sequence[int]) -> float:
        """The longest time for which a twin was done with an action before another was."""
        offsets, longest = np.asarray(offsets_ns, np.int64), 0
        for replica in self._replicas:
            twins = [self._twin(replica, twin, reports, offsets)[0] for twin in range(self.places.num_twins)]
            ends = np.array(twins)[:, :, 1]
            longest = max(longest, int(np.ptp(ends, axis=0).max(initial=0)))
        return longest * 1e-9

    def _twin(
        self, replica: int, twin: int, reports: Sequence[StepReport], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        processes = np.array([self.places.process(rank, replica, twin) for rank in range(self.places.num_ranks)])
        mine = [reports[process] for process in processes]
        stamps = np.concatenate([report.events.actions for report in mine])
        table = np.concatenate([table for report in mine for table in (report.events.messages, report.sync)])
        senders, receivers = offsets[processes[self._routes]].T
        table = table - np.stack([senders, senders, senders, receivers, np.zeros_like(senders)], axis=1)
        return stamps - offsets[processes[self._actions["rank"]], None], table

    def _merged_passage(self, tables: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
        """(start, end) [num, 2]: a shared link is taken by the messages of all replicas, one after the other."""
        took = (tables[:, :, 2] - tables[:, :, 1]).sum(axis=0)
        together = np.maximum(last[:, 0], last[:, 2] - took)
        return np.stack([np.where(self._is_shared, together, last[:, 1]), last[:, 2]], axis=1)


def latest_replica(places: Places, reports: Sequence[StepReport], offsets_ns: Sequence[int]) -> int:
    """The replica whose last action ended last."""

    def end_ns(process: int) -> int:
        actions = reports[process].events.actions
        return int(actions[:, 1].max()) - offsets_ns[process] if actions.size else 0

    ends = [
        max(end_ns(places.process(rank, replica)) for rank in range(places.num_ranks))
        for replica in range(places.num_replicas)
    ]
    return ends.index(max(ends))


def _latest(of_replicas: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """Rows with the latest `end` out of [num_replicas, num, columns], whole; of equal ones the one that began first."""
    ends, begins = of_replicas[:, :, end], of_replicas[:, :, 0]
    is_last = ends == ends.max(axis=0)
    slowest = np.where(is_last, begins, np.iinfo(np.int64).max).argmin(axis=0)
    return np.asarray(of_replicas[slowest, np.arange(of_replicas.shape[1])])


def _message_rows(problem: Problem, schedule: Schedule, rank: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """The messages that `rank` receives, in order, without their times, and who sends them."""
    for item in received(instructions(schedule, rank), rank):
        microbatch = item.action.microbatch
        hop = problem.hops[min(item.producer, item.action.stage)]
        transfer = hop and (hop.forward if item.direction == "forward" else hop.backward)
        names = transfer.link if transfer else None
        name = names[microbatch] if isinstance(names, tuple) else names
        kind = MESSAGE_KINDS.index(item.direction)
        yield (_link(problem, name), kind, item.producer, microbatch, item.source, rank, 0, 0, 0, 0, 0), item.source


def _collective_rows(run: RunSpec, rank: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """The collectives that `rank` reports, in order, and that rank itself."""
    for item in collectives_of(run, rank):
        link, kind = _link(run.plan.problem, collective_link(run.plan.problem, item)), MESSAGE_KINDS.index(item.kind)
        yield (link, kind, item.stage, -1, rank, rank, 0, 0, 0, 0, 0), rank


def _tied_rows(problem: Problem, rank: int, ends: Ends | None) -> Iterator[tuple[tuple[int, ...], int]]:
    """The tied weights' gradient that `rank` receives: in a Timeline it is the exchange of the stage that sends it."""
    if ends is None or rank not in (ends.first_rank, ends.last_rank):
        return
    to_first = rank == ends.first_rank
    source, link = (ends.last_rank, ends.link_back) if to_first else (ends.first_rank, ends.link_there)
    stage = problem.num_stages - 1 if to_first else 0
    kind = MESSAGE_KINDS.index("exchange")
    yield (_link(problem, link), kind, stage, -1, source, rank, 0, 0, 0, 0, 0), source


def _link(problem: Problem, name: str | None) -> int:
    """Place of the link called `name`, -1 for none."""
    return [*problem.links].index(name) if name in problem.links else -1


def step_metrics(
    timeline: Timeline | None, reports: Sequence[StepReport], tokens: int, tensor: int = 1
) -> dict[str, Any]:
    """Figures of one step, for its line of ``metrics.jsonl``. `step_s` and `pause_s` are rank 0's.

    `timeline` None: actions and messages were left out; then what follows from them is null, and `is_recorded` false.
    """
    step_s = (reports[0].end_ns - reports[0].begin_ns) * 1e-9
    loss, evaluation_loss = (
        _sum_of_finite(getattr(report, name) for report in reports[::tensor])  # those between have the same
        for name in ("loss", "evaluation_loss")
    )
    return {
        "step": reports[0].step,
        "loss": loss,
        "evaluation_loss": evaluation_loss,
        "grad_norm": None if loss is None else _sum_of_finite([reports[0].grad_norm]),
        "makespan_s": None if timeline is None else timeline.makespan_s,
        "step_s": step_s,
        "pause_s": reports[0].pause_ns * 1e-9,
        "tokens_per_s": tokens / step_s,
        **(dict.fromkeys(_OF_TIMELINE) | {"is_recorded": False} if timeline is None else _of_timeline(timeline)),
        "link_bytes": {} if timeline is None else _link_bytes(timeline, reports),
        "cpu_share": min((r.cpu_share for r in reports if math.isfinite(r.cpu_share)), default=None),
        "rss_max_bytes": max(report.rss_bytes for report in reports),
        "cuda_peak_max_bytes": max(report.cuda_peak_bytes for report in reports) or None,
    }


_OF_TIMELINE: Final = (
    "bubble",
    "exposed_inter_site_s",
    "exposed_inter_site_max_s",
    "exposed_intra_site_s",
    "exposed_intra_site_max_s",
)


def _of_timeline(timeline: Timeline) -> dict[str, float]:
    inter, intra = timeline.exposed_s.T
    waits = (inter.mean(), inter.max(), intra.mean(), intra.max())
    return dict(zip(_OF_TIMELINE, map(float, (timeline.bubble_ratio, *waits)), strict=True))


def _link_bytes(timeline: Timeline, reports: Sequence[StepReport]) -> dict[str, float]:
    """Bytes that every link carried: of collectives between sites those sent, for a Timeline has them on one link."""
    found, hops = timeline.link_bytes(), timeline.hop_bytes()
    sent = [report.link_bytes for report in reports if report.link_bytes.size]
    for name, size in zip(timeline.links, np.sum(sent, axis=0).tolist() if sent else (), strict=False):
        if timeline.is_between_sites(name):
            found[name] = hops[name] + size
    return found


def _sum_of_finite(values: Iterable[float]) -> float | None:
    """Each replica, and each process that shares its sequences, has its share of a loss; None where no rank has one."""
    found = [value for value in values if math.isfinite(value)]
    return math.fsum(found) if found else None


def record_bytes(run: RunSpec) -> int:
    """Bytes of one step's actions and messages, of all replicas."""
    num_actions = sum(map(len, run.plan.schedule.ranks))
    num_messages = int((run.plan.problem.traffic.messages.link >= 0).sum())
    return run.num_replicas * run.num_twins * (ACTION_BYTES * num_actions + MESSAGE_BYTES * num_messages)


def record_every(run: RunSpec) -> int:
    """The k of which every k-th step is recorded; 1 for records up to RECORD_BYTES, and where every step has other
    chunks."""
    return 1 if run.chunk_costs is not None else math.ceil(record_bytes(run) / RECORD_BYTES)


def is_recorded(step: int, every: int, num_steps: int) -> bool:
    """True if actions and messages of `step` are reported; those of the last step always are."""
    return (step + 1) % every == 0 or step + 1 == num_steps


class LinkLog:
    """Names the links and processes of events, and writes each to the log."""

    def __init__(self, run: RunSpec) -> None:
        self._links = {pair: name for pair, (name, _) in run.links().items()}

    def of_step(self, reports: Sequence[StepReport]) -> list[dict[str, Any]]:
        """The events of one step in the order of their times, for ``metrics.jsonl``; `reports` by process."""
        found = [self._named(process, event) for process, r in enumerate(reports) for event in r.link_events]
        found.sort(key=lambda event: event["unix_s"])
        for event in found:
            with suppress(OSError):  # the log's disk may be full
                print(f"step {reports[0].step}: {event_sentence(event)}", file=sys.stderr, flush=True)
        return found

    def _named(self, process: int, event: dict[str, Any]) -> dict[str, Any]:
        link = self._links.get((process, event["peer"]))
        return {"process": process} | ({"link": link} if link else {}) | event
