"""Compiled choice of the candidate and the block that a message takes, among those that are free now.

`net` and `rule` are the arrays of `pipeline_state`. Rates are counted in units of `rule.unit_gbit`.
"""

import numpy as np

from farpipe.optical.assign_kernel import choose, find_block, slots_needed
from farpipe.optical.compiled import inner
from farpipe.optical.spectrum_kernel import common, flip, longest_run


@inner
def widest(net, rule, pair, most, least):  # type: ignore[no-untyped-def]
    """(units, path, start, slots) of the widest block between `least` and `most` units; units 0: none fits."""
    low, high = np.int64(net.first[pair]), np.int64(net.first[pair + 1])
    for units in range(most, least - 1, -1):
        slots_needed(net.per_slot, low, high, units * rule.unit_gbit, net.guard, net.need)
        path, start = choose(net.spectrum, net.table, rule.policy, low, high, net.need, net.mask)
        if path >= 0:
            return units, path, start, net.need[path - low]
    return 0, -1, -1, 0


@inner
def units_of_run(net, rule, path, length, most):  # type: ignore[no-untyped-def]
    """Units, at most `most`, that a run of `length` free slots of a path carries beside its guard."""
    return max(0, min(most, np.int64((length - net.guard) * net.per_slot[path] / rule.unit_gbit + 1e-9)))


@inner
def first_units(net, rule, path, most):  # type: ignore[no-untyped-def]
    """Units, at most `most`, that the widest block on one path carries now."""
    if net.per_slot[path] <= 0 or not common(net.spectrum[0], net.table[0], net.table[1], path, net.mask):
        return 0
    return units_of_run(net, rule, path, longest_run(net.mask, net.spectrum[2].size)[1], most)


@inner
def units_on(net, rule, path, most):  # type: ignore[no-untyped-def]
    """Units, at most `most`, that `max_blocks` blocks on one path carry now."""
    if net.per_slot[path] <= 0 or not common(net.spectrum[0], net.table[0], net.table[1], path, net.mask):
        return 0
    total = np.int64(0)
    for _ in range(rule.max_blocks):
        start, length = longest_run(net.mask, net.spectrum[2].size)
        units = units_of_run(net, rule, path, length, most - total)
        total += units
        if units == 0 or total == most:
            break
        flip(net.mask, start, length)
    return total


@inner
def soonest(net, rule, pair, most, least, gbit):  # type: ignore[no-untyped-def]
    """The candidate over which `gbit` arrive first, on up to `max_blocks` blocks of it, or -1: none has `least` units.

    Width counts, and so does a short path.
    """
    found, soonest_s = -1, np.inf
    for path in range(np.int64(net.first[pair]), np.int64(net.first[pair + 1])):
        units = units_on(net, rule, path, most)
        if units < max(1, least):
            continue
        arrival_s = gbit / (units * rule.unit_gbit) + net.latency_s[path]
        if arrival_s < soonest_s:
            found, soonest_s = path, arrival_s
    return found


@inner
def block_on(net, rule, path, most):  # type: ignore[no-untyped-def]
    """(units, path, start, slots) of the widest block of at most `most` units on one path; units 0: none fits."""
    if path < 0 or not common(net.spectrum[0], net.table[0], net.table[1], path, net.mask):
        return 0, -1, -1, 0
    _, length = longest_run(net.mask, net.spectrum[2].size)
    units = units_of_run(net, rule, path, length, most)
    if units == 0:
        return 0, -1, -1, 0
    count = np.int64(np.ceil(units * rule.unit_gbit / net.per_slot[path] - 1e-9)) + net.guard
    return units, path, find_block(net.spectrum, net.table, rule.policy[1], path, count, net.mask), count


@inner
def together_s(rule, gbit, units, unit_latency_s):  # type: ignore[no-untyped-def]
    """Time from the first bit's start until all blocks' bits arrive together.

    `units`: of all blocks; `unit_latency_s`: sum of units x latency.
    """
    return (gbit / rule.unit_gbit + unit_latency_s) / units


@inner
def first_spread(net, rule, pair, most, least, gbit):  # type: ignore[no-untyped-def]
    """(path, seconds) of the widest block that, with the best second one beside it, brings `gbit` soonest.

    Path -1: none has `least` units. Candidates that share fibres are taken for apart here; the second block is sought
    anew when the first is lit.
    """
    low, high = np.int64(net.first[pair]), np.int64(net.first[pair + 1])
    for path in range(low, high):
        net.wide[0, path - low] = first_units(net, rule, path, most)
        net.wide[1, path - low] = units_on(net, rule, path, most) - net.wide[0, path - low]
    found, soonest_s = -1, np.inf
    for path in range(low, high):
        units = net.wide[0, path - low]
        if units < max(1, least):
            continue
        for other in range(low, high):
            room = net.wide[int(other == path), other - low]
            more = min(most - units, room) if rule.max_blocks > 1 else 0
            weighted_s = units * net.priced_s[path] + more * net.priced_s[other]
            seconds = together_s(rule, gbit, units + more, weighted_s)
            if max(net.priced_s[path], net.priced_s[other] * (more > 0)) < seconds < soonest_s:
                found, soonest_s = path, seconds
    return found, soonest_s


@inner
def more_spread(net, rule, pair, most, gbit, units, weighted_s):  # type: ignore[no-untyped-def]
    """The candidate whose widest block, beside those that are lit, brings `gbit` soonest; -1: none makes it sooner."""
    found, soonest_s = -1, together_s(rule, gbit, units, weighted_s)
    for path in range(np.int64(net.first[pair]), np.int64(net.first[pair + 1])):
        more = first_units(net, rule, path, most)
        seconds = together_s(rule, gbit, units + more, weighted_s + more * net.priced_s[path])
        if more > 0 and net.priced_s[path] < seconds < soonest_s:
            found, soonest_s = path, seconds
    return found
