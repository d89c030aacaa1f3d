"""The compiled greedy: always the rank that can start earliest, and there what its rules prefer.

The order of the rules is CrossPipe's (USENIX ATC 2025, arXiv 2507.00217); what it leaves open, `rules` says.
"""

import numpy as np

from farpipe.core.step.codes import B, F, I, W
from farpipe.core.step.inlined import (
    direction_of,
    encode,
    figure_place,
    kind_of,
    lacks,
    level_after,
    message_of,
    next_stage,
    put,
    slot_of,
)
from farpipe.core.step.jit import inner, jit

FORWARD_FIRST, DEEP_FORWARDS, MIXED, FREE_BY_WEIGHTS, OVERSHOOT, SPLIT = range(6)
"""Places in `rules`. FORWARD_FIRST: prefer F whatever came before. DEEP_FORWARDS: of several stages' forwards the
latest stage's first. MIXED: prefer the kind that did not come last (else always I). FREE_BY_WEIGHTS: when memory
keeps a forward waiting, W comes before I. OVERSHOOT: the part of a W that may delay what is known to come. SPLIT: I and
W (1) or B (0)."""


@jit
def greedy(  # type: ignore[no-untyped-def]
    tables, num_ranks, limits, opened, in_flight, rules
):
    """Actions as they start (codes, ranks), at most `in_flight` [S] microbatches between F and the end of W of a stage.

    `limits` = (stages [S], where each rank's begin in them [R + 1], bytes taken and freed [S, M, 4] both, headroom [R],
    reserve [S], microbatches in the order of their backwards [M], how many forwards each of these needs [M], zero
    without chains), `opened` = (when every stage may begin [S], when every link is free [L]) after the gathers.
    Stages without headroom for anything else get their W's done first, and an F only starts when the rank keeps
    headroom for one microbatch in every later stage of its own: so the oldest microbatch can always go on, and nothing
    gets stuck where one microbatch fits. Returns no codes where even that does not.
    """
    num_stages, num_microbatches = tables.shape
    opens_s, link_free = opened[0], opened[1].copy()
    done = np.zeros((3, num_stages), np.int32)  # by kind, of every stage; a B counts as I and as W
    arrival = np.full((2, num_stages, num_microbatches), np.inf)
    arrival[0, 0], arrival[1, num_stages - 1] = 0.0, 0.0
    free, used, last = np.zeros(num_ranks), np.zeros(num_ranks), np.full(num_ranks, I, np.int32)
    state = (done, arrival, free, used, last, opens_s, link_free)
    choices = (np.empty(num_ranks), np.empty(num_ranks, np.int64), np.arange(num_ranks))
    total = (3 if rules[SPLIT] > 0 else 2) * num_stages * num_microbatches
    codes, owner = np.empty(total, np.int32), np.empty(total, np.int32)
    count = _fill(codes, owner, tables, state, choices, limits, in_flight, rules)
    return codes[:count], owner[:count]


@inner
def _fill(codes, owner, tables, state, choices, limits, in_flight, rules):  # type: ignore[no-untyped-def]
    """Write the actions into `codes` and their ranks into `owner`; how many there are: all or none."""
    next_start, next_code, stale = choices
    num_ranks = num_stale = stale.size
    for at in range(codes.size):
        for rank in stale[:num_stale]:  # in one place: what is inlined twice takes twice as long to compile
            next_start[rank], next_code[rank] = _choose(rank, tables, state, limits, in_flight, rules)
        rank = np.int64(0)  # a plain 0 is a type of its own, for which `_do` would be compiled once more
        for other in range(1, num_ranks):
            if next_start[other] < next_start[rank]:
                rank = other
        if next_start[rank] == np.inf:
            return 0
        codes[at], owner[at] = next_code[rank], rank
        other = _do(rank, next_start[rank], next_code[rank], tables, state, limits[2:4])
        stale[0], num_stale = rank, 1
        if other >= 0 and other != rank:
            stale[1], num_stale = other, 2
    return codes.size


@inner
def _choose(rank, tables, state, limits, in_flight, rules):  # type: ignore[no-untyped-def]
    """(start, code) of what `rank` does next; an infinite start: nothing is known to come."""
    free = state[2][rank]
    forward_s, forward, blocked = _next_forward(rank, state, limits, in_flight, rules)
    backward_s, backward, waits_for_memory = _next_backward(rank, state, limits, rules)
    blocked |= waits_for_memory
    weight = _next_weight(rank, state, limits) if rules[SPLIT] > 0 else -1
    back = I if rules[SPLIT] > 0 else B
    forward_code = encode(F, forward)
    backward_code = encode(back, backward)
    if weight >= 0:
        weight_s = _duration_s(W, weight, tables)
        soonest = min(forward_s, backward_s)
        if blocked and (rules[FREE_BY_WEIGHTS] > 0 or waits_for_memory):
            soonest = np.inf
        if soonest - free > 0 and soonest - free >= weight_s * (1 - rules[OVERSHOOT]):
            return free, encode(W, weight)
    if forward_s == np.inf and backward_s == np.inf:
        return np.inf, -1
    if _prefers_forward(state[4][rank], rules) and forward_s <= max(backward_s, free):
        return max(free, forward_s), forward_code
    if backward_s <= max(forward_s, free):
        return max(free, backward_s), backward_code
    return max(free, forward_s), forward_code


@jit(inline="always")
def _duration_s(kind, slot, tables):  # type: ignore[no-untyped-def]
    num_stages, num_microbatches = tables.shape
    return tables.duration_s[kind * num_stages * tables.width + figure_place(tables, slot // num_microbatches, slot)]


@jit(inline="always")
def _prefers_forward(last, rules):  # type: ignore[no-untyped-def]
    return rules[FORWARD_FIRST] > 0 or (rules[MIXED] > 0 and last != F)


@inner
def _next_forward(rank, state, limits, in_flight, rules):  # type: ignore[no-untyped-def]
    """(when it can start, slot, whether memory keeps one waiting that has arrived)."""
    done, arrival, free, used, _, opens_s, _ = state
    stages, stages_begin, taken, _, headroom, reserve, _, needed = limits
    num_microbatches = arrival.shape[2]
    best_s, best, blocked = np.inf, -1, False
    for at in range(stages_begin[rank], stages_begin[rank + 1]):
        stage = stages[at]
        microbatch = done[F, stage]
        if microbatch == num_microbatches:
            continue
        start = max(free[rank], arrival[0, stage, microbatch], opens_s[stage])
        is_needed = microbatch < needed[done[I, stage]]
        full = used[rank] + taken[stage, microbatch, F] + (0.0 if is_needed else reserve[stage]) > headroom[rank]
        if full or (microbatch - done[W, stage] >= in_flight[stage] and not is_needed):
            blocked |= full and start <= free[rank]
        elif start < best_s or (start == best_s and rules[DEEP_FORWARDS] > 0):
            best_s, best = start, stage * num_microbatches + microbatch
    return best_s, best, blocked


@inner
def _next_backward(rank, state, limits, rules):  # type: ignore[no-untyped-def]
    """(when it can start, slot, whether memory keeps one waiting); of several stages the earliest, whose gradient has
    the most stages still before it."""
    done, arrival, free, used = state[0], state[1], state[2], state[3]
    stages, stages_begin, taken, _, headroom, _, backwards, _ = limits
    num_microbatches = arrival.shape[2]
    kind = I if rules[SPLIT] > 0 else B
    best_s, best, blocked = np.inf, -1, False
    for at in range(stages_begin[rank], stages_begin[rank + 1]):
        stage = stages[at]
        if done[I, stage] == num_microbatches:
            continue
        microbatch = backwards[done[I, stage]]
        if microbatch < done[F, stage]:
            start = max(free[rank], arrival[1, stage, microbatch])
            if start < np.inf and lacks(used[rank], taken[stage, microbatch, kind], 0.0, headroom[rank]):
                blocked = True
            elif start < best_s:
                best_s, best = start, stage * num_microbatches + microbatch
    return best_s, best, blocked


@inner
def _next_weight(rank, state, limits):  # type: ignore[no-untyped-def]
    """The slot whose W frees most memory, or -1."""
    done = state[0]
    stages, stages_begin, _, freed, _, _, backwards, _ = limits
    best, most = -1, -1.0
    for at in range(stages_begin[rank], stages_begin[rank + 1]):
        stage = stages[at]
        if done[W, stage] < done[I, stage]:
            microbatch = backwards[done[W, stage]]
            if freed[stage, microbatch, W] > most:
                best, most = stage * backwards.size + microbatch, freed[stage, microbatch, W]
    return best


@inner
def _do(rank, start, code, tables, state, memory):  # type: ignore[no-untyped-def]
    """Do an action, send its message; returns the rank that gets it, or -1."""
    shape, rank_of_stage = tables.shape, tables.rank_of_stage
    done, arrival, free, used, last, _, _ = state
    taken, freed = memory
    kind, slot = kind_of(code), slot_of(code)
    stage, microbatch = slot // shape[1], slot % shape[1]
    free[rank] = start + _duration_s(kind, slot, tables)
    last[rank] = kind if kind != W else last[rank]
    used[rank] = level_after(used[rank], taken[stage, microbatch, kind], freed[stage, microbatch, kind])
    if kind != B:
        done[kind, stage] += 1
    else:
        done[I, stage] += 1
        done[W, stage] += 1
    if kind == W:
        return -1
    direction = direction_of(kind)
    target = next_stage(stage, direction)
    if target < 0 or target >= shape[0]:
        return -1
    message = message_of(direction, figure_place(tables, stage, slot), shape[0] * tables.width)
    sent_s = put(tables.link[message], free[rank], tables.occupies_s[message], state[6])
    arrival[direction, target, microbatch] = sent_s + tables.arrives_after_s[message]
    return rank_of_stage[target]
