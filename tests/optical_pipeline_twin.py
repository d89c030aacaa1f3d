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
        self.carried = {}
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
            self.post(self.now + traffic.holding_s[request], RELEASE, (got[1], None))

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
        if self.rule.earliest:
            got = self.earliest(message, pair, left, least)
        for _ in range(0 if self.rule.earliest else self.rule.max_blocks):
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

    def blocks_on(self, index, most):
        """(units, slots) of the blocks that a message would take on a candidate, longest run first."""
        shared, found = self.shared, []
        rate = shared.modulation.efficiency(float(shared.paths.km[index])) * shared.grid.slot_ghz
        runs = sorted(self.spectrum.blocks(shared.paths._fibres_of(*shared.paths.paths[index])), key=lambda b: -b[1])
        for _, length in runs[: self.rule.max_blocks]:
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

    def send(self, message, hop, got):
        total = sum(units for units, _, _ in got)
        gbit = self.gbit(message)
        end = self.now + self.rule.setup_s + gbit / (total * self.rule.unit_gbit)
        self.lit[hop] = self.lit.get(hop, 0) + len(got)
        for _, _, block in got:
            self.post(end, RELEASE, (block, hop))
        self.units[message] = total
        self.arrival[message] = end + max(self.shared.paths.latency_s[index] for _, index, _ in got)
        self.post(self.arrival[message], ARRIVAL, message)

    def gbit(self, message):
        way, rest = divmod(message, self.stages * self.batches)
        stage = rest // self.batches
        hop = self.training.problem.hops[stage - way]
        return (hop.forward if way == 0 else hop.backward).bytes * 8e-9

    def release(self, what):
        block, hop = what
        self.spectrum.give(*block)
        if hop is not None:
            self.lit[hop] -= 1
        if hasattr(self, "waiting"):
            self.waiting = [message for message in self.waiting if self.serve(message) != "served"]

    def arrive(self, message):
        way, rest = divmod(message, self.stages * self.batches)
        stage, microbatch = divmod(rest, self.batches)
        target = stage + 1 - 2 * way
        self.there.add(("FB"[way], target, microbatch))
        self.run(self.rank_of(target))


def close(found, expected):
    return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12)
