"""The compiled simulator of dynamic traffic: requests arrive, are assigned or refused, and leave."""

import numpy as np

from farpipe.optical.assign_kernel import choose, find_block, occupy, slots_needed
from farpipe.optical.compiled import pop, push
from farpipe.step.jit import jit


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
def play(requests, table, paths_of, policy, state, scratch, out, span, guard, defragment):  # type: ignore[no-untyped-def]
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
