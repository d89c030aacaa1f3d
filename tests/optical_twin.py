"""A slow plain simulator of light paths to hold the compiled ones against: whole numbers as masks, lists, no tricks."""

import heapq
import math


class PlainSpectrum:
    """Sets of taken slots per fibre."""

    def __init__(self, num_fibres, num_slots):
        self.num_slots = num_slots
        self.taken = [set() for _ in range(num_fibres)]

    def fits(self, fibres, start, count):
        block = range(start, start + count)
        return (
            start >= 0
            and start + count <= self.num_slots
            and all(s not in self.taken[f] for f in fibres for s in block)
        )

    def blocks(self, fibres):
        """(start, length) of every run of slots that are free on all of `fibres`."""
        found, length = [], 0
        for slot in range(self.num_slots + 1):
            if slot < self.num_slots and self.fits(fibres, slot, 1):
                length += 1
            elif length:
                found.append((slot - length, length))
                length = 0
        return found

    def take(self, fibres, start, count):
        for fibre in fibres:
            self.taken[fibre] |= set(range(start, start + count))

    def give(self, fibres, start, count):
        for fibre in fibres:
            self.taken[fibre] -= set(range(start, start + count))


def block_start(spectrum, rule, fibres, count):
    starts = [s for s in range(spectrum.num_slots) if spectrum.fits(fibres, s, count)]
    if not starts:
        return None
    blocks = [(start, length) for start, length in spectrum.blocks(fibres) if length >= count]
    if rule == "last":
        return starts[-1]
    if rule == "best":
        return min(blocks, key=lambda block: (block[1], block[0]))[0]
    return starts[0]


def _score(spectrum, policy, paths, index, start, count, longest_km):
    nodes, plane = paths.paths[index]
    fibres = paths._fibres_of(nodes, plane)
    shares = [len(spectrum.taken[f]) / spectrum.num_slots for f in fibres]
    if policy.paths == "lowest-slot":
        return start
    if policy.paths == "min-cuts":
        return sum(spectrum.fits([f], start - 1, 1) and spectrum.fits([f], start + count, 1) for f in fibres)
    if policy.paths == "congestion":
        return sum(shares)
    around = {f for (a, _), places in paths.network.fibres.items() if a in nodes for f in places}
    broken = []
    for fibre in around:
        lengths = [length for _, length in spectrum.blocks([fibre])]
        broken.append(1 - max(lengths) / sum(lengths) if lengths else 1)
    terms = (paths.km[index] / longest_km, sum(shares) / len(shares), sum(broken) / len(broken))
    return sum(w * t for w, t in zip(policy.weights, terms, strict=True))


def choose(spectrum, policy, paths, pair, need):
    """(candidate, start, slots) or None; `need` says the slots on a candidate."""
    candidates = range(paths.first[pair], paths.first[pair + 1])
    if policy.paths == "shortest":
        candidates = [min(candidates, key=lambda i: (paths.km[i], i))]
    longest_km = max(paths.km[i] for i in range(paths.first[pair], paths.first[pair + 1]))
    best = None
    for index in candidates:
        count = need(index)
        fibres = paths._fibres_of(*paths.paths[index])
        start = block_start(spectrum, policy.slots, fibres, count) if count else None
        if start is None:
            continue
        if policy.paths in ("in-order", "shortest"):
            return index, start, count
        score = _score(spectrum, policy, paths, index, start, count, longest_km)
        if best is None or score < best[0] - 1e-9:  # equal but for rounding: the earlier one
            best = score, index, start, count
    return best and best[1:]


def slots_on(modulation, paths, grid, index, gbit_s):
    """Slots that a rate needs on a candidate, guard band included; 0 out of reach."""
    bits = modulation.efficiency(paths.km[index])
    return math.ceil(gbit_s / (bits * grid.slot_ghz) - 1e-9) + grid.guard if bits else 0


def play(traffic, paths, policy, grid, modulation):
    """(candidate, start, slots) of every request, or None."""
    spectrum = PlainSpectrum(paths.network.num_fibres, grid.num_slots)
    leaving, answers = [], []
    for request in range(len(traffic)):
        now = traffic.arrival_s[request]
        while leaving and leaving[0][0] <= now:
            _, _, fibres, start, count = heapq.heappop(leaving)
            spectrum.give(fibres, start, count)
        pair = paths.pairs[traffic.pairs[traffic.pair[request]]]
        answer = choose(
            spectrum, policy, paths, pair, lambda i, r=request: slots_on(modulation, paths, grid, i, traffic.gbit_s[r])
        )
        answers.append(answer)
        if answer:
            index, start, count = answer
            fibres = paths._fibres_of(*paths.paths[index])
            spectrum.take(fibres, start, count)
            heapq.heappush(leaving, (now + traffic.holding_s[request], request, fibres, start, count))
    return answers
