"""The compiled player: plays the orders of all ranks and writes down when everything happened.

Every rank runs ahead until an input is missing. A message on a link that one rank feeds is sent at once, for
such messages are ready in that rank's order. On a link that several ranks feed it is pending until nobody can run any
further: then the earliest pending message can't be overtaken any more, since whatever is still to come waits for it or
for a later one. So links serve in the order in which messages became ready, and the time is linear in the number of
actions (times the logarithm of the pending messages on shared links).

The heap of pending messages holds its keys itself: comparing through the tables of messages costs a cache miss each.
"""

import numpy as np
from numba import njit

_F, _W = 0, 2
_NOTHING, _FREE = -2, -1


@njit(cache=True, inline="always")
def _put(link, ready_s, occupies_s, link_free_s):  # type: ignore[no-untyped-def]
    """Put a message that is ready on its link: its start there."""
    if link == _FREE:
        return ready_s
    start_s = max(ready_s, link_free_s[link])
    link_free_s[link] = start_s + occupies_s
    return start_s


@njit(cache=True, inline="always")
def _settle(heap, place, ready_s, tie, item):  # type: ignore[no-untyped-def]
    """Put a pending message at `place` or above it, wherever nothing later is above."""
    keys, ties, items = heap
    while place > 0:
        parent = (place - 1) >> 1
        if ready_s > keys[parent] or (ready_s == keys[parent] and tie > ties[parent]):
            break
        keys[place], ties[place], items[place] = keys[parent], ties[parent], items[parent]
        place = parent
    keys[place], ties[place], items[place] = ready_s, tie, item


@njit(cache=True, inline="always")
def _pop(heap, size):  # type: ignore[no-untyped-def]
    """Take the earliest of the `size` pending messages off: the gap sinks to the bottom, where the last one settles."""
    keys, ties, items = heap
    size -= 1
    ready_s, tie, item = keys[size], ties[size], items[size]
    place, child = 0, 1
    while child < size:
        other = child + 1
        if other < size and (keys[other] < keys[child] or (keys[other] == keys[child] and ties[other] < ties[child])):
            child = other
        keys[place], ties[place], items[place] = keys[child], ties[child], items[child]
        place, child = child, 2 * child + 1
    _settle(heap, place, ready_s, tie, item)


@njit(cache=True, inline="always")
def stage_of(slot, per_microbatch):  # type: ignore[no-untyped-def]
    """Stage of a slot; `per_microbatch`: 1 / M. Exact below 2**51 slots, and faster than dividing integers."""
    return np.int64((slot + 0.5) * per_microbatch)


@njit(cache=True, inline="always")
def figure_place(tables, stage, slot):  # type: ignore[no-untyped-def]
    """Place of the figures of stage * M + microbatch = `slot` among those of one kind or direction."""
    return slot if tables.width > 1 else stage


@njit(cache=True)
def new_scratch(shape, num_ranks, num_links, any_shared, num_collectives):  # type: ignore[no-untyped-def]
    """Arrays for a play, to be used again: (link_free_s, idle_s, left, position, free_s, waits_for, stack, heap)."""
    num_stages, num_microbatches = shape
    capacity = 2 * num_stages * num_microbatches + num_collectives if any_shared else 0
    clocks = (np.empty(num_links), np.empty(num_ranks))
    left, position = np.empty(num_stages, np.int32), np.empty(num_ranks, np.int32)
    ranks = (np.empty(num_ranks), np.empty(num_ranks, np.int32), np.empty(num_ranks, np.int64))
    heap = (np.empty(capacity), np.empty(capacity, np.int64), np.empty(capacity, np.int64))
    return (clocks[0], clocks[1], left, position, ranks[0], ranks[1], ranks[2], heap)


@njit(cache=True)
def play(codes, begin, tables, num_links, out):  # type: ignore[no-untyped-def]
    """Play the orders; returns the number of actions that could be played.

    `codes` and `begin` are a Schedule's, `tables` as `StepArrays.tables` has them. In `out` a message's place is
    ``direction * S * M + stage * M + microbatch`` (direction 0 forward, 1 backward), of collective c
    ``2 * S * M + c``.
    `out` = (start_s [A], message_start_s [2SM], arrival_s [2SM], starts of the collectives [C]).
    """
    num_ranks = begin.size - 1
    scratch = new_scratch(tables.shape, num_ranks, num_links, tables.shared.any(), tables.collective_link.size)
    return run(codes, begin, tables, out, scratch, np.full(num_ranks, np.inf))


@njit(cache=True)
def makespan(codes, begin, tables, out, scratch, idle_limit_s):  # type: ignore[no-untyped-def]
    """The end of the last action or collective; infinite when the orders deadlock or a rank idles too long."""
    if run(codes, begin, tables, out, scratch, idle_limit_s) < codes.size:
        return np.inf
    arrives_after_s, first = tables.collective_arrives_after_s, tables.collective_begin[0]
    end_s = scratch[4].max()
    for at in range(first, arrives_after_s.size):
        end_s = max(end_s, out[3][at] + arrives_after_s[at])
    return end_s


@njit(cache=True)
def _begin(begin, tables, out, scratch):  # type: ignore[no-untyped-def]
    """Nothing is there yet but what needs no message: the first forwards, the last backwards."""
    num_microbatches, link_opens_s, gather_s = tables.shape[1], tables.link_opens_s, tables.gather_s
    arrival_s, other_start_s = out[2], out[3]
    link_free_s, idle_s, left, position, free_s, waits_for, stack = scratch[:7]
    arrival_s[:] = -1.0
    arrival_s[:num_microbatches] = arrival_s[arrival_s.size - num_microbatches :] = 0.0
    idle_s[:], free_s[:] = 0.0, 0.0
    for name in range(link_free_s.size):  # arrays into slices take seconds to compile
        link_free_s[name] = link_opens_s[name]
    for other in range(gather_s.size):
        other_start_s[other] = gather_s[other]
    left[:], waits_for[:] = num_microbatches, -1
    for rank in range(stack.size):
        stack[rank], position[rank] = rank, begin[rank]


@njit(cache=True)
def _end_stage(stage, now, pending, tables, out, scratch):  # type: ignore[no-untyped-def]
    """The collectives that wait for the last backward of a stage; returns the number of pending messages."""
    shape, link, after, shared = tables.shape, tables.collective_link, tables.collective_begin, tables.shared
    for other in range(after[stage], after[stage + 1]):
        if shared[link[other]]:
            tie = stage * link.size + (stage + 1) * shape[1] + other
            _settle(scratch[7], pending, now, tie, 2 * shape[0] * shape[1] + other)
            pending += 1
        else:
            out[3][other] = _put(link[other], now, tables.collective_occupies_s[other], scratch[0])
    return pending


@njit(cache=True)
def run(codes, begin, tables, out, scratch, idle_limit_s):  # type: ignore[no-untyped-def]  # noqa: C901
    """`play` in memory that is there already; given up (-1) when a rank waits longer than `idle_limit_s`."""
    duration_s, rank_of_stage, link = tables.duration_s, tables.rank_of_stage, tables.link
    occupies_s, arrives_after_s = tables.occupies_s, tables.arrives_after_s
    shared, opens_s = tables.shared, tables.opens_s
    start_s, message_start_s, arrival_s, other_start_s = out
    link_free_s, idle_s, left, position, free_s, waits_for, stack, heap = scratch
    (num_stages, num_microbatches), num_others = tables.shape, tables.collective_link.size
    per_kind, per_row, per_microbatch = num_stages * num_microbatches, num_stages * tables.width, 1 / num_microbatches
    _begin(begin, tables, out, scratch)
    top, played, pending = stack.size, 0, 0
    while top > 0 or pending > 0:
        if top == 0:  # nobody can run: the earliest pending message goes on its link
            ready_s, item = heap[0][0], heap[2][0]
            _pop(heap, pending)
            pending -= 1
            if item >= 2 * per_kind:
                other = item - 2 * per_kind
                name, occupied_s = tables.collective_link[other], tables.collective_occupies_s[other]
                other_start_s[other] = _put(name, ready_s, occupied_s, link_free_s)
                continue
            direction = item // per_kind
            slot = item - direction * per_kind
            stage = stage_of(slot, per_microbatch)
            sent = direction * per_row + figure_place(tables, stage, slot)
            target = item + num_microbatches - 2 * direction * num_microbatches
            start = _put(link[sent], ready_s, occupies_s[sent], link_free_s)
            message_start_s[item], arrival_s[target] = start, start + arrives_after_s[sent]
            rank = rank_of_stage[stage + 1 - 2 * direction]
            if waits_for[rank] != target:
                continue
            waits_for[rank] = -1
        else:
            top -= 1
            rank = stack[top]
        at, end, now = position[rank], begin[rank + 1], free_s[rank]
        while at < end:
            kind, slot = codes[at] & 3, codes[at] >> 2
            stage = stage_of(slot, per_microbatch)
            place = figure_place(tables, stage, slot)
            direction = 0 if kind == _F else 1
            message = direction * per_kind + slot
            if kind != _W:
                arrival = arrival_s[message]
                if arrival < 0.0:
                    waits_for[rank] = message
                    break
                if kind == _F:
                    arrival = max(arrival, opens_s[stage])
                if arrival > now:
                    idle_s[rank] += arrival - now
                    if idle_s[rank] > idle_limit_s[rank]:
                        return -1
                    now = arrival
            start_s[at] = now
            now += duration_s[kind * per_row + place]
            at += 1
            if kind != _W:
                sent = direction * per_row + place
                name = link[sent]
                if name >= 0 and shared[name]:
                    _settle(heap, pending, now, stage * num_others + slot, message)
                    pending += 1
                elif name != _NOTHING:
                    target = message + num_microbatches - 2 * direction * num_microbatches
                    start = _put(name, now, occupies_s[sent], link_free_s)
                    message_start_s[message], arrival_s[target] = start, start + arrives_after_s[sent]
                    receiver = rank_of_stage[stage + 1 - 2 * direction]
                    if waits_for[receiver] == target:
                        waits_for[receiver] = -1
                        stack[top] = receiver
                        top += 1
            if kind >= _W:
                left[stage] -= 1
                if left[stage] == 0:
                    pending = _end_stage(stage, now, pending, tables, out, scratch)
        played += at - position[rank]
        position[rank], free_s[rank] = at, now
    return played
