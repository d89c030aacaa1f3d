"""A slow plain simulator of a pipeline over light paths: one dictionary of events, nothing kept but what is needed."""

import heapq
import math

from optical_twin import PlainSpectrum, block_start, choose, slots_on

RELEASE, REQUEST, ACTION, ARRIVAL = range(4)


class PlainPlayer:
    """Plays steps as `NetworkPlayer` does, without requests ahead of time and kept light paths."""

    def __init__(self, shared, training, rule):
        self.shared, self.training, self.rule, self.now = shared, training, rule, 0.0
        self.spectrum = PlainSpectrum(shared.paths.network.num_fibres, shared.grid.num_slots)
        self.events, self.count, self.lit = [], 0, {}
        self.carried, self.ends, self.sending = {}, {}, {}
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
        self.ready, self.arrival, self.units, self.refused, self.start = {}, {}, {}, set(), {}
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
                served = self.serve_in_turn(message, self.waiting)
                if served == "refused":
                    self.refused.add(message)
                if served != "served":
                    self.waiting.append(message)
                    self.waiting.sort(key=lambda m: self.demands.priority[m])  # keeps the order of asking
        self.run(rank)

    def rank_of(self, stage):
        return self.training.problem.stages[stage].rank

    def serve_in_turn(self, message, before):
        """A hop of one light path at a time is first in, first out within a priority."""
        rank = self.demands.priority
        ahead = [m for m in before if m // self.batches == message // self.batches and rank[m] <= rank[message]]
        return "behind others" if ahead and self.rule.one_at_a_time else self.serve(message)

    def serve(self, message):
        hop = message // self.batches
        if self.rule.one_at_a_time and self.lit.get(hop, 0):
            return "its hop's turn"
        pair = self.shared.paths.pairs[self.training.hops[hop]]
        left, least, got = int(self.demands.want[message]), int(self.demands.least[message]), []
        if self.rule.earliest:
            got = self.earliest(message, pair, left, least)
        for units in () if self.rule.earliest else range(left, least - 1, -1):

            def need(index, units=units):
                rate = units * self.rule.unit_gbit
                return slots_on(self.shared.modulation, self.shared.paths, self.shared.grid, index, rate)

            block = self.light(self.rule.policy, pair, need)
            if block:
                got.append((units, *block))
                break
        if not got:
            return "refused"
        self.send(message, hop, got)
        return "served"

    def block_on(self, index, most):
        """(units, slots) of the widest block on a candidate, or None."""
        shared = self.shared
        rate = shared.modulation.efficiency(float(shared.paths.km[index])) * shared.grid.slot_ghz
        blocks = self.spectrum.blocks(shared.paths._fibres_of(*shared.paths.paths[index]))
        length = max((length for _, length in blocks), default=0)
        units = min(most, math.floor((length - shared.grid.guard) * rate / self.rule.unit_gbit + 1e-9))
        return (units, math.ceil(units * self.rule.unit_gbit / rate - 1e-9) + shared.grid.guard) if units > 0 else None

    def delay(self, index):
        return float(self.shared.paths.latency_s[index])

    def together(self, gbit, parts):
        """Seconds until all parts, each units and delay, arrive."""
        units = sum(units for units, _ in parts)
        return (gbit / self.rule.unit_gbit + sum(u * seconds for u, seconds in parts)) / units

    def soonest(self, pair, most, least, gbit, parts):
        """The candidate whose widest block beside `parts` makes all arrive soonest, or None."""
        paths, best = self.shared.paths, (self.together(gbit, parts) if parts else math.inf, None)
        for index in range(paths.first[pair], paths.first[pair + 1]):
            found, delay = self.block_on(index, most), self.delay(index)
            if not found or found[0] < max(1, least):
                continue
            seconds = self.together(gbit, [*parts, (found[0], delay)])
            if delay < seconds < best[0]:
                best = (seconds, index)
        return best[1]

    def take(self, index, most):
        units, count = self.block_on(index, most)
        fibres = self.shared.paths._fibres_of(*self.shared.paths.paths[index])
        start = block_start(self.spectrum, self.rule.policy.slots, fibres, count)
        self.spectrum.take(fibres, start, count)
        return units, index, (fibres, start, count)

    def earliest(self, message, pair, most, least):
        index = self.soonest(pair, most, least, self.gbit(message), [])
        return [] if index is None else [self.take(index, most)]

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
            self.until(block, hop, start + seconds + (mean - delay) + self.rule.release_s)
        self.start[message] = start
        self.units[message] = sum(units for units, _, _ in got)
        self.arrival[message] = start + seconds + mean
        self.sending[message] = got
        self.post(self.arrival[message], ARRIVAL, message)

    def improve(self):
        for message in list(self.sending):
            if self.rule.widen and self.units[message] < int(self.demands.want[message]):
                self.widen(message)

    def unsent(self, message, begin):
        """(blocks, Gbit, delays) of a message of which all blocks still send at `begin`, or None."""
        got = self.sending[message]
        known = [self.ends.get(key(block), (0, None)) for _, _, block in got]
        sent = [end - self.rule.release_s for end, _ in known]
        if not all(there[1] is mine[2] for there, mine in zip(known, got, strict=True)) or min(sent) <= begin:
            return None
        rates = [units * self.rule.unit_gbit for units, _, _ in got]
        gbit = sum(rate * (end - begin) for rate, end in zip(rates, sent, strict=True))
        return got, gbit, [float(self.shared.paths.latency_s[index]) for _, index, _ in got]

    def widen(self, message):
        begin = self.now + self.rule.setup_s
        if self.start[message] > begin:
            return
        most, found = int(self.demands.want[message]) - self.units[message], self.unsent(message, begin)
        if most == 0 or not found or len(found[0]) == 4:
            return
        got, gbit, delays = found
        hop = message // self.batches
        pair = self.shared.paths.pairs[self.training.hops[hop]]
        parts = [(units, delay) for (units, _, _), delay in zip(got, delays, strict=True)]
        index = self.soonest(pair, most, 1, gbit, parts)
        if index is None:
            return
        units, delay = self.block_on(index, most)[0], float(self.shared.paths.latency_s[index])
        if self.together(gbit, [*parts, (units, delay)]) > max(*delays, delay):
            self.lit[hop] += 1
            self.divide(message, hop, [*got, self.take(index, most)], begin, gbit)

    def gbit(self, message):
        way, rest = divmod(message, self.stages * self.batches)
        stage = rest // self.batches
        hop = self.training.problem.hops[stage - way]
        return (hop.forward if way == 0 else hop.backward).bytes * 8e-9

    def release(self, what):
        block, hop = what
        if self.ends.get(key(block), (None,))[0] != self.now or self.ends[key(block)][1] is not block:
            return
        del self.ends[key(block)]
        self.spectrum.give(*block)
        if hop is not None:
            self.lit[hop] -= 1
        if hasattr(self, "waiting"):
            waiting, self.waiting = self.waiting, []
            for message in waiting:
                if self.serve_in_turn(message, self.waiting) != "served":
                    self.waiting.append(message)
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
