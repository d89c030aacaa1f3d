"""Timelines as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing, in the JSON Trace Event Format.

Every timeline is a process group with one track per rank and per link; every message is an arrow from the action that
made it, over its link, to the action that used it. Counters show the bytes that ranks hold and the rates of links.
Times are whole nanoseconds, written in microseconds.

What is written is bounded: of a large step the arrows are left out, of a very large one also what begins late; the
names of the groups say so.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.simulate.events import makers, users, waits
from farpipe.core.simulate.timeline import MESSAGE_KINDS, Timeline
from farpipe.core.step import KINDS, Problem
from farpipe.core.strict import write_text
from farpipe.core.units import format_seconds
from farpipe.report.axis import lanes
from farpipe.report.charts import memory_over_time
from farpipe.report.gantt_rows import link_name

Event = dict[str, Any]
Nanoseconds = NDArray[np.int64]
Anchor = tuple[int, int, int]
"""A place to which an arrow can be tied: (track, start, end) of a slice, in nanoseconds."""

_ACTIONS: Final = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "backward"}
_ORDER: Final = {"M": 0, "C": 1, "X": 1, "s": 2, "t": 3, "f": 4}
_SHARED_LINK: Final = "{} ({})"
MAX_EVENTS: Final = 300_000
"""About 50 MB, which a browser opens in seconds."""
_EVENTS_PER_ARROW: Final = 3


def write_trace(timelines: Mapping[str, Timeline], path: Path | str, problem: Problem | None = None) -> None:
    """Write the trace of `timelines`, each under its name, to `path`, whole or not at all; `problem`: see `trace`."""
    write_text(path, json.dumps(trace(timelines, problem), separators=(",", ":"), allow_nan=False) + "\n")


def trace(timelines: Mapping[str, Timeline], problem: Problem | None = None) -> dict[str, Any]:
    """The trace as JSON data: events sorted by time, slices before the arrows that are tied to them.

    With the `problem` of the timelines memory and links have counters, unless the step is large.
    """
    events: list[Event] = []
    num_arrows = 0
    shown, with_arrows = _fitting(timelines)
    for index, (name, timeline) in enumerate(shown.items()):
        tracks = _Tracks(index + 1, timeline)
        arrows = list(tracks.arrows(num_arrows)) if with_arrows else []
        num_arrows += len(timeline.messages)
        events += [
            *tracks.names(name),
            *tracks.actions(),
            *tracks.waits(),
            *tracks.messages(),
            *tracks.outer(),
            *arrows,
        ]
        if problem is not None and with_arrows:
            events += [*tracks.memory(problem), *tracks.rates()]
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0), _ORDER[event["ph"]]))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _fitting(timelines: Mapping[str, Timeline]) -> tuple[Mapping[str, Timeline], bool]:
    """Timelines cut to MAX_EVENTS, the cut noted in their names; and True if arrows fit as well."""
    num_messages = sum(len(timeline.messages) for timeline in timelines.values())
    num_slices = num_messages + sum(len(timeline.actions) for timeline in timelines.values())
    if num_slices + _EVENTS_PER_ARROW * num_messages <= MAX_EVENTS:
        return timelines, True
    if num_slices <= MAX_EVENTS:
        return {f"{name} (too many messages for arrows)": timeline for name, timeline in timelines.items()}, False
    begins = [rows["start_s"] for timeline in timelines.values() for rows in (timeline.actions, timeline.messages)]
    until_s = float(np.partition(np.concatenate(begins), MAX_EVENTS)[MAX_EVENTS])
    return {
        f"{name} (only what begins in the first {format_seconds(until_s)}, without arrows)": replace(
            timeline,
            actions=timeline.actions[timeline.actions["start_s"] < until_s],
            messages=timeline.messages[timeline.messages["start_s"] < until_s],
        )
        for name, timeline in timelines.items()
    }, False


@dataclass(frozen=True)
class _Tracks:
    """The tracks of one timeline: rank r is track r + 1, links follow."""

    group: int
    timeline: Timeline

    @cached_property
    def lane(self) -> NDArray[np.int64]:
        """The track of every message; messages that share a link at the same time lie on several; 0: no link."""
        messages = self.timeline.messages
        track, free = np.zeros(len(messages), np.int64), self.timeline.num_ranks + 1
        for link in range(len(self.timeline.links)):
            own = np.flatnonzero(messages["link"] == link)
            own = own[np.argsort(messages["start_s"][own], kind="stable")]
            found = lanes(_nanoseconds(messages["start_s"][own]), _nanoseconds(messages["end_s"][own]))
            track[own] = free + found
            free += int(found.max(initial=0)) + 1
        return track

    def names(self, name: str) -> Iterator[Event]:
        """Names and order of the group and its tracks."""
        yield self._name("process_name", 0, name=name)
        yield self._name("process_sort_index", 0, sort_index=self.group)
        ranks = {rank + 1: f"rank {rank}" for rank in range(self.timeline.num_ranks)}
        for track, label in (ranks | self._link_tracks()).items():
            yield self._name("thread_name", track, name=label)
            yield self._name("thread_sort_index", track, sort_index=track)

    def _link_tracks(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for link in range(len(self.timeline.links)):
            own = np.unique(self.lane[self.timeline.messages["link"] == link])
            name = link_name(self.timeline, link)
            found |= {int(t): name if i == 0 else _SHARED_LINK.format(name, i + 1) for i, t in enumerate(own)}
        return found | {track: f"from {source}" for source, track in self._outer_tracks.items()}

    @cached_property
    def _outer_tracks(self) -> dict[str, int]:
        first = max(self.timeline.num_ranks, int(self.lane.max(initial=0))) + 1
        return {source: first + i for i, source in enumerate(dict.fromkeys(one.source for one in self.timeline.outer))}

    def outer(self) -> Iterator[Event]:
        """A slice for what came from sites outside, from its arrival until it was needed, or the wait for it."""
        for came in self.timeline.outer:
            start, end = sorted(round(seconds * 1e9) for seconds in (came.arrival_s, came.needed_s))
            name = f"{came.what}: {'slack' if came.slack_s >= 0 else 'waited'}"
            args = {"bytes": came.bytes, "slack_us": round(came.slack_s * 1e6, 3)}
            yield self._slice(self._outer_tracks[came.source], name, "outer message", start, end, args)

    def _name(self, what: str, track: int, **args: Any) -> Event:
        return {"ph": "M", "name": what, "pid": self.group, "tid": track, "args": args}

    def _slice(self, track: int, name: str, category: str, start: int, end: int, args: dict[str, Any]) -> Event:
        place = {"pid": self.group, "tid": track, "ts": start / 1000, "dur": (end - start) / 1000}
        return {"ph": "X", "name": name, "cat": category, **place, "args": args}

    def actions(self) -> Iterator[Event]:
        """A slice for every action."""
        for action, (track, start, end) in zip(self.timeline.actions, self._action_anchors, strict=True):
            args = {"stage": int(action["stage"]), "microbatch": int(action["microbatch"])}
            category = _ACTIONS[KINDS[action["kind"]]]
            yield self._slice(track, self.timeline.label(action), category, start, end, args)

    def waits(self) -> Iterator[Event]:
        """A slice for every exposed wait, between the actions of its rank."""
        found = waits(self.timeline)
        for wait, start, end in zip(
            found, *(_nanoseconds(found[f]).tolist() for f in ("start_s", "end_s")), strict=True
        ):
            if end > start:
                name = link_name(self.timeline, int(wait["link"]))
                across = wait["link"] >= 0 and self.timeline.is_between_sites(name)
                category = "wait between sites" if across else "wait inside a site"
                yield self._slice(int(wait["rank"]) + 1, f"wait: {name}", category, start, end, {})

    def messages(self) -> Iterator[Event]:
        """A slice for every message while it occupies its link."""
        for message, (track, start, end) in zip(self.timeline.messages, self._message_anchors, strict=True):
            if track > 0:
                kind, stage, microbatch = MESSAGE_KINDS[message["kind"]], message["stage"], message["microbatch"]
                name = f"{kind} {stage}" if microbatch < 0 else f"{kind} {stage}, microbatch {microbatch}"
                yield self._slice(track, name, "message", start, end, _message_args(message))

    def memory(self, problem: Problem) -> Iterator[Event]:
        """Counter of the bytes that every rank holds, in MiB."""
        for rank in range(self.timeline.num_ranks):
            times, held = memory_over_time(problem, self.timeline, rank)
            yield from self._counter(f"memory of rank {rank}", "MiB", times, held / 2**20)

    def rates(self) -> Iterator[Event]:
        """Counter of what every link carries, in Mbit/s."""
        for link in range(len(self.timeline.links)):
            own = self.timeline.messages[self.timeline.messages["link"] == link]
            own = own[own["end_s"] > own["start_s"]]
            rate = own["bytes"] * 8e-6 / (own["end_s"] - own["start_s"])
            times, change = np.concatenate([own["start_s"], own["end_s"]]), np.concatenate([rate, -rate])
            order = np.lexsort((change, times))
            carried = np.maximum(np.cumsum(change[order]), 0.0)
            yield from self._counter(link_name(self.timeline, link), "Mbit/s", times[order], carried)

    def _counter(
        self, name: str, unit: str, times: NDArray[np.float64], values: NDArray[np.float64]
    ) -> Iterator[Event]:
        for start, value in zip(_nanoseconds(times).tolist(), values.tolist(), strict=True):
            yield {
                "ph": "C",
                "name": name,
                "pid": self.group,
                "ts": start / 1000,
                "args": {unit: float(f"{value:.6g}")},
            }

    def arrows(self, first: int) -> Iterator[Event]:
        """Start, step and finish of the arrow of every message; its number is `first` plus the message's."""
        ends = zip(self._ends(makers(self.timeline)), self._ends(users(self.timeline)), strict=True)
        for index, (maker, user) in enumerate(ends):
            anchor = self._message_anchors[index]
            stops = [stop for stop in (maker, anchor if anchor[0] else None, user) if stop is not None]
            yield from self._arrow(first + index + 1, stops)

    def _arrow(self, number: int, stops: Sequence[Anchor]) -> Iterator[Event]:
        """An arrow leaves at the end of its first slice and points at the beginning of the others."""
        times = [_inside(stop, last=index == 0) for index, stop in enumerate(stops)]
        if len(stops) < 2 or times != sorted(times):  # a message that came before it was sent: clocks that disagree
            return
        for index, (stop, time) in enumerate(zip(stops, times, strict=True)):
            phase = "s" if index == 0 else "f" if index == len(stops) - 1 else "t"
            place = {"pid": self.group, "tid": stop[0], "ts": time / 1000}
            bind = {"bp": "e"} if phase == "f" else {}
            yield {"ph": phase, "name": "message", "cat": "message", "id": number, **place, **bind}

    def _ends(self, actions: NDArray[np.intp]) -> list[Anchor | None]:
        """The slices at one end of the arrows."""
        return [self._action_anchors[index] if index >= 0 else None for index in actions.tolist()]

    @cached_property
    def _action_anchors(self) -> list[Anchor]:
        return _anchors(self.timeline.actions["rank"] + 1, self.timeline.actions)

    @cached_property
    def _message_anchors(self) -> list[Anchor]:
        return _anchors(self.lane, self.timeline.messages)


def _anchors(track: NDArray[Any], rows: NDArray[np.void]) -> list[Anchor]:
    start, end = _nanoseconds(rows["start_s"]), _nanoseconds(rows["end_s"])
    return list(zip(track.tolist(), start.tolist(), np.maximum(start, end).tolist(), strict=True))


def _inside(stop: Anchor, last: bool) -> int:
    """A time within a slice, its last nanosecond or its first, so that a viewer ties the arrow to it."""
    _, start, end = stop
    return max(start, end - 1) if last else start


def _nanoseconds(seconds: NDArray[np.float64]) -> Nanoseconds:
    return np.rint(seconds * 1e9).astype(np.int64)


def _message_args(message: np.void) -> dict[str, Any]:
    times = {f"{name}_us": round(float(message[f"{name}_s"]) * 1e6, 3) for name in ("ready", "arrival")}
    return {
        "bytes": float(message["bytes"]),
        "source": int(message["source"]),
        "target": int(message["target"]),
        **times,
    }
