"""The events of one step as arrays, of which a Timeline is made, the actions that made and used
each message, and the intervals of exposed time."""

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.core.step import COLLECTIVE_KINDS
from farpipe.core.step.codes import F, W

MESSAGE_KINDS: Final = ("forward", "backward", *COLLECTIVE_KINDS)

ACTION_DTYPE: Final = np.dtype(
    [
        ("rank", "i4"),
        ("stage", "i4"),
        ("kind", "i4"),
        ("microbatch", "i4"),
        ("start_s", "f8"),
        ("end_s", "f8"),
    ]
)
"""One action; `kind` is its place in KINDS."""

MESSAGE_DTYPE: Final = np.dtype(
    [
        ("link", "i4"),
        ("kind", "i4"),
        ("stage", "i4"),
        ("microbatch", "i4"),
        ("source", "i4"),
        ("target", "i4"),
        ("bytes", "f8"),
        ("ready_s", "f8"),
        ("start_s", "f8"),
        ("end_s", "f8"),
        ("arrival_s", "f8"),
    ]
)
"""One message: `stage` is its producer's, `link` an index into `links` (-1: a hop without a link).

It was ready when its producer ended, was on the link from `start_s` to `end_s` and reached the consumer at
`arrival_s`. Collectives have microbatch -1; gathers and reduces, which are of several
replicas, have their own rank as source and target.
"""
Indices = NDArray[np.intp]
Keys = NDArray[np.int64]

_FORWARD: Final = MESSAGE_KINDS.index("forward")
_GATHER: Final = MESSAGE_KINDS.index("gather")
_NOTHING = -1


class OuterArrival(NamedTuple):
    """A message that a step used of a site outside of the pipeline: with local steps another site's difference, with
    elastic replicas the sum of their gradients. It may have come in an earlier step, before time 0."""

    what: str
    source: str
    """Names of the sites that it came from."""
    bytes: float
    arrival_s: float
    needed_s: float

    @property
    def slack_s(self) -> float:
        """Time for which it had been here when it was needed; below 0 the step waited so long for it."""
        return self.needed_s - self.arrival_s


@dataclass(frozen=True, repr=False)
class Events:
    """Every action and message of one step; `actions` are sorted by rank, then start."""

    source: Literal["predicted", "measured"]
    num_ranks: int
    links: tuple[str, ...]
    actions: NDArray[np.void]
    messages: NDArray[np.void]
    copies: tuple[int, ...] = ()
    """Per link how many replicas send a message like each of these there, one after the other; empty: one everywhere.

    Collectives are of all replicas together.
    """
    between: tuple[bool, ...] = ()
    """Per link whether it joins two sites; empty: as their names say."""
    outer: tuple[OuterArrival, ...] = ()
    """What came from sites outside of the pipeline; it counts neither as message nor in the makespan."""


def inputs(timeline: Events) -> Indices:
    """Message that every action uses; -1: none."""
    return _find(_action_keys(timeline), _message_keys(timeline, of_user=True))


def makers(timeline: Events) -> Indices:
    """Action that every message waits for: a collective for its stage's last one; -1: none (gathers)."""
    found, last = _find(_message_keys(timeline, of_user=False), _action_keys(timeline)), last_actions(timeline)
    for index in np.flatnonzero(timeline.messages["kind"] > _GATHER):
        found[index] = last.get(int(timeline.messages["stage"][index]), -1)
    return found


def users(timeline: Events) -> Indices:
    """Action that waits for every message, for a gather its stage's first; -1: none (other collectives)."""
    found, first = _find(_message_keys(timeline, of_user=True), _action_keys(timeline)), first_actions(timeline)
    for index in np.flatnonzero(timeline.messages["kind"] == _GATHER):
        found[index] = first.get(int(timeline.messages["stage"][index]), -1)
    return found


def first_actions(timeline: Events) -> dict[int, int]:
    """First action of every stage."""
    stages, index = np.unique(timeline.actions["stage"], return_index=True)
    return dict(zip(stages.tolist(), index.tolist(), strict=True))


def last_actions(timeline: Events) -> dict[int, int]:
    """Last action of every stage."""
    stages, index = np.unique(timeline.actions["stage"][::-1], return_index=True)
    return dict(zip(stages.tolist(), (len(timeline.actions) - 1 - index).tolist(), strict=True))


def _action_keys(timeline: Events) -> Keys:
    """One number for (stage, direction, microbatch); W neither makes nor uses a message."""
    actions = timeline.actions
    keys = _keys(timeline, actions["stage"], actions["kind"] != F, actions["microbatch"])
    return np.where(actions["kind"] == W, _NOTHING, keys)


def _message_keys(timeline: Events, of_user: bool) -> Keys:
    """The key of the action that uses (or made) each message; collectives have none."""
    messages = timeline.messages
    backward = messages["kind"] != _FORWARD
    step = np.where(backward, -1, 1) if of_user else 0
    keys = _keys(timeline, messages["stage"] + step, backward, messages["microbatch"])
    return np.where(messages["microbatch"] < 0, _NOTHING, keys)


def _keys(timeline: Events, stage: NDArray[Any], backward: NDArray[np.bool_], microbatch: NDArray[Any]) -> Keys:
    most = max(int(rows["microbatch"].max(initial=0)) for rows in (timeline.actions, timeline.messages))
    return np.asarray((stage.astype(np.int64) * 2 + backward) * (most + 1) + microbatch, np.int64)


def _find(wanted: Keys, given: Keys) -> Indices:
    """Place of every wanted key among the given ones, -1 where it is not there."""
    if not given.size:
        return np.full(wanted.size, -1, np.intp)
    order = np.argsort(given, kind="stable")
    place = np.minimum(np.searchsorted(given[order], wanted), given.size - 1)
    found = order[place]
    return np.asarray(np.where((given[found] == wanted) & (wanted != _NOTHING), found, -1), np.intp)


WAIT_DTYPE: Final = np.dtype([("rank", "i4"), ("link", "i4"), ("start_s", "f8"), ("end_s", "f8")])
"""One wait of a rank for a message on `link` (an index into the timeline's links; -1: a hop without a link)."""


def waits(timeline: Events) -> NDArray[np.void]:
    """Every exposed wait, by rank and start; added up they are the timeline's `exposed_s`.

    A wait runs from when the rank is free and the message is ready until it arrives or the action starts.
    """
    actions = timeline.actions
    before = np.zeros(len(actions))
    same_rank = actions["rank"][1:] == actions["rank"][:-1]
    before[1:] = np.where(same_rank, actions["end_s"][:-1], 0.0)
    found = [_for_inputs(timeline, before), *_for_gathers(timeline, before), *_for_the_end(timeline)]
    rows = np.concatenate(found)
    return rows[np.lexsort((rows["start_s"], rows["rank"]))]


def _rows(
    rank: NDArray[np.int32], link: NDArray[np.int32], start: NDArray[np.float64], end: NDArray[np.float64]
) -> NDArray[np.void]:
    rows = np.empty(rank.size, WAIT_DTYPE)
    rows["rank"], rows["link"], rows["start_s"], rows["end_s"] = rank, link, start, end
    return rows[rows["end_s"] > rows["start_s"]]


def _for_inputs(timeline: Events, before: NDArray[np.float64]) -> NDArray[np.void]:
    needs = inputs(timeline)
    chosen = np.flatnonzero(needs >= 0)
    actions, messages = timeline.actions[chosen], timeline.messages[needs[chosen]]
    start = np.maximum(before[chosen], messages["ready_s"])
    return _rows(actions["rank"], messages["link"], start, np.minimum(actions["start_s"], messages["arrival_s"]))


def _for_gathers(timeline: Events, before: NDArray[np.float64]) -> list[NDArray[np.void]]:
    """The stage's first action waits for its gather, after it has waited for its input."""
    first, needs = first_actions(timeline), inputs(timeline)
    found = []
    for gather in timeline.messages[timeline.messages["kind"] == _GATHER]:
        at = first.get(int(gather["stage"]))
        if at is not None:
            start_s = timeline.actions["start_s"][at]
            free = before[at]
            if needs[at] >= 0:
                free = _free_after(timeline.messages[needs[at]], free, start_s)
            until = min(start_s, gather["arrival_s"])
            found.append(_one(timeline.actions["rank"][at], gather["link"], max(free, gather["ready_s"]), until))
    return found


def _free_after(message: np.void, free: float, start_s: float) -> float:
    """End of a rank's wait, free since `free`, for the input of an action that began at `start_s`."""
    until = min(start_s, float(message["arrival_s"]))
    return until if until > max(free, float(message["ready_s"])) else free


def _for_the_end(timeline: Events) -> list[NDArray[np.void]]:
    """After its last action a rank waits for the collectives that end with it, one after the other."""
    free = np.zeros(timeline.num_ranks)
    np.maximum.at(free, timeline.actions["rank"], timeline.actions["end_s"])
    found = []
    for one in np.sort(timeline.messages[timeline.messages["kind"] > _GATHER], order="arrival_s"):
        rank = one["target"]
        found.append(_one(rank, one["link"], max(free[rank], one["ready_s"]), one["arrival_s"]))
        free[rank] = max(free[rank], one["arrival_s"])
    return found


def _one(rank: int, link: int, start: float, end: float) -> NDArray[np.void]:
    return _rows(np.array([rank]), np.array([link]), np.array([start]), np.array([end]))
