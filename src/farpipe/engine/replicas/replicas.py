"""A process's exchange with the other replicas of its stages: gradients are summed, and with ZeRO-1 weights gathered.

A stage's reduce starts when its last action is done and runs beside the rank's other actions; its gather starts when
the step begins and is over before the stage's first forward. Both are messages like all others and use the links that
join the processes.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farpipe.core.step import Problem, Transfer
from farpipe.engine.executor.executor import message_table
from farpipe.engine.executor.peers import MessageRow, Peers, TensorMessage
from farpipe.engine.replicas.background import BackgroundThread
from farpipe.engine.replicas.collectives import Flat, Line, Rings, Shard
from farpipe.engine.replicas.places import Places
from farpipe.engine.replicas.ring_stream import RingStream
from farpipe.engine.run_spec import ReplicaCollective, RunSpec, collective_link, collectives_of, transfer_of
from farpipe.engine.transport import ChannelKind, Tag

REDUCE: Final = 0
GATHER: Final = 1 << 29
COMPLETE: Final = 1 << 30
"""First numbers of the messages of a stage's reduce, gather and exact gather in one step."""


class PipelinePeers:
    """The Messenger of the pipeline that a process is in: other ranks of its own replica, its twins there."""

    def __init__(self, peers: Peers, places: Places) -> None:
        self._peers, self.clock = peers, peers.clock
        self.rank, *replica_and_twin = places.of(peers.rank)
        self._process = [places.process(rank, *replica_and_twin) for rank in range(places.num_ranks)]

    def send(self, peer: int, kind: ChannelKind, tag: Tag, tensor: Tensor) -> None:
        self._peers.send(self._process[peer], kind, tag, tensor)

    def receive(self, peer: int, kind: ChannelKind, tag: Tag, *, waiting_for: str) -> TensorMessage:
        return self._peers.receive(self._process[peer], kind, tag, waiting_for=waiting_for)


class StageSync(Protocol):
    """The collectives of one stage."""

    def begin_step(self) -> None:
        """Get ready, before anything else of the step."""

    def gather(self, line: Line) -> None:
        """Take the weights that other replicas have updated."""

    def reduce(self, line: Line) -> None:
        """Sum the gradient over the replicas."""


class WeightSync:
    """The StageSync of a stage that is trained."""

    def __init__(self, flats: Sequence[Flat]) -> None:
        self.flats = flats

    def begin_step(self) -> None:
        for flat in self.flats:
            flat.clear_grads()

    def gather(self, line: Line) -> None:
        for flat in self.flats:
            flat.gather_weights(line)

    def updated(self) -> None:
        """The optimizer has changed what is this process's."""
        for flat in self.flats:
            flat.take_masters()

    def reduce(self, line: Line) -> None:
        for flat in self.flats:
            flat.sum_grads(line)

    def shards(self) -> Iterator[Shard]:
        """Yield the parts of the stage's parameters that this process's optimizer has."""
        for flat in self.flats:
            yield from flat.shards()


class RehearsedSync:
    """A StageSync whose collectives put as many bytes on their links as the Problem says, and no meaning into them."""

    def __init__(
        self,
        gather: Transfer | None,
        reduce: Transfer | None,
        levels: Sequence[tuple[int, ...]],
        process: int,
        between_sites: Mapping[str, bool],
    ) -> None:
        """`levels`: see `Places.ring_levels`; `between_sites`: the Problem's, of every link."""
        self._rings = Rings(levels, process)
        self._scattered = gather is not None
        self._gradient, self._weights = (
            torch.zeros(self._rings.padded(num), dtype=torch.uint8)
            for num in (
                collective_bytes(reduce, levels, between_sites, rounds=1 if self._scattered else 2),
                collective_bytes(gather, levels, between_sites, rounds=1),
            )
        )

    def begin_step(self) -> None:
        """Do nothing: there is nothing to get ready."""

    def gather(self, line: Line) -> None:
        self._rings.all_gather(self._weights, line)

    def reduce(self, line: Line) -> None:
        if self._scattered:
            self._rings.reduce_scatter(self._gradient, line)
        else:
            self._rings.all_reduce(self._gradient, line)


def has_barrier(run: RunSpec) -> bool:
    """True if all ranks end a step together: what one sends in it is received before any begins the next."""
    return run.plan.training is None or run.plan.training.barrier


def exposed_transfer(problem: Problem, kind: str, stage: int) -> Transfer | None:
    """A stage's collective with the bytes that its link carries while it is occupied.

    Those that the Problem takes to be sent beside computing are left out of a rehearsal.
    """
    transfer = transfer_of(problem, kind, stage)
    if transfer is None or transfer.occupies_s is None:
        return transfer
    assert isinstance(transfer.link, str)
    assert isinstance(transfer.bytes, float)
    assert isinstance(transfer.occupies_s, float)
    carried = transfer.occupies_s * problem.links[transfer.link].bandwidth_bytes_per_s
    return transfer.model_copy(update={"bytes": min(transfer.bytes, carried)})


def collective_bytes(
    transfer: Transfer | None, levels: Sequence[tuple[int, ...]], between_sites: Mapping[str, bool], rounds: int
) -> int:
    """The tensor of which a ring that goes round `rounds` times puts the transfer's bytes on its link."""
    if transfer is None:
        return 0
    assert isinstance(transfer.link, str)
    assert isinstance(transfer.bytes, float)
    size = len(levels[-1] if between_sites[transfer.link] else levels[0])
    return round(transfer.bytes * size / (rounds * (size - 1))) if size > 1 else 0


class ReplicaSync:
    """The collectives of one process's stages, in the background."""

    def __init__(self, run: RunSpec, peers: Peers, stages: Mapping[int, StageSync]) -> None:
        """`stages`: those of this process that have collectives; none where there is one replica."""
        self._peers, self._stages, self._has_barrier = peers, stages, has_barrier(run)
        place = run.places.of(peers.rank)
        self._has_others = bool(stages) and run.num_replicas > 1
        self._collectives = collectives_of(run, place.rank) if self._has_others else []
        own, links = peers.rank, run.links() if self._has_others else {}
        between = {pair: name for pair, (name, _) in links.items() if run.plan.problem.between_sites[name]}
        self._link_to = {target: name for (source, target), name in between.items() if source == own}
        self._link_from = {source: name for (source, target), name in between.items() if target == own}
        self._places = {name: place for place, name in enumerate(run.plan.problem.links)}
        self.link_bytes = self._no_bytes()
        """[num links of the Problem]: what this process has sent in the step over links between sites."""
        self._counts_for = {
            item: self._counted(run, collective_link(run.plan.problem, item)) for item in self._collectives
        }
        """The processes to which bytes count: those behind the link, if it joins sites, otherwise those at the site."""
        self._stagger_s = place.replica * run.plan.problem.traffic.stagger_s
        self._background = BackgroundThread(f"farpipe replicas of {peers.rank}")
        self._ring = RingStream(peers) if self._collectives and run.device == "cuda" else None
        self._tasks: dict[ReplicaCollective, Future[MessageRow]] = {}
        reduced = [item.stage for item in self._collectives if item.kind == "reduce"]
        self._turns = sorted(reduced, reverse=True) if run.chunk_costs is not None else []
        """The order of the reduces where every replica has an order of actions of its own."""
        self._done: set[int] = set()

    def _no_bytes(self) -> NDArray[np.int64]:
        return np.zeros(len(self._places) if self._has_others else 0, np.int64)

    def _counted(self, run: RunSpec, link: str) -> set[int]:
        if link and run.plan.problem.between_sites[link]:
            return {process for process, name in self._link_to.items() if name == link}
        own, places = self._peers.rank, run.places
        others = (process for process in range(places.num_processes) if process != own)
        return {process for process in others if places.site(process) == places.site(own)}

    def count_received(self, process: int, num_bytes: int) -> None:
        """Count the bytes of something else that came from `process` in this step, here as well as there."""
        if process in self._link_from:
            self.link_bytes[self._places[self._link_from[process]]] += num_bytes

    def begin_step(self, step: int) -> None:
        """Start the gathers; wait for as long as this replica is behind the first where they are staggered."""
        self.link_bytes = self._no_bytes()
        self._done.clear()
        for sync in self._stages.values():
            sync.begin_step()
        for item in self._collectives:
            if item.kind == "gather":
                self._start(step, item, self._stages[item.stage].gather, GATHER)
        if self._stagger_s > 0:
            time.sleep(self._stagger_s)

    def stage_begins(self, step: int, stage: int) -> None:
        """Wait for the stage's weights, before its first forward."""
        if task := self._tasks.get(ReplicaCollective("gather", stage)):
            task.result()
            if self._ring is not None:
                self._ring.before_actions()

    def stage_done(self, step: int, stage: int) -> None:
        """Start the stage's reduce, and those that have waited for their turn behind it."""
        self._done.add(stage)
        for turn in self._turns or [stage]:
            item = ReplicaCollective("reduce", turn)
            if turn not in self._done:
                return
            if item in self._counts_for and item not in self._tasks:
                self._start(step, item, self._stages[turn].reduce, REDUCE)

    def _start(self, step: int, item: ReplicaCollective, work: Callable[[Line], None], first_number: int) -> None:
        what = "the replicas' weights" if item.kind == "gather" else "the replicas' gradient"
        messenger = self._peers if self._ring is None else self._ring.messenger
        line = Line(messenger, step, item.stage, what, first_number, copies=not self._has_barrier)
        work = work if self._ring is None else self._ring.after_actions(work)
        timed = partial(self._timed, work, line, self._peers.clock.now_ns(), self._counts_for[item])
        self._tasks[item] = self._background.start(timed)

    def _timed(self, work: Callable[[Line], None], line: Line, ready_ns: int, counts: set[int]) -> MessageRow:
        """Do it: as a message that took its link as long as what was received did."""
        start_ns = self._peers.clock.now_ns()
        work(line)
        arrival_ns = self._peers.clock.now_ns()
        end_ns = min(start_ns + line.link_ns, arrival_ns)
        num_bytes = sum(size for process, size in line.sent_bytes.items() if process in counts)
        for process, size in line.sent_bytes.items():
            if process in self._link_to:
                self.link_bytes[self._places[self._link_to[process]]] += size
        return ready_ns, start_ns, end_ns, arrival_ns, num_bytes

    def finish_step(self) -> NDArray[np.int64]:
        """Wait for what has not ended; a row as in `StepEvents.messages` for each of `collectives_of`."""
        rows = message_table([self._tasks.pop(item).result() for item in self._collectives])
        if self._ring is not None:
            self._ring.before_actions()
        return rows
