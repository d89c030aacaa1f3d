"""The search over candidates: estimates of the lattice order them, and the best are evaluated until a budget ends.

Candidates are evaluated as long as their estimate is within MARGIN of the best, corrected for the error that the
estimates showed so far; so a candidate can be missed whose estimate is off by more than that against the others'.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Job
from farpipe.planning.cost import JobCosts, Layout, Profile
from farpipe.planning.planner.candidates import Candidate, decided, neighbours, stages_of_zero
from farpipe.planning.planner.deep_stages import deep_candidates
from farpipe.planning.planner.evaluate import ROUNDING, Evaluated, Rejected, evaluate, reject, whole
from farpipe.planning.planner.in_flight import minimum_in_flight
from farpipe.planning.planner.lattice import Estimate, Lattice
from farpipe.planning.planner.no_layout import why_none
from farpipe.planning.planner.orders import AUTO, QUICK, best_order
from farpipe.planning.planner.partition import missing_bytes
from farpipe.planning.planner.site_sets import SiteSet

Advance = Callable[[int, int], None]
"""Called with (candidates evaluated, candidates in all); 0 in all: not known beforehand."""

Key = tuple[str, Layout, bool]
Kind = tuple[SiteSet, bool]
"""A site set, and whether stages lie in a V."""

MARGIN: Final = 0.12
"""Relative distance of an estimate to the best step, up to which a candidate is evaluated."""
FAR: Final = 1.6
"""Ratio of an estimate to the least beyond which a search for the best alone does not look at it: estimates err by up
to 0.3, and kinds of site sets differ by more as a rule."""
MAX_EVALUATED: Final = 20
"""Largest number of candidates besides the first of every site set."""
MAX_WORK: Final = 3e6
"""Largest number of actions in all steps that are evaluated; each step is simulated in about a dozen orders. Eight
million make 2 of 24 plans over random sites faster, by 0.01 %; with one million 5 are slower, by up to 5 %."""
NEARLY_BEST: Final = 0.01
"""Relative distance to the best step up to which a long one is simulated whole at once: extrapolated it errs by up to
8 %, so that the search would climb towards a step that is not there, and reject others for it."""
MAX_SMALL_DEVICES: Final = 12
"""Largest number of devices for which every named order is simulated and more neighbours are evaluated."""
MAX_VARIED: Final = 5
"""Number of candidates, the best first, whose neighbours are evaluated in each round of hill climbing."""
MAX_DEEP: Final = 40
"""Largest number of layouts with many stages on every rank that are looked at besides the neighbours of the best: most
do not fit memory, or a bound rules them out, in 3 ms each."""
MAX_DEEP_EVALUATED: Final = 6
"""Largest number of them that are simulated."""
MAX_CLIMBS: Final = 8
"""Largest number of rounds of hill climbing."""
MAX_FINISHED: Final = 3
"""Number of candidates, the best first, that are simulated in every named order."""
NEARLY_IN_V: Final = 0.25
"""Relative gain that orders besides the quick ones may bring to stages in a V: these may have to recompute where
``wave`` need not."""
MAX_FINISHED_ACTIONS: Final = 20_000
"""Largest number of actions in a step that is simulated in every named order."""


class Budget(NamedTuple):
    """Limits of a search; its estimates alone, without any search, are a quote."""

    per_kind: int
    """Site sets of each kind (alone, pipelines, replicas) that are evaluated."""
    points: int
    """Estimates that are known of each site set."""
    tries: int
    """Estimates of a site set that are evaluated until `wanted` of them work."""
    wanted: int = 1
    best_only: bool = False
    """True if only what is faster than all before is of use."""
    climbs: bool = False
    """True if whatever is near the best is evaluated too, then its neighbours, and all named orders for the best."""


LARGE: Final = Budget(per_kind=8, points=16, tries=3, climbs=True)
"""Budget of a plan."""
MAX_FAILURES: Final = 3
"""Infeasible estimates after which a small search abandons a site set."""


def small(per_kind: int = 2, wanted: int = 1, *, best_only: bool = False) -> Budget:
    """Budget where many answers are needed in a row: strategies, changes, parts of a batch."""
    return Budget(per_kind, wanted + MAX_FAILURES, wanted + MAX_FAILURES, wanted, best_only)


BEST_ONLY: Final = small(1, best_only=True)
"""Budget for the fastest of what is given and of the first that works of each kind of site set."""


class Found(NamedTuple):
    """Candidates that work, the fastest first, and those that were evaluated and do not work."""

    job: Job
    """Settled: no setting of it is open."""
    costs: JobCosts
    evaluated: list[Evaluated]
    rejected: list[Rejected]

    @property
    def best(self) -> Evaluated | None:
        """The fastest; None where nothing works."""
        return self.evaluated[0] if self.evaluated else None


def search(
    job: Job,
    costs: JobCosts,
    budget: Budget = LARGE,
    progress: Advance | None = None,
    also: Iterable[Candidate] = (),
    until_s: float = math.inf,
    lattice: Lattice | None = None,
) -> Found:
    """The best candidates of a job within `budget`, and those in `also`.

    `job` is decided (see `decided`), `costs` are its, and `lattice` is of both, where it is made already. Nothing
    more is evaluated once something works and the clock (`time.monotonic`) is past `until_s`. With a small budget long
    steps are known by their steady state alone (`Evaluated.extrapolated_s`). InfeasibleError where the job's pins
    leave no candidate to a large one.
    """
    found = Search(job, costs, lattice or Lattice(job, costs), budget, progress, until_s)
    found.run(also)
    return Found(job, costs, sorted(found.evaluated.values(), key=lambda e: e.step_s), found.rejected)


def search_job(
    job: Job, profiles: dict[str, Profile], progress: Advance | None = None, costs: JobCosts | None = None
) -> Found:
    """The findings of a large search, by the first stage of ZeRO that works if the job names none; by the best where
    activations are offloaded, for one rank has all layers then.

    Nothing is found where no stage works. `costs` are those of an earlier search with the same model and profiles.
    """
    answers: list[Found] = []
    for zero in stages_of_zero(job):
        settled = decided(job, zero)
        costs = costs or JobCosts(settled.model, settled.training, profiles)
        answers.append(search(settled, costs.trained(settled.training), progress=progress))
        if answers[-1].evaluated and not job.training.cpu_offloading_num_layers:
            return answers[-1]
    return min(reversed(answers), key=lambda answer: answer.best.step_s if answer.best else math.inf)


class Search:
    """Evaluates the lattice's estimates, the best first."""

    def __init__(
        self,
        job: Job,
        costs: JobCosts,
        lattice: Lattice,
        budget: Budget = LARGE,
        progress: Advance | None = None,
        until_s: float = math.inf,
    ) -> None:
        self._job, self._costs, self._budget, self._progress, self._until_s = job, costs, budget, progress, until_s
        self.evaluated: dict[Key, Evaluated] = {}
        self.rejected: list[Rejected] = []
        self._tried: set[Key] = set()
        self._work, self._looked = 0.0, 0
        self.best_s = math.inf
        self.lattice = lattice
        self._is_small = budget.climbs and job.cluster.num_devices <= MAX_SMALL_DEVICES
        self._method = AUTO if self._is_small else QUICK

    def run(self, also: Iterable[Candidate] = ()) -> None:
        """The first that works of every site set; with a large budget what is near the best, then its neighbours."""
        budget = self._budget
        for candidate in also:
            self._try(candidate)
        site_sets = self._chosen(shared=budget.best_only)
        for of_set in site_sets:
            self._first(of_set[: budget.tries])
        if budget.best_only and not self.evaluated:  # those near the best do not fit
            for of_set in self._chosen(shared=False):
                self._first(of_set[: budget.tries])
        if budget.climbs:
            self._climb(site_sets)

    def _first(self, estimates: Sequence[Estimate]) -> None:
        """Evaluate until as many as wanted work."""
        works = 0
        for candidate in map(self.lattice.candidate, estimates):
            works += candidate is not None and self._works(candidate)
            if works == self._budget.wanted:
                return

    def _works(self, candidate: Candidate) -> bool:
        """True if the candidate works, or, where only the best is of use, if a bound shows it to be no faster."""
        self._try(candidate, self.best_s if self._budget.best_only else math.inf)
        if self._budget.best_only:
            return all(_key(one.candidate) != _key(candidate) for one in self.rejected)
        return _key(candidate) in self.evaluated

    def _climb(self, site_sets: Sequence[Sequence[Estimate]]) -> None:
        for found in [*self.evaluated.values()] if self._is_small else []:
            self._vary(found.candidate, everything=False)
        self._near(sorted((one for of_set in site_sets for one in of_set), key=lambda one: one.step_s))
        self._alone(site_sets)
        if not self.evaluated:
            self._lacking_least()
        self._neighbours()
        if self._deeper([one for of_set in site_sets for one in of_set]):
            self._neighbours()
        self._finish()

    def _chosen(self, *, shared: bool) -> list[list[Estimate]]:
        """The best site sets of each kind; `shared`: only those with an estimate within FAR of the best of all."""
        wanted: dict[str, Any] = {"slack": FAR, "shared": True} if shared else {}
        all_orders = self._budget.climbs
        estimates = self.lattice.estimates(self.lattice.whole, self._budget.points, every_order=all_orders, **wanted)
        by_set = {of_set[0].site_set: of_set for of_set in sorted(estimates, key=lambda of_set: of_set[0].step_s)}
        budget = self._budget
        return [by_set[one] for one in self.lattice.chosen(by_set, budget.per_kind, for_large=budget.climbs)]

    def _near(self, estimates: Sequence[Estimate]) -> None:
        """Evaluate estimates near the best: the first of every kind that nothing was simulated of, then the others.

        Estimates of one kind err equally, so each is corrected by the least step over estimate of its kind so far.
        """
        # Without the correction 405B on 3 x 1024 devices took p48, 27 % slower than estimated, and never looked at p12,
        # 6 % slower than estimated: 40.14 s a step instead of 35.31 s. The first of every kind is simulated before the
        # others because the correction of a kind is not known before that.
        scales = self._scales(estimates)
        unknown = {_kind(estimate): estimate for estimate in reversed(estimates) if _kind(estimate) not in scales}
        firsts = sorted(unknown.values(), key=lambda estimate: estimate.step_s)
        self._look_into(firsts, scales)
        others = [estimate for estimate in estimates if estimate not in firsts]
        self._look_into(sorted(others, key=lambda estimate: _corrected_s(estimate, scales)), scales)

    def _look_into(self, estimates: Sequence[Estimate], scales: dict[Kind, float]) -> None:
        # Budgets count candidates and actions, not seconds, so that a plan does not depend on the machine's load. Lower
        # bounds were tried as the order: they favour layouts that compute fast and exchange for ever (28.4 s a step
        # where 14.0 s was there). So estimates order, and bounds only leave out.
        for estimate in estimates:
            if self._looked >= MAX_EVALUATED or self._work > MAX_WORK:
                return
            if _corrected_s(estimate, scales) > self.best_s * (1 + MARGIN):
                continue
            found = self._try(self.lattice.candidate(estimate), self.best_s)
            if found is not None:
                self._looked += 1
                scales[_kind(estimate)] = min(scales.get(_kind(estimate), math.inf), found.step_s / estimate.step_s)

    def _scales(self, estimates: Sequence[Estimate]) -> dict[Kind, float]:
        """Step over estimate, the least of what was simulated of every kind."""
        ratios: dict[Kind, float] = {}
        for estimate in estimates:
            candidate = self.lattice.candidate(estimate)
            if candidate is not None and (found := self.evaluated.get(_key(candidate))) is not None:
                ratios[_kind(estimate)] = min(ratios.get(_kind(estimate), math.inf), found.step_s / estimate.step_s)
        return ratios

    def _alone(self, site_sets: Sequence[Sequence[Estimate]]) -> None:
        """A few more candidates of the best single site, as several sites are compared with it."""
        alone = [of_set for of_set in site_sets if of_set[0].site_set.kind == "alone"]
        for of_set in alone[:1]:
            for estimate in of_set[1:4]:
                found = [e.step_s for e in self.evaluated.values() if len(e.candidate.order) == 1]
                self._try(self.lattice.candidate(estimate), min(found, default=math.inf))

    def _lacking_least(self) -> None:
        """Candidates that lack least memory, where none of the estimates works."""
        lacking = [(missing_bytes(self._costs, c, minimum_in_flight(c)), c) for c in self.lattice.candidates()]
        if not lacking:
            raise InfeasibleError(why_none(self.lattice.job))
        for _, candidate in sorted(lacking, key=lambda pair: pair[0])[:MAX_EVALUATED]:
            self._try(candidate)

    def _neighbours(self) -> None:
        """Hill climbing from the best: its other shapes, sizes and degrees, and the reverse order of its sites, as long
        as that is faster; of the next best the other shapes."""
        # Shapes, sizes and degrees beside the lattice's best are worth up to 20.7 % of a step on the frozen plans.
        # Branch and bound over all layouts was tried instead: on 60 random clusters of up to 12 devices it was better
        # on one (by 2.2 %), worse on two, and took five times as long.
        for _ in range(MAX_CLIMBS):
            before_s = self.best_s
            ranked = sorted(self.evaluated.values(), key=lambda found: found.step_s)
            for index, found in enumerate(ranked[:MAX_VARIED]):
                if self._work < MAX_WORK:
                    self._vary(found.candidate, everything=not index or self._is_small)
            if self.best_s >= before_s * (1 - ROUNDING):
                return

    def _deeper(self, estimates: Sequence[Estimate]) -> bool:
        """Evaluate layouts with many stages on every rank; True if one is the best now."""
        before_s, worked = self.best_s, 0
        evaluated = [*self.evaluated.values()]
        for candidate in deep_candidates(self._job, self.lattice, estimates, evaluated, before_s)[:MAX_DEEP]:
            if worked < MAX_DEEP_EVALUATED and self._work < MAX_WORK:
                worked += self._try(candidate, self.best_s) is not None
        return self.best_s < before_s * (1 - ROUNDING)

    def _vary(self, candidate: Candidate, everything: bool) -> None:
        for other in neighbours(self._job, candidate, everything):
            self._try(other, self.best_s)

    def _finish(self) -> None:
        """Simulate all named orders of the best ones, and the whole step of the best of each kind."""
        ranked = sorted(self.evaluated, key=lambda key: self.evaluated[key].step_s)
        of_kinds = {self.evaluated[key].candidate.kind: key for key in reversed(ranked)}.values()
        for key in dict.fromkeys([*ranked[:MAX_FINISHED], *of_kinds]):
            if (found := self._whole(self.evaluated[key])) is not None:
                self.evaluated[key] = found
        self.evaluated = {key: found for key, found in self.evaluated.items() if found.extrapolated_s is None}
        for key in self._named_orders_worth_trying(ranked) if self._job.schedule is None and not self._is_small else []:
            one = self.evaluated.get(key)
            if one is None or 3 * one.problem.num_stages * one.problem.num_microbatches > MAX_FINISHED_ACTIONS:
                continue
            self.evaluated[key] = min(one, self._at_its_best(one), key=lambda either: either.step_s)

    def _whole(self, found: Evaluated) -> Evaluated | None:
        """`found` with its whole step; None, and rejected, where no order fits that."""
        try:
            return whole(found)
        except InfeasibleError as error:
            self.rejected.append(reject(found.candidate, self._costs, error))
            return None

    def _at_its_best(self, found: Evaluated) -> Evaluated:
        """The same under every named order; where memory binds, with every mode of recomputing too."""
        binds = found.schedule.method == "1f1b" or any(placement.recompute != "none" for placement in found.placements)
        if not binds:
            schedule, timeline = best_order(found.problem)
            return replace(found, schedule=schedule, timeline=timeline)
        better = evaluate(self._job, found.candidate, self._costs, found.step_s)
        return better if isinstance(better, Evaluated) else found

    def _named_orders_worth_trying(self, ranked: Sequence[Key]) -> list[Key]:
        """The MAX_FINISHED best, and the best in a V if it is nearly as fast: ``wave`` is no quick order."""
        in_v = [key for key in ranked[MAX_FINISHED:] if key in self.evaluated and self.evaluated[key].candidate.in_v]
        near_s = self.best_s * (1 + NEARLY_IN_V)
        return [*ranked[:MAX_FINISHED], *(key for key in in_v[:1] if self.evaluated[key].step_s <= near_s)]

    def _try(self, candidate: Candidate | None, limit_s: float = math.inf) -> Evaluated | None:
        if candidate is None or (key := _key(candidate)) in self._tried:
            return None
        if self.evaluated and time.monotonic() > self._until_s:
            return None
        self._tried.add(key)
        if self._progress is not None:
            self._progress(len(self._tried), 0)
        at = candidate.layout
        self._work += 3 * at.num_stages * at.num_microbatches
        wanted_s = self.best_s if self._budget.climbs else math.inf
        found = evaluate(self._job, candidate, self._costs, limit_s, self._method, wanted_s)
        if isinstance(found, Rejected):
            self.rejected.append(found)
            return None
        # A long step that looks best is played whole at once: an extrapolation that is too short would become the limit
        # that rejects what comes after it.
        if self._budget.climbs and found is not None and found.step_s < self.best_s * (1 + NEARLY_BEST):
            found = self._whole(found)
        if found is None:
            return None
        self.evaluated[key] = found
        self.best_s = min(self.best_s, found.step_s)
        return found


def _kind(estimate: Estimate) -> Kind:
    return estimate.site_set, estimate.in_v


def _corrected_s(estimate: Estimate, scales: dict[Kind, float]) -> float:
    """Estimate times the scale of its kind; times the least of all, and never up, where that is not known."""
    return estimate.step_s * scales.get(_kind(estimate), min(1.0, *scales.values(), 1.0))


def _key(candidate: Candidate) -> Key:
    return candidate.where, candidate.layout, candidate.in_v
