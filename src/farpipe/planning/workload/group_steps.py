"""Step of one stage whose processes share each chunk in groups of several context degrees, as the engine runs it.

All processes have all chunks in one order, and each leaves out those that it has no part of. So whoever waits for
others of a group has nothing before that chunk left to do, nor have they what would need it: nobody waits in a circle.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, cast

import numpy as np

from farpipe.core.errors import InfeasibleError
from farpipe.core.step import Action, Problem, Schedule
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.workload.batch_options import BatchOptions
from farpipe.planning.workload.batch_plan import PlacedPlan
from farpipe.planning.workload.chunk import Chunk, Floats, Ints, Slice, load_of
from farpipe.planning.workload.device_groups import (
    DeviceGroup,
    Devices,
    DocumentTimes,
    assignments,
    document_times,
    placed_plans,
)
from farpipe.planning.workload.step_plans import StepPlan, joined, step_plan

_ONE_CHUNK: Final = Schedule(1, ((Action(0, "F", 0), Action(0, "B", 0)),), "chunk-1f1b")


def makespan_s(placed: Sequence[PlacedPlan]) -> float:
    """Seconds until the last group is done."""
    return max(one.end_s - one.plan.overhead_s for one in placed)


def degrees_of(placed: Sequence[PlacedPlan]) -> dict[int, int]:
    """Number of groups of every context degree, descending."""
    return dict(sorted(Counter(one.degree for one in placed).items(), reverse=True))


def plan_group_step(
    costs: Sequence[ChunkCosts], sizes: Ints, num_processes: int, options: BatchOptions
) -> tuple[list[PlacedPlan], StepPlan]:
    """The fastest found step of documents of these `sizes`: plans of the groups, the largest first, and the same for
    the engine. `costs`: of every degree, ascending.

    InfeasibleError where a document fits whole on no number of processes.
    """
    times = document_times(costs, sizes, keeps_attention=options.tries_keeping_attention)
    if not np.isfinite(times.seconds).any(axis=0).all():
        raise InfeasibleError(
            f"a document of {int(sizes.max())} tokens fits whole on no group of up to {costs[-1].context} devices; "
            "cut documents shorter (training.sequence_length), or pin layout.context to train in slices"
        )
    of_degree, best, errors = {one.context: one for one in costs}, list[PlacedPlan](), list[InfeasibleError]()
    for groups in _assigned(times, [*of_degree], num_processes):
        below_s = max((one.end_s for one in best), default=math.inf)
        try:
            best = placed_plans(of_degree, groups, num_processes, sizes, options, below_s) or best
        except InfeasibleError as error:
            errors.append(error)
    if not best:
        raise errors[-1]
    return best, _joined(best, num_processes, sizes.size)


def _assigned(times: DocumentTimes, degrees: list[int], num_processes: int) -> list[list[DeviceGroup]]:
    """Documents on groups of degrees that leave no process over, of all degrees, and of each that leaves none alone."""
    divides = [num_processes % degree == 0 for degree in degrees]
    dividing = [degree for degree, is_one in zip(degrees, divides, strict=True) if is_one]
    found = assignments(times.of(divides), dividing, num_processes)
    found += [] if all(divides) else assignments(times, degrees, num_processes)
    devices = Devices(times, degrees, num_processes)
    fits = np.isfinite(times.seconds).all(axis=1) & np.array(divides)
    found += [devices.grouped(np.full(times.seconds.shape[1], number)) for number in np.flatnonzero(fits).tolist()]
    return [groups for _, groups in sorted(found, key=lambda one: one[0])]


def _joined(placed: Sequence[PlacedPlan], num_processes: int, num_documents: int) -> StepPlan:
    """The plans of all groups one after the other. Where some recompute attention, all that recompute do: it fits.

    Each process without documents has a chunk of one token that does not count, of a document of its own behind the
    last: FSDP2 sums gradients of processes that all have some.
    """
    parts, groups = [step_plan(one.plan) for one in placed], list[tuple[int, int]]()
    for one, part in zip(placed, parts, strict=True):
        groups += [(one.first_device, one.degree)] * len(part.chunks)
    busy = {process for first, degree in groups for process in range(first, first + degree)}
    idle = sorted({*range(num_processes)} - busy)
    keeps = [part.keeps_attention for part in parts if part.recomputed.any()]
    nothing = [Chunk((Slice(num_documents + number, 0, 1, 1),)) for number in range(len(idle))]
    parts += [StepPlan((chunk,), np.zeros((1, 1), np.int64), _ONE_CHUNK) for chunk in nothing]
    return StepPlan(
        tuple(chunk for part in parts for chunk in part.chunks),
        np.concatenate([part.recomputed for part in parts], axis=1),
        joined([part.schedule for part in parts]),
        bool(keeps) and all(keeps),
        (*groups, *((process, 1) for process in idle)),
    )


def group_problem(plan: StepPlan, costs: Sequence[ChunkCosts]) -> Problem:
    """A step in groups as the Problem of the process that is done last: chunks of others take no time there.

    Waits for the others of a group are not in it.
    """
    load, degrees = load_of(plan.chunks), np.array([degree for _, degree in plan.groups])
    kinds = [one.keeping_attention if plan.keeps_attention else one for one in costs]
    problems = [one.problem(load, [None] * len(plan.chunks), plan.recomputed) for one in kinds]
    numbers = np.searchsorted([one.context for one in costs], degrees)

    def rows(name: str) -> Floats:
        of_degree = np.array([cast("tuple[float, ...]", getattr(one.stages[0], name)) for one in problems])
        return np.asarray(of_degree[numbers, np.arange(numbers.size)])

    names = ("forward_s", "input_grad_s", "weight_grad_s", "activation_bytes", "weight_stash_bytes")
    found = {name: rows(name) for name in names}
    mine = _of_last(plan.groups, sum(found[name] for name in names[:3]))
    changed = {name: tuple(np.where(mine, row, 0.0).tolist()) for name, row in found.items()}
    return problems[-1].changed(stages=(problems[-1].stages[0].model_copy(update=changed),))


def _of_last(groups: Sequence[tuple[int, int]], seconds: Floats | int) -> Floats:
    """True for the chunks of the process that is done last, if a chunk begins when all of its group are free."""
    free_s = np.zeros(max(first + degree for first, degree in groups))
    for (first, degree), each_s in zip(groups, np.asarray(seconds).tolist(), strict=True):
        free_s[first : first + degree] = free_s[first : first + degree].max() + each_s
    last = int(free_s.argmax())
    return np.array([first <= last < first + degree for first, degree in groups])
