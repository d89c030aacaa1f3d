"""The exact place of one job over more sites than can be enumerated: a path and a division by CP-SAT.

Electricity of a step is (sum of the sites' hourly cost) x (step time), and every hop adds its own seconds. What
the model does not know (devices of several kinds, a checkpoint that moves) the quote does: each solution is quoted, and
as long as the model promises something better than the best quote it is solved again without that path and division.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from farpipe.fleet.job import Placement
from farpipe.fleet.policies.question import Question

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

MAX_ROUNDS: Final = 20
MAX_SOLVER_S: Final = 1.0
"""Deterministic seconds of every round, so that a decision is bounded and the same on every machine."""
FINE: Final = 1_000_000
"""Steps into which costs and times are divided: what is nearer than that counts as equal."""


def solved(question: Question, best: Placement | None) -> Placement | None:
    """The best of `best` and all pipelines over several sites."""
    if sum(question.free_units(site) for site in question.usd_per_h) * question.unit < question.num_devices:
        return best
    model = _Model(question)
    for _ in range(MAX_ROUNDS):
        found = model.solve(None if best is None else question.cost(best)[0])
        if found is None:
            return best
        best = question.better(tuple((site, units * question.unit) for site, units in found), best)
        model.forbid(found)
    return best


class _Model:
    """Arcs of a path from an empty place through the chosen sites and back, units at each, their product."""

    def __init__(self, question: Question) -> None:
        from ortools.sat.python import cp_model

        self._cp, self._question = cp_model, question
        self._model = cp_model.CpModel()
        self._sites = sorted(question.usd_per_h)
        self._units = {
            site: self._model.new_int_var(0, max(0, question.free_units(site)), site) for site in self._sites
        }
        self._arcs: dict[tuple[str, str], cp_model.IntVar] = {}
        self._path()
        self._model.add(sum(self._units.values()) == question.num_devices // question.unit)
        self._cost, self._usd_per_tick = self._product()

    def _path(self) -> None:
        model, index = self._model, {site: number + 1 for number, site in enumerate(self._sites)}
        arcs = []
        for site, number in index.items():
            unused = model.new_bool_var("")
            model.add(self._units[site] == 0).only_enforce_if(unused)
            model.add(self._units[site] >= 1).only_enforce_if(unused.negated())
            arcs += [(number, number, unused), (0, number, model.new_bool_var("")), (number, 0, model.new_bool_var(""))]
        for a, b in self._linked():
            self._arcs[a, b] = model.new_bool_var("")
            arcs.append((index[a], index[b], self._arcs[a, b]))
        model.add_circuit(arcs)
        model.add(sum(self._arcs.values()) >= 1)  # a single site is not asked for

    def _linked(self) -> list[tuple[str, str]]:
        return [(a, b) for a in self._sites for b in self._sites if a != b and self._question.linked(a, b)]

    def _product(self) -> "tuple[cp_model.IntVar, float]":
        """The cost of a step in ticks, and the USD of a tick."""
        question, model = self._question, self._model
        most_usd = max(map(abs, question.usd_per_h.values())) * question.num_devices / question.unit or 1.0
        extra_s = self._extra_s()
        most_s = question.best_step_s + max(extra_s.values(), default=0.0) * len(self._sites)
        usd = model.new_int_var(-FINE, FINE, "usd")
        rates = {site: _down(price * FINE / most_usd) for site, price in question.usd_per_h.items()}
        model.add(usd == sum(rates[site] * units for site, units in self._units.items()))
        seconds = model.new_int_var(0, FINE, "seconds")
        ticks = {arc: _down(seconds * FINE / most_s) for arc, seconds in extra_s.items()}
        base = _down(question.best_step_s * FINE / most_s)
        model.add(seconds == base + sum(ticks[arc] * taken for arc, taken in self._arcs.items()))
        cost = model.new_int_var(-FINE * FINE, FINE * FINE, "cost")
        model.add_multiplication_equality(cost, [usd, seconds])
        model.minimize(cost)
        return cost, most_usd * most_s / 3600 / FINE / FINE

    def _extra_s(self) -> Mapping[tuple[str, str], float]:
        """Seconds that each hop between sites adds to the step, as the quote over it alone says."""
        q, half = self._question, self._question.num_devices // 2
        found = {}
        for a, b in self._arcs:
            placement = q.view.quotes.placement(q.job.job.kind, ((a, q.num_devices - half), (b, half)), q.space.rates)
            found[a, b] = max(0.0, placement.step_s - q.best_step_s) if placement else 0.0
        return found

    def solve(self, below_usd: float | None) -> list[tuple[str, int]] | None:
        """(site, units) along the best path that is left, None if none is better than `below_usd`."""
        if below_usd is not None:
            self._model.add(self._cost < _down(below_usd / self._usd_per_tick))
        solver = self._cp.CpSolver()
        solver.parameters.num_workers, solver.parameters.max_deterministic_time = 1, MAX_SOLVER_S
        if solver.solve(self._model) not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            return None
        units = {site: solver.value(number) for site, number in self._units.items()}
        following = {a: b for (a, b), taken in self._arcs.items() if solver.value(taken)}
        (first,) = (site for site, number in units.items() if number and site not in following.values())
        path = [first]
        while path[-1] in following:
            path.append(following[path[-1]])
        return [(site, units[site]) for site in path]

    def forbid(self, path: list[tuple[str, int]]) -> None:
        """Not this path with these units again."""
        model, others = self._model, []
        for site, number in path:
            differs = model.new_bool_var("")
            model.add(self._units[site] != number).only_enforce_if(differs)
            others.append(differs)
        taken = [self._arcs[a, b].negated() for (a, _), (b, _) in pairwise(path)]
        model.add_bool_or([*others, *taken])


def _down(value: float) -> int:
    return int(value // 1)
