"""Going over to another order while a run goes on: rank 0 proposes one, all ranks take it at the same step.

Rank 0 asks for a new order ahead of the exchange that ends a step (see commands.py), so that all ranks know of it after
the same step; then it tells them which one it is. Who decides on rank 0 is a `Watch`; `farpipe.control.watch` has one.
"""

import json
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from farpipe.runtime.peers import Peers
from farpipe.runtime.run_spec import RunSpec
from farpipe.simulate.timeline import Timeline
from farpipe.step import Schedule

REPLAN: Final = b"r"
"""The command to switch to another schedule at the end of this step."""


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


class Replanning:
    """Every rank's part."""

    def __init__(self, peers: Peers, watch: Watch | None) -> None:
        """`watch`: on rank 0."""
        self._peers, self._watch = peers, watch
        self._next: Schedule | None = None

    def first(self) -> Schedule | None:
        """Before the first step, on all ranks: the order to begin with, if it is not the plan's."""
        return self._tell("the first order", None if self._watch is None else self._watch.first_order)

    def give(self, step: int, ask: Callable[[int, bytes], None]) -> None:
        """Before the exchange that ends `step`: ask for a new order."""
        if self._watch is not None and not self._watch.proposals.empty():
            self._next = self._watch.proposals.get()
            ask(step, REPLAN)

    def take(self, step: int, commands: set[bytes]) -> Schedule | None:
        """After that exchange: the order of the next step, if it is another."""
        if REPLAN not in commands:
            return None
        schedule = self._tell(f"the order after step {step}", self._next)
        if self._watch is not None:
            self._watch.swapped.put(step)
        return schedule

    def _tell(self, name: str, schedule: Schedule | None) -> Schedule | None:
        """Rank 0's `schedule` on all ranks."""
        payload = b"" if schedule is None else json.dumps(schedule.to_data()).encode()
        told, *_ = self._peers.exchange(name, payload, waiting_for=f"{name} of actions")
        return Schedule.from_json(told.decode(), name) if told else None
