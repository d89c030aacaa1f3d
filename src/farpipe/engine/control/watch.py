"""Re-planning beside a run: rank 0 watches the measured steps, decides, and asks a second process for better orders."""

import contextlib
import json
import queue
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from farpipe.core.errors import FarpipeError
from farpipe.core.simulate.timeline import Timeline
from farpipe.core.step import Schedule
from farpipe.core.strict import parse_json, read_text, write_text
from farpipe.engine.control.beside import Beside
from farpipe.engine.processes import Guarded
from farpipe.engine.run_spec import RunSpec

if TYPE_CHECKING:  # the planner's modules take time to load and are for rank 0 only
    from farpipe.engine.control.replanning import SearchRequest, Swap

LOG_NAME: Final = "replan.jsonl"
STATE_NAME: Final = "replan.json"
QUICK_S: Final = 0.5
"""Time for which rank 0's recorder waits for a search's first answer, which then counts before this step ends."""
LATE_S: Final = 60.0
"""Seconds that a search may take beyond its time, on cores that others use, until it is given up."""


class ReplanWatch:
    """The Watch of a run that is re-planned: decides on orders, in the recorder's thread."""

    def __init__(self, run: RunSpec, run_dir: Path, first_step: int = 0) -> None:
        from farpipe.engine.control.replanning import Replanner

        assert run.replan is not None
        self._search_s, self._log, self._state = run.replan.search_s, run_dir / LOG_NAME, run_dir / STATE_NAME
        self._replanner = Replanner(run.plan.problem, run.plan.schedule, run.replan, first_step)
        self.first_order = self._go_on(run.plan.schedule, first_step)
        """The order of an earlier attempt at the run, to go on with; None: the plan's."""
        self._has_failed = False
        self._searcher = Searcher()
        self.proposals: queue.SimpleQueue[Schedule] = queue.SimpleQueue()
        """Orders that the ranks should take."""
        self.swapped: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Steps at whose end they took one."""

    def _go_on(self, planned: Schedule, first_step: int) -> Schedule | None:
        """The order of an earlier attempt at the run, whose beliefs are taken over, if there was one."""
        if not self._state.exists():
            return None
        event: dict[str, Any] = {"step": first_step, "event": "go on"}
        try:
            self._replanner.go_on(read_text(self._state), str(self._state))
        except FarpipeError as error:
            self._replanner.events.append(event | {"why": f"with the plan's order: {error}", "method": planned.method})
            return None
        order = self._replanner.schedule
        self._replanner.events.append(event | {"why": "with the order of before", "method": order.method})
        return order if order != planned else None

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
        from farpipe.engine.control.replanning import SearchRequest

        self._take_swapped()
        todo = self._replanner.observe(step, timeline)
        for item in todo:
            if isinstance(item, SearchRequest):
                self._searcher.ask(item, self._search_s)
            else:
                self._propose(item)
        wait_s = QUICK_S if todo and isinstance(todo[0], SearchRequest) else 0.0
        while (answer := self._searcher.answer(wait_s)) is not None:
            self._propose(self._replanner.found(step, answer.schedule, is_last=answer.is_last))
            wait_s = 0.0

    def _propose(self, swap: "Swap | None") -> None:
        if swap is not None:
            self.proposals.put(swap.schedule)

    def _take_swapped(self) -> None:
        while not self.swapped.empty():
            self._replanner.swapped(self.swapped.get())

    def _write_events(self) -> None:
        events, self._replanner.events = self._replanner.events, []
        if events:
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(event) + "\n" for event in events))
            with contextlib.suppress(FarpipeError):
                write_text(self._state, self._replanner.to_json() + "\n")

    def close(self) -> None:
        """Write the last events; end a search that is still going on."""
        if not self._has_failed:
            self._take_swapped()
        self._write_events()
        self._searcher.close()


class Answer(NamedTuple):
    """Result of a search so far."""

    schedule: Schedule | None
    is_last: bool


class Searcher:
    """The process that seeks orders beside the run; see `farpipe.engine.control.searcher`."""

    def __init__(self) -> None:
        self._until_s: float | None = None
        self._beside = Beside("orders")

    @property
    def process(self) -> Guarded:
        """The process that is searching, or waiting for a question."""
        return self._beside.process

    def ask(self, search: "SearchRequest", search_s: float) -> None:
        """Begin a search; one that is going on is given up."""
        from farpipe.engine.control.searcher import question

        if self._until_s is not None or self._beside.has_ended:
            self._beside.restart()
        self._until_s = time.monotonic() + search_s + LATE_S
        self._beside.send(question(search.problem, search.samples, search_s))

    def answer(self, wait_s: float = 0.0) -> Answer | None:
        """The next answer to the question that was asked, if it comes within `wait_s` seconds.

        The last one has nothing where the search takes too long, the process has died, or it writes nonsense.
        """
        if self._until_s is None:
            return None
        try:
            found = _read(self._beside.receive(wait_s))
        except queue.Empty:
            if time.monotonic() < self._until_s:
                return None
            found = None
        if found is None:
            self._beside.kill()
            found = Answer(None, is_last=True)
        if found.is_last:
            self._until_s = None
        return found

    def close(self) -> None:
        """End the process; nothing of it is left."""
        self._beside.close()


def _read(line: str | None) -> Answer | None:
    """An answer; None for nonsense, or where the process has ended."""
    with contextlib.suppress(FarpipeError, KeyError, TypeError, ValueError):
        body = parse_json(line or "", "answer of the search")
        found = body["schedule"]
        schedule = None if found is None else Schedule.from_data(found, "answer of the search")
        return Answer(schedule, is_last=body["is_last"] is True)
    return None
