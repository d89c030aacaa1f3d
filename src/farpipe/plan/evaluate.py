"""Evaluation of one candidate: its layers and recomputation, its Problem, its best order, its step time."""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

from farpipe.cost import JobCosts, Placement, StepCost, place_stages, step_cost
from farpipe.errors import InfeasibleError, InputError
from farpipe.plan.candidates import Candidate
from farpipe.plan.in_flight import InFlight, in_flight_targets, minimum_in_flight
from farpipe.plan.orders import AUTO, QUICK, best_order
from farpipe.plan.partition import Division, divide_layers
from farpipe.plan.stage_modes import StageModes, missing_bytes, stage_options
from farpipe.schedule.bounds import lower_bound_s
from farpipe.schedule.library import ORDERS
from farpipe.simulate import Timeline
from farpipe.spec import Job, Recompute, operations_of
from farpipe.step import Problem, Schedule, stagger
from farpipe.units import format_bytes

ROUNDING = 1e-9
MAX_QUICK_ACTIONS: Final = 7_000
"""Of steps that the quick search plays whole."""
MIN_SHORT: Final = 24


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

    @property
    def step_s(self) -> float:
        """From one step's start to the next one's: makespan and what is outside the pipeline."""
        return (self.extrapolated_s or self.timeline.makespan_s) + self.overhead_s

    def __str__(self) -> str:
        return f"{self.candidate}{describe_recompute([p.recompute for p in self.placements])}"


@dataclass(frozen=True)
class Rejected:
    """A candidate that does not work, and why; `missing_bytes` is 0 where memory was not the reason."""

    candidate: Candidate
    reason: str
    missing_bytes: float = 0.0


class Node(NamedTuple):
    """A node of the branch and bound: a part of a candidate, none of whose steps is faster than `bound_s`."""

    bound_s: float
    candidate: Candidate
    follow: Callable[[float], "list[Node] | Evaluated"]
    """Narrower nodes, or what it comes to, of which only a step faster than the limit that is given, seconds, is of
    use; InfeasibleError or InputError where it comes to nothing."""


def evaluate(
    job: Job,
    candidate: Candidate,
    costs: JobCosts,
    limit_s: float = math.inf,
    method: str = AUTO,
    wanted_s: float = math.inf,
) -> Evaluated | Rejected | None:
    """The candidate at its best: layers, recomputation and order chosen together; None where it is no faster than
    `limit_s`, as far as a bound tells. `method`: ``auto``, or ``quick``, which tries fewer orders.

    Where its step turns out to be far above `wanted_s`, less is tried to make it shorter.

    For every target of `in_flight_targets` layers are divided and stages recompute so that the slowest stage is as fast
    as it can be with so many microbatches in flight; of these, the one with the shortest simulated step is taken.
    """
    nodes, best = Frontier([node(job, candidate, costs, method=method)]), None
    obstacle: InfeasibleError | InputError | None = None
    while (next_one := nodes.pop()) is not None:
        limit_s = limit_s if best is None else min(limit_s, best.step_s)
        if next_one.bound_s >= limit_s * (1 - ROUNDING):
            return best
        try:
            found = next_one.follow(min(limit_s, wanted_s))
        except (InfeasibleError, InputError) as error:
            obstacle = error
            continue
        if isinstance(found, Evaluated):
            best = found if best is None or found.step_s < best.step_s else best
        else:
            nodes.push(found)
    if best is None:
        assert obstacle is not None
        return reject(candidate, costs, obstacle)
    return best


class Frontier:
    """Nodes still to follow: the one with the lowest bound first; of equals the one that was found last."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._heap = [(one.bound_s, -index, one) for index, one in enumerate(nodes)]
        self._count = len(self._heap)
        heapq.heapify(self._heap)

    def push(self, nodes: Iterable[Node]) -> None:
        """Add some."""
        for one in nodes:
            self._count += 1
            heapq.heappush(self._heap, (one.bound_s, -self._count, one))

    def pop(self) -> Node | None:
        """Take the first one off; None: there is none."""
        return heapq.heappop(self._heap)[2] if self._heap else None

    @property
    def rest(self) -> list[Node]:
        """All that there are."""
        return [one for _, _, one in self._heap]


def node(job: Job, candidate: Candidate, costs: JobCosts, bound_s: float = 0.0, method: str = AUTO) -> Node:
    """Evaluations of a candidate: its divisions of layers, each with every method of sending, and each of them played.

    From `bound_s`, which is told at once, every node that it comes to has a higher bound, and takes longer to follow.
    """
    return Node(bound_s, candidate, lambda _: _Divisions(job, candidate, costs, method).nodes(bound_s))


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

    With ``quick`` a long step is told by its steady state.
    """
    if method == QUICK and (count := short_count(step.problem)) is not None:
        return _extrapolated(candidate, placements, step, count, limit_s - step.overhead_s)
    schedule, timeline = best_order(step.problem, method, limit_s - step.overhead_s)
    return Evaluated(candidate, placements, step.problem, schedule, timeline, step.overhead_s)


def short_count(problem: Problem) -> int | None:
    """Microbatches of a shorter step that has fill, drain and a steady state; None for a step that is short itself."""
    count = max(problem.num_stages + 8, MIN_SHORT)
    long = 3 * problem.num_stages * problem.num_microbatches > MAX_QUICK_ACTIONS
    return count if long and 2 * count < problem.num_microbatches else None


def _extrapolated(
    candidate: Candidate, placements: tuple[Placement, ...], step: StepCost, count: int, limit_s: float
) -> Evaluated:
    """Told by two shorter steps, of `count` microbatches and half as many more; `limit_s` as for `best_order`."""
    problem, counts = step.problem, (count, count + count // 2)
    short, long = (problem.model_copy(update={"num_microbatches": number}) for number in counts)
    wanted_s = _short_limit_s(problem, short, long, limit_s)
    schedule, timeline = best_order(short, QUICK, wanted_s)
    pair = timeline, best_order(long, schedule.method)[1]
    makespan_s = _steady_s(problem.num_microbatches, counts, pair)
    return Evaluated(candidate, placements, problem, schedule, timeline, step.overhead_s, makespan_s)


def _steady_s(num_microbatches: int, counts: tuple[int, int], pair: tuple[Timeline, Timeline]) -> float:
    """The makespan of so many: a microbatch more of the steady state takes what it takes between `counts`.

    What the periods of the order round off is less than a pace for each of the steps that are compared.
    """
    (fewer, more), (short_s, long_s) = counts, (timeline.makespan_s for timeline in pair)
    return long_s + (num_microbatches - more) * (long_s - short_s) / (more - fewer)


def _short_limit_s(problem: Problem, short: Problem, long: Problem, limit_s: float) -> float:
    """The makespan of `short` above which that of `problem` is above `limit_s`, about, as 1F1B's says.

    An order that is faster than 1F1B by its pace alone gains least in the shorter step.
    """
    try:
        pair = best_order(short, "1f1b")[1], best_order(long, "1f1b")[1]
    except (InfeasibleError, InputError):
        return math.inf
    whole_s = _steady_s(problem.num_microbatches, (short.num_microbatches, long.num_microbatches), pair)
    wanted_s = min(limit_s, whole_s)
    return pair[0].makespan_s - (whole_s - wanted_s) * short.num_microbatches / problem.num_microbatches


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


def staggerings(candidate: Candidate, together: StepCost) -> list[StepCost]:
    """Replicas that send together between sites, and staggered replicas."""
    data = candidate.layout.data
    if data == 1 or candidate.layout.replica_sites or not any(together.problem.between_sites.values()):
        return [together]
    return [together, StepCost(stagger(together.problem, data), together.overhead_s)]


def staggered_like(best: Evaluated, together: StepCost) -> StepCost:
    """Replicas send as they do in `best`."""
    return staggerings(best.candidate, together)[-1 if best.problem.traffic.num_staggered > 1 else 0]


class _Divisions:
    """The different ways in which a candidate's layers can be divided, and stages recompute."""

    def __init__(self, job: Job, candidate: Candidate, costs: JobCosts, method: str) -> None:
        self._job, self._candidate, self._costs = job, candidate, costs
        self._method = job.schedule if job.schedule is not None and job.schedule in ORDERS else method
        self._stages = StageModes(costs, candidate)
        self._modes = self._stages.open if method == AUTO else self._stages.coarse
        self._first = self._divide(minimum_in_flight(candidate))

    def nodes(self, bound_s: float) -> list[Node]:
        """The first division, where no order needs less memory: then the others.

        Orders of one stage per rank have at least as many microbatches under way as 1F1B; then no division that fits
        has a faster slowest stage.
        """
        alone = self._candidate.layout.virtual == 1
        fastest_s = self._first.slowest_s * self._candidate.layout.num_microbatches if alone else 0.0
        return [Node(max(bound_s, fastest_s), self._candidate, self._each)]

    def _each(self, limit_s: float) -> list[Node]:
        """One node for every division; all that its busiest rank computes is the bound."""
        problem = self._costed(self._first)[1].problem
        divisions = dict.fromkeys([self._first, *self._others(in_flight_targets(self._candidate, problem))])
        return [Node(self._busiest_s(d), self._candidate, partial(self._staggerings, d)) for d in divisions]

    def _staggerings(self, division: Division, limit_s: float) -> list[Node]:
        """One node for replicas that send together and one for staggered ones, with the bounds of their Problems."""
        placements, together = self._costed(division)
        return [
            Node(
                lower_bound_s(step.problem, limit_s - step.overhead_s) + step.overhead_s,
                self._candidate,
                partial(finish, self._candidate, placements, step, self._method),
            )
            for step in staggerings(self._candidate, together)
        ]

    def _others(self, hopes: list[InFlight]) -> Iterator[Division]:
        """The other divisions of layers that fit; the first one did.

        Where stages share a rank, memory is shared out for the lightest mode; if that is not enough for all of them, it
        is also shared out for each other mode alone.
        """
        if (only := self._same_for_all(hopes)) is not None:
            yield only
            return
        for wanted in hopes:
            alone = self._stages.coarse[1:] if self._candidate.layout.virtual > 1 else ()
            for modes in [self._modes, *((mode,) for mode in alone)]:
                try:
                    division = self._divide(wanted, modes)
                except InfeasibleError:
                    continue
                yield division
                if set(division.recompute) == {self._modes[0]}:
                    break

    def _same_for_all(self, hopes: list[InFlight]) -> Division | None:
        """The division of all of `hopes` where the fewest and the most in flight of any of them have the same.

        More in flight only takes divisions away, so what is best with few and still fits with many is best between.
        """
        fewest, most = (tuple(map(choose, zip(*hopes, strict=True))) for choose in (min, max))
        try:
            many = self._divide(most, self._modes)
        except InfeasibleError:
            return None
        alone = self._candidate.layout.virtual == 1 or set(many.recompute) == {self._modes[0]}
        return many if alone and self._divide(fewest, self._modes) == many else None

    def _busiest_s(self, division: Division) -> float:
        """All that the busiest rank computes in a step."""
        work = [0.0] * self._candidate.layout.pipeline
        each = zip(division.layers, division.recompute, self._candidate.ranks, strict=True)
        for index, (num_layers, recompute, rank) in enumerate(each):
            part = self._stages.of(index, recompute)
            work[rank] += part.none.seconds + num_layers * part.layer_s
        return max(work) * self._candidate.layout.num_microbatches

    def _divide(self, in_flight: InFlight, modes: tuple[Recompute, ...] | None = None) -> Division:
        """With all operations open only where with few modes stages recompute."""
        chosen = modes or (self._modes if self._candidate.layout.virtual == 1 else self._modes[-1:])
        few = tuple(mode for mode in chosen if mode in self._stages.coarse)
        for some in dict.fromkeys([few or chosen, chosen]):
            options = stage_options(self._stages, in_flight, some)
            division = divide_layers(self._job.model.num_layers, options, self._job.layout.layers)
            if set(division.recompute) == {self._modes[0]}:
                return division
        return division

    def _costed(self, division: Division) -> tuple[tuple[Placement, ...], StepCost]:
        candidate = self._candidate
        sites = [site.name for site in candidate.sites]
        placements = place_stages(candidate.ranks, sites, division.layers, division.recompute)
        return placements, step_cost(self._costs, candidate.layout, placements, self._job.cluster)


def peak_bytes(job: Job, candidate: Candidate, costs: JobCosts) -> tuple[float, float]:
    """Bytes that the fullest rank holds under 1F1B and that it may hold, each of one device.

    InfeasibleError when the layers do not fit.
    """
    stages, flights = StageModes(costs, candidate), minimum_in_flight(candidate)
    modes = stages.open if candidate.layout.virtual == 1 else stages.open[-1:]
    options = stage_options(stages, flights, modes)
    division = divide_layers(job.model.num_layers, options, job.layout.layers)
    held, working = [0.0] * candidate.layout.pipeline, [0.0] * candidate.layout.pipeline
    for index, rank in enumerate(candidate.ranks):
        part = stages.of(index, division.recompute[index])
        held[rank] += part.none.held_bytes(flights[index]) + division.layers[index] * part.layer_bytes(flights[index])
        working[rank] = max(working[rank], part.one.working_bytes)
    used = [(h + w, site.plannable_bytes) for h, w, site in zip(held, working, candidate.sites, strict=True)]
    return max(used, key=lambda pair: pair[0] / pair[1])


def describe_recompute(recompute: list[Recompute]) -> str:
    """``, stages 0 to 2 recompute all``; empty where none does."""
    words, known = [], {"full": "all", "selective": "attention"}
    sets = {mode: " and ".join(operations_of(mode)) for mode in recompute if mode != "none"}
    for mode, what in (sets | known).items():
        stages = [index for index, chosen in enumerate(recompute) if chosen == mode]
        if len(stages) == len(recompute):
            return f", recomputing {what}"
        if stages:
            run = stages == list(range(stages[0], stages[-1] + 1)) and len(stages) > 1
            named = f"{stages[0]} to {stages[-1]}" if run else " and ".join(map(str, stages))
            words.append(f"stage{'s' if len(stages) > 1 else ''} {named} recomputing {what}")
    return "".join(f", {word}" for word in words)


def describe_shortfall(rejected: Rejected) -> str:
    """The shortfall of a rejected candidate, in words."""
    devices = sorted({site.device.name for site in rejected.candidate.sites})
    lack = f"about {format_bytes(rejected.missing_bytes)} short over its ranks" if rejected.missing_bytes > 1 else ""
    return f"{rejected.candidate} on {', '.join(devices)}: {rejected.reason}" + (f" ({lack})" if lack else "")
