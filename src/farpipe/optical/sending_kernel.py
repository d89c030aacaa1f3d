"""Compiled light paths: choosing among those free now, assigning, sending a message over those it has, releasing.

`net` and `rule` are the arrays of `pipeline_state`. Rates are counted in units of `rule.unit_gbit`.
"""

import numpy as np

from farpipe.optical.assign_kernel import choose, find_block, occupy, slots_needed
from farpipe.optical.pipeline_state import LOGGED, POSTED, SENDING, SPARE
from farpipe.optical.spectrum_kernel import common, largest_block, push, subroutine


@subroutine
def widest(net, rule, pair, most, least):  # type: ignore[no-untyped-def]
    """(units, path, start, slots) of the widest block between `least` and `most` units; units 0: none fits."""
    low, high = np.int64(net.first[pair]), np.int64(net.first[pair + 1])
    for units in range(most, least - 1, -1):
        slots_needed(net.per_slot, low, high, units * rule.unit_gbit, net.guard, net.need)
        path, start = choose(net.spectrum, net.table, rule.policy, low, high, net.need, net.mask)
        if path >= 0:
            return units, path, start, net.need[path - low]
    return 0, -1, -1, 0


@subroutine
def units_of_run(net, rule, path, length, most):  # type: ignore[no-untyped-def]
    """Units, at most `most`, that a run of `length` free slots of a path carries beside its guard."""
    return max(0, min(most, np.int64((length - net.guard) * net.per_slot[path] / rule.unit_gbit + 1e-9)))


@subroutine
def first_units(net, rule, path, most):  # type: ignore[no-untyped-def]
    """Units, at most `most`, that the widest block on one path carries now."""
    if net.per_slot[path] <= 0 or not common(net.spectrum[0], net.table[0], net.table[1], path, net.mask):
        return 0
    return units_of_run(net, rule, path, largest_block(net.mask, net.spectrum[2])[0], most)


@subroutine
def block_on(net, rule, path, most):  # type: ignore[no-untyped-def]
    """(units, path, start, slots) of the widest block of at most `most` units on one path; units 0: none fits."""
    units = first_units(net, rule, path, most) if path >= 0 else 0
    if units == 0:
        return 0, -1, -1, 0
    count = np.int64(np.ceil(units * rule.unit_gbit / net.per_slot[path] - 1e-9)) + net.guard
    return units, path, find_block(net.spectrum, net.table, rule.policy[1], path, count, net.mask), count


@subroutine
def together_s(rule, gbit, units, unit_latency_s):  # type: ignore[no-untyped-def]
    """Time from the first bit's start until all blocks' bits arrive together.

    `units`: of all blocks; `unit_latency_s`: sum of units x latency.
    """
    return (gbit / rule.unit_gbit + unit_latency_s) / units


@subroutine
def soonest(net, rule, pair, most, least, gbit, units, weighted_s):  # type: ignore[no-untyped-def]
    """Candidate whose widest block, beside the `units` that are assigned, brings `gbit` soonest; -1: none does.

    The block has at least `least` units; `weighted_s`: sum of units x latency of those that are assigned.
    """
    found, soonest_s = -1, np.inf if units == 0 else together_s(rule, gbit, units, weighted_s)
    for path in range(np.int64(net.first[pair]), np.int64(net.first[pair + 1])):
        more = first_units(net, rule, path, most)
        if more < max(1, least):
            continue
        seconds = together_s(rule, gbit, units + more, weighted_s + more * net.latency_s[path])
        if net.latency_s[path] < seconds < soonest_s:
            found, soonest_s = path, seconds
    return found


RELEASE, REQUEST, ACTION, ARRIVAL, ASK, IDLE, SWITCH, RETRY = range(8)
"""Kinds of events in their order at the same time."""


@subroutine
def assign(net, state, block, owner, hop, now_s):  # type: ignore[no-untyped-def]
    """Take a block (path, start, count); the place of the new light path."""
    lights, counters = state.lights, state.counters
    counters[SPARE] -= 1
    place = lights.spare[counters[SPARE]]
    lights.path[place], lights.start[place], lights.width[place] = block
    lights.hop[place], lights.begun_s[place], lights.entry[place] = hop, now_s, -1
    lights.until_s[place] = np.inf
    occupy(net.spectrum, net.table, block[0], block[1], block[2], 1)
    if hop >= 0:
        state.num_active[hop] += 1
    if counters[LOGGED] < state.log.shape[0]:
        row = state.log[counters[LOGGED]]
        row[0], row[1], row[2], row[3], row[4], row[5] = owner, block[0], block[1], block[2], now_s, np.inf
        lights.entry[place] = counters[LOGGED]
        counters[LOGGED] += 1
    return place


@subroutine
def release(net, state, place, now_s):  # type: ignore[no-untyped-def]
    """Release the block of a light path."""
    lights, counters = state.lights, state.counters
    path, count, hop = lights.path[place], lights.width[place], lights.hop[place]
    occupy(net.spectrum, net.table, path, lights.start[place], count, -1)
    if hop >= 0:
        state.num_active[hop] -= 1
        state.used[0] += count * (net.table[0][path + 1] - net.table[0][path]) * (now_s - lights.begun_s[place])
    if lights.entry[place] >= 0:
        state.log[lights.entry[place], 5] = now_s
    lights.until_s[place] = np.inf
    lights.spare[counters[SPARE]] = place
    counters[SPARE] += 1


@subroutine
def post(state, at_s, kind, item):  # type: ignore[no-untyped-def]
    """Put an event on the queue; those of one kind at one time stay in the order in which they were posted."""
    push(state.events, at_s, (kind << 44) + state.counters[POSTED], item)
    state.counters[POSTED] += 1


@subroutine
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
            sent_s = start_s + seconds + (mean_s - net.latency_s[lights.path[place]])
            end_s = max(end_s, sent_s)
            if rule.keep_s < 0:
                lights.until_s[place] = sent_s + rule.release_s
                post(state, lights.until_s[place], np.int64(RELEASE), place)
    out.end_s[message], out.arrival_s[message] = end_s, start_s + seconds + mean_s
    post(state, out.arrival_s[message], np.int64(ARRIVAL), message)


@subroutine
def assign_message(net, orders, rule, state, out, message, now_s):  # type: ignore[no-untyped-def]
    """Assign a light path to a message; False: none is free."""
    hop, most, least = message // orders.num_microbatches, rule.want[message], rule.least[message]
    pair = orders.pair_of_hop[hop]
    if rule.earliest:
        path = soonest(net, rule, pair, most, least, orders.gbit[message], 0, 0.0)
        units, path, start, count = block_on(net, rule, path, most)
    else:
        units, path, start, count = widest(net, rule, pair, most, least)
    if units == 0:
        return False
    out.held[0, message] = assign(net, state, (path, start, count), message, hop, now_s)
    out.path[message], out.block_units[0, message], out.units[message] = path, units, units
    return True


@subroutine
def widen(net, orders, rule, state, out, now_s):  # type: ignore[no-untyped-def]
    """Add blocks to the messages that are being sent on fewer units than they asked for."""
    sending, kept = state.sending, 0
    for place in range(state.counters[SENDING]):
        message = sending[place]
        if out.end_s[message] > now_s and out.units[message] < rule.want[message]:
            sending[kept] = message
            kept += 1
            if out.start_s[message] <= now_s + rule.setup_s:
                _widen(net, orders, rule, state, out, message, now_s)
    state.counters[SENDING] = kept


@subroutine
def _unsent(net, rule, state, out, message, from_s):  # type: ignore[no-untyped-def]
    """(blocks, Gbit to be sent after `from_s`, sum of units x latency, longest latency) of a message.

    Blocks 0: one of them will have sent its part, so that the rest can't be divided again.
    """
    lights, left, weighted_s, longest_s, blocks = state.lights, 0.0, 0.0, 0.0, 0
    for block in range(out.held.shape[0]):
        place, units = out.held[block, message], out.block_units[block, message]
        if place < 0:
            break
        sent_s, latency_s = lights.until_s[place] - rule.release_s, net.latency_s[lights.path[place]]
        ended = abs(sent_s + latency_s - out.arrival_s[message]) > 1e-9  # its place may be another message's by now
        if ended or sent_s <= from_s:
            return 0, 0.0, 0.0, 0.0
        left += units * rule.unit_gbit * (sent_s - from_s)
        weighted_s += units * latency_s
        longest_s, blocks = max(longest_s, latency_s), blocks + 1
    return blocks, left, weighted_s, longest_s


@subroutine
def _widen(net, orders, rule, state, out, message, now_s):  # type: ignore[no-untyped-def]
    """Add a block to a message that is being sent, and divide the rest again when the block is set up."""
    from_s = now_s + rule.setup_s
    blocks, left, weighted_s, longest_s = _unsent(net, rule, state, out, message, from_s)
    if blocks in (0, out.held.shape[0]):
        return
    hop, total, most = message // orders.num_microbatches, out.units[message], rule.want[message] - out.units[message]
    path = soonest(net, rule, orders.pair_of_hop[hop], most, 1, left, total, weighted_s)
    units, path, start, count = block_on(net, rule, path, most)
    if units == 0:
        return
    seconds = together_s(rule, left, total + units, weighted_s + units * net.latency_s[path])
    if seconds <= max(longest_s, net.latency_s[path]):
        return
    out.held[blocks, message] = assign(net, state, (path, start, count), message, hop, now_s)
    out.block_units[blocks, message] = units
    out.units[message] = total + units
    divide(net, orders, rule, state, out, message, from_s, left)


@subroutine
def replace_kept(net, orders, rule, state, now_s):  # type: ignore[no-untyped-def]
    """Set up a wider light path beside every kept one that has fewer units than its hop asks for."""
    for hop in range(state.kept.size):
        place, first = state.kept[hop], hop * orders.num_microbatches
        settled = place >= 0 and state.wider[hop] < 0 and state.kept_until_s[hop] < np.inf
        if not settled or state.kept_units[hop] >= rule.want[first]:
            continue
        units, latency_s = state.kept_units[hop], net.latency_s[state.lights.path[place]]
        now_takes_s = together_s(rule, orders.gbit[first], units, units * latency_s)
        path = soonest(net, rule, orders.pair_of_hop[hop], rule.want[first], units + 1, orders.gbit[first], 0, 0.0)
        units, path, start, count = block_on(net, rule, path, rule.want[first])
        if units > 0 and together_s(rule, orders.gbit[first], units, units * net.latency_s[path]) < now_takes_s:
            state.wider[hop] = assign(net, state, (path, start, count), first, hop, now_s)
            post(state, now_s + rule.setup_s, np.int64(SWITCH), hop)


@subroutine
def switch(net, orders, rule, state, hop, now_s):  # type: ignore[no-untyped-def]
    """Keep a hop's wider light path, once it is set up, instead of the one before, which ends after its message."""
    place, old, lights = state.wider[hop], state.kept[hop], state.lights
    if place < 0 or lights.begun_s[place] + rule.setup_s != now_s:
        return
    want = rule.want[hop * orders.num_microbatches]
    state.kept[hop], state.wider[hop] = place, -1
    state.kept_units[hop] = units_of_run(net, rule, lights.path[place], lights.width[place], want)
    lights.until_s[old] = max(now_s, state.kept_until_s[hop]) + rule.release_s
    post(state, lights.until_s[old], np.int64(RELEASE), old)
