"""Compiled assignment: a path and a block of slots for one request, by the rules of `policies`; traffic played by it.

`spectrum` is (free [fibres, words], used [fibres], num_slots); `table` is (begin, fibres, km, neighbour_begin,
neighbours) of the candidate paths; `policy` is (rule of paths, rule of slots, weights).
"""

import numpy as np

from farpipe.core.step.jit import inner, jit
from farpipe.optical.spectrum_kernel import (
    common,
    flip,
    highest,
    is_free,
    keep_starts,
    largest_block,
    lowest,
    next_clear,
    next_set,
    pop,
    push,
)

_FIRST, _LAST, _BEST = range(3)
_SAME = 1e-9
"""Scores that differ by less are equal, and the earlier candidate is taken: sums are rounded differently."""
_IN_ORDER, _LOWEST_SLOT, _SHORTEST, _MIN_CUTS, _CONGESTION, _CROSS_DOMAIN = range(6)


@inner
def _sized_block(mask, count, num_slots):  # type: ignore[no-untyped-def]
    """Start of the smallest block of at least `count` slots."""
    found, size = -1, num_slots + 1
    start = next_set(mask, 0, num_slots)
    while start < num_slots:
        end = next_clear(mask, start, num_slots)
        length = end - start
        if length == count:
            return start
        if count < length < size:
            found, size = start, length
        start = next_set(mask, end, num_slots)
    return found


@inner
def find_block(spectrum, table, rule, path, count, mask):  # type: ignore[no-untyped-def]
    """Start of a block of `count` slots that are free on the whole path, or -1."""
    free, _, num_slots = spectrum
    if count > num_slots or not common(free, table[0], table[1], path, mask):
        return -1
    if rule == _BEST:
        return _sized_block(mask, count, num_slots)
    keep_starts(mask, count)
    return highest(mask) if rule == _LAST else lowest(mask)


@inner
def _cuts(spectrum, table, path, start, count):  # type: ignore[no-untyped-def]
    """Fibres of the path on which the block would lie inside a free block and split it."""
    free, _, num_slots = spectrum
    cuts, end = 0, start + count
    for place in range(table[0][path], table[0][path + 1]):
        mask = free[table[1][place]]
        cuts += is_free(mask, start - 1) and end < num_slots and is_free(mask, end)
    return cuts


@inner
def _congestion(spectrum, table, path):  # type: ignore[no-untyped-def]
    """Shares of the spectrum that are taken, added up over the fibres of the path."""
    used = 0
    for place in range(table[0][path], table[0][path + 1]):
        used += spectrum[1][table[1][place]]
    return used / spectrum[2]


@inner
def _discontinuity(spectrum, table, path):  # type: ignore[no-untyped-def]
    """Mean over the fibres at the path's nodes of 1 - (largest free block / free slots); 1 where nothing is free."""
    low, high = table[3][path], table[3][path + 1]
    total = 0.0
    for place in range(low, high):
        longest, free, _ = largest_block(spectrum[0][table[4][place]], spectrum[2])
        total += 1.0 - longest / free if free else 1.0
    return total / (high - low)


@inner
def _score(spectrum, table, policy, path, block, longest_km):  # type: ignore[no-untyped-def]
    """Figure that the rule of paths makes least."""
    rule, _, weights = policy
    start, count = block
    if rule == _LOWEST_SLOT:
        return float(start)
    if rule == _MIN_CUTS:
        return float(_cuts(spectrum, table, path, start, count))
    if rule == _CONGESTION:
        return _congestion(spectrum, table, path)
    hops = table[0][path + 1] - table[0][path]
    return (
        weights[0] * table[2][path] / longest_km
        + weights[1] * _congestion(spectrum, table, path) / hops
        + weights[2] * _discontinuity(spectrum, table, path)
    )


@inner
def _shortest(km, first, last):  # type: ignore[no-untyped-def]
    path = first
    for other in range(first + 1, last):
        if km[other] < km[path]:
            path = other
    return path


@inner
def choose(spectrum, table, policy, first, last, need, mask):  # type: ignore[no-untyped-def]
    """(path, start) for a request that needs ``need[i]`` slots on its i-th candidate (0: out of reach), or (-1, -1)."""
    if policy[0] == _SHORTEST:
        path = _shortest(table[2], first, last)
        start = find_block(spectrum, table, policy[1], path, need[path - first], mask) if need[path - first] else -1
        return (path, start) if start >= 0 else (-1, -1)
    chosen, chosen_start, least, longest_km = -1, -1, np.inf, 0.0
    for path in range(first, last):
        longest_km = max(longest_km, table[2][path])
    for path in range(first, last):
        count = need[path - first]
        if count == 0:
            continue
        start = find_block(spectrum, table, policy[1], path, count, mask)
        if start < 0:
            continue
        if policy[0] == _IN_ORDER:
            return path, start
        score = _score(spectrum, table, policy, path, (start, count), longest_km)
        if score < least - _SAME:
            chosen, chosen_start, least = path, start, score
    return chosen, chosen_start


@inner
def occupy(spectrum, table, path, start, count, sign):  # type: ignore[no-untyped-def]
    """Take a block on all fibres of a path (`sign` 1), or give it back (-1)."""
    free, used, _ = spectrum
    for place in range(table[0][path], table[0][path + 1]):
        fibre = table[1][place]
        flip(free[fibre], start, count)
        used[fibre] += sign * count


@inner
def slots_needed(per_slot, first, last, gbit_s, guard, need):  # type: ignore[no-untyped-def]
    """Slots of a request on each of its candidates, guard band included; 0 where the path is out of reach."""
    for path in range(first, last):
        rate = per_slot[path]
        need[path - first] = np.int64(np.ceil(gbit_s / rate - 1e-9)) + guard if rate > 0 else 0


@jit(nogil=True)
def _leave(state, table, until_s, out):  # type: ignore[no-untyped-def]
    """Give back what every light path that has ended by `until_s` held."""
    spectrum, heap = state
    while heap[3][0] > 0 and heap[0][0] <= until_s:
        _, _, request = pop(heap)
        occupy(spectrum, table, out[0][request], out[1][request], out[2][request], -1)


@jit(nogil=True)
def _repack(state, table, out, mask):  # type: ignore[no-untyped-def]
    """Defragment: each light path, lowest slot first, moves to the lowest block on its own path; how many moved."""
    spectrum, heap = state
    active = heap[2][: heap[3][0]].copy()
    moved = 0
    for place in np.argsort(out[1][active], kind="mergesort"):
        request = active[place]
        path, start, count = out[0][request], out[1][request], out[2][request]
        occupy(spectrum, table, path, start, count, -1)
        lower = find_block(spectrum, table, 0, path, count, mask)
        out[1][request] = lower
        moved += lower != start
        occupy(spectrum, table, path, lower, count, 1)
    return moved


@jit(nogil=True)
def play_requests(requests, table, paths_of, policy, state, scratch, out, span, guard, defragment):  # type: ignore[no-untyped-def]
    """Play the requests from ``span[0]`` to ``span[1]``; how many light paths were moved to make space.

    `requests` is (arrival_s, pair, gbit_s, holding_s); `paths_of` is (first, gbit per slot and path); `out` gets the
    path (-1: refused), first slot and number of slots of every request. A light path that ends when a request arrives
    has left before it.
    """
    arrival_s, pair, gbit_s, holding_s = requests
    first, per_slot = paths_of
    need, mask = scratch
    spectrum, heap = state
    moved = 0
    for request in range(span[0], span[1]):
        _leave(state, table, arrival_s[request], out)
        low, high = np.int64(first[pair[request]]), np.int64(first[pair[request] + 1])
        slots_needed(per_slot, low, high, gbit_s[request], guard, need)
        path, start = choose(spectrum, table, policy, low, high, need, mask)
        if path < 0 and defragment:
            moved += _repack(state, table, out, mask)
            path, start = choose(spectrum, table, policy, low, high, need, mask)
        out[0][request] = path
        if path >= 0:
            count = need[path - low]
            out[1][request], out[2][request] = start, count
            occupy(spectrum, table, path, start, count, 1)
            push(heap, arrival_s[request] + holding_s[request], request, request)
    return moved
