"""Compiled sending of a message over the light paths that it holds, and their change while it is sent."""

import numpy as np

from farpipe.optical.assign_kernel import occupy
from farpipe.optical.choice_kernel import block_on, first_spread, more_spread, together_s, widest
from farpipe.optical.compiled import inner
from farpipe.optical.heap_kernel import push
from farpipe.optical.lights_kernel import dark, light
from farpipe.optical.pipeline_state import POSTED, SENDING

RELEASE, REQUEST, ACTION, ARRIVAL, ASK, IDLE = range(6)
"""Kinds of events in their order at the same time."""


@inner
def post(state, at_s, kind, item):  # type: ignore[no-untyped-def]
    """Put an event on the queue; those of one kind at one time stay in the order in which they were posted."""
    push(state.events, at_s, (kind << 44) + state.counters[POSTED], item)
    state.counters[POSTED] += 1


@inner
def divide(net, orders, rule, state, out, message, start_s, gbit):  # type: ignore[no-untyped-def]
    """Divide the `gbit` of a message that are to be sent from `start_s` on over its blocks, to arrive together."""
    lights, weighted_s, end_s = state.lights, 0.0, start_s
    for block in range(out.held.shape[0]):
        place = out.held[block, message]
        if place >= 0:
            weighted_s += out.block_units[block, message] * net.latency_s[lights.path[place]]
    mean_s, seconds = weighted_s / out.units[message], gbit / (out.units[message] * rule.unit_gbit)
    for place in out.held[:, message]:
        if place >= 0:
            until_s = start_s + seconds + (mean_s - net.latency_s[lights.path[place]])
            end_s = max(end_s, until_s)
            if rule.keep_s < 0:
                lights.until_s[place] = until_s
                post(state, until_s, np.int64(RELEASE), place)
    out.end_s[message], out.arrival_s[message] = end_s, start_s + seconds + mean_s
    post(state, out.arrival_s[message], np.int64(ARRIVAL), message)


@inner
def light_blocks(net, orders, rule, state, out, message, now_s, path, gbit):  # type: ignore[no-untyped-def]
    """Light up to `max_blocks` blocks for `gbit` of a message, with `spread` or `earliest` the first one on `path`.

    Returns the units of all; 0: none is free.
    """
    hop = message // orders.num_microbatches
    pair, most, least, total, weighted_s = orders.pair_of_hop[hop], rule.want[message], rule.least[message], 0, 0.0
    for block in range(rule.max_blocks if rule.keep_s < 0 else 1):
        if most == 0:
            break
        if rule.spread and block > 0:
            path = more_spread(net, rule, pair, most, gbit, total, weighted_s)
        if rule.earliest or rule.spread:
            units, path, start, count = block_on(net, rule, path, most)
        else:
            units, path, start, count = widest(net, rule, pair, most, least)
        if units == 0:
            break
        out.held[block, message] = light(net, state, (path, start, count), message, hop, now_s)
        if block == 0:
            out.path[message] = path
        out.block_units[block, message] = units
        total, most, least = total + units, most - units, 1
        weighted_s += units * net.priced_s[path]
    out.units[message] = total
    return total


@inner
def improve(net, orders, rule, state, out, now_s):  # type: ignore[no-untyped-def]
    """Move or widen each message that is being sent on fewer units than it asked for, where that brings it sooner."""
    sending, kept = state.sending, 0
    for place in range(state.counters[SENDING]):
        message = sending[place]
        if out.end_s[message] > now_s and out.units[message] < rule.want[message]:
            sending[kept] = message
            kept += 1
            if out.start_s[message] <= now_s:
                if rule.move:
                    _move(net, orders, rule, state, out, message, now_s)
                if rule.widen:
                    _widen(net, orders, rule, state, out, message, now_s)
    state.counters[SENDING] = kept


@inner
def _unsent(net, orders, rule, state, out, message, now_s):  # type: ignore[no-untyped-def]
    """(blocks, Gbit that are not sent yet, sum of units x latency, longest latency) of a message that is being sent.

    Blocks 0: one of them has sent its part, so that what is left can't be divided anew.
    """
    lights, left, weighted_s, longest_s, blocks = state.lights, 0.0, 0.0, 0.0, 0
    for block in range(out.held.shape[0]):
        place, units = out.held[block, message], out.block_units[block, message]
        if place < 0:
            break
        if lights.hop[place] != message // orders.num_microbatches or not now_s < lights.until_s[place] < np.inf:
            return 0, 0.0, 0.0, 0.0
        left += units * rule.unit_gbit * (lights.until_s[place] - now_s)
        weighted_s += units * net.latency_s[lights.path[place]]
        longest_s, blocks = max(longest_s, net.latency_s[lights.path[place]]), blocks + 1
    return blocks, left, weighted_s, longest_s


@inner
def _widen(net, orders, rule, state, out, message, now_s):  # type: ignore[no-untyped-def]
    """Add a block to a message that is being sent, and divide what is left of it anew."""
    blocks, left, weighted_s, longest_s = _unsent(net, orders, rule, state, out, message, now_s)
    if blocks in (0, out.held.shape[0]):
        return
    hop, total, most = message // orders.num_microbatches, out.units[message], rule.want[message] - out.units[message]
    path = more_spread(net, rule, orders.pair_of_hop[hop], most, left, total, weighted_s)
    units, path, start, count = block_on(net, rule, path, most)
    if units == 0:
        return
    seconds = together_s(rule, left, total + units, weighted_s + units * net.latency_s[path])
    if seconds <= max(longest_s, net.latency_s[path]):
        return
    out.held[blocks, message] = light(net, state, (path, start, count), message, hop, now_s)
    out.block_units[blocks, message] = units
    out.units[message] = total + units
    divide(net, orders, rule, state, out, message, now_s, left)


@inner
def _occupy_all(net, state, out, message, blocks, sign):  # type: ignore[no-untyped-def]
    """Take the blocks of a message (`sign` 1), or give them back (-1), for a trial."""
    lights = state.lights
    for block in range(blocks):
        place = out.held[block, message]
        occupy(net.spectrum, net.table, lights.path[place], lights.start[place], lights.width[place], sign)


@inner
def _move(net, orders, rule, state, out, message, now_s):  # type: ignore[no-untyped-def]
    """Move a message that is being sent to other blocks, as if nobody noticed, where these bring the rest sooner."""
    blocks, left, _, longest_s = _unsent(net, orders, rule, state, out, message, now_s)
    if blocks == 0:
        return
    pair = orders.pair_of_hop[message // orders.num_microbatches]
    _occupy_all(net, state, out, message, blocks, -1)
    path, seconds = first_spread(net, rule, pair, rule.want[message], rule.least[message], left)
    _occupy_all(net, state, out, message, blocks, 1)
    if path < 0 or not longest_s < seconds < out.arrival_s[message] - now_s - 1e-9:
        return  # what is on its way already arrives first
    for block in range(blocks):
        dark(net, state, out.held[block, message], now_s)
        out.held[block, message] = -1
    light_blocks(net, orders, rule, state, out, message, now_s, path, left)
    divide(net, orders, rule, state, out, message, now_s, left)
