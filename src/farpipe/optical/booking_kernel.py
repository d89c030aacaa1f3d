"""Compiled waiting for light paths that are known to end, and booking of the spectrum that will be free then.

A message that books holds what is free of its block at once and gets the rest when the light path ends: nobody comes
between. A light path is booked by one message at most.
"""

import numpy as np

from farpipe.optical.assign_kernel import occupy
from farpipe.optical.choice_kernel import block_on, first_spread
from farpipe.optical.compiled import inner
from farpipe.optical.spectrum_kernel import flip, is_free


@inner
def wait_for_end(net, orders, rule, state, out, message, now_s, seconds):  # type: ignore[no-untyped-def]
    """True if a light path that is known to end brings a message sooner than in `seconds`, and its rule is to wait.

    With `book` the spectrum is booked, also for a message that finds nothing now (`seconds` infinite).
    """
    early = out.ready_s[message] > now_s + rule.setup_s + 1e-9
    if not rule.patient or early or (seconds == np.inf and not rule.book):
        return False
    place, path = _awaited(net, orders, rule, state, message, now_s, seconds)
    if place >= 0 and rule.book:
        _book(net, rule, state, message, now_s, (place, path))
    return place >= 0


@inner
def _awaited(net, orders, rule, state, message, now_s, seconds):  # type: ignore[no-untyped-def]
    """(place, path): the light path after whose end a message arrives first, and the candidate that it then takes.

    Place -1: none brings it sooner than in `seconds`.
    """
    lights, pair = state.lights, orders.pair_of_hop[message // orders.num_microbatches]
    found, found_path, least_s = -1, -1, now_s + seconds
    for place in range(lights.until_s.size):
        until_s = lights.until_s[place]
        if not now_s < until_s < least_s or lights.booked[place] >= 0:
            continue
        _trial(net, lights, place, -1)
        path, then_s = first_spread(net, rule, pair, rule.want[message], rule.least[message], orders.gbit[message])
        _trial(net, lights, place, 1)
        if until_s + then_s < least_s:
            found, found_path, least_s = place, path, until_s + then_s
    return found, found_path


@inner
def _trial(net, lights, place, sign):  # type: ignore[no-untyped-def]
    """Free what a light path has taken (`sign` -1), or take it again (1)."""
    occupy(net.spectrum, net.table, lights.path[place], lights.start[place], lights.width[place], sign)


@inner
def _book(net, rule, state, message, now_s, choice):  # type: ignore[no-untyped-def]
    """Hold what is free of the widest block on `choice` (place, path) when the light path there has ended."""
    place, path = choice
    _trial(net, state.lights, place, -1)
    _, _, start, count = block_on(net, rule, path, rule.want[message])
    _trial(net, state.lights, place, 1)
    state.lights.booked[place] = message
    state.booked[message], state.booked_path[message], state.booked_s[message] = place, path, now_s
    low = net.table[0][path]
    for hop in range(net.table[0][path + 1] - low):
        free = net.spectrum[0][net.table[1][low + hop]]
        for slot in range(start, start + count):
            if is_free(free, slot):
                _hold(net, state, message, hop, slot, 1)


@inner
def _hold(net, state, message, hop, slot, sign):  # type: ignore[no-untyped-def]
    """Take a slot on the `hop`-th fibre of the candidate that a message has booked (`sign` 1), or give it back."""
    fibre = net.table[1][net.table[0][state.booked_path[message]] + hop]
    flip(net.spectrum[0][fibre], slot, 1)
    flip(state.held[message, hop], slot, 1)
    net.spectrum[1][fibre] += sign
    net.spectrum[2][slot] += sign


@inner
def cancel(net, state, message, now_s):  # type: ignore[no-untyped-def]
    """Give back what a message has booked, if anything."""
    place = state.booked[message]
    if place < 0:
        return
    for hop in range(state.held.shape[1]):
        for slot in range(net.spectrum[2].size):
            if is_free(state.held[message, hop], slot):
                _hold(net, state, message, hop, slot, -1)
                state.used[0] += now_s - state.booked_s[message]
    if state.lights.booked[place] == message:
        state.lights.booked[place] = -1
    state.booked[message] = -1
