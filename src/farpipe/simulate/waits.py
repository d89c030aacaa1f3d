"""Intervals of a Timeline's exposed time."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.simulate.events import MESSAGE_KINDS, Events, first_actions, inputs

WAIT_DTYPE: Final = np.dtype([("rank", "i4"), ("link", "i4"), ("start_s", "f8"), ("end_s", "f8")])
"""One wait of a rank for a message on `link` (an index into the timeline's links; -1: a hop without a link)."""

_GATHER = MESSAGE_KINDS.index("gather")


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
