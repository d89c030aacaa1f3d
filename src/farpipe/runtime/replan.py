"""Planning anew while a run goes on: rank 0 watches and searches beside the training, all ranks go over together.

A new order first goes to every rank, which says that it has it; then rank 0 asks for it ahead of an exchange that ends
a step (see orders.py), so that all ranks take it between the same two steps.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from farpipe.errors import FarpipeError
from farpipe.runtime.peers import Peers
from farpipe.runtime.run_spec import RunSpec
from farpipe.schedule import Schedule
from farpipe.simulate.timeline import Timeline
from farpipe.strict import read_text

if TYPE_CHECKING:  # the planner's modules take time to load and are for rank 0 only
    from farpipe.plan.replanning import Search

REPLAN: Final = b"r"
"""The order to take the new schedule at the end of this step."""
LOG_NAME: Final = "replan.jsonl"
LOWEST_PRIORITY: Final = 19
START_UP_S: Final = 60.0
"""What a search may take beyond its time: to start, and to check its bounds, on cores that others use."""
_NEW: Final = "new order"
_HAVE: Final = "have new order"


class Watch:
    """Rank 0's part: decides, with the recorder's thread as its own, what the ranks are to do."""

    def __init__(self, run: RunSpec, run_dir: Path) -> None:
        from farpipe.plan.replanning import Replanner

        assert run.replan is not None
        self._search_s, self._log = run.replan.search_s, run_dir / LOG_NAME
        self._replanner = Replanner(run.problem, run.schedule, run.replan)
        self._search: SearchProcess | None = None
        self._has_failed = False
        self.proposals: queue.SimpleQueue[Schedule] = queue.SimpleQueue()
        """Orders that the ranks should take."""
        self.swapped: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Steps at whose end they took one."""

    def on_timeline(self, step: int, timeline: Timeline) -> None:
        """A step was measured. Called in the recorder's thread, in the order of the steps.

        Whatever goes wrong in here ends the watching, not the training.
        """
        if self._has_failed:
            return
        try:
            self._observe(step, timeline)
        except Exception as error:
            self._has_failed = True
            self._replanner.events.append({"step": step, "event": "failed", "why": f"{type(error).__name__}: {error}"})
        self._write_events()

    def _observe(self, step: int, timeline: Timeline) -> None:
        from farpipe.plan.replanning import Search

        while not self.swapped.empty():
            self._replanner.swapped(self.swapped.get())
        answer = self._replanner.observe(step, timeline)
        if isinstance(answer, Search):
            self._search = SearchProcess(answer, self._search_s)
        elif answer is not None:
            self.proposals.put(answer.schedule)
        if self._search is not None and self._search.is_over():
            swap = self._replanner.found(step, self._search.result())
            self._search = None
            if swap is not None:
                self.proposals.put(swap.schedule)

    def _write_events(self) -> None:
        events, self._replanner.events = self._replanner.events, []
        if events:
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(event) + "\n" for event in events))

    def close(self) -> None:
        """Write what is left to tell; end a search that is still going on."""
        while not self.swapped.empty():
            self._replanner.swapped(self.swapped.get())
        self._write_events()
        if self._search is not None:
            self._search.end()


class SearchProcess:
    """``farpipe schedule`` in a process of its own, which gets a core only where nobody else wants it."""

    def __init__(self, search: "Search", seconds: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="farpipe-replan-", ignore_cleanup_errors=True)
        problem, self._found = (Path(self._folder.name) / name for name in ("problem.json", "schedule.json"))
        search.problem.save(problem)
        options = ["--time-limit", f"{seconds:g}", "-o", str(self._found)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "farpipe", "schedule", str(problem), *options],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with contextlib.suppress(OSError):  # it has ended already
            os.setpriority(os.PRIO_PROCESS, self._process.pid, LOWEST_PRIORITY)
        self._deadline_s = time.monotonic() + seconds + START_UP_S

    def is_over(self) -> bool:
        """Whether it has ended, or was ended because it took too long."""
        if self._process.poll() is None and time.monotonic() > self._deadline_s:
            self._process.kill()
            self._process.wait()
        return self._process.poll() is not None

    def result(self) -> Schedule | None:
        """What it found; None where it failed."""
        try:
            return Schedule.from_json(read_text(self._found), str(self._found))
        except FarpipeError:
            return None
        finally:
            self.end()

    def end(self) -> None:
        """Nothing is left of it."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


class Replanning:
    """Every rank's part."""

    def __init__(self, peers: Peers, watch: Watch | None) -> None:
        """`watch`: on rank 0."""
        self._peers, self._watch = peers, watch
        self._next: Schedule | None = None
        self._num_ready = 0

    def give(self, step: int, ask: Callable[[int, bytes], None]) -> None:
        """Before the exchange that ends `step`: hand a new order out; ask for it when all have it."""
        if self._watch is None:
            return
        self._num_ready += len(self._peers.poll(_HAVE))
        if self._num_ready == self._peers.world_size:
            self._num_ready = 0
            ask(step, REPLAN)
        elif not self._watch.proposals.empty():
            payload = json.dumps(self._watch.proposals.get().to_data()).encode()
            for rank in range(self._peers.world_size):
                self._peers.post(rank, _NEW, payload)

    def take(self, step: int, orders: set[bytes]) -> Schedule | None:
        """After that exchange: the order of the next step, if it is another."""
        for _, payload in self._peers.poll(_NEW):
            self._next = Schedule.from_json(payload.decode())
            self._peers.post(0, _HAVE, b"")
        if REPLAN not in orders:
            return None
        assert self._next is not None, "it is asked for when all ranks have said that they have it"
        if self._watch is not None:
            self._watch.swapped.put(step)
        return self._next
