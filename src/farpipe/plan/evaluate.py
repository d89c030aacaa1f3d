"""What one candidate would do: its layers and recomputation, its Problem, its best order, its step time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from farpipe.cost import JobCosts, Placement, StepCost, place_stages, step_cost
from farpipe.errors import InfeasibleError, InputError
from farpipe.plan.candidates import Candidate
from farpipe.plan.in_flight import InFlight, fewest, wishes
from farpipe.plan.orders import AUTO, best_order
from farpipe.plan.partition import Division, divide_layers
from farpipe.plan.stage_ways import missing_bytes, open_ways, stage_rooms, stage_way
from farpipe.problem import Problem, is_inter_site
from farpipe.schedule import Schedule
from farpipe.schedule.bounds import lower_bound_s
from farpipe.schedule.library import ORDERS
from farpipe.simulate import Timeline, in_turns
from farpipe.spec import Job, Recompute
from farpipe.units import format_bytes

ROUNDING = 1e-9


@dataclass(frozen=True)
class Evaluated:
    """A candidate that works, and what it would do."""

    candidate: Candidate
    placements: tuple[Placement, ...]
    problem: Problem
    schedule: Schedule
    timeline: Timeline
    overhead_s: float

    @property
    def step_s(self) -> float:
        """From one step's start to the next one's: makespan and what is outside the pipeline."""
        return self.timeline.makespan_s + self.overhead_s

    def __str__(self) -> str:
        return f"{self.candidate}{describe_recompute([p.recompute for p in self.placements])}"


@dataclass(frozen=True)
class Rejected:
    """A candidate that does not work, and why; `missing_bytes` is 0 where memory was not the reason."""

    candidate: Candidate
    reason: str
    missing_bytes: float = 0.0


def evaluate(job: Job, candidate: Candidate, costs: JobCosts, limit_s: float = math.inf) -> Evaluated | Rejected | None:
    """The candidate at its best: layers, recomputation and order chosen together; None: not faster than `limit_s`.

    For every wish of `in_flight.wishes` layers are divided and stages recompute so that the slowest stage is as fast as
    it can be with so many microbatches under way; of all of these, the one with the shortest simulated step is taken.
    """
    try:
        divisions = _Divisions(job, candidate, costs)
        return None if divisions.fastest_s >= limit_s else _best_of(job, candidate, divisions, limit_s)
    except InfeasibleError as error:
        missing = max(1.0, missing_bytes(costs, candidate, fewest(candidate)))
        return Rejected(candidate, str(error).splitlines()[0], missing)
    except InputError as error:
        return Rejected(candidate, str(error).splitlines()[0])


def _best_of(job: Job, candidate: Candidate, divisions: "_Divisions", limit_s: float) -> Evaluated | None:
    best: Evaluated | None = None
    obstacle: InfeasibleError | InputError | None = None
    for bound_s, placements, step in divisions.by_bound(limit_s):
        if best is not None and bound_s >= best.step_s * (1 - ROUNDING):
            break
        try:
            found = finish(candidate, placements, step, job.schedule if job.schedule in ORDERS else AUTO)
        except (InfeasibleError, InputError) as error:
            obstacle = error
            continue
        best = found if best is None or found.step_s < best.step_s else best
    if best is None and obstacle is not None:
        raise obstacle
    return best


def finish(candidate: Candidate, placements: tuple[Placement, ...], step: StepCost, method: str) -> Evaluated:
    """Order and simulate; errors as for `best_order`."""
    schedule, timeline = best_order(step.problem, method)
    return Evaluated(candidate, placements, step.problem, schedule, timeline, step.overhead_s)


def ways_to_send(candidate: Candidate, together: StepCost) -> list[StepCost]:
    """Replicas that send together between sites, and replicas that take turns there."""
    data = candidate.layout.data
    if data == 1 or candidate.layout.replica_sites or not any(map(is_inter_site, together.problem.links)):
        return [together]
    return [together, StepCost(in_turns(together.problem, data), together.overhead_s)]


class _Divisions:
    """The different ways in which a candidate's layers can be divided, and stages recompute."""

    def __init__(self, job: Job, candidate: Candidate, costs: JobCosts) -> None:
        self._job, self._candidate, self._costs = job, candidate, costs
        self._ways = open_ways(costs, candidate.sites)
        self._first = self._divide(fewest(candidate))

    @property
    def fastest_s(self) -> float:
        """A step time that none of them beats: the slowest stage's work, where no order needs less memory.

        Orders of one stage per rank have at least as many microbatches under way as 1F1B; then no division that fits
        has a faster slowest stage.
        """
        alone = self._candidate.layout.virtual == 1
        return self._first.slowest_s * self._candidate.layout.num_microbatches if alone else 0.0

    def by_bound(self, limit_s: float) -> list[tuple[float, tuple[Placement, ...], StepCost]]:
        """(a step time that no order of it beats, placements, costs) below `limit_s`, the lowest first."""
        problem = self._costed(self._first)[1].problem
        divisions = dict.fromkeys([self._first, *self._others(wishes(self._candidate, problem))])
        found = [
            (placements, step)
            for placements, together in map(self._costed, [d for d in divisions if self._busiest_s(d) < limit_s])
            for step in ways_to_send(self._candidate, together)
        ]
        bounded = [(lower_bound_s(step.problem) + step.overhead_s, placements, step) for placements, step in found]
        return sorted((one for one in bounded if one[0] < limit_s * (1 - ROUNDING)), key=lambda one: one[0])

    def _others(self, hopes: list[InFlight]) -> Iterator[Division]:
        """What does not fit is left out; the first division did.

        Where stages share a rank, memory is shared out for the lightest way; if that is not enough for all of them, it
        is also shared out for each other way alone.
        """
        for wish in hopes:
            for ways in [self._ways, *((way,) for way in self._ways[1:] if self._candidate.layout.virtual > 1)]:
                try:
                    division = self._divide(wish, ways)
                except InfeasibleError:
                    continue
                yield division
                if set(division.recompute) == {self._ways[0]}:
                    break

    def _busiest_s(self, division: Division) -> float:
        """All that the busiest rank computes in a step."""
        work = [0.0] * self._candidate.layout.pipeline
        each = zip(division.layers, division.recompute, self._candidate.ranks, strict=True)
        for index, (num_layers, recompute, rank) in enumerate(each):
            part = stage_way(self._costs, self._candidate, index, recompute)
            work[rank] += part.none.seconds + num_layers * part.layer_s
        return max(work) * self._candidate.layout.num_microbatches

    def _divide(self, in_flight: InFlight, ways: tuple[Recompute, ...] | None = None) -> Division:
        chosen = ways or (self._ways if self._candidate.layout.virtual == 1 else self._ways[-1:])
        rooms = stage_rooms(self._costs, self._candidate, in_flight, chosen)
        return divide_layers(self._job.model.num_layers, rooms, self._job.layout.layers)

    def _costed(self, division: Division) -> tuple[tuple[Placement, ...], StepCost]:
        candidate = self._candidate
        sites = [site.name for site in candidate.sites]
        placements = place_stages(candidate.ranks, sites, division.layers, division.recompute)
        return placements, step_cost(self._costs, candidate.layout, placements, self._job.cluster)


def describe_recompute(recompute: list[Recompute]) -> str:
    """``, stages 0 to 2 recompute all``; empty where none does."""
    words = []
    for way, what in (("full", "all"), ("selective", "attention")):
        stages = [index for index, chosen in enumerate(recompute) if chosen == way]
        if len(stages) == len(recompute):
            return f", recomputing {what}"
        if stages:
            run = stages == list(range(stages[0], stages[-1] + 1)) and len(stages) > 1
            named = f"{stages[0]} to {stages[-1]}" if run else " and ".join(map(str, stages))
            words.append(f"stage{'s' if len(stages) > 1 else ''} {named} recomputing {what}")
    return "".join(f", {word}" for word in words)


def describe_shortfall(rejected: Rejected) -> str:
    """What a rejected candidate lacks, in words."""
    devices = sorted({site.device.name for site in rejected.candidate.sites})
    lack = f"about {format_bytes(rejected.missing_bytes)} short over its ranks" if rejected.missing_bytes > 1 else ""
    return f"{rejected.candidate} on {', '.join(devices)}: {rejected.reason}" + (f" ({lack})" if lack else "")
