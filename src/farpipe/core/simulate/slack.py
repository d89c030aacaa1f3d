"""Slack: how much later everything in a Timeline could have ended without a longer step, and its critical path.

Ranks keep their order and links the sequence in which they served. By when everything has to have ended then follows
from longest paths backwards in time: over what comes next on the same rank or link, and over what waits for it. What
has no slack is critical: the critical path consists of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.simulate.events import makers, users
from farpipe.core.simulate.timeline import Timeline

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Edges = tuple[Indices, Indices, Floats]
"""(earlier, later, seconds between the end of the one and the start of the other at least), actions before messages."""

ROUNDING: Final = 1e-9
"""A part of the makespan: less slack than that is none."""


@dataclass(frozen=True)
class Slack:
    """Seconds, by the places in the Timeline's arrays."""

    actions_s: Floats
    """Time by which every action could have ended later."""
    messages_s: Floats
    """Time by which every message could have arrived later."""
    critical_messages: NDArray[np.bool_]


def slack(timeline: Timeline) -> Slack:
    """The slack of every action and message; linear in their number."""
    actions, messages = timeline.actions, timeline.messages
    took_s = np.concatenate([actions["end_s"] - actions["start_s"], messages["arrival_s"] - messages["start_s"]])
    ended_s = np.concatenate([actions["end_s"], messages["arrival_s"]])
    earlier, later, between_s = (np.concatenate(parts) for parts in zip(*_edges(timeline), strict=True))
    due_s = _latest_ends((earlier, later, between_s), took_s, float(ended_s.max(initial=0.0)))
    late_s = np.maximum(due_s - ended_s, 0.0)
    is_critical = late_s <= ROUNDING * timeline.makespan_s
    count = len(actions)
    return Slack(late_s[:count], late_s[count:], is_critical[count:])


def data_with_slack(timeline: Timeline) -> dict[str, Any]:
    """The Timeline as JSON data, every event with its ``slack_s``."""
    found, data = slack(timeline), timeline.to_data()
    for event, late_s in zip(data["events"], [*found.actions_s.tolist(), *found.messages_s.tolist()], strict=True):
        event["slack_s"] = late_s
    return data


def _latest_ends(edges: Edges, took_s: Floats, end_s: float) -> Floats:
    """Latest end of every event for all to end by `end_s`: the later ones first."""
    earlier, later, between_s = edges
    order = np.argsort(later, kind="stable")
    earlier, between_s = earlier[order], between_s[order]
    first = np.searchsorted(later[order], np.arange(took_s.size + 1)).tolist()
    waiting = np.bincount(earlier, minlength=took_s.size).tolist()
    due_s, ready = [end_s] * took_s.size, [event for event, count in enumerate(waiting) if count == 0]
    took, before, between = took_s.tolist(), earlier.tolist(), between_s.tolist()
    while ready:
        event = ready.pop()
        start_s = due_s[event] - took[event]
        for at in range(first[event], first[event + 1]):
            other = before[at]
            due_s[other] = min(due_s[other], start_s - between[at])
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return np.array(due_s)


def _edges(timeline: Timeline) -> Iterator[Edges]:
    """Pairs in which one comes before the other: on a rank, on a link, an action and its message, and the reverse."""
    count = len(timeline.actions)
    ranks, own = timeline.actions["rank"], np.arange(len(timeline.messages)) + count
    follows = np.flatnonzero(ranks[1:] == ranks[:-1]) + 1
    yield follows - 1, follows, np.zeros(follows.size)
    yield _on_links(timeline, count)
    for earlier, later in ((makers(timeline), own), (own, users(timeline))):
        known = (earlier >= 0) & (later >= 0)
        yield earlier[known], later[known], np.zeros(int(known.sum()))


def _on_links(timeline: Timeline, count: int) -> Edges:
    """The second of two messages in a row starts when the first has left, if it was ready: after a pause, if it waited.

    An event ends with the arrival, so what is between its end and the start of the next may be less than nothing.
    """
    messages = timeline.messages
    order = np.lexsort((messages["end_s"], messages["start_s"], messages["link"]))
    rows = messages[order]
    same = np.flatnonzero((rows["link"][1:] == rows["link"][:-1]) & (rows["link"][1:] >= 0))
    one, other = rows[same], rows[same + 1]
    pause_s = np.where(other["start_s"] > other["ready_s"], np.maximum(other["start_s"] - one["end_s"], 0.0), 0.0)
    return order[same] + count, order[same + 1] + count, pause_s - (one["arrival_s"] - one["end_s"])
