"""The action that made a message and the one that used it, as indices into a Timeline's arrays."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.simulate.events import MESSAGE_KINDS, Events
from farpipe.step import KINDS

Indices = NDArray[np.intp]
Keys = NDArray[np.int64]

_FORWARD: Final = MESSAGE_KINDS.index("forward")
_GATHER: Final = MESSAGE_KINDS.index("gather")
_F, _W = KINDS.index("F"), KINDS.index("W")
_NOTHING = -1


def inputs(timeline: Events) -> Indices:
    """For every action the message that it uses; -1: none."""
    return _find(_action_keys(timeline), _message_keys(timeline, of_user=True))


def makers(timeline: Events) -> Indices:
    """For every message the action that it waits for: a collective for its stage's last one; -1: none (gathers)."""
    found, last = _find(_message_keys(timeline, of_user=False), _action_keys(timeline)), last_actions(timeline)
    for index in np.flatnonzero(timeline.messages["kind"] > _GATHER):
        found[index] = last.get(int(timeline.messages["stage"][index]), -1)
    return found


def users(timeline: Events) -> Indices:
    """For every message the action that waits for it, for a gather its stage's first; -1: none (other collectives)."""
    found, first = _find(_message_keys(timeline, of_user=True), _action_keys(timeline)), first_actions(timeline)
    for index in np.flatnonzero(timeline.messages["kind"] == _GATHER):
        found[index] = first.get(int(timeline.messages["stage"][index]), -1)
    return found


def first_actions(timeline: Events) -> dict[int, int]:
    """For every stage its first action."""
    stages, index = np.unique(timeline.actions["stage"], return_index=True)
    return dict(zip(stages.tolist(), index.tolist(), strict=True))


def last_actions(timeline: Events) -> dict[int, int]:
    """For every stage its last action."""
    stages, index = np.unique(timeline.actions["stage"][::-1], return_index=True)
    return dict(zip(stages.tolist(), (len(timeline.actions) - 1 - index).tolist(), strict=True))


def _action_keys(timeline: Events) -> Keys:
    """One number for (stage, direction, microbatch); W neither makes nor uses a message."""
    actions = timeline.actions
    keys = _keys(timeline, actions["stage"], actions["kind"] != _F, actions["microbatch"])
    return np.where(actions["kind"] == _W, _NOTHING, keys)


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
    """For every wanted key its place among the given ones, -1 where it is not there."""
    if not given.size:
        return np.full(wanted.size, -1, np.intp)
    order = np.argsort(given, kind="stable")
    place = np.minimum(np.searchsorted(given[order], wanted), given.size - 1)
    found = order[place]
    return np.asarray(np.where((given[found] == wanted) & (wanted != _NOTHING), found, -1), np.intp)
