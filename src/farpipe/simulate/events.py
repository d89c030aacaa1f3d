"""The events of one step as arrays, of which a Timeline is made, and the actions that made and used each message."""

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from farpipe.step import COLLECTIVE_KINDS
from farpipe.step.codes import F, W

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
