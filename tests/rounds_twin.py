"""A slow, plain twin of the orders in rounds (`farpipe.schedule.library.rounds`): dictionaries instead of arrays."""

from farpipe.step import Action, Schedule

FIGURES = {"F": "forward_s", "I": "input_grad_s", "W": "weight_grad_s"}


class Rounds:
    """The orders as far as they are made. Every hop has a link of its own in both directions."""

    def __init__(self, problem, headroom, bubble_first, input_grads_first, weights_always):
        self.problem, self.num_microbatches = problem, problem.num_microbatches
        self.bubble_first, self.input_grads_first, self.weights_always = bubble_first, input_grads_first, weights_always
        self.stages = list(range(problem.num_stages))
        self.orders = [[] for _ in self.stages]
        self.end, self.waited = [0.0 for _ in self.stages], [0.0 for _ in self.stages]
        self.left = [headroom[stage.rank] * (1 + 1e-9) for stage in problem.stages]
        self.arrival, self.link_free = {}, {}
        self.tolerance = 1e-9 * max(problem.table(name).max() for name in FIGURES.values())

    def build(self):
        """The Schedule; None where memory does not suffice."""
        for s in self.stages:
            self.do(s, "F")
        forwards = [count - 1 for count in self.warm_up()]
        for _ in range(self.num_microbatches):
            every = [(s, "F") for s in self.stages for _ in range(forwards[s])] + [(s, "I") for s in self.stages[::-1]]
            if not all(self.try_to_do(s, kind) for s, kind in every):
                return None
            forwards = self.next_forwards()
        for s in self.stages:
            while self.count(s, "W") < self.num_microbatches:
                self.do(s, "W")
        ranks = [()] * self.problem.num_ranks
        for s in self.stages:
            ranks[self.problem.stages[s].rank] = tuple(self.orders[s])
        return Schedule(self.num_microbatches, tuple(ranks), "rounds")

    def warm_up(self):
        """The number of forwards that every stage does before its first I."""
        counts, last = [1 for _ in self.stages], self.stages[-1]
        first_end = self.end[last] + self.seconds(last, "I", 0)
        for s in self.stages[-2::-1]:
            comes, at, left = first_end + self.hop_s(s + 1, "I", 0), self.end[s], self.left[s]
            while counts[s] < self.num_microbatches:
                seconds, needed = self.seconds(s, "F", counts[s]), self.held(s, "F", counts[s])[0]
                on_time = at + seconds <= comes + self.tolerance if self.bubble_first else at < comes - self.tolerance
                if not on_time or needed > left:
                    break
                at, left, counts[s] = at + seconds, left - needed, counts[s] + 1
            first_end = max(at, comes) + self.seconds(s, "I", 0)
        for s in self.stages[1:]:
            if counts[s - 1] < self.num_microbatches:
                counts[s] = max(1, min(counts[s], counts[s - 1] - 1))
        return counts

    def next_forwards(self):
        """The number of forwards of every stage in the next round: one, or none."""
        counts = [0 for _ in self.stages]
        for s in self.stages[::-1]:
            is_last = s == self.stages[-1]
            if self.count(s, "F") < self.num_microbatches and (is_last or counts[s + 1]):
                counts[s] = int(is_last or not (self.input_grads_first and self.waits(s)))
        return counts

    def waits(self, s):
        """True if the stage leaves out a forward for the next stage's I."""
        ahead, nxt = self.count(s, "F") - self.count(s + 1, "F"), s + 1
        if ahead < 2:
            return False
        i, w = self.count(nxt, "I"), self.count(s, "W")
        due = self.end[nxt] + self.seconds(nxt, "F", self.count(nxt, "F")) + self.seconds(nxt, "I", i)
        due += self.hop_s(nxt, "I", i)
        if self.end[s] >= due - self.tolerance:
            return True
        at = self.end[s] + self.seconds(s, "F", self.count(s, "F"))
        left = self.left[s] - self.held(s, "F", self.count(s, "F"))[0]
        while left < 0 and w < self.count(s, "I"):
            at, left, w = at + self.seconds(s, "W", w), left + self.held(s, "W", w)[1], w + 1
        return at > due + self.tolerance and due - self.end[s] <= max(self.waited) - self.waited[s] + self.tolerance

    def try_to_do(self, s, kind):
        """Do W's for memory and in the gap, then the action; False where memory does not suffice."""

        def weights_left():
            return self.count(s, "W") < self.count(s, "I")

        j = self.count(s, kind)
        taken, freed = self.held(s, kind, j)
        while taken + max(0.0, -freed) > self.left[s]:
            if not weights_left():
                return False
            self.do(s, "W")
        comes = self.arrival.get((s, kind, j), 0.0)
        while weights_left() and self.end[s] < comes - self.tolerance:
            fits = self.end[s] + self.seconds(s, "W", self.count(s, "W")) <= comes + self.tolerance
            worst = comes - self.end[s] > max(self.waited) - self.waited[s] + self.tolerance
            if not (fits or worst or self.weights_always):
                break
            self.do(s, "W")
        while kind == "I" and s == 0 and self.count(0, "F") == self.num_microbatches and weights_left():
            self.do(s, "W")
        self.do(s, kind)
        return True

    def do(self, s, kind):
        """The next action of this kind, as soon as its input is there."""
        j = self.count(s, kind)
        start = max(self.end[s], self.arrival.get((s, kind, j), 0.0))
        if self.orders[s]:
            self.waited[s] += start - self.end[s]
        self.end[s] = start + self.seconds(s, kind, j)
        taken, freed = self.held(s, kind, j)
        self.left[s] += freed - taken
        self.orders[s].append(Action(s, kind, j))
        target = {"F": s + 1, "I": s - 1}.get(kind)
        if target in self.stages:
            occupied_s, latency_s = self.message(s, kind, j)
            sent = max(self.end[s], self.link_free.get((s, kind), 0.0)) + occupied_s
            self.link_free[s, kind], self.arrival[target, kind, j] = sent, sent + latency_s

    def count(self, s, kind):
        """The number of actions of a kind that are done."""
        return sum(action.kind == kind for action in self.orders[s])

    def seconds(self, s, kind, j):
        """Of one action."""
        return float(self.problem.table(FIGURES[kind])[s, j])

    def held(self, s, kind, j):
        """(bytes taken, bytes freed)."""
        activation, stash = (self.problem.table(name)[s, j] for name in ("activation_bytes", "weight_stash_bytes"))
        return {"F": (activation, 0.0), "I": (0.0, activation - stash), "W": (0.0, stash)}[kind]

    def message(self, s, kind, j):
        """(seconds on its link, latency) of what an F or I sends."""
        hop = self.problem.hops[s if kind == "F" else s - 1]
        transfer = hop and (hop.forward if kind == "F" else hop.backward)
        if not transfer:
            return 0.0, 0.0
        link = self.problem.links[transfer.link]
        return self.problem.row(transfer.bytes)[j] / link.bandwidth_bytes_per_s, link.latency_s

    def hop_s(self, s, kind, j):
        """From the end of an F or I to the arrival of what it sends, if the link is free."""
        return sum(self.message(s, kind, j))
