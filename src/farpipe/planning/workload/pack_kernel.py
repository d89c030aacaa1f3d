"""Compiled loops: packing, best fit decreasing over the bins that are open, in the order of what they hold; and
documents on groups of devices, the longest first."""

import numpy as np

from farpipe.core.step.jit import jit


@jit
def pack(short_s, shorts, tail_s, tail_tokens, target_s, token_limit, literal):  # type: ignore[no-untyped-def]
    """The bin of every short sequence [num_shorts], the longest first; see `farpipe.planning.workload.cut.pack`.

    Literal rule: where no bin has time left, the one that ends earliest takes it, as long as it has tokens left.
    `order` has the bins that may take the shortest sequence, those with most time used first, of equal ones the first
    bin: time is left from some place on, which is found by bisection.
    """
    num_shorts, num_bins = short_s.size, tail_s.size
    bins = np.empty(num_shorts, np.int64)
    if num_shorts == 0:
        return bins
    used_s, used = np.zeros(num_bins + num_shorts), np.zeros(num_bins + num_shorts, np.int64)
    used_s[:num_bins], used[:num_bins] = tail_s, tail_tokens
    order = np.empty(num_bins + num_shorts, np.int64)
    order[:num_bins] = np.argsort(-tail_s, kind="mergesort")
    num_open = num_bins
    for i in range(num_shorts):
        place = _place(order, num_open, used_s, used, short_s[i], shorts[i], target_s, token_limit)
        best = order[place] if place < num_open else -1
        if best < 0 and literal:
            best = _loosest(used_s, used, num_bins, shorts[i], token_limit)
            place = 0
            while best >= 0 and place < num_open and order[place] != best:
                place += 1
        if best < 0:
            best, place = num_bins, num_open
            num_bins += 1
        used_s[best] += short_s[i]
        used[best] += shorts[i]
        bins[i] = best
        if used_s[best] + short_s[-1] > target_s or used[best] + shorts[-1] > token_limit:
            if place < num_open:
                num_open -= 1
                order[place:num_open] = order[place + 1 : num_open + 1].copy()
            continue
        num_open = max(num_open, place + 1)
        while place > 0 and used_s[order[place - 1]] < used_s[best]:
            order[place] = order[place - 1]
            place -= 1
        while place > 0 and used_s[order[place - 1]] == used_s[best] and order[place - 1] > best:
            order[place] = order[place - 1]
            place -= 1
        order[place] = best
    return bins


@jit
def _place(order, num_open, used_s, used, seconds, tokens, target_s, token_limit):  # type: ignore[no-untyped-def]
    """The first place in the order whose bin has time and tokens left; `num_open` if there is none."""
    low, high = 0, num_open
    while low < high:
        middle = (low + high) // 2
        if used_s[order[middle]] + seconds <= target_s:
            high = middle
        else:
            low = middle + 1
    while low < num_open and used[order[low]] + tokens > token_limit:
        low += 1
    return low


@jit
def _loosest(used_s, used, num_bins, tokens, token_limit):  # type: ignore[no-untyped-def]
    """The bin with least time used of those with tokens left; -1 if there is none."""
    best = -1
    for b in range(num_bins):
        if used[b] + tokens <= token_limit and (best < 0 or used_s[b] < used_s[best]):
            best = b
    return best


@jit
def place(seconds, shares, fixed_s, longest, degrees, chosen, num_devices, num_sites):  # type: ignore[no-untyped-def]
    """(seconds until each device is free, first device of each document's group); see `device_groups.grouped`.

    `longest` [num_degrees, num_documents]: the documents by falling `seconds` of each degree.
    """
    num_documents, each_site = chosen.size, num_devices // num_sites
    free_s, first_of = np.zeros(num_devices), np.zeros(num_documents, np.int64)
    work_s, held, first = np.empty(num_devices), np.empty(num_devices), np.empty(num_devices, np.int64)
    for number in range(degrees.size - 1, -1, -1):
        degree, count = degrees[number], 0
        for site in range(num_sites):
            for begin in range(site * each_site, (site + 1) * each_site - degree + 1, degree):
                first[count], held[count], work_s[count] = begin, 0.0, free_s[begin : begin + degree].max()
                count += 1
        for index in longest[number]:
            if chosen[index] != number:
                continue
            best, best_s, share = 0, np.inf, shares[number, index]
            for group in range(count):
                end_s = work_s[group] + fixed_s[number] * np.ceil(held[group] + share - 1e-9)
                if end_s < best_s:
                    best, best_s = group, end_s
            held[best] += share
            work_s[best] += seconds[number, index] - fixed_s[number] * share
            first_of[index] = first[best]
            end_s = work_s[best] + fixed_s[number] * np.ceil(held[best] - 1e-9)
            free_s[first[best] : first[best] + degree] = end_s
    return free_s, first_of
