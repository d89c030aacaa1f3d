"""The compiled part of the window search: by when everything has to begin for a step to end in time."""

import numpy as np
from numba import njit

from farpipe.step.player import figure_place

_F, _I, _W, _B = 0, 1, 2, 3


@njit(cache=True)
def places(codes, num_codes):  # type: ignore[no-untyped-def]
    """[num_codes]: the place of every action in the orders; -1: it does not exist."""
    place = np.full(num_codes, -1, np.int64)
    for at in range(codes.size):
        place[codes[at]] = at
    return place


@njit(cache=True)
def consumer(code, place, shape):  # type: ignore[no-untyped-def]
    """The place of the action that waits for this one's message, or -1."""
    kind, slot = code & 3, code >> 2
    stage = slot // shape[1]
    if kind == _W or (kind == _F and stage + 1 == shape[0]) or (kind != _F and stage == 0):
        return -1
    if kind == _F:
        return place[4 * (slot + shape[1])]
    other = 4 * (slot - shape[1])
    return place[other + _I] if place[other + _I] >= 0 else place[other + _B]


@njit(cache=True)
def latest_starts(codes, begin, tables, place, last_first, end_s):  # type: ignore[no-untyped-def]
    """[A]: by when every action has to begin, if all orders stay as they are, for the step to end at `end_s`.

    Longest paths backwards in time, actions in the sequence `last_first` of their ends; links keep theirs as well.
    """
    shape, per_row, after = tables.shape, tables.shape[0] * tables.width, tables.collective_begin
    due, link_due = np.empty(codes.size), np.full(tables.shared.size, np.inf)
    for at in last_first:
        kind, slot = codes[at] & 3, codes[at] >> 2
        stage = slot // shape[1]
        place_of_figures = figure_place(tables, stage, slot)
        end = end_s if at + 1 == begin[tables.rank_of_stage[stage] + 1] else due[at + 1]
        if kind >= _W:
            for other in range(after[stage], after[stage + 1]):
                end = min(end, end_s - tables.collective_arrives_after_s[other])
        user = consumer(codes[at], place, shape)
        if user >= 0:
            sent = (0 if kind == _F else per_row) + place_of_figures
            name, there = tables.link[sent], due[user]
            if name >= 0:
                there = min(there - tables.arrives_after_s[sent], link_due[name] - tables.occupies_s[sent])
                link_due[name] = there
            end = min(end, there)
        due[at] = end - tables.duration_s[kind * per_row + place_of_figures]
    return due
