"""The compiled player: plays the orders of all ranks and writes down when everything happened.

Every rank runs ahead until an input is missing. A message on a link that one rank feeds is sent at once, for
such messages are ready in that rank's order. On a link that several ranks feed it is pending until no rank can run any
further: then the earliest pending message can't be overtaken any more, since whatever is still to come waits for it or
for a later one. So links serve in the order in which messages became ready, and the time is linear in the number of
actions (times the logarithm of the pending messages on shared links).

The heap of pending messages holds its keys itself: comparing through the tables of messages costs a cache miss each.
"""

import numpy as np

from farpipe.core.step.arrays import Tables
from farpipe.core.step.codes import F, W
from farpipe.core.step.inlined import (
    arrival_of,
    direction_of,
    figure_place,
    kind_of,
    message_of,
    next_stage,
    pop,
    put,
    settle,
    slot_of,
    stage_of,
)
from farpipe.core.step.jit import inner, jit
from farpipe.core.step.messages import NOTHING


@jit
def new_scratch(tables, num_ranks):  # type: ignore[no-untyped-def]
    """Arrays for a play, to be used again: (link_free_s, idle_s, left, position, free_s, waits_for, stack, heap)."""
    num_stages, num_microbatches = tables.shape
    capacity = 0
    for is_shared in tables.shared:  # sooner compiled than `any`
        if is_shared:
            capacity = 2 * num_stages * num_microbatches + tables.collective_link.size
    clocks = (np.empty(tables.shared.size), np.empty(num_ranks))
    left, position = np.empty(num_stages, np.int32), np.empty(num_ranks, np.int32)
    ranks = (np.empty(num_ranks), np.empty(num_ranks, np.int32), np.empty(num_ranks, np.int64))
    heap = (np.empty(capacity), np.empty(capacity, np.int64), np.empty(capacity, np.int64))
    return (clocks[0], clocks[1], left, position, ranks[0], ranks[1], ranks[2], heap)


@jit
def play(codes, begin, fields, out):  # type: ignore[no-untyped-def]
    """Play the orders; returns the number of actions that could be played.

    `codes` and `begin` are a Schedule's, `fields` those of `StepArrays.tables` as a plain tuple, which a call takes a
    microsecond sooner than a named one. Places of messages are as `step.codes` has them, of collective c ``2 S M + c``.
    `out` = (start_s [A], message_start_s [2SM], arrival_s [2SM], starts of the collectives [C]).
    """
    tables, num_ranks = Tables(*fields), begin.size - 1
    return run(codes, begin, tables, out, new_scratch(tables, num_ranks), np.full(num_ranks, np.inf))


@jit
def makespan(codes, begin, tables, out, scratch, idle_limit_s):  # type: ignore[no-untyped-def]
    """The end of the last action or collective; infinite when the orders deadlock or a rank idles too long."""
    if run(codes, begin, tables, out, scratch, idle_limit_s) < codes.size:
        return np.inf
    arrives_after_s, first = tables.collective_arrives_after_s, tables.collective_begin[0]
    end_s = scratch[4][0]
    for free_s in scratch[4]:
        end_s = max(end_s, free_s)
    for at in range(first, arrives_after_s.size):
        end_s = max(end_s, out[3][at] + arrives_after_s[at])
    return end_s


@inner
def _begin(begin, tables, out, scratch):  # type: ignore[no-untyped-def]
    """Nothing is there yet but what needs no message: the first forwards, the last backwards."""
    num_microbatches, link_opens_s, gather_s = tables.shape[1], tables.link_opens_s, tables.gather_s
    arrival_s, other_start_s = out[2], out[3]
    link_free_s, idle_s, left, position, free_s, waits_for, stack = scratch[:7]
    last = arrival_s.size - num_microbatches
    for at in range(arrival_s.size):  # loops: filling slices takes as long to compile as all the rest
        arrival_s[at] = 0.0 if at < num_microbatches or at >= last else -1.0
    for name in range(link_free_s.size):
        link_free_s[name] = link_opens_s[name]
    for other in range(gather_s.size):
        other_start_s[other] = gather_s[other]
    for stage in range(left.size):
        left[stage] = num_microbatches
    for rank in range(stack.size):
        stack[rank], position[rank] = rank, begin[rank]
        idle_s[rank], free_s[rank], waits_for[rank] = 0.0, 0.0, -1


@inner
def _end_stage(stage, now, pending, tables, out, scratch):  # type: ignore[no-untyped-def]
    """The collectives that wait for the last backward of a stage; returns the number of pending messages."""
    shape, link, after, shared = tables.shape, tables.collective_link, tables.collective_begin, tables.shared
    for other in range(after[stage], after[stage + 1]):
        if shared[link[other]]:
            tie = stage * link.size + (stage + 1) * shape[1] + other
            settle(scratch[7], pending, now, tie, 2 * shape[0] * shape[1] + other)
            pending += 1
        else:
            out[3][other] = put(link[other], now, tables.collective_occupies_s[other], scratch[0])
    return pending


@inner
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
        if top == 0:  # no rank can run: the earliest pending message goes on its link
            ready_s, item = heap[0][0], heap[2][0]
            pop(heap, pending)
            pending -= 1
            if item >= 2 * per_kind:
                other = item - 2 * per_kind
                name, occupied_s = tables.collective_link[other], tables.collective_occupies_s[other]
                other_start_s[other] = put(name, ready_s, occupied_s, link_free_s)
                continue
            direction = item // per_kind
            slot = item - direction * per_kind
            stage = stage_of(slot, per_microbatch)
            sent = message_of(direction, figure_place(tables, stage, slot), per_row)
            target = arrival_of(item, direction, num_microbatches)
            start = put(link[sent], ready_s, occupies_s[sent], link_free_s)
            message_start_s[item], arrival_s[target] = start, start + arrives_after_s[sent]
            rank = rank_of_stage[next_stage(stage, direction)]
            if waits_for[rank] != target:
                continue
            waits_for[rank] = -1
        else:
            top -= 1
            rank = stack[top]
        at, end, now = position[rank], begin[rank + 1], free_s[rank]
        while at < end:
            kind, slot = kind_of(codes[at]), slot_of(codes[at])
            stage = stage_of(slot, per_microbatch)
            place = figure_place(tables, stage, slot)
            direction = direction_of(kind)
            message = message_of(direction, slot, per_kind)
            if kind != W:
                arrival = arrival_s[message]
                if arrival < 0.0:
                    waits_for[rank] = message
                    break
                if kind == F:
                    arrival = max(arrival, opens_s[stage])
                if arrival > now:
                    idle_s[rank] += arrival - now
                    if idle_s[rank] > idle_limit_s[rank]:
                        return -1
                    now = arrival
            start_s[at] = now
            now += duration_s[kind * per_row + place]
            at += 1
            if kind != W:
                sent = message_of(direction, place, per_row)
                name = link[sent]
                if name >= 0 and shared[name]:
                    settle(heap, pending, now, stage * num_others + slot, message)
                    pending += 1
                elif name != NOTHING:
                    target = arrival_of(message, direction, num_microbatches)
                    start = put(name, now, occupies_s[sent], link_free_s)
                    message_start_s[message], arrival_s[target] = start, start + arrives_after_s[sent]
                    receiver = rank_of_stage[next_stage(stage, direction)]
                    if waits_for[receiver] == target:
                        waits_for[receiver] = -1
                        stack[top] = receiver
                        top += 1
            if kind >= W:
                left[stage] -= 1
                if left[stage] == 0:
                    pending = _end_stage(stage, now, pending, tables, out, scratch)
        played += at - position[rank]
        position[rank], free_s[rank] = at, now
    return played
