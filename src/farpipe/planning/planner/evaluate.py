"""Evaluation of one candidate: its layers and recomputation, its Problem, its best order, its step time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.core.schedule.library import is_order
from farpipe.core.simulate import Timeline
from farpipe.core.spec import Job, Recompute, operations_of
from farpipe.core.step import Problem, Schedule, stagger
from farpipe.core.units import format_bytes
from farpipe.planning.cost import JobCosts, Placement, StepCost, place_stages, step_cost
from farpipe.planning.planner.bandwidth import link_bytes
from farpipe.planning.planner.candidates import Candidate
from farpipe.planning.planner.in_flight import InFlight, in_flight_targets, minimum_in_flight
from farpipe.planning.planner.orders import AUTO, QUICK, best_order, quick_orders, try_quickly
from farpipe.planning.planner.partition import (
    Division,
    StageModes,
    divide_layers,
    missing_bytes,
    sooner_ended,
    stage_options,
)

ROUNDING: Final = 1e-9
"""Relative difference of two times below which they are equal."""
MAX_QUICK_ACTIONS: Final = 7_000
"""Largest number of actions that a quick evaluation simulates in full."""
MIN_SHORT: Final = 24
"""Least number of microbatches of a shorter step from which a long one is extrapolated."""
MAX_BOUND_ACTIONS: Final = 500_000
"""Largest number of actions of a long step that a lower bound may rule out: more take longer than extrapolating it."""
REFINED: Final = 0.005
"""Relative gain that a plan's refinement may still bring to a step: other recomputation, or a layer elsewhere."""


@dataclass(frozen=True)
class Evaluated:
    """A candidate that works, and what it would do."""

    candidate: Candidate
    placements: tuple[Placement, ...]
    problem: Problem
    schedule: Schedule
    timeline: Timeline
    overhead_s: float
    extrapolated_s: float | None = None
    """The makespan as it follows from shorter steps; None where `schedule` and `timeline` are the whole step's."""
    mean_s: float | None = None
    """The mean step over samples where links lose packets or jitter; None: not drawn, or each takes as long."""

    @property
    def step_s(self) -> float:
        """Seconds from one step's start to the next one's: makespan and what is outside the pipeline."""
        if self.mean_s is not None:
            return self.mean_s
        return (self.extrapolated_s or self.timeline.makespan_s) + self.overhead_s

    @property
    def where(self) -> str:
        """``a > b`` for a pipeline over both sites, ``a + b`` for replicas at each of them."""
        return self.candidate.where

    @property
    def devices(self) -> dict[str, int]:
        """Devices in use by site."""
        return self.candidate.devices

    @cached_property
    def link_bytes(self) -> dict[str, float]:
        """Bytes of a step over each link, all replicas together."""
        return link_bytes(self.problem, self.timeline)

    @property
    def inter_site_bytes(self) -> dict[str, float]:
        """The same of the links between sites."""
        return {name: size for name, size in self.link_bytes.items() if self.problem.between_sites[name]}

    def __str__(self) -> str:
        return f"{self.candidate}{describe_recompute([p.recompute for p in self.placements])}"


@dataclass(frozen=True)
class Rejected:
    """A candidate that does not work, and why; `missing_bytes` is 0 where memory was not the reason."""

    candidate: Candidate
    reason: str
    missing_bytes: float = 0.0


def evaluate(
    job: Job,
    candidate: Candidate,
    costs: JobCosts,
    limit_s: float = math.inf,
    method: str = AUTO,
    wanted_s: float = math.inf,
) -> Evaluated | Rejected | None:
    """The candidate at its best: layers, recomputation and order chosen together; None where it is no faster than
    `limit_s` by a lower bound. `method`: ``auto``, or ``quick``, which tries fewer orders.

    Where its step turns out to be far above `wanted_s`, less is tried to make it shorter.

    For every target of `in_flight_targets` layers are divided and stages recompute so that the slowest stage is as fast
    as it can be with so many microbatches in flight; of these, the one with the shortest simulated step is taken.
    """
    best: Evaluated | None = None
    any_slower = False
    obstacle: InfeasibleError | InputError | None = None
    try:
        steps = _Divisions(job, candidate, costs, method).steps(limit_s)
    except (InfeasibleError, InputError) as error:
        return reject(candidate, costs, error)
    # Steps come by their bound, the lowest first, so the first whose bound is no better than what is there ends the
    # loop; of equal steps the first stays. The dearer bound of a long step is asked for only when it is its turn: on
    # eight sites of 2,048 devices it takes 20 ms and spares 16 extrapolations of about a second.
    for bound_s, placements, step in steps:
        limit_s = limit_s if best is None else min(limit_s, best.step_s)
        if bound_s >= limit_s * (1 - ROUNDING):
            return best
        if _is_extrapolated(step, _method_of(job, method)) and not _may_be_faster(step, limit_s * (1 + REFINED)):
            any_slower = True
            continue
        try:
            found = finish(candidate, placements, step, _method_of(job, method), min(limit_s, wanted_s))
        except (InfeasibleError, InputError) as error:
            obstacle = error
            continue
        best = found if best is None or found.step_s < best.step_s else best
    return best if best is not None or any_slower or obstacle is None else reject(candidate, costs, obstacle)


def _is_extrapolated(step: StepCost, method: str) -> bool:
    """True if `finish` knows the step by its steady state alone."""
    return method == QUICK and short_count(step.problem) is not None


def _may_be_faster(step: StepCost, limit_s: float) -> bool:
    """False where a lower bound is above `limit_s`; none is asked for of more than MAX_BOUND_ACTIONS."""
    is_huge = 3 * step.problem.num_stages * step.problem.num_microbatches > MAX_BOUND_ACTIONS
    return is_huge or limit_s == math.inf or _bound_s(step, limit_s) < limit_s


def _bound_s(step: StepCost, limit_s: float) -> float:
    """Lower bound of a step; a looser one where that is above `limit_s` already."""
    return lower_bound_s(step.problem, limit_s - step.overhead_s) + step.overhead_s


def _method_of(job: Job, method: str) -> str:
    """Named order of the job, or else `method`."""
    return job.schedule if job.schedule is not None and is_order(job.schedule) else method


def reject(candidate: Candidate, costs: JobCosts, error: InfeasibleError | InputError) -> Rejected:
    """Rejection of a candidate that came to nothing, with its reason."""
    missing = (
        max(1.0, missing_bytes(costs, candidate, minimum_in_flight(candidate)))
        if isinstance(error, InfeasibleError)
        else 0.0
    )
    return Rejected(candidate, str(error).splitlines()[0], missing)


def finish(
    candidate: Candidate, placements: tuple[Placement, ...], step: StepCost, method: str, limit_s: float = math.inf
) -> Evaluated:
    """Order and simulate; only a step faster than `limit_s` is of use. Errors as for `best_order`.

    With ``quick`` a long step is extrapolated from its steady state.
    """
    if method == QUICK and (count := short_count(step.problem)) is not None:
        return _extrapolated(candidate, placements, step, count, limit_s - step.overhead_s)
    schedule, timeline = best_order(step.problem, method, limit_s - step.overhead_s)
    return Evaluated(candidate, placements, step.problem, schedule, timeline, step.overhead_s)


def short_count(problem: Problem) -> int | None:
    """Microbatches of a shorter step that has fill, drain and a steady state; None for a step that is short itself.

    Where stages share a rank, round robin, it has whole rounds of the ranks, as interleaved orders need them.
    """
    count, ranks = max(problem.num_stages + 8, MIN_SHORT), problem.num_ranks
    if quick_orders(problem)[0] == "interleaved":
        count = 2 * ranks * -(-count // (2 * ranks))
    long = 3 * problem.num_stages * problem.num_microbatches > MAX_QUICK_ACTIONS
    return count if long and 2 * count < problem.num_microbatches else None


def _extrapolated(
    candidate: Candidate, placements: tuple[Placement, ...], step: StepCost, count: int, limit_s: float
) -> Evaluated:
    """A step extrapolated from two shorter ones, of `count` microbatches and half as many more; `limit_s` as for
    `best_order`."""
    problem, counts = step.problem, (count, count + count // 2)
    short, long = (problem.part(slice(number)) for number in counts)
    wanted_s = _short_limit_s(problem, short, long, limit_s)
    schedule, timeline = best_order(short, QUICK, wanted_s)
    outcome = try_quickly(schedule.method, long)
    long_s = outcome.makespan_s if outcome.schedule is not None else best_order(long, schedule.method)[1].makespan_s
    makespan_s = _steady_s(problem.num_microbatches, counts, (timeline.makespan_s, long_s))
    return Evaluated(candidate, placements, problem, schedule, timeline, step.overhead_s, makespan_s)


def _steady_s(num_microbatches: int, counts: tuple[int, int], pair: tuple[float, float]) -> float:
    """The makespan of so many: a microbatch more of the steady state takes what it takes between `counts`.

    What the periods of the order round off is less than a pace for each of the steps that are compared.
    """
    (fewer, more), (short_s, long_s) = counts, pair
    return long_s + (num_microbatches - more) * (long_s - short_s) / (more - fewer)


def _short_limit_s(problem: Problem, short: Problem, long: Problem, limit_s: float) -> float:
    """The makespan of `short` above which that of `problem` is above `limit_s`, about, as 1F1B's says.

    An order that is faster than 1F1B by its pace alone gains least in the shorter step.
    """
    pair = try_quickly("1f1b", short).makespan_s, try_quickly("1f1b", long).makespan_s
    if math.inf in pair:
        return math.inf
    whole_s = _steady_s(problem.num_microbatches, (short.num_microbatches, long.num_microbatches), pair)
    wanted_s = min(limit_s, whole_s)
    return pair[0] - (whole_s - wanted_s) * short.num_microbatches / problem.num_microbatches


def whole(found: Evaluated) -> Evaluated:
    """The same with the order and the timeline of the whole step, by the same named order.

    Where that order fits the shorter step alone, by the best of the quick orders; InfeasibleError where none fits.
    """
    if found.extrapolated_s is None:
        return found
    try:
        schedule, timeline = best_order(found.problem, found.schedule.method)
    except InfeasibleError:
        schedule, timeline = best_order(found.problem, QUICK)
    return replace(found, schedule=schedule, timeline=timeline, extrapolated_s=None)


def staggerings(candidate: Candidate, together: StepCost, costs: JobCosts) -> list[StepCost]:
    """Replicas that send together between sites, and staggered replicas; ZeRO-2 and 3 keep replicas together."""
    data, is_coupled = candidate.layout.data, costs.settled(candidate.layout).zero in (2, 3)
    if data == 1 or is_coupled or candidate.layout.replica_sites or not any(together.problem.between_sites.values()):
        return [together]
    return [together, replace(together, problem=stagger(together.problem, data))]


def staggered_like(best: Evaluated, together: StepCost, costs: JobCosts) -> StepCost:
    """Replicas send as they do in `best`."""
    return staggerings(best.candidate, together, costs)[-1 if best.problem.traffic.num_staggered > 1 else 0]


class _Divisions:
    """The different ways in which a candidate's layers can be divided, and stages recompute."""

    def __init__(self, job: Job, candidate: Candidate, costs: JobCosts, method: str) -> None:
        self._job, self._candidate, self._costs = job, candidate, costs
        self._method = _method_of(job, method)
        self._stages = StageModes(costs, candidate)
        self._modes = self._stages.open if method == AUTO else self._stages.coarse
        self._first = self._divide(minimum_in_flight(candidate))
        self._problem: Problem | None = None
        """The first Problem that was made of it."""

    def steps(self, limit_s: float) -> list[tuple[float, tuple[Placement, ...], StepCost]]:
        """Steps of all divisions, replicas sending together and staggered, each with its bound, the lowest first.

        Those that a bound shows to be no faster than `limit_s` are left out. Orders of one stage per rank have at least
        as many microbatches under way as 1F1B; then no division that fits has a faster slowest stage than the first.
        """
        enough_s, alone = limit_s * (1 - ROUNDING), self._candidate.layout.virtual == 1
        if alone and self._first.slowest_s * self._candidate.layout.num_microbatches >= enough_s:
            return []
        known, problem = self._costed(self._first), self._problem
        assert problem is not None
        others = self._others(in_flight_targets(self._candidate, problem))
        sooner = sooner_ended(self._stages, self._first, problem) if self._job.layout.layers is None else ()
        divisions = dict.fromkeys([self._first, *others, *sooner])
        found = []
        for division in divisions:
            busiest_s = self._busiest_s(division)
            if busiest_s < enough_s:
                placements, together = known if division is self._first else self._costed(division)
                found += [
                    (max(busiest_s, self._quick_bound_s(step, limit_s)), placements, step)
                    for step in staggerings(self._candidate, together, self._costs)
                ]
        return sorted((one for one in found if one[0] < enough_s), key=lambda one: one[0])

    def _quick_bound_s(self, step: StepCost, limit_s: float) -> float:
        """Lower bound of a step; 0 for one that is extrapolated: `evaluate` asks for that only where it comes to it."""
        return 0.0 if _is_extrapolated(step, self._method) else _bound_s(step, limit_s)

    def _others(self, targets: list[InFlight]) -> Iterator[Division]:
        """The other divisions of layers that fit; the first one did.

        Where stages share a rank, memory is shared out for the lightest mode; if that is not enough for all of them, it
        is also shared out for each mode alone.
        """
        if (only := self._same_for_all(targets)) is not None:
            yield only
            return
        for wanted in targets:
            alone = self._stages.coarse if self._candidate.layout.virtual > 1 else ()
            for modes in [self._modes, *((mode,) for mode in alone)]:
                try:
                    division = self._divide(wanted, modes)
                except InfeasibleError:
                    continue
                yield division
                if set(division.recompute) == {self._modes[0]}:
                    break

    def _same_for_all(self, targets: list[InFlight]) -> Division | None:
        """The division of all of `targets` where the fewest and the most in flight of any of them have the same.

        More in flight only takes divisions away, so what is best with few and still fits with many is best between.
        """
        fewest, most = (tuple(map(choose, zip(*targets, strict=True))) for choose in (min, max))
        try:
            many = self._divide(most, self._modes)
        except InfeasibleError:
            return None
        alone = self._candidate.layout.virtual == 1 or set(many.recompute) == {self._modes[0]}
        return many if alone and self._divide(fewest, self._modes) == many else None

    def _busiest_s(self, division: Division) -> float:
        """All that the busiest rank computes in a step, after the forwards of one microbatch that lead to it."""
        at = self._candidate.layout
        work, began_s, reached_s = [0.0] * at.pipeline, [math.inf] * at.pipeline, 0.0
        each = zip(division.layers, division.recompute, self._candidate.ranks, strict=True)
        for index, (num_layers, recompute, rank) in enumerate(each):
            part = self._stages.of(index, recompute)
            work[rank] += part.none.seconds + num_layers * part.layer_s
            began_s[rank] = min(began_s[rank], reached_s)
            reached_s += part.none.forward_s + num_layers * (part.one.forward_s - part.none.forward_s)
        return max(head + each * at.num_microbatches for head, each in zip(began_s, work, strict=True)) * (1 - ROUNDING)

    def _divide(self, in_flight: InFlight, modes: tuple[Recompute, ...] | None = None) -> Division:
        """Best split of layers. Modes per operation are tried only if a coarse mode already recomputes."""
        chosen = modes or (self._modes if self._candidate.layout.virtual == 1 else self._modes[-1:])
        few = tuple(mode for mode in chosen if mode in self._stages.coarse)
        for some in dict.fromkeys([few or chosen, chosen]):
            options = stage_options(self._stages, in_flight, some, self._job.layout.layers)
            division = divide_layers(self._job.model.num_layers, options, self._job.layout.layers)
            if set(division.recompute) == {self._modes[0]}:
                return division
        return division

    def _costed(self, division: Division) -> tuple[tuple[Placement, ...], StepCost]:
        candidate = self._candidate
        sites = [site.name for site in candidate.sites]
        placements = place_stages(candidate.ranks, sites, division.layers, division.recompute)
        step = step_cost(self._costs, candidate.layout, placements, self._job.cluster, self._problem)
        self._problem = self._problem or step.problem
        return placements, step


def describe_recompute(recompute: list[Recompute]) -> str:
    """``, stages 0 to 2 recompute all``; empty where none does."""
    words, known = [], {"full": "all", "selective": "attention", "op": "every second product"}
    sets = {mode: " and ".join(operations_of(mode)) for mode in recompute if mode != "none"}
    for mode, what in (sets | known).items():
        stages = [index for index, chosen in enumerate(recompute) if chosen == mode]
        if len(stages) == len(recompute):
            return f", recomputing {what}"
        if stages:
            words.append(f"stage{'s' if len(stages) > 1 else ''} {_runs(stages)} recomputing {what}")
    return "".join(f", {word}" for word in words)


def _runs(numbers: list[int]) -> str:
    """``0 to 4 and 8``: numbers, the smallest first, by runs."""
    first, last = ([n for n in numbers if n + step not in numbers] for step in (-1, 1))
    return " and ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(first, last, strict=True))


def describe_shortfall(rejected: Rejected) -> str:
    """The shortfall of a rejected candidate, in words."""
    devices = sorted({site.device.name for site in rejected.candidate.sites})
    lack = f"about {format_bytes(rejected.missing_bytes)} short over its ranks" if rejected.missing_bytes > 1 else ""
    return f"{rejected.candidate} on {', '.join(devices)}: {rejected.reason}" + (f" ({lack})" if lack else "")
