"""The compiled greedy: always the rank that can start earliest, and there what its rules prefer.

The order of the rules is CrossPipe's (USENIX ATC 2025, arXiv 2507.00217); what it leaves open is a `taste`.
"""

import numpy as np
from numba import njit

_F, _I, _W, _B = 0, 1, 2, 3
_NOTHING, _FREE = -2, -1

FORWARD_FIRST, DEEP_FORWARDS, MIXED, FREE_BY_WEIGHTS, OVERSHOOT, SPLIT = range(6)
"""Places in a taste. FORWARD_FIRST: prefer F whatever came before. DEEP_FORWARDS: of several stages' forwards the
latest stage's first. MIXED: prefer the kind that did not come last (else always I). FREE_BY_WEIGHTS: when memory
keeps a forward waiting, W comes before I. OVERSHOOT: the part of a W that may delay what is known to come. SPLIT: I and
W (1) or B (0)."""


@njit(cache=True)
def greedy(  # type: ignore[no-untyped-def]
    tables, num_ranks, stages, stages_begin, held, kept, room, in_flight, taste
):
    """The orders (codes, begin), at most `in_flight` [S] microbatches between F and the end of W of a stage.

    Stages without room for anything else get their W's done first, and an F only starts when the rank keeps room for
    one microbatch in every later stage of its own: so the oldest microbatch can always go on, and nothing gets stuck
    where one microbatch fits. Returns no codes where even that does not.
    """
    num_stages, num_microbatches = tables[0]
    gate, link_free = np.zeros(num_stages), np.zeros(tables[7].size)
    _gathers(tables, gate, link_free)
    done = np.zeros((3, num_stages), np.int32)  # by kind, of every stage; a B counts as I and as W
    arrival = np.full((2, num_stages, num_microbatches), np.inf)
    arrival[0, 0], arrival[1, num_stages - 1] = tables[9], tables[9]
    free, used, last = np.zeros(num_ranks), np.zeros(num_ranks), np.full(num_ranks, _I, np.int32)
    reserve = _reserves(stages, stages_begin, held, num_ranks)
    state = (done, arrival, free, used, last, gate, link_free)
    limits = (stages, stages_begin, held, kept, room, reserve, in_flight)
    next_start, next_code = np.empty(num_ranks), np.empty(num_ranks, np.int64)
    for rank in range(num_ranks):
        next_start[rank], next_code[rank] = _choose(rank, tables, state, limits, taste)
    total = (3 if taste[SPLIT] > 0 else 2) * num_stages * num_microbatches
    codes, owner = np.empty(total, np.int32), np.empty(total, np.int32)
    for at in range(total):
        rank = int(np.argmin(next_start))
        if next_start[rank] == np.inf:
            return codes[:0], np.zeros(num_ranks + 1, np.int32)
        codes[at], owner[at] = next_code[rank], rank
        other = _do(rank, next_start[rank], next_code[rank], tables, state, limits)
        next_start[rank], next_code[rank] = _choose(rank, tables, state, limits, taste)
        if other >= 0:
            next_start[other], next_code[other] = _choose(other, tables, state, limits, taste)
    return _by_rank(codes, owner, num_ranks)


@njit(cache=True)
def _gathers(tables, gate, link_free):  # type: ignore[no-untyped-def]
    sync_link, sync_s, latency_s = tables[5], tables[6], tables[7]
    for stage in range(gate.size):
        link = sync_link[0, stage]
        if link != _NOTHING:
            link_free[link] += sync_s[0, stage]
            gate[stage] = link_free[link] + latency_s[link] + tables[9]


@njit(cache=True)
def _reserves(stages, stages_begin, held, num_ranks):  # type: ignore[no-untyped-def]
    """Per stage the room that one microbatch needs in all later stages of the same rank."""
    reserve = np.zeros(stages.size)
    for rank in range(num_ranks):
        for at in range(stages_begin[rank + 1] - 2, stages_begin[rank] - 1, -1):
            reserve[stages[at]] = reserve[stages[at + 1]] + held[stages[at + 1]].max()
    return reserve


@njit(cache=True)
def _by_rank(codes, owner, num_ranks):  # type: ignore[no-untyped-def]
    begin = np.zeros(num_ranks + 1, np.int32)
    begin[1:] = np.cumsum(np.bincount(owner, minlength=num_ranks))
    at, sorted_codes = begin.copy(), np.empty_like(codes)
    for i in range(codes.size):
        sorted_codes[at[owner[i]]] = codes[i]
        at[owner[i]] += 1
    return sorted_codes, begin


@njit(cache=True)
def _choose(rank, tables, state, limits, taste):  # type: ignore[no-untyped-def]
    """(start, code) of what `rank` does next; an infinite start: nothing is known to come."""
    num_microbatches = tables[0][1]
    free = state[2][rank]
    forward_s, forward, blocked = _next_forward(rank, state, limits, taste)
    backward_s, backward = _next_backward(rank, state, limits)
    weight = _next_weight(rank, state, limits) if taste[SPLIT] > 0 else -1
    back = _I if taste[SPLIT] > 0 else _B
    forward_code = 4 * forward + _F
    backward_code = 4 * backward + back
    if weight >= 0:
        weight_s = tables[1][(_W * tables[0][0] * num_microbatches) + weight]
        soonest = min(forward_s, backward_s)
        if blocked and taste[FREE_BY_WEIGHTS] > 0:
            soonest = np.inf
        if soonest - free > 0 and soonest - free >= weight_s * (1 - taste[OVERSHOOT]):
            return free, 4 * weight + _W
    if forward_s == np.inf and backward_s == np.inf:
        return np.inf, -1
    if _prefers_forward(state[4][rank], taste) and forward_s <= max(backward_s, free):
        return max(free, forward_s), forward_code
    if backward_s <= max(forward_s, free):
        return max(free, backward_s), backward_code
    return max(free, forward_s), forward_code


@njit(cache=True, inline="always")
def _prefers_forward(last, taste):  # type: ignore[no-untyped-def]
    return taste[FORWARD_FIRST] > 0 or (taste[MIXED] > 0 and last != _F)


@njit(cache=True)
def _next_forward(rank, state, limits, taste):  # type: ignore[no-untyped-def]
    """(when it can start, slot, whether memory keeps one waiting that has arrived)."""
    done, arrival, free, used, _, gate, _ = state
    stages, stages_begin, held, _, room, reserve, in_flight = limits
    num_microbatches = arrival.shape[2]
    best_s, best, blocked = np.inf, -1, False
    for at in range(stages_begin[rank], stages_begin[rank + 1]):
        stage = stages[at]
        microbatch = done[_F, stage]
        if microbatch == num_microbatches:
            continue
        start = max(free[rank], arrival[0, stage, microbatch], gate[stage])
        full = used[rank] + held[stage, microbatch] + reserve[stage] > room[rank]
        if full or microbatch - done[_W, stage] >= in_flight[stage]:
            blocked |= full and start <= free[rank]
        elif start < best_s or (start == best_s and taste[DEEP_FORWARDS] > 0):
            best_s, best = start, stage * num_microbatches + microbatch
    return best_s, best, blocked


@njit(cache=True)
def _next_backward(rank, state, limits):  # type: ignore[no-untyped-def]
    """(when it can start, slot); of several stages the earliest, whose gradient has the longest way behind it."""
    done, arrival, free = state[0], state[1], state[2]
    stages, stages_begin = limits[0], limits[1]
    num_microbatches = arrival.shape[2]
    best_s, best = np.inf, -1
    for at in range(stages_begin[rank], stages_begin[rank + 1]):
        stage = stages[at]
        microbatch = done[_I, stage]
        if microbatch < done[_F, stage]:
            start = max(free[rank], arrival[1, stage, microbatch])
            if start < best_s:
                best_s, best = start, stage * num_microbatches + microbatch
    return best_s, best


@njit(cache=True)
def _next_weight(rank, state, limits):  # type: ignore[no-untyped-def]
    """The slot whose W frees most memory, or -1."""
    done = state[0]
    stages, stages_begin, kept = limits[0], limits[1], limits[3]
    best, most = -1, -1.0
    for at in range(stages_begin[rank], stages_begin[rank + 1]):
        stage = stages[at]
        microbatch = done[_W, stage]
        if microbatch < done[_I, stage] and kept[stage, microbatch] > most:
            best, most = stage * kept.shape[1] + microbatch, kept[stage, microbatch]
    return best


@njit(cache=True)
def _do(rank, start, code, tables, state, limits):  # type: ignore[no-untyped-def]
    """Do an action, send its message; returns the rank that gets it, or -1."""
    shape, duration_s, rank_of_stage = tables[0], tables[1], tables[2]
    done, arrival, free, used, last, _, _ = state
    held, kept = limits[2], limits[3]
    kind, slot = code & 3, code >> 2
    stage, microbatch = slot // shape[1], slot % shape[1]
    free[rank] = start + duration_s[kind * shape[0] * shape[1] + slot]
    last[rank] = kind if kind != _W else last[rank]
    if kind == _W:
        done[_W, stage] += 1
        used[rank] -= kept[stage, microbatch]
        return -1
    if kind == _F:
        done[_F, stage] += 1
        used[rank] += held[stage, microbatch]
    else:
        done[_I, stage] += 1
        used[rank] -= held[stage, microbatch] - (kept[stage, microbatch] if kind == _I else 0.0)
        done[_W, stage] += 1 if kind == _B else 0
    way = 0 if kind == _F else 1
    target = stage + 1 - 2 * way
    if target < 0 or target >= shape[0]:
        return -1
    arrival[way, target, microbatch] = _arrival(way * shape[0] * shape[1] + slot, free[rank], tables, state[6])
    return rank_of_stage[target]


@njit(cache=True)
def _arrival(message, ready, tables, link_free):  # type: ignore[no-untyped-def]
    """When a message arrives; on a link that others feed too, served in the order in which this is asked."""
    link, transfer_s, latency_s = tables[3], tables[4], tables[7]
    name = link[message]
    if name < 0:
        return ready
    link_free[name] = max(ready, link_free[name]) + transfer_s[message]
    return link_free[name] + latency_s[name]
