"""Policy "oracle", the exact place of one job: the cheapest of all paths and divisions that don't stall it.

`places.bace` looks at one division and one path for every set of at most three sites. Here all are compared, over any
number of sites: up to six by enumeration with a bound, beyond by CP-SAT. How much dearer the place of another rule is,
is that rule's gap.

To CP-SAT electricity of a step is (sum of the sites' hourly cost) x (step time), and every hop adds its own seconds.
What the model does not know (devices of several kinds, a checkpoint that moves) the quote does: each solution is
quoted, and as long as the model promises something better than the best quote it is solved again without that path and
division.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Final

from farpipe.fleet.job import JobPlacement, JobState
from farpipe.fleet.policies import orders
from farpipe.fleet.policies.places import QUANTUM, electricity_usd_per_h, electricity_usd_per_step
from farpipe.fleet.policies.protocol import View
from farpipe.fleet.policies.queueing import QueuePolicy
from farpipe.fleet.quotes import Devices
from farpipe.fleet.snapshot import Space

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


MAX_ENUMERATED: Final = 6
"""Sites; beyond, divisions and paths are too many."""
MAX_QUOTED: Final = 5000
"""Placements that one decision quotes at most."""
MAX_ROUNDS: Final = 20
MAX_SOLVER_S: Final = 1.0
"""Deterministic seconds of every round, so that a decision is bounded and the same on every machine."""
FINE: Final = 1_000_000
"""Steps into which costs and times are divided: what is nearer than that counts as equal."""


@dataclass(frozen=True)
class Question:
    """One job on so many devices out of a space: what all its placements have in common."""

    view: View
    space: Space
    job: JobState
    num_devices: int
    unit: int
    """Every site has a multiple of so many devices."""
    usd_per_h: Mapping[str, float]
    """Electricity of one unit, by site that has one free."""
    best_step_s: float
    """No placement is faster than the whole job at its fastest site."""
    needed_rate: float

    def free_units(self, site: str) -> int:
        """Units that are free at a site."""
        return self.space.devices[site] // self.unit

    def linked(self, a: str, b: str) -> bool:
        """True if a hop between two sites never slows the job."""
        rates = self.space.rates
        return min(rates.get(f"{a}>{b}", 0.0), rates.get(f"{b}>{a}", 0.0)) >= max(self.needed_rate, 1e-9)

    def cost(self, placement: JobPlacement) -> tuple[float, int, float, Devices]:
        """The least is the best: electricity per step; of equals fewer sites, and the shorter step."""
        usd = electricity_usd_per_step(self.view, placement)
        return usd, len(placement.devices), placement.step_s, placement.devices

    def better(self, devices: Devices, best: JobPlacement | None) -> JobPlacement | None:
        """The job on `devices` if it can be there and that is better than `best`; else `best`."""
        found = self.view.start(self.space, self.job, devices)
        if found is None or (best is not None and self.cost(best) <= self.cost(found)):
            return best
        return found


def ask(view: View, space: Space, job: JobState, num_devices: int) -> Question:
    """The question where `job` is to run; power is taken to be in proportion to the devices."""
    unit = math.gcd(num_devices, QUANTUM)
    kind, whole = job.job.kind, float(num_devices)
    quotes = {s: view.quotes.placement(kind, ((s, num_devices),), {}) for s, n in space.devices.items() if n >= unit}
    found = {site: placement for site, placement in quotes.items() if placement is not None}
    return Question(
        view=view,
        space=space,
        job=job,
        num_devices=num_devices,
        unit=unit,
        usd_per_h={site: electricity_usd_per_h(view, p) / whole * unit for site, p in found.items()},
        best_step_s=min((placement.step_s for placement in found.values()), default=math.inf),
        needed_rate=view.quotes.needed_rate(kind, num_devices) or math.inf,
    )


def solved(question: Question, best: JobPlacement | None) -> JobPlacement | None:
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


def exact(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """The place with the cheapest electricity per step of all that don't stall the job; None if there is none."""
    question = ask(view, space, job, num_devices)
    search = solved if len(question.usd_per_h) > MAX_ENUMERATED else enumerated
    best = search(question, _alone(question))
    return best.devices if best else None


def _alone(question: Question) -> JobPlacement | None:
    best: JobPlacement | None = None
    for site in question.usd_per_h:
        if question.space.devices[site] >= question.num_devices:
            best = question.better(((site, question.num_devices),), best)
    return best


def enumerated(question: Question, best: JobPlacement | None) -> JobPlacement | None:
    """The best of `best` and all pipelines over several sites, the divisions with the least bound first."""
    most_usd = math.inf if best is None else question.cost(best)[0]
    bounds = ((_bound(question, shares), shares) for shares in _divisions(question))
    num_quoted = 0
    for bound, shares in sorted(pair for pair in bounds if pair[0] < most_usd):
        if (best is not None and bound >= question.cost(best)[0]) or num_quoted >= MAX_QUOTED:
            return best
        by_site = dict(shares)
        for path in _paths(question, sorted(by_site)):
            num_quoted += 1
            best = question.better(tuple((site, by_site[site] * question.unit) for site in path), best)
    return best


def _bound(question: Question, shares: Devices) -> float:
    """The least electricity of a step on any path: no inter-site hop makes it shorter; a dear step is a long one."""
    hourly = sum(units * question.usd_per_h[site] for site, units in shares)
    return hourly * question.best_step_s / 3600 if hourly >= 0 else -math.inf


def _divisions(question: Question) -> Iterator[Devices]:
    """(site, units) of every division of the devices between two or more sites."""
    total = question.num_devices // question.unit
    if not any(question.linked(a, b) for a, b in combinations(question.usd_per_h, 2)):
        return
    for count in range(2, len(question.usd_per_h) + 1):
        for sites in combinations(sorted(question.usd_per_h), count):
            free = [question.free_units(site) for site in sites]
            for units in _compositions(total, free):
                yield tuple(zip(sites, units, strict=True))


def _compositions(total: int, free: list[int]) -> Iterator[tuple[int, ...]]:
    """Every division of `total` into a sum of one number from 1 to each of `free`."""
    if not free:
        if total == 0:
            yield ()
        return
    others = sum(free[1:])
    for first in range(max(1, total - others), min(free[0], total - len(free) + 1) + 1):
        for rest in _compositions(total - first, free[1:]):
            yield (first, *rest)


def _paths(question: Question, sites: list[str]) -> Iterator[tuple[str, ...]]:
    """Every order of the sites along links that don't stall the job, each and its reverse."""

    def grow(path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if len(path) == len(sites):
            yield path
        for site in sites:
            if site not in path and (not path or question.linked(path[-1], site)):
                yield from grow((*path, site))

    return grow(())


ORACLE = QueuePolicy("oracle", orders.bace_priority, exact)
