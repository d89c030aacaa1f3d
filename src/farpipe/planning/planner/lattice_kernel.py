"""Closed forms over the whole lattice of degrees, compiled: about what a step takes, before any candidate exists.

Per row of degrees and order of sites: ranks are placed in proportion to devices, layers divided so that the slowest
stage is as fast as its memory lets it be (bisection), and the step is

    m x pace + fill and drain + exchange of gradients + overhead

pace is the largest of the slowest stage, of the busiest link between sites, and of round trip / microbatches in flight
on any stage. Fill and drain are (p - 1)(F + I - W) with as many microbatches in flight as 1F1B has, (p - 1)(F + I - 2W)
with twice as many (arXiv 2401.10241), a share of pace in a V, and the round trip over all links.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.core.step.jit import inner, jit
from farpipe.planning.workload import layout

Floats = NDArray[np.float64]

V_BUBBLE = 0.35
"""Share of (p - 1) x pace that the best named order in a V leaves idle, about, where F, I and W differ."""
_BISECTIONS = 14


class Point(NamedTuple):
    """One point of the lattice: degrees, and the row of the tables for them."""

    v: int
    row: int
    tensor: int
    num_microbatches: int
    shape: int
    """0: one stage per rank; 1: two in a V."""


class Path(NamedTuple):
    """Ranks of a point on their sites."""

    kinds: np.ndarray
    """[p]: kind of the site of every rank."""
    busiest_s: float
    """Seconds of one message of all replicas on the busiest link."""
    travel_s: np.ndarray
    """[p]: seconds there and back of a message, over all links below every rank."""
    hops_s: float
    """Seconds of one message over all hops inside sites."""


share_ranks = inner(layout.share_ranks)


@jit(inline="always")
def _group(extra_s, layer_s, most, num_layers, groups):  # type: ignore[no-untyped-def]
    """Stages that are identical, as groups: extra seconds, 1 / seconds of a layer, most layers, how many; their number.

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


@inner
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


@jit(inline="always")
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


@jit(inline="always")
def _held(limit_s, extra_s, layer_s, most):  # type: ignore[no-untyped-def]
    """Number of layers that one stage holds if it takes no longer than `limit_s`."""
    held = 0
    for mode in range(layer_s.size):
        by_time = int((limit_s - extra_s) / layer_s[mode] + 1e-9) if limit_s > extra_s else 0
        held = max(held, min(by_time, most[mode]))
    return held


@inner
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


@jit(inline="always")
def _in_flight(i, shape, target, pipeline, m, travel_s, pace_s):  # type: ignore[no-untyped-def]
    """Microbatches in flight on rank i: as 1F1B; with what hides the links' delays; twice as many with that."""
    number = pipeline if shape == 1 else (pipeline - i if target < 2 else 2 * (pipeline - i) - 1)
    if target > 0:
        number += int(np.ceil(travel_s[i] / pace_s - 1e-9))
    return min(number, m)


@jit(inline="always")
def _limits(kinds, row, state, flights, last, memory, most):  # type: ignore[no-untyped-def]
    """`most` [p, mode]: the layers that the memory of every rank holds."""
    layer_bytes, working_bytes, ends_bytes, layer_params, ends_params, limit_bytes = memory
    for i in range(kinds.size):
        held = 0.0
        if i == 0:
            held += state * ends_params[0] + flights[i] * ends_bytes[row, 0]
        if i == last:
            held += state * ends_params[1] + flights[i] * ends_bytes[row, 1]
        for mode in range(most.shape[1]):
            free = limit_bytes[kinds[i]] - held - working_bytes[kinds[i], row, mode]
            each = state * layer_params[row] + flights[i] * layer_bytes[kinds[i], row, mode]
            most[i, mode] = int(max(-1.0, free / each + 1e-9))


@jit(inline="always")
def _exchange_s(slowest, point, kinds, ranks, ends, sync, beside_s):  # type: ignore[no-untyped-def]
    """Exposed seconds of the slowest rank's exchange: a layer's at least, and all that is longer than `beside_s`."""
    (extra_s, stage_s, most), (layer_params, ends_params) = ranks, ends
    last, longest = kinds.size - 1 if point.shape == 0 else 0, 0.0
    for i in range(kinds.size):
        layers = _held(slowest, extra_s[i], stage_s[i], most[i])
        params = layers * layer_params
        params += ends_params[0] if i == 0 else 0.0
        params += ends_params[1] if i == last else 0.0
        seconds = params / point.tensor * sync[kinds[i], point.v, 1]
        longest = max(longest, sync[kinds[i], point.v, 0] + max(seconds - beside_s, seconds / max(1, layers)))
    return longest


@jit(inline="always")
def _pipeline_s(point, path, slowest, target, layer_s, flights):  # type: ignore[no-untyped-def]
    """Seconds of a step without exchange and overhead whose slowest stage takes `slowest` for a microbatch."""
    p, shape, travel_s = path.kinds.size, point.shape, path.travel_s
    f, b, w = layer_s[0], layer_s[1], layer_s[2]
    whole, pace = f + b + w, max(slowest, (1 + shape) * path.busiest_s)
    for i in range(p):
        stages = p if shape == 1 else p - i
        round_trip = stages * (f + b) / whole * slowest + (1 + shape) * travel_s[0 if shape == 1 else i]
        pace = max(pace, round_trip / flights[i])
    idle = V_BUBBLE if shape == 1 else max(0.0, f + b - (w if target < 2 else 2 * w)) / whole
    return point.num_microbatches * pace + (p - 1) * idle * slowest + (1 + shape) * travel_s[0] + 2 * path.hops_s


@jit(inline="always")
def _least_pipeline_s(point, path, slowest, idle):  # type: ignore[no-untyped-def]
    """Lower bound of `_pipeline_s` for any number of microbatches in flight; `idle` is `_least_idle`."""
    pace = max(slowest, (1 + point.shape) * path.busiest_s)
    filling_s = (path.kinds.size - 1) * idle * slowest
    return point.num_microbatches * pace + filling_s + (1 + point.shape) * path.travel_s[0] + 2 * path.hops_s


@inner
def _step_s(point, path, limit_s, stages, of_ranks):  # type: ignore[no-untyped-def]
    """About the step's seconds without overhead; infinite where memory is too small, or where the slowest stage alone
    takes more than `limit_s`.

    Tables are taken apart here once: passing a tuple of many arrays on for every point costs a tenth of the time.
    """
    layer_s, base_s, ends_s, state_bytes, num_layers, sync, memory, overlap = stages
    extra_s, stage_s, most, flights, groups = of_ranks
    kinds, m, shape, row = path.kinds, point.num_microbatches, point.shape, point.row
    p, last = kinds.size, kinds.size - 1 if shape == 0 else 0
    for i in range(p):
        extra_s[i] = (1 + shape) * base_s[kinds[i], row]
        for mode in range(stage_s.shape[1]):
            stage_s[i, mode] = _whole_s(layer_s, kinds[i], row, mode)
    extra_s[0] += ends_s[kinds[0], row, 0]
    extra_s[last] += ends_s[kinds[last], row, 1]
    # Three numbers of microbatches in flight are tried, as in `_in_flight`: those of 1F1B first, for they need the
    # least memory, and their slowest stage says how many more hide the links. A point ends with the first where even
    # its lower bound is too slow, or where memory holds too few layers: more in flight only take more memory.
    best_s, first_s = np.inf, 1.0
    for target in range(3 if shape == 0 else 1):
        for i in range(p):
            flights[i] = _in_flight(i, shape, target, p, m, path.travel_s, first_s)
        _limits(kinds, row, state_bytes[point.v], flights, last, memory, most)
        size = _group(extra_s, stage_s, most, num_layers, groups)
        if target == 0 and np.isfinite(limit_s) and _capacity(limit_s / m, groups, size) < num_layers:
            break
        slowest = _slowest_s(num_layers, groups, size, first_s if target else 0.0)
        if not np.isfinite(slowest):
            break
        if target == 0:
            first_s = slowest
            if _least_pipeline_s(point, path, slowest, _least_idle(layer_s, kinds[0], row)) > limit_s:
                break
        total = _pipeline_s(point, path, slowest, target, layer_s[kinds[0], row, 0], flights)
        ranks, ends = (extra_s, stage_s, most), (memory.layer_params[row], memory.ends_params)
        best_s = min(best_s, total + _exchange_s(slowest, point, kinds, ranks, ends, sync, overlap * slowest))
    return best_s


@jit(inline="always")
def _whole_s(layer_s, kind, row, mode):  # type: ignore[no-untyped-def]
    """Seconds of a layer's F, I and W; `sum` of an array would be compiled for each of its layouts."""
    return layer_s[kind, row, mode, 0] + layer_s[kind, row, mode, 1] + layer_s[kind, row, mode, 2]


@jit(inline="always")
def _least_idle(layer_s, kind, row):  # type: ignore[no-untyped-def]
    """Share of a stage's time that filling and draining takes for each rank but one, in the best shape."""
    f, b, w = layer_s[kind, row, 0, 0], layer_s[kind, row, 0, 1], layer_s[kind, row, 0, 2]
    return min(V_BUBBLE, max(0.0, f + b - 2 * w) / (f + b + w))


@jit(inline="always")
def _keep(step_s, at, best_s, best_at):  # type: ignore[no-untyped-def]
    """Put a point among the best ones, the fastest first, of equals the one with the lower number."""
    place = best_s.size - 1
    if step_s > best_s[place] or (step_s == best_s[place] and at > best_at[place]):
        return
    while place > 0 and (step_s < best_s[place - 1] or (step_s == best_s[place - 1] and at < best_at[place - 1])):
        best_s[place], best_at[place] = best_s[place - 1], best_at[place - 1]
        place -= 1
    best_s[place], best_at[place] = step_s, at


@inner
def _fastest(order, kind_of_site, layer_s, low_s, idle):  # type: ignore[no-untyped-def]
    """Fill, by row of the tables, a layer's seconds on the fastest site of `order` and the first site's idle share."""
    for row in range(low_s.size):
        low_s[row] = np.inf
        idle[row] = _least_idle(layer_s, kind_of_site[order[0]], row)
        for k in range(order.size):
            for mode in range(layer_s.shape[2]):
                low_s[row] = min(low_s[row], _whole_s(layer_s, kind_of_site[order[k]], row, mode))


@inner
def _place(order, per_rank, num_devices, counts, most, ranks):  # type: ignore[no-untyped-def]
    """Fill the site of every rank; False where the sites of `order` can't hold them."""
    for k in range(order.size):
        most[k] = num_devices[order[k]] // per_rank
    if not share_ranks(ranks.size, most[: order.size], counts):
        return False
    rank = 0
    for k in range(order.size):
        for _ in range(counts[k]):
            ranks[rank] = order[k]
            rank += 1
    return True


@inner
def _hops(ranks, kind_of_site, hop_s, row, kinds):  # type: ignore[no-untyped-def]
    """Fill the kind of every rank's site; return the seconds of one message over all hops inside sites."""
    hops_s = 0.0
    for i in range(ranks.size):
        kinds[i] = kind_of_site[ranks[i]]
        hops_s += hop_s[kinds[i], row] if i else 0.0
    return hops_s


@jit(inline="always")
def _is_open(p, shape, bounds):  # type: ignore[no-untyped-def]
    """True if the pins leave `p` ranks of this shape."""
    fits = bounds.fewest_stages <= p * (2 if shape else bounds.virtual) <= bounds.most_stages
    return fits and (bounds.in_v if shape else bounds.alone)


@jit(inline="always")
def _could_hold(num_layers, p, most_s, layer_s):  # type: ignore[no-untyped-def]
    """False where `p` ranks, each with whole layers of `layer_s`, can't hold all layers in `most_s` a microbatch."""
    return most_s == np.inf or p * int(max(0.0, most_s) / layer_s + 1e-9) >= num_layers


@inner
def _estimate_order(o, least, asked, question, scratch, best):  # type: ignore[no-untyped-def]
    """Enter the best points of order `o`; return the least step of them and of `least`."""
    order, times, ring = asked.orders[o][: asked.sizes[o]], asked.times[o], asked.ring[o]
    rows, tables, bounds = question.rows, question.tables, question.bounds
    stages, slack = tables.stages, bounds.slack
    _fastest(order, question.sites.kind, stages.layer_s, scratch.low_s, scratch.idle)
    whole, widest = 0, question.sites.most_tensor[order[0]]
    for site in order:
        whole, widest = whole + question.sites.num_devices[site], min(widest, question.sites.most_tensor[site])
    rounds = 2.0 * (times - 1)
    rounds_s, ring_s = rounds * ring[0], rounds / times * tables.exchanged_bytes / ring[1]
    low_s, idle, num_layers, overlap = scratch.low_s, scratch.idle, stages.num_layers, stages.overlap
    layer_ring_s, alike = ring_s / num_layers, stages.layer_s.shape[0] == 1
    for v in question.scan:
        tensor, inside, m, p, row, width = rows[v, 0], rows[v, 1], rows[v, 2], rows[v, 3], rows[v, 5], rows[v, 6]
        one_s = num_layers * low_s[row] / p
        least_s = (m + (p - 1) * idle[row]) * one_s
        if alike and least_s + rounds_s + layer_ring_s > slack * least:
            break
        around_s = rounds_s + max(ring_s - overlap * one_s, layer_ring_s)
        least_s += around_s
        if least_s > slack * least or tensor > widest or rows[v, 4] != inside * times:
            continue
        most_s = (slack * least - around_s - tables.overhead_s) / (m + (p - 1) * idle[row])
        too_many = width * inside * p > whole or width * rows[v, 4] * p > bounds.max_devices
        if too_many or not _could_hold(num_layers, p, most_s, low_s[row]):
            continue
        ranks, kinds, travel_s = scratch.ranks[:p], scratch.kinds[:p], scratch.travel_s[:p]
        if not _place(order, width * inside, question.sites.num_devices, scratch.counts, scratch.most_ranks, ranks):
            continue
        size = tables.message_bytes[row] * inside
        busiest_s = _travel(ranks, question.links.latency_s, question.links.rate, size, travel_s)
        if max(least_s, m * busiest_s + around_s) + travel_s[0] > slack * least:
            continue
        hops_s = _hops(ranks, question.sites.kind, tables.hop_s, row, kinds)
        path = Path(kinds, busiest_s, travel_s, hops_s)
        of_ranks = (scratch.extra_s[:p], scratch.stage_s[:p], scratch.most[:p], scratch.flights[:p], scratch.groups)
        for shape in range(2 if p > 1 else 1):
            if _is_open(p, shape, bounds):
                limit_s = slack * least - around_s if bounds.shared else np.inf
                step_s = _step_s(Point(v, row, tensor, m, shape), path, limit_s, stages, of_ranks)
                step_s *= 1 + tables.slowest[v]  # not += a share of it: 0 times infinity is no number
                step_s += around_s + tables.overhead_s
                least = min(least, step_s)
                _keep(step_s, 2 * v + shape, best[0][o], best[1][o])
    return least


@jit
def estimate(asked, question, best, scratch):  # type: ignore[no-untyped-def]
    """Fill `best` (seconds, points) [O, K]: the least of about a step's seconds of every order, and at which point.

    `asked` is an OrderTable, `question` a Question, `scratch` from `new_scratch`. Point 2 v is row v with one stage per
    rank, 2 v + 1 the same in a V. Infinite where fewer than K fit, or where a point's work with its bubble, or its
    traffic, takes `bounds.slack` times as long as the best of the order; with `bounds.shared`, as the best of all
    orders so far, the last one first.
    """
    best[0][:] = np.inf
    least, number = np.inf, asked.sizes.size
    for turn in range(number):
        o = number - 1 - turn if question.bounds.shared else turn
        known = least if question.bounds.shared else np.inf
        least = _estimate_order(o, known, asked, question, scratch, best)
