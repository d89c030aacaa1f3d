"""The record of an elastic run: one line for each step, from whichever site has done it first. Needs no torch."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import RunError
from farpipe.core.units import format_bytes
from farpipe.engine.checkpoint.folders import site_folder
from farpipe.engine.figures.follower import Follower
from farpipe.engine.figures.metrics import (
    METRICS_NAME,
    SUMMARY_NAME,
    TIMELINE_NAME,
    MetricsFile,
    Summary,
    read_metrics,
    summarise,
)

_COMPARED: Final = ("loss", "grad_norm")
_KEPT: Final = 4096
"""Steps for which what other sites say later is compared."""
EVENTS: Final = "site_events"
"""Field of a line with what sites have done since the line before: events with their ``site``."""


def site_event_text(event: Mapping[str, Any]) -> str:
    """What a site has done, in words."""
    match event["kind"]:
        case "broken":
            return f"lost the others in step {event['step']}: {event['reason']}"
        case "lost":
            return f"goes on by itself, and completes step {event['step']}"
        case "helps":
            return f"sends its state after {event['step']} steps to {' and '.join(event['sites'])}"
        case "entered":
            sent = f", after {format_bytes(event['sent_bytes'])} from each process" if "sent_bytes" in event else ""
            return f"from step {event['step']} on in one world with {' and '.join(event['members'])}{sent}"
        case _:
            return f"joined no world: {event.get('reason', '')}"


class Record:
    """Puts the lines of all sites together, in ``metrics.jsonl`` of the run directory."""

    def __init__(
        self,
        run_dir: Path,
        sites: Sequence[str],
        on_step: Callable[[dict[str, Any]], None] | None,
        on_notice: Callable[[str], None] | None,
    ) -> None:
        """`on_step` gets every line; `on_notice` hears of sites that have computed a step differently, if that is
        odd."""
        self._run_dir, self._sites = run_dir, sites
        self._on_step, self._on_notice = on_step or (lambda line: None), on_notice
        self._followers = [
            Follower(site_folder(run_dir, site) / METRICS_NAME, partial(self._take, site)) for site in sites
        ]
        self._lines: dict[int, tuple[str, dict[str, Any]]] = {}
        self._written: dict[int, tuple[str, tuple[Any, ...]]] = {}
        self._events: list[dict[str, Any]] = []
        self._file: MetricsFile | None = None
        self._next = -1
        self._has_differed = False

    def read(self) -> None:
        """Write the lines of the steps that have been done since the last call."""
        for follower in self._followers:
            follower.read()
        self._write()

    def _take(self, site: str, line: dict[str, Any]) -> None:
        """Take a line in: the first of its step counts, events of all are kept."""
        step = line["step"]
        events = [{"site": site, **event} for event in line.pop(EVENTS, ())]
        figures = tuple(line.get(name) for name in _COMPARED)
        first, known = self._written.setdefault(step, (site, figures))
        if known != figures and not self._has_differed and self._on_notice is not None:
            self._has_differed = True
            self._on_notice(f"step {step}: {first} and {site} have computed it differently: {known} and {figures}")
        if step >= self._next and step not in self._lines:
            self._lines[step] = site, line | ({EVENTS: events} if events else {})
        else:
            self._events += events
        for old in [*self._written][:-_KEPT]:
            del self._written[old]

    def _write(self) -> None:
        if self._next < 0 and self._lines:
            self._next = min(self._lines)
        while self._next in self._lines:
            site, line = self._lines.pop(self._next)
            if self._file is None:
                self._file = MetricsFile(self._run_dir / METRICS_NAME, self._next)
            events, self._events = [*line.get(EVENTS, ()), *self._events], []
            line = line | {"attempt": self._file.attempt, "recorded_by": site} | ({EVENTS: events} if events else {})
            self._file.write(line)
            self._on_step(line)
            self._next += 1

    def finish(self) -> Summary:
        """Write ``summary.json`` of all steps, and take ``timeline.json`` from a site that has done them."""
        self.read()
        path = self._run_dir / METRICS_NAME
        if not path.exists():
            raise RunError("no site has done a step; see the logs of its ranks under sites/")
        timeline_step = None
        for folder in (site_folder(self._run_dir, site) for site in self._sites):
            if (folder / SUMMARY_NAME).exists() and (folder / TIMELINE_NAME).exists():
                timeline_step = Summary.load(folder / SUMMARY_NAME).timeline_step
                shutil.copyfile(folder / TIMELINE_NAME, self._run_dir / TIMELINE_NAME)
                break
        summary = summarise(read_metrics(path), timeline_step)
        summary.save(self._run_dir / SUMMARY_NAME)
        return summary

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
