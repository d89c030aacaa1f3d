"""The compiled kernel: plays the orders of all ranks and writes down when everything happened.

Every rank runs ahead until an input is missing. A message on a link that one rank feeds goes on its way at once, for
such messages are ready in that rank's order. On a link that several ranks feed it is pending until nobody can run any
further: then the earliest pending message can't be overtaken any more, since whatever is still to come waits for it or
for a later one. So links serve in the order in which messages became ready, and the time is linear in the number of
actions (times the logarithm of the pending messages on shared links).
"""

import numpy as np
from numba import njit

_F, _W = 0, 2
_NOTHING, _FREE = -2, -1


@njit(cache=True, inline="always")
def _put(link, ready, occupies_s, link_free_s):  # type: ignore[no-untyped-def]
    """Put a message that is ready on its link: its start there."""
    if link == _FREE:
        return ready
    start = max(ready, link_free_s[link])
    link_free_s[link] = start + occupies_s
    return start


@njit(cache=True, inline="always")
def _before(one, other, ready_s, tie):  # type: ignore[no-untyped-def]
    return ready_s[one] < ready_s[other] or (ready_s[one] == ready_s[other] and tie[one] < tie[other])


@njit(cache=True)
def _push(heap, size, item, ready_s, tie):  # type: ignore[no-untyped-def]
    place = size
    while place > 0:
        parent = (place - 1) >> 1
        if not _before(item, heap[parent], ready_s, tie):
            break
        heap[place] = heap[parent]
        place = parent
    heap[place] = item


@njit(cache=True)
def _pop(heap, size, ready_s, tie):  # type: ignore[no-untyped-def]
    """The earliest of the `size` items on the heap, taken off."""
    first, last = heap[0], heap[size - 1]
    place, size = 0, size - 1
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and _before(heap[child + 1], heap[child], ready_s, tie):
            child += 1
        if not _before(heap[child], last, ready_s, tie):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = last
    return first


@njit(cache=True)
def new_scratch(shape, num_ranks, num_links, any_shared, num_collectives):  # type: ignore[no-untyped-def]
    """What a play works in, to be used again: (link_free_s, idle_s, left, position, free_s, waits_for, stack, heap,
    ready_s, tie)."""
    num_stages, num_microbatches = shape
    capacity = 2 * num_stages * num_microbatches + num_collectives if any_shared else 0
    clocks = (np.empty(num_links), np.empty(num_ranks))
    left, position = np.empty(num_stages, np.int32), np.empty(num_ranks, np.int32)
    ranks = (np.empty(num_ranks), np.empty(num_ranks, np.int32), np.empty(num_ranks, np.int64))
    heap, ready_s, tie = np.empty(capacity, np.int64), np.empty(capacity), np.empty(capacity, np.int64)
    return (clocks[0], clocks[1], left, position, ranks[0], ranks[1], ranks[2], heap, ready_s, tie)


@njit(cache=True)
def play(codes, begin, tables, num_links, out):  # type: ignore[no-untyped-def]
    """Play the orders; returns the number of actions that could be played.

    `codes` are as `lowering.encode` makes them; `tables` as `StepArrays.tables` does. They are flat: a message's place
    is ``way * S * M + stage * M + microbatch`` (way 0 forward, 1 backward), a collective's ``2 * S * M`` and its own.
    `out` = (start_s [A], message_start_s [2SM], arrival_s [2SM], starts of the collectives [C]).
    """
    num_ranks = begin.size - 1
    scratch = new_scratch(tables[0], num_ranks, num_links, tables[10].any(), tables[6].size)
    return run(codes, begin, tables, out, scratch, np.full(num_ranks, np.inf))


@njit(cache=True)
def makespan(codes, begin, tables, out, scratch, idle_limit_s):  # type: ignore[no-untyped-def]
    """The end of the last action or collective; infinite when the orders deadlock or a rank idles too long."""
    if run(codes, begin, tables, out, scratch, idle_limit_s) < codes.size:
        return np.inf
    arrives_after_s, first = tables[8], tables[9][0]
    end_s = scratch[4].max()
    for at in range(first, arrives_after_s.size):
        end_s = max(end_s, out[3][at] + arrives_after_s[at])
    return end_s


@njit(cache=True)
def run(codes, begin, tables, out, scratch, idle_limit_s):  # type: ignore[no-untyped-def]  # noqa: C901
    """What `play` does, in memory that is there already; given up (-1) when a rank waits longer than `idle_limit_s`."""
    shape, duration_s, rank_of_stage, link, occupies_s, arrives_after_s, other_link, other_s, _, after = tables[:10]
    shared, gate_s, link_opens_s, gather_s = tables[10:14]
    start_s, message_start_s, arrival_s, other_start_s = out
    link_free_s, idle_s, left, position, free_s, waits_for, stack, heap, ready_s, tie = scratch
    num_stages, num_microbatches = shape
    per_kind = num_stages * num_microbatches
    num_ranks = begin.size - 1
    arrival_s[:] = -1.0  # not there yet, but for what needs no message: the first forwards, the last backwards
    arrival_s[:num_microbatches] = arrival_s[2 * per_kind - num_microbatches :] = 0.0
    link_free_s[:], idle_s[:], free_s[:] = link_opens_s, 0.0, 0.0
    other_start_s[: gather_s.size] = gather_s
    num_ties = num_microbatches + other_link.size
    left[:], waits_for[:], position[:] = num_microbatches, -1, begin[:-1]
    for rank in range(num_ranks):
        stack[rank] = rank
    top, played, pending = num_ranks, 0, 0
    while top > 0 or pending > 0:
        if top == 0:  # nobody can run: the earliest pending message goes on its link
            item = _pop(heap, pending, ready_s, tie)
            pending -= 1
            if item >= 2 * per_kind:
                other = item - 2 * per_kind
                other_start_s[other] = _put(other_link[other], ready_s[item], other_s[other], link_free_s)
                continue
            way = item // per_kind
            target = item + num_microbatches - 2 * way * num_microbatches
            start = _put(link[item], ready_s[item], occupies_s[item], link_free_s)
            message_start_s[item], arrival_s[target] = start, start + arrives_after_s[item]
            rank = rank_of_stage[(target - way * per_kind) // num_microbatches]
            if waits_for[rank] != target:
                continue
            waits_for[rank] = -1
        else:
            top -= 1
            rank = stack[top]
        at, end, now = position[rank], begin[rank + 1], free_s[rank]
        while at < end:
            code = codes[at]
            kind, slot = code & 3, code >> 2
            stage = slot // num_microbatches
            way = 0 if kind == _F else 1
            if kind != _W:
                arrival = arrival_s[way * per_kind + slot]
                if arrival < 0.0:
                    waits_for[rank] = way * per_kind + slot
                    break
                if kind == _F:
                    arrival = max(arrival, gate_s[stage])
                if arrival > now:
                    idle_s[rank] += arrival - now
                    if idle_s[rank] > idle_limit_s[rank]:
                        return -1
                    now = arrival
            start_s[at] = now
            now += duration_s[kind * per_kind + slot]
            at += 1
            if kind != _W:
                sent = way * per_kind + slot
                name = link[sent]
                if name >= 0 and shared[name]:
                    ready_s[sent], tie[sent] = now, stage * num_ties + slot % num_microbatches
                    _push(heap, pending, sent, ready_s, tie)
                    pending += 1
                elif name != _NOTHING:
                    target = sent + num_microbatches - 2 * way * num_microbatches
                    start = _put(name, now, occupies_s[sent], link_free_s)
                    message_start_s[sent], arrival_s[target] = start, start + arrives_after_s[sent]
                    receiver = rank_of_stage[stage + 1 - 2 * way]
                    if waits_for[receiver] == target:
                        waits_for[receiver] = -1
                        stack[top] = receiver
                        top += 1
            if kind >= _W:
                left[stage] -= 1
                if left[stage] == 0:
                    for other in range(after[stage], after[stage + 1]):
                        if shared[other_link[other]]:
                            item = 2 * per_kind + other
                            ready_s[item], tie[item] = now, stage * num_ties + num_microbatches + other
                            _push(heap, pending, item, ready_s, tie)
                            pending += 1
                        else:
                            other_start_s[other] = _put(other_link[other], now, other_s[other], link_free_s)
        played += at - position[rank]
        position[rank], free_s[rank] = at, now
    return played
