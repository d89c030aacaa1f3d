"""Events of a run's links: from the reports of all ranks into the metrics and rank 0's log."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from farpipe.runtime.figures.step_report import StepReport
from farpipe.runtime.run_spec import RunSpec
from farpipe.transport.link_events import event_sentence


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
