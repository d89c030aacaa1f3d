"""The guided search: the lattice's estimates say what is promising, and that is evaluated, the best first.

Candidates are looked into as long as their estimate is within MARGIN of the best, corrected for the error that the
estimates showed so far; so a candidate can be missed whose estimate is off by more than that against the others'.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from farpipe.cost import JobCosts, Layout
from farpipe.errors import InfeasibleError
from farpipe.plan.candidates import Candidate, shapes
from farpipe.plan.evaluate import ROUNDING, Evaluated, Rejected, evaluate, reject, whole
from farpipe.plan.lattice import Lattice, Promise, Use
from farpipe.plan.orders import QUICK, best_order
from farpipe.plan.placement import missing_link, place_ranks
from farpipe.spec import Job, Site

Progress = Callable[[int, int], None]
"""Called with (candidates looked at, candidates in all)."""

Key = tuple[str, Layout, bool]
Kind = tuple[Use, bool]
"""One use of sites, and whether stages lie in a V."""

MARGIN: Final = 0.12
"""Relative distance of an estimate to the best step, up to which a candidate is looked into."""
MAX_LOOKED_INTO: Final = 20
"""Candidates, besides the first of every use of sites that is told."""
MAX_WORK: Final = 6e6
"""Actions of all steps that are played for it; each is played in about a dozen orders."""
PER_USE: Final = 16
MAX_VARIED: Final = 5
MAX_FINISHED: Final = 2
NEARLY: Final = 0.03
"""Relative gain that orders besides the quick ones may bring."""
MAX_FINISHED_ACTIONS: Final = 20_000
"""Of steps that are played in every named order."""
MAX_USES: Final = 8
"""Sets of sites of each kind that are told of."""
MAX_ALIKE: Final = 2
"""Of them, those that differ in names and links alone."""


class GuidedSearch:
    """Evaluates the lattice's promises, the best first."""

    def __init__(self, job: Job, costs: JobCosts, lattice: Lattice, progress: Progress | None = None) -> None:
        self._job, self._costs, self._progress = job, costs, progress
        self.evaluated: dict[Key, Evaluated] = {}
        self.rejected: list[Rejected] = []
        self._tried: set[Key] = set()
        self._work, self._looked = 0.0, 0
        self.best_s = math.inf
        self.lattice = lattice

    def run(self) -> None:
        """The first that works of every use that is told of, then whatever is near the best, then its neighbours."""
        uses = self._told_of(self.lattice.promises(self.lattice.whole, PER_USE))
        for promises in uses:
            for promise in promises[:3]:
                if self._try(self._candidate(promise)) is not None:
                    break
        every = sorted((p for promises in uses for p in promises), key=lambda p: p.step_s)
        self._near(every)
        self._alone(uses)
        self._neighbours()
        self._finish()

    def _told_of(self, uses: list[list[Promise]]) -> list[list[Promise]]:
        """The best uses of each kind; of sets of sites that are alike but for their links the best MAX_ALIKE."""
        chosen: list[list[Promise]] = []
        count: Counter[str] = Counter()
        alike: Counter[object] = Counter()
        for promises in sorted(uses, key=lambda promises: promises[0].step_s):
            use = promises[0].use
            sites = (use.kind, *sorted(map(self.lattice.likeness, use.homes or use.order)))
            if alike[sites] < MAX_ALIKE and count[use.kind] < (MAX_USES if use.kind != "replicas" else MAX_ALIKE):
                alike[sites] += 1
                count[use.kind] += 1
                chosen.append(promises)
        return chosen

    def _near(self, promises: Sequence[Promise]) -> None:
        """Whatever is near the best: the first of every kind that nothing was simulated of, then the others.

        Estimates of one kind err alike, so each is corrected by the least step over estimate of its kind so far.
        """
        scales = self._scales(promises)
        unknown = {_kind(promise): promise for promise in reversed(promises) if _kind(promise) not in scales}
        firsts = sorted(unknown.values(), key=lambda promise: promise.step_s)
        self._look_into(firsts, scales)
        others = [promise for promise in promises if promise not in firsts]
        self._look_into(sorted(others, key=lambda promise: _corrected_s(promise, scales)), scales)

    def _look_into(self, promises: Sequence[Promise], scales: dict[Kind, float]) -> None:
        for promise in promises:
            if self._looked >= MAX_LOOKED_INTO or self._work > MAX_WORK:
                return
            if _corrected_s(promise, scales) > self.best_s * (1 + MARGIN):
                continue
            found = self._try(self._candidate(promise), self.best_s)
            if found is not None:
                self._looked += 1
                scales[_kind(promise)] = min(scales.get(_kind(promise), math.inf), found.step_s / promise.step_s)

    def _scales(self, promises: Sequence[Promise]) -> dict[Kind, float]:
        """Step over estimate, the least of what was simulated of every kind."""
        ratios: dict[Kind, float] = {}
        for promise in promises:
            candidate = self._candidate(promise)
            if candidate is not None and (found := self.evaluated.get(_key(candidate))) is not None:
                ratios[_kind(promise)] = min(ratios.get(_kind(promise), math.inf), found.step_s / promise.step_s)
        return ratios

    def _alone(self, uses: Sequence[Sequence[Promise]]) -> None:
        """Candidates of the best single site, a few more than of others, as several sites are compared with it."""
        alone = [promises for promises in uses if len(promises[0].use.order) == 1 and not promises[0].use.homes]
        for promises in alone[:1]:
            for promise in promises[1:4]:
                found = [e.step_s for e in self.evaluated.values() if len(e.candidate.order) == 1]
                self._try(self._candidate(promise), min(found, default=math.inf))

    def _neighbours(self) -> None:
        """The best's other shapes and sizes, the same on the reverse order of its sites if that is faster with the
        best's own; of the next best the other shapes."""
        ranked = sorted(self.evaluated.values(), key=lambda e: e.step_s)[:MAX_VARIED]
        for index, found in enumerate(ranked):
            self._vary(found.candidate, everything=not index)
            other = None if index or self._job.layout.sites is not None else reverse(self._job, found.candidate)
            before_s = self.best_s
            if other is not None and self._try(other, before_s) is not None and self.best_s < before_s * (1 - ROUNDING):
                self._vary(other, everything=True)

    def _vary(self, candidate: Candidate, everything: bool) -> None:
        for other in _variants(self._job, candidate, everything):
            self._try(other, self.best_s)

    def _finish(self) -> None:
        """Every named order for the best ones, which so far were given a few; the whole step of those that are told."""
        ranked = sorted(self.evaluated, key=lambda key: self.evaluated[key].step_s)
        told = {kind_of(self.evaluated[key].candidate): key for key in reversed(ranked)}.values()
        for key in dict.fromkeys([*ranked[:MAX_FINISHED], *told]):
            try:
                self.evaluated[key] = whole(self.evaluated[key])
            except InfeasibleError as error:
                self.rejected.append(reject(self.evaluated[key].candidate, self._costs, error))
        self.evaluated = {key: found for key, found in self.evaluated.items() if found.extrapolated_s is None}
        for key in self._finished(ranked) if self._job.schedule is None else []:
            found = self.evaluated.get(key)
            if found is None or 3 * found.problem.num_stages * found.problem.num_microbatches > MAX_FINISHED_ACTIONS:
                continue
            schedule, timeline = best_order(found.problem)
            if timeline.makespan_s < found.timeline.makespan_s:
                self.evaluated[key] = replace(found, schedule=schedule, timeline=timeline)

    def _finished(self, ranked: Sequence[Key]) -> list[Key]:
        """The MAX_FINISHED best, and the best in a V if it is nearly as fast: ``wave`` is no quick order."""
        in_v = [key for key in ranked[MAX_FINISHED:] if key in self.evaluated and self.evaluated[key].candidate.in_v]
        near_s = self.best_s * (1 + NEARLY)
        return [*ranked[:MAX_FINISHED], *(key for key in in_v[:1] if self.evaluated[key].step_s <= near_s)]

    def _candidate(self, promise: Promise) -> Candidate | None:
        use, sites = promise.use, self.lattice.sites
        order = tuple(sites[index] for index in use.order)
        return placed(self._job, order, promise.layout, promise.in_v)

    def _try(self, candidate: Candidate | None, limit_s: float = math.inf) -> Evaluated | None:
        if candidate is None or (key := _key(candidate)) in self._tried:
            return None
        self._tried.add(key)
        if self._progress is not None:
            self._progress(len(self._tried), MAX_LOOKED_INTO)
        at = candidate.layout
        self._work += 3 * at.num_stages * at.num_microbatches
        found = evaluate(self._job, candidate, self._costs, limit_s, QUICK, self.best_s)
        if isinstance(found, Rejected):
            self.rejected.append(found)
            return None
        if found is None:
            return None
        self.evaluated[key] = found
        self.best_s = min(self.best_s, found.step_s)
        return found


def kind_of(candidate: Candidate) -> str:
    """``alone``, ``pipelines`` over several sites, or ``replicas`` at several."""
    if len(candidate.order) == 1:
        return "alone"
    return "replicas" if candidate.layout.replica_sites else "pipelines"


def _kind(promise: Promise) -> Kind:
    return promise.use, promise.in_v


def _corrected_s(promise: Promise, scales: dict[Kind, float]) -> float:
    """By the scale of its kind; by the least of all, and never up, where that is not known."""
    return promise.step_s * scales.get(_kind(promise), min(1.0, *scales.values(), 1.0))


def _key(candidate: Candidate) -> Key:
    return candidate.where, candidate.layout, candidate.in_v


def placed(job: Job, order: Sequence[Site], layout: Layout, in_v: bool, linked: bool = False) -> Candidate | None:
    """The candidate of a layout on sites in this order; None where it does not fit there.

    `linked`: links are known to be there.
    """
    if layout.num_stages > job.model.num_layers or not (linked or missing_link(job.cluster, order) is None):
        return None
    if layout.replica_sites:
        return Candidate(layout, tuple(order[:1]) * layout.pipeline, in_v)
    sites = place_ranks(order, layout.pipeline, layout.devices_per_rank)
    return None if sites is None else Candidate(layout, tuple(sites), in_v)


def reverse(job: Job, candidate: Candidate) -> Candidate | None:
    """The same on the reverse order of its sites; None for a single one, for replicas, and where it does not fit."""
    order = [job.cluster.site(name) for name in reversed(candidate.order)]
    if len(order) == 1 or candidate.layout.replica_sites:
        return None
    return placed(job, order, candidate.layout, candidate.in_v)


def _variants(job: Job, best: Candidate, everything: bool) -> Iterator[Candidate]:
    """Its other shapes; with `everything` microbatches of half and twice the size too."""
    order = [job.cluster.site(name) for name in best.order] if not best.layout.replica_sites else list(best.sites[:1])
    for virtual, in_v in shapes(job):
        same = replace(best.layout, virtual=virtual)
        for layout in _resized(job, same) if everything else [same]:
            candidate = placed(job, order, layout, in_v)
            if candidate is not None and (layout.pipeline > 1 or virtual == 1):
                yield candidate


def _resized(job: Job, layout: Layout) -> Iterator[Layout]:
    yield layout
    if job.training.microbatch_size is not None or job.layout.num_microbatches is not None:
        return
    size, count = layout.microbatch_size, layout.num_microbatches
    if count % 2 == 0:
        yield replace(layout, microbatch_size=2 * size, num_microbatches=count // 2)
    if size % 2 == 0:
        yield replace(layout, microbatch_size=size // 2, num_microbatches=2 * count)
