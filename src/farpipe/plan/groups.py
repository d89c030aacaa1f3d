"""A step of several groups of replicas that are not alike: their pipelines side by side, then the sum of gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from farpipe.cost import JobCosts, Layout, Placement, RankShape, StepCost, place_stages
from farpipe.cost.groups import GroupReduce, ReplicaGroup, group_costs, group_reduces
from farpipe.errors import InfeasibleError, InputError
from farpipe.plan.orders import AUTO, best_order
from farpipe.plan.partition import StageOption, divide_layers
from farpipe.plan.shares import Pace, balanced_counts
from farpipe.plan.stage_modes import StageMode, open_modes
from farpipe.simulate import Timeline
from farpipe.spec import Cluster, Job
from farpipe.spec.groups import GroupPin
from farpipe.step import Schedule

SHORT: Final = 8
"""Microbatches beyond the number of stages of the shorter of the two steps that tell a group's pace."""


@dataclass(frozen=True)
class PlayedGroup:
    """One group with its order and what happens in its own pipeline."""

    group: ReplicaGroup
    step: StepCost
    schedule: Schedule
    timeline: Timeline


@dataclass(frozen=True)
class PlayedGroups:
    """One step of all groups."""

    groups: tuple[PlayedGroup, ...]
    reduces: tuple[GroupReduce, ...]

    @property
    def makespan_s(self) -> float:
        """From the start of the step to the end of the last sum of gradients."""
        return joined_s([played.timeline for played in self.groups], self.reduces)

    @property
    def overhead_s(self) -> float:
        """The slowest group's optimizer, clipping, and whatever else is outside the pipeline."""
        return max(played.step.overhead_s for played in self.groups)

    @property
    def step_s(self) -> float:
        """From one step's start to the next one's."""
        return self.makespan_s + self.overhead_s

    @property
    def bubble_ratio(self) -> float:
        """1 - busy compute time / (devices x makespan), every rank with its devices."""
        busy = total = 0.0
        for played in self.groups:
            at = played.group.layout
            devices = np.array([at.of_rank(rank).devices_per_rank for rank in range(at.pipeline)])
            busy += float((played.timeline.busy_s * devices).sum())
            total += float(devices.sum())
        return 1 - busy / (total * self.makespan_s)


def joined_s(timelines: Sequence[Timeline], reduces: Sequence[GroupReduce]) -> float:
    """End of the step: a sum begins when all groups have its gradients and its links are free, earlier ones first."""
    end_s = max(timeline.makespan_s for timeline in timelines)
    ready = [(max(map(_ready_s, timelines, one.stages)), index) for index, one in enumerate(reduces)]
    free_s: dict[str, float] = {}
    for ready_s, index in sorted(ready):
        one = reduces[index]
        done_s = max([ready_s, *(free_s.get(link, 0.0) for link in one.links)]) + one.seconds
        free_s.update(dict.fromkeys(one.links, done_s))
        end_s = max(end_s, done_s)
    return end_s


def _ready_s(timeline: Timeline, stage: int) -> float:
    """End of the stage's last action and of the sum over the group's own replicas."""
    actions, messages = timeline.actions, timeline.messages
    own = messages[(messages["microbatch"] < 0) & (messages["stage"] == stage)]
    return float(max([actions["end_s"][actions["stage"] == stage].max(), *own["arrival_s"]]))


def play_groups(job: Job, costs: JobCosts, groups: Sequence[ReplicaGroup], method: str = AUTO) -> PlayedGroups:
    """Costs, orders and timelines of groups whose shares are settled; errors as for `group_costs`, `best_order`."""
    steps = group_costs(costs, groups, job.cluster)
    orders = [best_order(step.problem, method) for step in steps]
    played = zip(groups, steps, orders, strict=True)
    found = tuple(PlayedGroup(group, step, *order) for group, step, order in played)
    return PlayedGroups(found, tuple(group_reduces(costs, groups, job.cluster)))


def balanced(
    job: Job, costs: JobCosts, groups: Sequence[ReplicaGroup], pinned: Sequence[int | None]
) -> list[ReplicaGroup]:
    """The groups with numbers of microbatches that add up to the batch and balance their time.

    `pinned`: numbers that are given. InfeasibleError where none add up.
    """
    if len(groups) == 1 or None not in pinned:
        paces = [Pace(_sequences(g.layout), 0.0, 1.0, n) for g, n in zip(groups, pinned, strict=True)]
    else:
        paces = [_pace(job, costs, group, number) for group, number in zip(groups, pinned, strict=True)]
    counts = balanced_counts(job.training.global_batch, paces)
    return [_with_count(group, count) for group, count in zip(groups, counts, strict=True)]


def _sequences(layout: Layout) -> int:
    return layout.data * layout.microbatch_size


def _with_count(group: ReplicaGroup, count: int) -> ReplicaGroup:
    return replace(group, layout=replace(group.layout, num_microbatches=count))


def _pace(job: Job, costs: JobCosts, group: ReplicaGroup, pinned: int | None) -> Pace:
    """From two short steps; between them and the whole step the pace of 1F1B and its like does not change."""
    few = group.layout.pipeline + SHORT
    ends = [_alone_s(job, costs, _with_count(group, count)) for count in (few, 2 * few)]
    each_s = (ends[1] - ends[0]) / few
    return Pace(_sequences(group.layout), ends[0] - few * each_s, each_s, pinned)


def _alone_s(job: Job, costs: JobCosts, group: ReplicaGroup) -> float:
    part = costs.with_training(costs.training.model_copy(update={"global_batch": group.num_sequences}))
    (step,) = group_costs(part, [group], job.cluster)
    return best_order(step.problem, job.schedule or "1f1b")[1].makespan_s


def pinned_groups(job: Job, costs: JobCosts, microbatch_size: int) -> list[ReplicaGroup]:
    """The groups that the job pins, with layers and shares of the batch settled; errors as for `play_groups`."""
    pins = job.layout.groups or ()
    groups = [_pinned(job, costs, pin, microbatch_size) for pin in pins]
    return balanced(job, costs, groups, [pin.num_microbatches for pin in pins])


def _pinned(job: Job, costs: JobCosts, pin: GroupPin, microbatch_size: int) -> ReplicaGroup:
    return shaped_group(job, costs, pin.sites, pin.tensor, pin.data, microbatch_size, pin.layers)


def shaped_group(
    job: Job,
    costs: JobCosts,
    sites: Sequence[str],
    tensor: Sequence[int],
    data: Sequence[int],
    microbatch_size: int,
    layers: Sequence[int] | None = None,
) -> ReplicaGroup:
    """A group with a stage on each rank, its layers divided so that the slowest rank is as fast as it can be in memory.

    It has as many microbatches as it has ranks: shares are for `balanced`. InfeasibleError when the layers do not fit.
    """
    devices = [job.cluster.site(name).device.name for name in sites]
    differ = len(set(zip(tensor, data, strict=True))) > 1
    shapes = tuple(map(RankShape, devices, tensor, data)) if differ else ()
    layout = Layout(len(sites), max(data), max(tensor), 1, microbatch_size, len(sites), shapes=shapes)
    return ReplicaGroup(layout, _placements(job.cluster, costs, layout, sites, layers))


def _placements(
    cluster: Cluster, costs: JobCosts, layout: Layout, sites: Sequence[str], layers: Sequence[int] | None
) -> tuple[Placement, ...]:
    """One stage on each rank, with 1F1B's microbatches in flight."""
    last = layout.pipeline - 1
    options = []
    for rank, name in enumerate(sites):
        at, site = layout.of_rank(rank), cluster.site(name)
        if _sequences(layout) % at.data:
            raise InputError(
                f"layout.groups: data {at.data} of rank {rank} does not divide the {_sequences(layout)} sequences of a "
                "microbatch"
            )
        modes = [
            StageMode(mode, *costs.apart(at, site, mode, embedding=rank == 0, head=rank == last))
            for mode in open_modes(costs, [site])
        ]
        options.append([_option(mode, site.plannable_bytes, layout.pipeline - rank) for mode in modes])
    division = divide_layers(costs.model.num_layers, options, layers)
    return place_stages(range(layout.pipeline), list(sites), division.layers, division.recompute)


def _option(mode: StageMode, memory_bytes: float, in_flight: int) -> StageOption:
    free = memory_bytes - mode.one.working_bytes - mode.none.held_bytes(in_flight)
    most = int(np.floor(free / mode.layer_bytes(in_flight) * (1 + 1e-9)))
    return StageOption(mode.layer_s, mode.none.seconds, most, mode.recompute)


def best_pinned(job: Job, costs: JobCosts, sizes: Sequence[int]) -> PlayedGroups:
    """The groups that the job pins, with the microbatch size of `sizes` whose step is fastest.

    InfeasibleError or InputError, that of the first size, when none works.
    """
    found: list[PlayedGroups] = []
    obstacles: list[InfeasibleError | InputError] = []
    for size in sizes:
        try:
            found.append(play_groups(job, costs, pinned_groups(job, costs, size), job.schedule or AUTO))
        except (InfeasibleError, InputError) as error:
            obstacles.append(error)
    if not found:
        raise obstacles[0]
    return min(found, key=lambda played: played.step_s)
