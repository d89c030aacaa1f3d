"""Compiled keeping of the light paths that are lit: lighting one, and giving back what it held."""

import numpy as np

from farpipe.optical.assign_kernel import occupy
from farpipe.optical.compiled import inner
from farpipe.optical.pipeline_state import LOGGED, SPARE


@inner
def light(net, state, block, owner, hop, now_s):  # type: ignore[no-untyped-def]
    """Take a block (path, start, count); the place of the new light path."""
    lights, counters = state.lights, state.counters
    counters[SPARE] -= 1
    place = lights.spare[counters[SPARE]]
    lights.path[place], lights.start[place], lights.width[place] = block
    lights.hop[place], lights.begun_s[place], lights.entry[place] = hop, now_s, -1
    lights.until_s[place], lights.booked[place] = np.inf, -1
    occupy(net.spectrum, net.table, block[0], block[1], block[2], 1)
    if hop >= 0:
        state.lit[hop] += 1
    if counters[LOGGED] < state.log.shape[0]:
        row = state.log[counters[LOGGED]]
        row[0], row[1], row[2], row[3], row[4], row[5] = owner, block[0], block[1], block[2], now_s, np.inf
        lights.entry[place] = counters[LOGGED]
        counters[LOGGED] += 1
    return place


@inner
def dark(net, state, place, now_s):  # type: ignore[no-untyped-def]
    """Give back what a light path held."""
    lights, counters = state.lights, state.counters
    path, count, hop = lights.path[place], lights.width[place], lights.hop[place]
    occupy(net.spectrum, net.table, path, lights.start[place], count, -1)
    if hop >= 0:
        state.lit[hop] -= 1
        state.used[0] += count * (net.table[0][path + 1] - net.table[0][path]) * (now_s - lights.begun_s[place])
    if lights.entry[place] >= 0:
        state.log[lights.entry[place], 5] = now_s
    lights.until_s[place], lights.booked[place] = np.inf, -1
    lights.spare[counters[SPARE]] = place
    counters[SPARE] += 1
