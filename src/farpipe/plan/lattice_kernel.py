"""Closed forms over the whole lattice of degrees, compiled: about what a step takes, before any candidate exists.

Per row of degrees and order of sites: ranks are placed in proportion to devices, layers divided so that the slowest
stage is as fast as its memory lets it be (bisection), and the step is

    m x pace + fill and drain + exchange of gradients + overhead

pace is the largest of the slowest stage, of the busiest link between sites, and of round trip / microbatches in flight
on any stage. Fill and drain are (p - 1)(F + I - W) with as many microbatches in flight as 1F1B has, (p - 1)(F + I - 2W)
with twice as many (arXiv 2401.10241), a share of pace in a V, and the round trip over all links.
"""

import numpy as np
from numba import njit

MAX_STAGES = 1024
V_BUBBLE = 0.35
"""Of (p - 1) x pace: what the best named order in a V leaves idle, about, where F, I and W differ."""
_BISECTIONS = 14


@njit(cache=True)
def _place(order, num_sites, num_devices, per_rank, pipeline, site_of_rank):  # type: ignore[no-untyped-def]  # noqa: C901
    """The site of every rank in proportion to what the sites hold, as `placement.place_ranks`; False: they can't."""
    counts, total, given = np.zeros(num_sites, np.int64), 0, 0
    for k in range(num_sites):
        most = num_devices[order[k]] // per_rank
        if most < 1:
            return False
        total += most
    if total < pipeline or pipeline < num_sites:
        return False
    for k in range(num_sites):
        counts[k] = max(1, int(pipeline * (num_devices[order[k]] // per_rank) / total))
        given += counts[k]
    while given != pipeline:
        step = 1 if given < pipeline else -1
        best, gain = -1, -np.inf
        for k in range(num_sites):
            most = num_devices[order[k]] // per_rank
            if (step > 0 and counts[k] >= most) or (step < 0 and counts[k] <= 1):
                continue
            lack = step * (pipeline * most / total - counts[k])
            if lack > gain:
                best, gain = k, lack
        counts[best] += step
        given += step
    rank = 0
    for k in range(num_sites):
        for _ in range(counts[k]):
            site_of_rank[rank] = order[k]
            rank += 1
    return True


@njit(cache=True)
def _group(extra_s, layer_s, most, num_layers, groups):  # type: ignore[no-untyped-def]
    """Stages that are alike, as groups: extra seconds, 1 / seconds of a layer, most layers, how many; their number.

    Neighbours are compared only; where memory binds nobody, a pipeline on one kind of site has three groups.
    """
    extra, speed, holds, count = groups
    found = -1
    for i in range(extra_s.size):
        same = i > 0 and extra_s[i] == extra_s[i - 1]
        for mode in range(layer_s.shape[1]):
            most[i, mode] = min(most[i, mode], num_layers)
            same = same and layer_s[i, mode] == layer_s[i - 1, mode] and most[i, mode] == most[i - 1, mode]
        if same:
            count[found] += 1
            continue
        found += 1
        extra[found], count[found] = extra_s[i], 1
        for mode in range(layer_s.shape[1]):
            speed[found, mode], holds[found, mode] = 1.0 / layer_s[i, mode], most[i, mode]
    return found + 1


@njit(cache=True)
def _capacity(limit_s, groups, size):  # type: ignore[no-untyped-def]
    """Number of layers that all stages hold if none takes longer than `limit_s`; -1 where one holds none."""
    extra, speed, holds, count = groups
    total = 0
    for g in range(size):
        held, free_s = 0, limit_s - extra[g]
        for mode in range(speed.shape[1]):
            held = max(held, min(int(free_s * speed[g, mode] + 1e-9) if free_s > 0 else 0, holds[g, mode]))
        if held < 1:
            return -1
        total += count[g] * held
    return total


@njit(cache=True)
def _slowest_s(num_layers, groups, size, known_s):  # type: ignore[no-untyped-def]
    """The time of the slowest stage in the best division of layers, about; infinite where memory is too small.

    `known_s`: of the same stages with more memory, which can't be slower; 0 if there is none.
    """
    extra, speed, _, count = groups
    if known_s > 0 and _capacity(known_s, groups, size) >= num_layers:
        return known_s
    low, pace = 0.0, 0.0
    for g in range(size):
        fastest = 0.0
        for mode in range(speed.shape[1]):
            fastest = max(fastest, speed[g, mode])
        low, pace = low + count[g] * extra[g] * fastest, pace + count[g] * fastest
    low = (num_layers + low) / pace
    high = low * 1.5
    while _capacity(high, groups, size) < num_layers:
        high *= 1.6
        if high > 500.0 * low:
            return np.inf
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _capacity(middle, groups, size) >= num_layers:
            high = middle
        else:
            low = middle
    return high


@njit(cache=True, inline="always")
def _held(limit_s, extra_s, layer_s, most):  # type: ignore[no-untyped-def]
    """Number of layers that one stage holds if it takes no longer than `limit_s`."""
    held = 0
    for mode in range(layer_s.size):
        by_time = int((limit_s - extra_s) / layer_s[mode] + 1e-9) if limit_s > extra_s else 0
        held = max(held, min(by_time, most[mode]))
    return held


@njit(cache=True)
def _travel(site_of_rank, latency_s, rate, size, travel_s):  # type: ignore[no-untyped-def]
    """The busiest link's seconds for one message of all replicas; `travel_s`: there and back below every rank."""
    busiest, round_trip_s = 0.0, 0.0
    travel_s[-1] = 0.0
    for rank in range(site_of_rank.size - 2, -1, -1):
        a, b = site_of_rank[rank], site_of_rank[rank + 1]
        if a != b:
            there, back = size / rate[a, b], size / rate[b, a]
            busiest = max(busiest, max(there, back))
            round_trip_s += latency_s[a, b] + latency_s[b, a] + there + back
        travel_s[rank] = round_trip_s
    return busiest


@njit(cache=True, inline="always")
def _in_flight(i, shape, target, pipeline, m, travel_s, pace_s):  # type: ignore[no-untyped-def]
    """Microbatches in flight on rank i: as 1F1B; with what hides the links' delays; twice as many with that."""
    number = pipeline if shape == 1 else (pipeline - i if target < 2 else 2 * (pipeline - i) - 1)
    if target > 0:
        number += int(np.ceil(travel_s[i] / pace_s - 1e-9))
    return min(number, m)


@njit(cache=True)
def _limits(kinds, row, state, flights, last, tables, most):  # type: ignore[no-untyped-def]
    """`most` [p, mode]: the layers that the memory of every rank holds."""
    layer_bytes, working_bytes, ends_bytes, layer_params, ends_params, memory_bytes = tables
    for i in range(kinds.size):
        held = 0.0
        if i == 0:
            held += state * ends_params[0] + flights[i] * ends_bytes[row, 0]
        if i == last:
            held += state * ends_params[1] + flights[i] * ends_bytes[row, 1]
        for mode in range(most.shape[1]):
            free = memory_bytes[kinds[i]] - held - working_bytes[kinds[i], row, mode]
            each = state * layer_params + flights[i] * layer_bytes[kinds[i], row, mode]
            most[i, mode] = int(max(-1.0, free / each + 1e-9))


@njit(cache=True)
def _exchange_s(slowest, stages, kinds, last, tensor, v, sync, ends, beside_s):  # type: ignore[no-untyped-def]
    """Exposed seconds of the slowest rank's exchange beside `beside_s` of computing, at least a layer's."""
    (extra_s, stage_s, most), (layer_params, ends_params) = stages, ends
    longest = 0.0
    for i in range(kinds.size):
        layers = _held(slowest, extra_s[i], stage_s[i], most[i])
        params = layers * layer_params
        params += ends_params[0] if i == 0 else 0.0
        params += ends_params[1] if i == last else 0.0
        seconds = params / tensor * sync[kinds[i], v, 1]
        longest = max(longest, sync[kinds[i], v, 0] + max(seconds - beside_s, seconds / max(1, layers)))
    return longest


@njit(cache=True)
def _step_s(v, row, kinds, m, tensor, shape, limit_s, busiest_s, travel_s, hops_s, tables, scratch):  # type: ignore[no-untyped-def]
    """About the step's seconds without overhead; infinite where memory is too small, or where the slowest stage alone
    takes more than `limit_s`."""
    layer_s, base_s, ends_s, state_bytes, num_layers, sync, memory, overlap = tables
    extra_s, stage_s, most, flights, groups = scratch
    p, last = kinds.size, kinds.size - 1 if shape == 0 else 0
    for i in range(p):
        extra_s[i] = (1 + shape) * base_s[kinds[i], row]
        for mode in range(stage_s.shape[1]):
            stage_s[i, mode] = layer_s[kinds[i], row, mode, :].sum()
    extra_s[0] += ends_s[kinds[0], row, 0]
    extra_s[last] += ends_s[kinds[last], row, 1]
    f, b, w = layer_s[kinds[0], row, 0, 0], layer_s[kinds[0], row, 0, 1], layer_s[kinds[0], row, 0, 2]
    best_s, first_s, whole = np.inf, 1.0, f + b + w
    for target in range(3 if shape == 0 else 1):
        for i in range(p):
            flights[i] = _in_flight(i, shape, target, p, m, travel_s, first_s)
        _limits(kinds, row, state_bytes[v], flights, last, memory, most)
        size = _group(extra_s, stage_s, most, num_layers, groups)
        if target == 0 and np.isfinite(limit_s) and _capacity(limit_s / m, groups, size) < num_layers:
            break
        slowest = _slowest_s(num_layers, groups, size, first_s if target else 0.0)
        if not np.isfinite(slowest):
            break
        if target == 0:
            first_s = slowest
        pace = max(slowest, (1 + shape) * busiest_s)
        for i in range(p):
            stages = p if shape == 1 else p - i
            round_trip = stages * (f + b) / whole * slowest + (1 + shape) * travel_s[0 if shape == 1 else i]
            pace = max(pace, round_trip / flights[i])
        idle = V_BUBBLE if shape == 1 else max(0.0, f + b - (w if target < 2 else 2 * w)) / whole
        total = m * pace + (p - 1) * idle * slowest + (1 + shape) * travel_s[0] + 2 * hops_s
        stages, ends = (extra_s, stage_s, most), (memory[3], memory[4])
        total += _exchange_s(slowest, stages, kinds, last, tensor, v, sync, ends, overlap * slowest)
        best_s = min(best_s, total)
    return best_s


@njit(cache=True, inline="always")
def _least_idle(layer_s, kind, row):  # type: ignore[no-untyped-def]
    """Share of a stage's time that filling and draining takes for each rank but one, in the best shape."""
    f, b, w = layer_s[kind, row, 0, 0], layer_s[kind, row, 0, 1], layer_s[kind, row, 0, 2]
    return min(V_BUBBLE, max(0.0, f + b - 2 * w) / (f + b + w))


@njit(cache=True, inline="always")
def _keep(step_s, at, best_s, best_at):  # type: ignore[no-untyped-def]
    """Put a point among the best ones, the fastest first, of equals the one with the lower number."""
    place = best_s.size - 1
    if step_s > best_s[place] or (step_s == best_s[place] and at > best_at[place]):
        return
    while place > 0 and (step_s < best_s[place - 1] or (step_s == best_s[place - 1] and at < best_at[place - 1])):
        best_s[place], best_at[place] = best_s[place - 1], best_at[place - 1]
        place -= 1
    best_s[place], best_at[place] = step_s, at


@njit(cache=True)
def _fastest(order, kind_of_site, layer_s, low_s, idle):  # type: ignore[no-untyped-def]
    """By row of the tables: a layer's seconds on the fastest site of `order`, and the first site's least idle share."""
    for row in range(low_s.size):
        low_s[row] = np.inf
        idle[row] = _least_idle(layer_s, kind_of_site[order[0]], row)
        for k in range(order.size):
            for mode in range(layer_s.shape[2]):
                low_s[row] = min(low_s[row], layer_s[kind_of_site[order[k]], row, mode, :].sum())


@njit(cache=True)
def least_work_s(rows, layer_s):  # type: ignore[no-untyped-def]
    """By row the work with its bubble on the first kind of site, but for the number of layers."""
    low_s, idle = np.empty(layer_s.shape[1]), np.empty(layer_s.shape[1])
    _fastest(np.zeros(1, np.int64), np.zeros(1, np.int64), layer_s, low_s, idle)
    return (rows[:, 2] + (rows[:, 3] - 1) * idle[rows[:, 5]]) * low_s[rows[:, 5]] / rows[:, 3]


@njit(cache=True)
def estimate(  # type: ignore[no-untyped-def]  # noqa: C901
    orders, sizes, times, ring, rows, scan, max_devices, sites, links, tables, allow, slack, shared, best_s, best_at
):
    """Fill `best_s` and `best_at` [O, K]: the least of about a step's seconds of every order, and at which point.

    Point 2 v is row v with one stage per rank, 2 v + 1 the same in a V. Infinite where fewer than K fit, or where a
    point's work with its bubble, or its traffic, takes `slack` times as long as the best of the order; with `shared`,
    as the best of all orders looked at so far, the last one first. `orders` [O, L] sites by number, `sizes` [O] how
    many, `times` [O] sites that hold a whole pipeline each (1: a pipeline over `orders`), `ring` [O, 2] latency and
    bytes per second of the slowest link around these. `rows` [V, 6]: tensor, data inside a site, microbatches, ranks,
    replicas in all, row of the tables; those with more than `max_devices` in all are left out. `scan` [V]: the rows in
    the order in which they are looked at, those with the least work first, so that the best are known early. `sites`:
    devices, kind, largest tensor degree, by site. `links`: latency_s, bytes per second [S, S]. `allow`: one stage per
    rank, V.
    """
    num_devices, kind_of_site, most_tensor = sites
    step_tables, message_bytes, hop_s, exchanged_bytes, overhead_s = tables
    layer_s, num_layers, overlap = step_tables[0], step_tables[4], step_tables[7]
    modes = layer_s.shape[2]
    ranks, kinds = np.empty(MAX_STAGES, np.int64), np.empty(MAX_STAGES, np.int64)
    travel_s, extra_s = np.empty(MAX_STAGES), np.empty(MAX_STAGES)
    stage_s, most = np.empty((MAX_STAGES, modes)), np.empty((MAX_STAGES, modes), np.int64)
    flights = np.empty(MAX_STAGES, np.int64)
    holds, count = np.empty((MAX_STAGES, modes), np.int64), np.empty(MAX_STAGES, np.int64)
    groups = (np.empty(MAX_STAGES), np.empty((MAX_STAGES, modes)), holds, count)
    low_s, idle = np.empty(layer_s.shape[1]), np.empty(layer_s.shape[1])
    best_s[:] = np.inf
    least, alike = np.inf, layer_s.shape[0] == 1
    for turn in range(orders.shape[0]):
        o = orders.shape[0] - 1 - turn if shared else turn
        order, num_sites, least = orders[o], sizes[o], least if shared else np.inf
        ring_s, rounds_s, whole, widest = 0.0, 0.0, 0, most_tensor[order[0]]
        for k in range(num_sites):
            whole, widest = whole + num_devices[order[k]], min(widest, most_tensor[order[k]])
        if times[o] > 1:
            rounds = 2.0 * (times[o] - 1)
            rounds_s, ring_s = rounds * ring[o, 0], rounds / times[o] * exchanged_bytes / ring[o, 1]
        _fastest(order[:num_sites], kind_of_site, layer_s, low_s, idle)
        for v in scan:
            tensor, inside, m, p, row = rows[v, 0], rows[v, 1], rows[v, 2], rows[v, 3], rows[v, 5]
            one_s = num_layers * low_s[row] / p
            least_s = (m + (p - 1) * idle[row]) * one_s
            if alike and least_s + rounds_s + ring_s / num_layers > slack * least:
                break
            around_s = rounds_s + max(ring_s - overlap * one_s, ring_s / num_layers)
            least_s += around_s
            if least_s > slack * least or tensor > widest or rows[v, 4] != inside * times[o]:
                continue
            if tensor * inside * p > whole or tensor * rows[v, 4] * p > max_devices:
                continue
            if not _place(order, num_sites, num_devices, tensor * inside, p, ranks):
                continue
            busiest_s = _travel(ranks[:p], links[0], links[1], message_bytes[row] * inside, travel_s[:p])
            if max(least_s, m * busiest_s + around_s) + travel_s[0] > slack * least:
                continue
            hops_s = 0.0
            for i in range(p):
                kinds[i] = kind_of_site[ranks[i]]
                hops_s += hop_s[kinds[i], row] if i else 0.0
            scratch = (extra_s[:p], stage_s[:p], most[:p], flights[:p], groups)
            for shape in range(2 if p > 1 else 1):
                if allow[shape]:
                    limit_s = slack * least - around_s if shared else np.inf
                    hop = (busiest_s, travel_s[:p], hops_s)
                    step_s = _step_s(v, row, kinds[:p], m, tensor, shape, limit_s, *hop, step_tables, scratch)
                    step_s += around_s + overhead_s
                    least = min(least, step_s)
                    _keep(step_s, 2 * v + shape, best_s[o], best_at[o])
