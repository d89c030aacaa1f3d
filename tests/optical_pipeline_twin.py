"""A slow plain simulator of a pipeline over light paths: one dictionary of events, nothing kept but what is needed."""

import heapq
import math

from optical_twin import PlainSpectrum, block_start, choose, slots_on

RELEASE, REQUEST, ACTION, ARRIVAL = range(4)


class PlainCoupled:
    """Plays steps as `farpipe.optical.coupled.Coupled` does, without requests ahead of time and kept light paths."""

    def __init__(self, shared, training, rule):
        self.shared, self.training, self.rule, self.now = shared, training, rule, 0.0
        self.spectrum = PlainSpectrum(shared.paths.network.num_fibres, shared.grid.num_slots)
        self.events, self.count, self.lit = [], 0, {}
        self.carried, self.ends, self.sending = {}, {}, {}
        self.booked = {}
        traffic = shared.traffic
        for request in range(len(traffic) if traffic else 0):
            self.post(float(traffic.arrival_s[request]), REQUEST, request)

    def post(self, at, kind, what):
        heapq.heappush(self.events, (at, kind, self.count, what))
        self.count += 1

    def light(self, policy, pair, need):
        found = choose(self.spectrum, policy, self.shared.paths, pair, need)
        if found is None:
            return None
        index, start, count = found
        fibres = self.shared.paths._fibres_of(*self.shared.paths.paths[index])
        self.spectrum.take(fibres, start, count)
        return index, (fibres, start, count)

    def request(self, request):
        shared, traffic = self.shared, self.shared.traffic
        pair = shared.paths.pairs[traffic.pairs[traffic.pair[request]]]

        def need(index):
            return slots_on(shared.background_modulation, shared.paths, shared.grid, index, traffic.gbit_s[request])

        got = self.light(shared.background_policy, pair, need)
        self.carried[request] = got[0] if got else -1
        if got:
            self.until(got[1], None, self.now + float(traffic.holding_s[request]))

    def until(self, block, hop, end):
        """A block is known to be given back at `end`, also if something else was known before."""
        self.ends[key(block)] = (end, block)
        self.post(end, RELEASE, (block, hop))

    def step(self, demands):
        problem = self.training.problem
        self.demands, self.stages, self.batches = demands, problem.num_stages, problem.num_microbatches
        self.order = [list(order) for order in self.training.schedule.ranks]
        self.left = sum(map(len, self.order))
        self.busy, self.waiting = set(), []
        self.there = {("F", 0, j) for j in range(self.batches)} | {
            ("B", self.stages - 1, j) for j in range(self.batches)
        }
        self.ready, self.arrival, self.units, self.refused = {}, {}, {}, set()
        for rank in range(problem.num_ranks):
            self.run(rank)
        while self.left:
            self.now, kind, _, what = heapq.heappop(self.events)
            (self.release, self.request, self.finish, self.arrive)[kind](what)
        return self.now

    def run(self, rank):
        if rank in self.busy or not self.order[rank]:
            return
        action = self.order[rank][0]
        if (
            action.kind != "W"
            and ("F" if action.kind == "F" else "B", action.stage, action.microbatch) not in self.there
        ):
            return
        self.busy.add(rank)
        stage = self.training.problem.stages[action.stage]
        seconds = {"F": stage.forward_s, "I": stage.input_grad_s, "W": stage.weight_grad_s}
        seconds["B"] = seconds["I"] + seconds["W"]
        self.post(self.now + seconds[action.kind], ACTION, rank)

    def finish(self, rank):
        action = self.order[rank].pop(0)
        self.busy.discard(rank)
        self.left -= 1
        way = "F" if action.kind == "F" else "B"
        target = action.stage + (1 if way == "F" else -1)
        if action.kind != "W" and 0 <= target < self.stages:
            hop = (0 if way == "F" else 1) * self.stages + action.stage
            message = hop * self.batches + action.microbatch
            if self.training.hops[hop] is None:
                self.there.add((way, target, action.microbatch))
                self.run(self.rank_of(target))
            else:
                self.ready[message] = self.now
                served = self.serve(message)
                if served == "refused":
                    self.refused.add(message)
                if served != "served":
                    self.waiting.append(message)
                    self.waiting.sort(key=lambda m: self.demands.priority[m])  # keeps the order of asking
        self.run(rank)

    def rank_of(self, stage):
        return self.training.problem.stages[stage].rank

    def serve(self, message):
        hop = message // self.batches
        if self.rule.one_at_a_time and self.lit.get(hop, 0):
            return "its hop's turn"
        pair = self.shared.paths.pairs[self.training.hops[hop]]
        left, least, got = int(self.demands.want[message]), int(self.demands.least[message]), []
        self.cancel(message)
        if self.rule.earliest:
            got = self.earliest(message, pair, left, least)
        if self.rule.spread:
            got = self.spread(message, pair, left, least)
            if got == "it waits":
                return got
        for _ in range(0 if self.rule.earliest or self.rule.spread else self.rule.max_blocks):
            for units in range(left, least - 1, -1) if left else ():

                def need(index, units=units):
                    rate = units * self.rule.unit_gbit
                    return slots_on(self.shared.modulation, self.shared.paths, self.shared.grid, index, rate)

                block = self.light(self.rule.policy, pair, need)
                if block:
                    got.append((units, *block))
                    left, least = left - units, 1
                    break
            else:
                break
        if not got:
            return "refused"
        self.send(message, hop, got)
        return "served"

    def blocks_on(self, index, most, count=None):
        """(units, slots) of the blocks, `count` at most, that a message takes on a candidate, longest run first."""
        shared, found = self.shared, []
        rate = shared.modulation.efficiency(float(shared.paths.km[index])) * shared.grid.slot_ghz
        runs = sorted(self.spectrum.blocks(shared.paths._fibres_of(*shared.paths.paths[index])), key=lambda b: -b[1])
        for _, length in runs[: count or self.rule.max_blocks]:
            units = min(most, math.floor((length - shared.grid.guard) * rate / self.rule.unit_gbit + 1e-9))
            if units > 0:
                found.append((units, math.ceil(units * self.rule.unit_gbit / rate - 1e-9) + shared.grid.guard))
                most -= units
        return found

    def earliest(self, message, pair, most, least):
        paths, best, soonest = self.shared.paths, None, math.inf
        for index in range(paths.first[pair], paths.first[pair + 1]):
            blocks = self.blocks_on(index, most)
            units = sum(units for units, _ in blocks)
            if units >= max(1, least):
                arrival = self.gbit(message) / (units * self.rule.unit_gbit) + float(paths.latency_s[index])
                if arrival < soonest:
                    best, soonest = (index, blocks), arrival
        if best is None:
            return []
        index, got = best[0], []
        fibres = paths._fibres_of(*paths.paths[index])
        for units, count in best[1]:
            start = block_start(self.spectrum, self.rule.policy.slots, fibres, count)
            self.spectrum.take(fibres, start, count)
            got.append((units, index, (fibres, start, count)))
        return got

    def priced(self, pair, index):
        """Delay of a candidate and the price of its spectrum."""
        paths, grid = self.shared.paths, self.shared.grid

        def spectrum(one):
            rate = self.shared.modulation.efficiency(float(paths.km[one])) * grid.slot_ghz
            return len(paths._fibres_of(*paths.paths[one])) / rate

        least = min(spectrum(one) for one in range(paths.first[pair], paths.first[pair + 1]))
        return float(paths.latency_s[index]) + self.rule.price_s * (spectrum(index) / least - 1)

    def together(self, gbit, parts):
        """Seconds until all parts, each units and delay, arrive."""
        units = sum(units for units, _ in parts)
        return (gbit / self.rule.unit_gbit + sum(u * seconds for u, seconds in parts)) / units

    def best_pair(self, message, pair, most, least, gbit=None):
        """(seconds, candidate) of the widest block that arrives soonest with the best other one beside it."""
        paths, gbit = self.shared.paths, self.gbit(message) if gbit is None else gbit
        candidates = range(paths.first[pair], paths.first[pair + 1])
        blocks = {index: [units for units, _ in self.blocks_on(index, most, 2)] for index in candidates}
        best = (math.inf, None)
        for index in candidates:
            units = blocks[index][0] if blocks[index] else 0
            if units < max(1, least):
                continue
            for other in candidates:
                beside = blocks[index][1:] if other == index else blocks[other]
                more = min(most - units, beside[0]) if beside and self.rule.max_blocks > 1 else 0
                parts = [(units, self.priced(pair, index))] + ([(more, self.priced(pair, other))] if more else [])
                seconds = self.together(gbit, parts)
                if max(delay for _, delay in parts) < seconds < best[0]:
                    best = (seconds, index)
        return best

    def one_more(self, pair, most, gbit, parts):
        """The candidate whose widest block beside `parts` makes all arrive soonest, or None."""
        paths, best = self.shared.paths, (self.together(gbit, parts), None)
        for index in range(paths.first[pair], paths.first[pair + 1]):
            found, delay = self.blocks_on(index, most, 1), self.priced(pair, index)
            if found and delay < (seconds := self.together(gbit, [*parts, (found[0][0], delay)])) < best[0]:
                best = (seconds, index)
        return best[1]

    def take(self, index, most):
        units, count = self.blocks_on(index, most, 1)[0]
        fibres = self.shared.paths._fibres_of(*self.shared.paths.paths[index])
        start = block_start(self.spectrum, self.rule.policy.slots, fibres, count)
        self.spectrum.take(fibres, start, count)
        return units, index, (fibres, start, count)

    def spread(self, message, pair, most, least):
        seconds, index = self.best_pair(message, pair, most, least)
        if index is None and not self.rule.book:
            return []
        if self.rule.patient and self.comes_sooner_later(message, pair, most, least, seconds):
            return "it waits"
        return self.blocks_from(index, message, pair, most, self.gbit(message)) if index is not None else []

    def blocks_from(self, index, message, pair, most, gbit):
        got = [self.take(index, most)]
        while len(got) < self.rule.max_blocks and sum(units for units, _, _ in got) < most:
            parts = [(units, self.priced(pair, one)) for units, one, _ in got]
            left = most - sum(units for units, _, _ in got)
            index = self.one_more(pair, left, gbit, parts)
            if index is None:
                break
            got.append(self.take(index, left))
        return got

    def comes_sooner_later(self, message, pair, most, least, seconds):
        best = (self.now + seconds, None)
        for end, block in list(self.ends.values()):
            if self.now < end < best[0] and key(block) not in {one for one, _ in self.booked.values()}:
                self.spectrum.give(*block)
                then, index = self.best_pair(message, pair, most, least)
                self.spectrum.take(*block)
                if end + then < best[0]:
                    best = (end + then, (block, index))
        if best[1] and self.rule.book:
            self.book(message, most, *best[1])
        return best[1] is not None

    def book(self, message, most, block, index):
        """Hold the slots of the block that will be there which are free already."""
        self.spectrum.give(*block)
        _, _, (fibres, start, count) = self.take(index, most)
        self.spectrum.give(fibres, start, count)
        self.spectrum.take(*block)
        free = [(f, s) for f in fibres for s in range(start, start + count) if self.spectrum.fits([f], s, 1)]
        for fibre, slot in free:
            self.spectrum.take([fibre], slot, 1)
        self.booked[message] = (key(block), free)

    def cancel(self, message):
        for fibre, slot in self.booked.pop(message, (None, []))[1]:
            self.spectrum.give([fibre], slot, 1)

    def send(self, message, hop, got):
        self.lit[hop] = self.lit.get(hop, 0) + len(got)
        self.divide(message, hop, got, self.now + self.rule.setup_s, self.gbit(message))

    def divide(self, message, hop, got, start, gbit):
        """Divide what is left of a message over its blocks so that all of it arrives together."""
        delays = [float(self.shared.paths.latency_s[index]) for _, index, _ in got]
        total = sum(units for units, _, _ in got)
        mean = sum(units * delay for (units, _, _), delay in zip(got, delays, strict=True)) / total
        seconds = gbit / (total * self.rule.unit_gbit)  # in the kernel's order of operations: who comes first at a tie
        for (_, _, block), delay in zip(got, delays, strict=True):
            self.until(block, hop, start + seconds + (mean - delay))
        self.units[message] = sum(units for units, _, _ in got)
        self.arrival[message] = start + seconds + mean
        self.sending[message] = got
        self.post(self.arrival[message], ARRIVAL, message)

    def improve(self):
        for message in list(self.sending):
            if self.units[message] < int(self.demands.want[message]):
                if self.rule.move:
                    self.move(message)
                if self.rule.widen:
                    self.widen(message)

    def unsent(self, message):
        """(blocks, Gbit, delays) of a message of which all blocks still send, or None."""
        got = self.sending[message]
        known = [self.ends.get(key(block), (0, None)) for _, _, block in got]
        if not all(block is mine[2] and end > self.now for (end, block), mine in zip(known, got, strict=True)):
            return None
        rates = [units * self.rule.unit_gbit for units, _, _ in got]
        gbit = sum(rate * (end - self.now) for rate, (end, _) in zip(rates, known, strict=True))
        return got, gbit, [float(self.shared.paths.latency_s[index]) for _, index, _ in got]

    def move(self, message):
        if not (found := self.unsent(message)):
            return
        got, gbit, delays = found
        hop, most = message // self.batches, int(self.demands.want[message])
        pair = self.shared.paths.pairs[self.training.hops[hop]]
        for _, _, block in got:
            self.spectrum.give(*block)
        seconds, index = self.best_pair(message, pair, most, int(self.demands.least[message]), gbit)
        if index is None or not max(delays) < seconds < self.arrival[message] - self.now - 1e-9:
            for _, _, block in got:
                self.spectrum.take(*block)
            return
        for _, _, block in got:
            del self.ends[key(block)]
        blocks = self.blocks_from(index, message, pair, most, gbit)
        self.lit[hop] += len(blocks) - len(got)
        self.divide(message, hop, blocks, self.now, gbit)

    def widen(self, message):
        most, found = int(self.demands.want[message]) - self.units[message], self.unsent(message)
        if most == 0 or not found or len(found[0]) == 4:
            return
        got, gbit, delays = found
        hop = message // self.batches
        pair = self.shared.paths.pairs[self.training.hops[hop]]
        parts = [(units, delay) for (units, _, _), delay in zip(got, delays, strict=True)]
        index = self.one_more(pair, most, gbit, parts)
        if index is None:
            return
        units, delay = self.blocks_on(index, most, 1)[0][0], float(self.shared.paths.latency_s[index])
        if self.together(gbit, [*parts, (units, delay)]) > max(*delays, delay):
            self.lit[hop] += 1
            self.divide(message, hop, [*got, self.take(index, most)], self.now, gbit)

    def gbit(self, message):
        way, rest = divmod(message, self.stages * self.batches)
        stage = rest // self.batches
        hop = self.training.problem.hops[stage - way]
        return (hop.forward if way == 0 else hop.backward).bytes * 8e-9

    def release(self, what):
        block, hop = what
        if self.ends.get(key(block), (None, None))[0] != self.now or self.ends[key(block)][1] is not block:
            return
        del self.ends[key(block)]
        self.spectrum.give(*block)
        if hop is not None:
            self.lit[hop] -= 1
        if hasattr(self, "waiting"):
            first = [message for message, (awaited, _) in self.booked.items() if awaited == key(block)]
            served = [message for message in first if self.serve(message) == "served"]
            waiting = [message for message in self.waiting if message not in served]
            self.waiting = [message for message in waiting if self.serve(message) != "served"]
            self.improve()

    def arrive(self, message):
        if self.arrival[message] != self.now:
            return
        self.sending.pop(message, None)
        way, rest = divmod(message, self.stages * self.batches)
        stage, microbatch = divmod(rest, self.batches)
        target = stage + 1 - 2 * way
        self.there.add(("FB"[way], target, microbatch))
        self.run(self.rank_of(target))


def key(block):
    """A block by its first fibre and slot, which no other has at the same time."""
    return block[0][0], block[1]


def close(found, expected):
    return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12)
