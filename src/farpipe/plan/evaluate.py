"""What one candidate would do: its partition, its Problem, its best order, its step time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from farpipe.cost import (
    Layout,
    Placement,
    Profile,
    StageCost,
    place_evenly,
    stage_cost,
    step_overhead_s,
    step_problem,
)
from farpipe.errors import InfeasibleError, InputError
from farpipe.plan.candidates import Candidate
from farpipe.plan.orders import AUTO, best_order
from farpipe.plan.partition import StageRoom, divide_layers
from farpipe.problem import Problem
from farpipe.schedule import Schedule
from farpipe.simulate import Timeline
from farpipe.spec import Job, Site
from farpipe.units import format_bytes

Profiles = Mapping[str, Profile]
"""Measured times by device name."""


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


@dataclass(frozen=True)
class Rejected:
    """A candidate that does not work, and why; `missing_bytes` is 0 where memory was not the reason."""

    candidate: Candidate
    reason: str
    missing_bytes: float = 0.0


def evaluate(job: Job, candidate: Candidate, profiles: Profiles) -> Evaluated | Rejected:
    """Partition, place, order and simulate one candidate."""
    try:
        layers = partition(job, candidate, profiles)
    except InfeasibleError as error:
        return Rejected(candidate, str(error), _missing_bytes(job, candidate, profiles))
    try:
        placements = place_evenly([site.name for site in candidate.sites], layers)
        placed = (job.model, job.training, candidate.layout, placements, job.cluster)
        problem = step_problem(*placed, profiles=profiles)
        schedule, timeline = best_order(problem, job.schedule or AUTO)
        overhead_s = step_overhead_s(*placed, profiles=profiles)
        return Evaluated(candidate, placements, problem, schedule, timeline, overhead_s)
    except InfeasibleError as error:
        return Rejected(candidate, str(error).splitlines()[0], 1.0)
    except InputError as error:
        if job.schedule is not None:
            raise
        return Rejected(candidate, str(error))


def partition(job: Job, candidate: Candidate, profiles: Profiles) -> list[int]:
    """Layers of every stage; those that the job pins, or the division with the fastest slowest stage."""
    if job.layout.layers is not None:
        if sum(job.layout.layers) != job.model.num_layers:
            raise InputError(
                f"layout.layers: they add up to {sum(job.layout.layers)}, model.num_layers is {job.model.num_layers}"
            )
        return list(job.layout.layers)
    parts = stage_parts(job, candidate, profiles)
    rooms = [StageRoom(part.layer_s, part.extra_s, part.most_layers) for part in parts]
    return divide_layers(job.model.num_layers, rooms)


@dataclass(frozen=True)
class StageParts:
    """One stage taken apart: what every layer adds, and the rest: embedding, head, fixed overhead.

    Bytes in flight are those of the fewest microbatches in flight that keep the pipeline full, 1F1B's.
    """

    site: Site
    layer_s: float
    extra_s: float
    layer_bytes: float
    extra_bytes: float
    free_bytes: float
    """What the device has for both; the stages of a rank share it evenly."""

    @property
    def most_layers(self) -> int | None:
        """Layers that fit; None: any number."""
        free = self.free_bytes - self.extra_bytes
        return math.floor(free / self.layer_bytes * (1 + 1e-9)) if self.layer_bytes else None


def stage_parts(job: Job, candidate: Candidate, profiles: Profiles) -> list[StageParts]:
    """Every stage of the candidate taken apart."""
    layout, last = candidate.layout, candidate.layout.num_stages - 1
    known: dict[tuple[str, int, bool, bool], StageCost] = {}

    def cost(site: Site, num_layers: int, index: int) -> StageCost:
        key = (site.name, num_layers, index == 0, index == last)
        if key not in known:
            slice_of = (job.model, job.training, layout, site, num_layers)
            measured = profiles.get(site.device.name)
            known[key] = stage_cost(*slice_of, embedding=index == 0, head=index == last, profile=measured)
        return known[key]

    sites = [candidate.sites[index % layout.pipeline] for index in range(last + 1)]
    return [_take_apart(cost(s, 1, i), cost(s, 2, i), s, i, layout) for i, s in enumerate(sites)]


def _take_apart(one: StageCost, two: StageCost, site: Site, index: int, layout: Layout) -> StageParts:
    """From what one layer and what two layers cost: both are linear in their number."""
    in_flight = min(layout.num_microbatches, layout.num_stages - index)
    layer_s, layer_bytes = seconds(two) - seconds(one), _held_bytes(two, in_flight) - _held_bytes(one, in_flight)
    free_bytes = site.device.memory_bytes / layout.virtual - one.working_bytes
    extra_bytes = _held_bytes(one, in_flight) - layer_bytes
    return StageParts(site, layer_s, seconds(one) - layer_s, layer_bytes, extra_bytes, free_bytes)


def seconds(cost: StageCost) -> float:
    """Forward and backward of one microbatch."""
    return cost.forward_s + cost.input_grad_s + cost.weight_grad_s


def _held_bytes(cost: StageCost, in_flight: int) -> float:
    return cost.static_bytes + in_flight * cost.activation_bytes


def fastest_possible_s(job: Job, candidate: Candidate, profiles: Profiles) -> float:
    """A bound that no partition and no order of the candidate beats: all its work, divided evenly over its ranks."""
    parts = stage_parts(job, candidate, profiles)
    work = job.model.num_layers * min(part.layer_s for part in parts) + sum(part.extra_s for part in parts)
    return candidate.layout.num_microbatches * work / candidate.layout.pipeline


def _missing_bytes(job: Job, candidate: Candidate, profiles: Profiles) -> float:
    """How many bytes all ranks together lack for the layers (of one tensor-parallel device each)."""
    parts = stage_parts(job, candidate, profiles)
    needed = job.model.num_layers * sum(part.layer_bytes for part in parts) / len(parts)
    return max(1.0, needed + sum(part.extra_bytes - part.free_bytes for part in parts))


def describe_shortfall(job: Job, rejected: Rejected) -> str:
    """What a rejected candidate lacks, in words."""
    devices = sorted({site.device.name for site in rejected.candidate.sites})
    lack = f"about {format_bytes(rejected.missing_bytes)} short over its ranks" if rejected.missing_bytes > 1 else ""
    return f"{rejected.candidate} on {', '.join(devices)}: {rejected.reason}" + (f" ({lack})" if lack else "")
