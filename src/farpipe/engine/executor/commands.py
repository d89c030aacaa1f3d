"""Commands of any rank to all: a checkpoint at the end of this step, to leave after one, or another order.

Rank 0 asks for a new order ahead of the exchange that ends a step, so that all ranks know of it after the same step;
then it sends them that order. A `Watch` decides on rank 0; `farpipe.engine.control.watch` has one.
"""

import json
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from farpipe.core.simulate.timeline import Timeline
from farpipe.core.step import Schedule
from farpipe.engine.executor.peers import Peers
from farpipe.engine.run_spec import RunSpec

CHECKPOINT: Final = b"c"
STOP: Final = b"s"
REPLAN: Final = b"r"
"""The command to switch to another schedule at the end of this step."""


class Commands:
    """Commands ride ahead of the exchange that ends a step, so all ranks know the same ones when it is over.

    Posts and exchanges share a connection, and a command is not longer than a rank's part of that exchange: none is
    overtaken, on a real link or an emulated one.
    """

    def __init__(self, peers: Peers, stop: Callable[[], bool], every_s: float) -> None:
        """`stop`: whether this process was asked to leave. `every_s`: rank 0 asks for checkpoints; 0: it doesn't."""
        self._peers, self._stop, self._every_s = peers, stop, every_s
        self._last_s = time.monotonic()

    def before_exchange(self, step: int) -> None:
        """Ask for what this rank wants, ahead of the exchange that ends `step`."""
        if self._stop():
            self.ask(step, STOP)
        if self._every_s and self._peers.rank == 0 and time.monotonic() > self._last_s + self._every_s:
            self.ask(step, CHECKPOINT)

    def ask(self, step: int, command: bytes) -> None:
        """Post `command` to all ranks, this one too, before the exchange that ends `step`: after it all know it."""
        for rank in range(self._peers.world_size):
            self._peers.post(rank, f"commands {step}", command)

    def after_exchange(self, step: int) -> set[bytes]:
        """The commands that were asked for, the same on all ranks."""
        return {command for _, command in self._peers.poll(f"commands {step}")}

    def checkpoint_begun(self) -> None:
        """The clock starts again."""
        self._last_s = time.monotonic()


class Watch(Protocol):
    """Rank 0's part: sees every measured step and proposes orders."""

    first_order: Schedule | None
    """The order to begin with; None: the plan's."""
    proposals: queue.SimpleQueue[Schedule]
    """Orders that the ranks should take."""
    swapped: queue.SimpleQueue[int]
    """Steps at whose end they took one."""

    def on_timeline(self, step: int, timeline: Timeline) -> None:
        """A step was measured. Called in the recorder's thread, in the order of the steps."""

    def close(self) -> None:
        """End whatever it has started."""


MakeWatch = Callable[[RunSpec, Path, int], Watch]
"""Makes rank 0's watch of a run, from its directory and the first step."""


class OrderSwitch:
    """Every rank's part in switching to another order while the run goes on."""

    def __init__(self, peers: Peers, watch: Watch | None) -> None:
        """`watch`: on rank 0."""
        self._peers, self._watch = peers, watch
        self._next: Schedule | None = None

    def first(self) -> Schedule | None:
        """The order to begin with, if it is not the plan's; on all ranks, before the first step."""
        return self._send("the first order", None if self._watch is None else self._watch.first_order)

    def before_exchange(self, step: int, ask: Callable[[int, bytes], None]) -> None:
        """Ask for a new order, ahead of the exchange that ends `step`."""
        if self._watch is not None and not self._watch.proposals.empty():
            self._next = self._watch.proposals.get()
            ask(step, REPLAN)

    def after_exchange(self, step: int, commands: set[bytes]) -> Schedule | None:
        """The order of the next step, if it is another."""
        if REPLAN not in commands:
            return None
        schedule = self._send(f"the order after step {step}", self._next)
        if self._watch is not None:
            self._watch.swapped.put(step)
        return schedule

    def _send(self, name: str, schedule: Schedule | None) -> Schedule | None:
        """Rank 0's `schedule` on all ranks."""
        payload = b"" if schedule is None else json.dumps(schedule.to_data()).encode()
        sent, *_ = self._peers.exchange(name, payload, waiting_for=f"{name} of actions")
        return Schedule.from_json(sent.decode(), name) if sent else None
