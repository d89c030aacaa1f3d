"""The search over candidates: exhaustive branch and bound where they are few, guided by estimates where they are many.

Exhaustive, a candidate is left out only if a bound shows that it is no faster than the best found: nothing is missed.
Guided, see `guided`, something may be.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Final

from farpipe.cost import JobCosts, Layout, Profile, step_cost
from farpipe.errors import InfeasibleError, InputError
from farpipe.plan.candidates import Candidate, candidates
from farpipe.plan.evaluate import ROUNDING, Evaluated, Frontier, Node, Rejected, node, reject, staggered_like
from farpipe.plan.guided import GuidedSearch, Progress
from farpipe.plan.inter_site_traffic import inter_site_traffic_s
from farpipe.plan.lattice import Lattice
from farpipe.plan.stage_modes import fastest_possible_s
from farpipe.simulate import simulate
from farpipe.spec import Job

MAX_ORDERS_TO_COMPARE: Final = 12
MAX_RIVALS: Final = 40
"""Candidates over several sites that are looked into for what is the best of their kind, though they can't be the best
of all; the most promising first."""
MAX_EXHAUSTIVE_DEVICES: Final = 12
"""In clusters of so many devices at so many sites, or with so few combinations of degrees, every candidate is looked
into that a bound does not exclude."""
MAX_EXHAUSTIVE_SITES: Final = 3
MAX_EXHAUSTIVE_ROWS: Final = 12


def search(job: Job, costs: JobCosts, progress: Progress | None = None) -> tuple[list[Evaluated], list[Rejected]]:
    """The candidates worth telling of, the fastest first, and those that do not work."""
    lattice = Lattice(job, costs)
    if _few(lattice):
        return search_all(job, costs, progress)
    guided = GuidedSearch(job, costs, lattice, progress)
    guided.run()
    if not guided.evaluated and not guided.rejected:
        return search_all(job, costs, progress)
    return sorted(guided.evaluated.values(), key=lambda e: e.step_s), guided.rejected


def _few(lattice: Lattice) -> bool:
    """True if all candidates that bounds do not exclude can be looked into."""
    pins = lattice.job.layout
    if (pins.context or 1) > 1 or (pins.expert or 1) > 1:
        return True  # the estimates know nothing of them
    if len(lattice.sites) > MAX_EXHAUSTIVE_SITES:
        return False
    num_devices = sum(site.num_devices for site in lattice.sites)
    return num_devices <= MAX_EXHAUSTIVE_DEVICES or len(lattice.rows.table) <= MAX_EXHAUSTIVE_ROWS


def search_all(job: Job, costs: JobCosts, progress: Progress | None = None) -> tuple[list[Evaluated], list[Rejected]]:
    """Every candidate that a bound does not exclude: the answer is the best of all.

    Orders of sites that are alike in everything but their names are searched once; the others of them get the best
    layout of the first.
    """
    known = [c for c in candidates(job) if job.layout.tensor is not None or _is_measured(c, costs.profiles)]
    groups = _alike(job, known)
    firsts = {alike[0] for alike in groups}
    found = _Search(costs)
    found.follow([_first_node(job, costs, c) for c in known if c.where in firsts], progress)
    pairs = [(found.best_of[first], other) for first, *others in groups if first in found.best_of for other in others]
    evaluated = list(found.evaluated.values())
    for best, where in pairs[: MAX_ORDERS_TO_COMPARE - len(found.best_of)]:
        evaluated += _transferred(job, costs, known, best, where)
    return sorted(evaluated, key=lambda e: e.step_s), found.rejected


class _Search:
    """Follows nodes, the lowest bound first: so only what could still be the best of its kind is ever simulated."""

    def __init__(self, costs: JobCosts) -> None:
        self._costs = costs
        self.evaluated: dict[Candidate, Evaluated] = {}
        self.best_of: dict[str, Evaluated] = {}
        """By `Candidate.where`."""
        self._obstacles: dict[Candidate, InfeasibleError | InputError] = {}
        self._looked_into: Counter[str] = Counter()

    def follow(self, first: Sequence[tuple[float, Node]], progress: Progress | None) -> None:
        """All of them, as far as they are worth it; given with about what they will take, seconds."""
        nodes, seen = Frontier(self._first_answers(first)), set[Candidate]()
        while (one := nodes.pop()) is not None:
            if progress is not None and one.candidate not in seen:
                progress(len(seen), len(first))
            seen.add(one.candidate)
            if one.bound_s < self._limit_s(one.candidate) * (1 - ROUNDING):
                nodes.push(self._narrow(one))

    def _first_answers(self, first: Sequence[tuple[float, Node]]) -> list[Node]:
        """Follow the most promising at every use of sites until one works, for with a good one early many others are
        spared; what is left of all."""
        left = []
        for _, one in sorted(first, key=lambda pair: pair[0]):
            nodes = Frontier([one])
            while self._limit_s(one.candidate) == math.inf and (narrower := nodes.pop()) is not None:
                nodes.push(self._narrow(narrower))
            left += nodes.rest
        return left

    def _narrow(self, one: Node) -> list[Node]:
        """Outcome of a node: a result is kept, and the reason where there is none."""
        try:
            found = one.follow(self._limit_s(one.candidate))
        except (InfeasibleError, InputError) as error:
            self._obstacles[one.candidate] = error
            return []
        if not isinstance(found, Evaluated):
            return found
        self._keep(found)
        return []

    @property
    def rejected(self) -> list[Rejected]:
        """The candidates that came to nothing."""
        none = ((c, error) for c, error in self._obstacles.items() if c not in self.evaluated)
        return [reject(candidate, self._costs, error) for candidate, error in none]

    def _keep(self, found: Evaluated) -> None:
        def by_time(one: Evaluated) -> float:
            return one.step_s

        at, where = found.candidate, found.candidate.where
        self._looked_into[_kind(at)] += 1
        self.evaluated[at] = min(self.evaluated.get(at, found), found, key=by_time)
        self.best_of[where] = min(self.best_of.get(where, found), found, key=by_time)

    def _limit_s(self, candidate: Candidate) -> float:
        """The step to beat: the best of its kind, or of all if many of its kind were looked into; the first at its
        sites has no limit.

        Kinds are each site alone, pipelines over several, and replicas at several: the user is told how they compare.
        The best that a site can do alone is what more sites are measured by, so it has to be right.
        """
        if candidate.where not in self.best_of and len(self.best_of) < MAX_ORDERS_TO_COMPARE:
            return math.inf
        kind = _kind(candidate)
        best_s = min((best.step_s for best in self.best_of.values()), default=math.inf)
        rivals = [best.step_s for best in self.best_of.values() if _kind(best.candidate) == kind]
        if not rivals or (len(candidate.order) > 1 and self._looked_into[kind] >= MAX_RIVALS):
            return best_s
        return min(rivals)


def _first_node(job: Job, costs: JobCosts, candidate: Candidate) -> tuple[float, Node]:
    """About what a candidate will take, and with what to begin: its bound is a step time that it can't beat.

    To the bound comes half of the idle time of 1F1B, and what still has to cross when the last microbatch is computed:
    its own message, or of replicas all gradients.
    """
    at, compute_s = candidate.layout, fastest_possible_s(costs, candidate)
    links_s = inter_site_traffic_s(costs, candidate, job.cluster)
    idle_s = compute_s * (at.pipeline - 1) / (2 * at.num_microbatches * at.virtual)
    hope_s = max(compute_s, links_s) + idle_s + links_s / (1 if at.replica_sites else at.num_microbatches)
    return hope_s, node(job, candidate, costs, max(compute_s, links_s))


def _alike(job: Job, known: Sequence[Candidate]) -> list[list[str]]:
    """Uses of sites (`Candidate.where`), grouped so that those of a group differ in the names of their sites alone."""
    groups: dict[str, list[str]] = {}
    for where, candidate in {c.where: c for c in known}.items():
        sites = [job.cluster.site(name).model_copy(update={"name": ""}) for name in candidate.order]
        links = [job.cluster.link(*ends) for ends in permutations(candidate.order, 2)]
        speeds = [link and (link.latency_s, link.bandwidth_bytes_per_s) for link in links]
        is_across = bool(candidate.layout.replica_sites)
        groups.setdefault(f"{is_across} {sites} {speeds}", []).append(where)
    return list(groups.values())


def _transferred(job: Job, costs: JobCosts, known: Sequence[Candidate], best: Evaluated, where: str) -> list[Evaluated]:
    """`best` transferred to other sites that are alike."""
    same = [c for c in known if c.where == where and shape_of(c) == shape_of(best.candidate)]
    found = []
    for candidate in same[:1]:
        placements = tuple(replace(p, site=candidate.sites[p.rank].name) for p in best.placements)
        step = staggered_like(best, step_cost(costs, candidate.layout, placements, job.cluster))
        timeline = simulate(step.problem, best.schedule, checked=True)
        found.append(Evaluated(candidate, placements, step.problem, best.schedule, timeline, step.overhead_s))
    return found


def shape_of(candidate: Candidate) -> tuple[Layout, bool]:
    """Layout without the replicas' sites, and True for stages in a V."""
    return replace(candidate.layout, replica_sites=()), candidate.in_v


def _is_measured(candidate: Candidate, profiles: Mapping[str, Profile]) -> bool:
    """A profile tells of one device; with one, layers are not divided over several unless the job pins that."""
    return candidate.layout.tensor == 1 or not any(site.device.name in profiles for site in candidate.sites)


def _kind(candidate: Candidate) -> str:
    alone = len(candidate.order) == 1
    return candidate.where if alone else "replicas" if candidate.layout.replica_sites else "pipelines"
