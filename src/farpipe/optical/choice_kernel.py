"""Compiled choice of the candidate and the block that a message takes, among those that are free now.

`net` and `rule` are the arrays of `pipeline_state`. Rates are counted in units of `rule.unit_gbit`.
"""

import numpy as np

from farpipe.optical.assign_kernel import choose, find_block, slots_needed
from farpipe.optical.compiled import inner
from farpipe.optical.spectrum_kernel import common, largest_block


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
    return units_of_run(net, rule, path, largest_block(net.mask, net.spectrum[2])[0], most)


@inner
def block_on(net, rule, path, most):  # type: ignore[no-untyped-def]
    """(units, path, start, slots) of the widest block of at most `most` units on one path; units 0: none fits."""
    units = first_units(net, rule, path, most) if path >= 0 else 0
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
