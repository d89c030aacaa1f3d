"""Documents on groups of neighbouring devices whose context degrees follow their lengths, in one stage.

As Megatron's dynamic context parallelism and FlexSP (arXiv 2412.01523): every document has the fewest devices that keep
it below a time, which is searched, or those that spend least on it. From both a local search moves the long documents
to other degrees, counting the fixed times of whole chunks. Larger groups come first, and smaller ones begin on devices
that are done with them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple, Self

import numpy as np

from farpipe.core.errors import FarpipeError, InfeasibleError
from farpipe.core.spec import Job
from farpipe.core.spec.training import Zero
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.workload.batch_options import BatchOptions
from farpipe.planning.workload.batch_plan import BatchPlan, PlacedPlan, exchange_s
from farpipe.planning.workload.checkpointing import unrecomputed_tokens
from farpipe.planning.workload.chunk import Floats, Ints, as_load
from farpipe.planning.workload.layout import ChunkLayout, Profiles, chunk_layout, sequence_seconds
from farpipe.planning.workload.sequence_plan import SequencePlan, plan_sequences

_TRIED_SHARES: Final = np.geomspace(1, 64, 25)
"""Tried limits of a document's time: the batch's time, if all devices were always busy, over these."""
_NUM_MOVED: Final = 128
"""Number of documents, the longest, that the local search moves to other degrees."""
_MAX_PASSES: Final = 8
"""Number of times that it goes over them at most."""
_MAX_PLANNED: Final = 4
"""Number of assignments of documents to groups, the best by the estimate, that are planned to the end: of degrees that
leave no device over, and of all."""
_FILLED: Final = 0.97
"""Share of a chunk's tokens that documents fill: they don't fit into each other without gaps."""


class DeviceGroup(NamedTuple):
    """Documents that `degree` neighbouring devices share."""

    first_device: int
    degree: int
    documents: Ints


class DocumentTimes(NamedTuple):
    """Seconds of every document in every context degree, ascending, and what whole chunks take beside them."""

    seconds: Floats
    """Seconds, a chunk's fixed ones by the share of it that the document fills: [num_degrees, num_documents]."""
    shares: Floats
    """[num_degrees, num_documents]"""
    fixed_s: Floats
    """Fixed seconds of a chunk: [num_degrees]."""

    @classmethod
    def by_token(cls, seconds: Floats) -> Self:
        """Documents that fill no chunks, whose seconds are all that counts."""
        return cls(seconds, np.zeros_like(seconds), np.zeros(len(seconds)))

    def of(self, degrees: Sequence[bool]) -> Self:
        """Times of some degrees."""
        return type(self)(*(part[list(degrees)] for part in self))


@dataclass(frozen=True)
class Family:
    """Layouts of one stage of ZeRO that differ in their context degree alone, ascending, and what documents take."""

    zero: Zero
    layouts: list[ChunkLayout]
    times: DocumentTimes

    @property
    def degrees(self) -> list[int]:
        return [layout.costs.context for layout in self.layouts]

    @property
    def num_devices(self) -> int:
        """Devices, of which each counts as one with those that share its tensors."""
        return self.layouts[0].num_devices // self.layouts[0].layout.tensor

    @property
    def outside_s(self) -> float:
        """Seconds of a step outside the documents."""
        return max(layout.costs.overhead_s + exchange_s(layout) for layout in self.layouts)

    @property
    def ideal_s(self) -> float:
        """Seconds of the documents, each on the devices that make it cheapest, if all devices are always busy."""
        return float((self.times.seconds * np.array(self.degrees)[:, None]).min(axis=0).sum()) / self.num_devices

    @cached_property
    def dividing(self) -> "Family":
        """The degrees that leave no device over; itself where all do."""
        is_one = [layout.num_devices == self.layouts[0].num_devices for layout in self.layouts]
        layouts = [layout for layout, divides in zip(self.layouts, is_one, strict=True) if divides]
        return self if all(is_one) else Family(self.zero, layouts, self.times.of(is_one))

    def assigned(self) -> list[tuple[float, list[DeviceGroup]]]:
        """`assignments` on the family's devices."""
        num_sites = max(1, len(self.layouts[0].layout.replica_sites))
        return assignments(self.times, self.degrees, self.num_devices, num_sites)


def document_times(each: Sequence[ChunkCosts], sizes: Ints, *, keeps_attention: bool = True) -> DocumentTimes:
    """Forward and backward of every document in one stage of these degrees, infinite where it does not fit.

    Packed with others up to the tokens that recompute nothing; longer ones are alone and recompute as many layers as
    they have to, keeping attention's results where that is faster.
    """
    limits = [max(1, unrecomputed_tokens(costs)) for costs in each]
    fixed_s = np.array([costs.stages[0].laws.total.fixed_s for costs in each])
    shares = np.minimum(1.0, sizes / (_FILLED * np.array(limits))[:, None])
    again_s = [_again_s(costs, sizes, limit, keeps_attention) for costs, limit in zip(each, limits, strict=True)]
    alone_s = [sequence_seconds(costs, sizes) for costs in each]
    return DocumentTimes(np.array(alone_s) + fixed_s[:, None] * shares + np.array(again_s), shares, fixed_s)


def _again_s(costs: ChunkCosts, sizes: Ints, limit: int, keeps_attention: bool) -> Floats:
    """Seconds that documents of more than `limit` tokens recompute: [num_documents]."""
    stage, rank, load = costs.stages[0], costs.base.ranks[0], as_load(sizes)
    room = math.inf if rank.memory_bytes is None else rank.memory_bytes - rank.static_bytes
    beside = max(stage.working_bytes, stage.logit_bytes) * load.tokens
    missing = np.maximum(0.0, stage.held_bytes(load, 0) + beside - room)
    again_s = np.full(sizes.size, np.inf)
    for kind in stage.kinds(keeps_attention):
        layers = np.where(sizes > limit, np.ceil(missing / kind.saved_of(load)), 0.0)
        mine = np.where(layers > stage.num_layers, np.inf, layers * kind.layer_forward.of_load(load))
        again_s = np.minimum(again_s, mine)
    return again_s


def fewest(seconds: Floats, costs: Floats, most_s: float) -> Ints:
    """Number of the degree with the least of `costs` that takes at most `most_s` for each document, else the fastest.

    `seconds`: [num_degrees, num_documents]; `costs`, of that shape or a column: devices, or seconds of all of them.
    """
    open_costs = np.where(seconds <= most_s, costs, np.inf)
    is_open = np.isfinite(open_costs).any(axis=0)
    return np.asarray(np.where(is_open, open_costs.argmin(axis=0), seconds.argmin(axis=0)))


class Devices:
    """Devices of equal sites that documents are placed on, in groups of any of these degrees, ascending."""

    def __init__(self, times: DocumentTimes, degrees: Sequence[int], num_devices: int, num_sites: int = 1) -> None:
        self.times, self.degrees, self._num = times, degrees, (num_devices, num_sites)
        longest = np.argsort(-times.seconds, axis=1, kind="stable")
        self._columns = (*times, longest, np.array(degrees, np.int64))

    def placed(self, chosen: Ints) -> tuple[Floats, Ints]:
        """(seconds until each device is free, first device of every document) for documents of degrees `chosen`.

        `chosen`: numbers of degrees. The largest groups come first; documents of one degree, the longest first, each
        go to the group whose chunks, filled up, would end first. Where a degree does not divide the devices of a site,
        the last of them are left to smaller groups.
        """
        from farpipe.planning.workload import pack_kernel  # here, for numba takes a third of a second to import

        kernel: Any = pack_kernel.place
        found: tuple[Floats, Ints] = kernel(*self._columns, np.asarray(chosen, np.int64), *self._num)
        return found

    def grouped(self, chosen: Ints) -> tuple[float, list[DeviceGroup]]:
        """(makespan, groups, the largest first) of the same."""
        free_s, first = self.placed(chosen)
        keys = sorted(set(zip((-chosen).tolist(), first.tolist(), strict=True)))
        return float(free_s.max()), [
            DeviceGroup(device, self.degrees[-number], np.flatnonzero((chosen == -number) & (first == device)))
            for number, device in keys
        ]

    def score(self, chosen: Ints) -> float:
        """Makespan and mean of the devices' seconds: what a move spares lets the next ones shorten the makespan."""
        free_s = self.placed(chosen)[0]
        return float(free_s.max() + free_s.mean())

    def shortest(self, starts: Sequence[Ints]) -> Ints:
        """The one with the least makespan."""
        return min(starts, key=lambda one: float(self.placed(one)[0].max()))

    def moved(self, chosen: Ints, passes: int) -> Ints:
        """The same after each of the longest documents, in turn, has gone to the degree with the least score."""
        seconds, least = self.times.seconds, self.score(chosen)
        longest = np.argsort(-seconds.min(axis=0), kind="stable")[:_NUM_MOVED].tolist()
        for _ in range(passes):
            before = least
            for document in longest:
                for number in np.flatnonzero(np.isfinite(seconds[:, document])).tolist():
                    other = chosen.copy()
                    other[document] = number
                    if number != chosen[document] and (its := self.score(other)) < least:
                        chosen, least = other, its
            if least == before:
                break
        return chosen


def assignments(
    times: DocumentTimes, degrees: Sequence[int], num_devices: int, num_sites: int = 1, passes: int = _MAX_PASSES
) -> list[tuple[float, list[DeviceGroup]]]:
    """(makespan, groups), each once, for the fewest devices and for the least seconds of all, improved by moves.

    Moves, in so many `passes`, where chunks' fixed times are paid by the token, which has fewer local optima; then
    where they are paid whole; and the latter alone. The first ones are also placed as if they were paid by the token.
    """
    devices = np.array(degrees, np.float64)[:, None]
    whole, smooth = (
        Devices(each, degrees, num_devices, num_sites) for each in (times, DocumentTimes.by_token(times.seconds))
    )
    ideal_s = float((times.seconds * devices).min(axis=0).sum()) / num_devices
    found, firsts = list[Ints](), list[Ints]()
    for costs in (devices, times.seconds * devices):
        starts = [fewest(times.seconds, costs, ideal_s / share) for share in _TRIED_SHARES]
        first = smooth.moved(smooth.shortest(starts), passes)
        found += [first, whole.moved(first, passes), whole.moved(whole.shortest(starts), passes)]
        firsts += [first] if times.fixed_s.any() else []  # else both place alike
    return [
        each.grouped(one)
        for each, chosen in ((whole, found), (smooth, firsts))
        for one in {one.tobytes(): one for one in chosen}.values()
    ]


def plan_groups(jobs: Sequence[Job], sizes: Ints, options: BatchOptions, below_s: float) -> BatchPlan | None:
    """The best plan of a batch on groups of several degrees; None where it is not below `below_s`.

    `jobs`: with one stage on every device, for each stage of ZeRO and each use of the sites that is to be tried.
    Degrees that leave devices over compete with the best plan without them, for estimates put them first too often.
    """
    families, best = [one for job in jobs if (one := family_of(job, sizes, options))], None
    for each in ([one.dividing for one in families], [one for one in families if one.dividing is not one]):
        if found := _best_of(each, sizes, options, below_s):
            best, below_s = found, found.step_s
    return best


def _best_of(families: Sequence[Family], sizes: Ints, options: BatchOptions, below_s: float) -> BatchPlan | None:
    tried = [
        (least_s + one.outside_s, number, groups)
        for number, one in enumerate(families)
        if one.ideal_s + one.outside_s < below_s
        for least_s, groups in one.assigned()
    ]
    best = None
    for estimate_s, number, groups in sorted(tried, key=lambda each: each[:2])[:_MAX_PLANNED]:
        if estimate_s >= below_s:  # plans take as long or up to 1 % longer
            break
        with suppress(InfeasibleError):
            if found := plan_assigned(families[number], groups, sizes, options, below_s):
                best, below_s = found, found.step_s
    return best


def family_of(job: Job, sizes: Ints, options: BatchOptions) -> Family | None:
    """All degrees of a job; None for less than two, and where a document fits in none."""
    layouts = list(group_layouts(job, int(sizes.max())))
    keeps = options.tries_keeping_attention
    if len(layouts) < 2:
        return None
    times = document_times([layout.costs for layout in layouts], sizes, keeps_attention=keeps)
    assert job.training.zero != "auto"
    is_one = bool(np.isfinite(times.seconds).any(axis=0).all())
    return Family(job.training.zero, layouts, times) if is_one else None


def group_layouts(job: Job, longest: int, profiles: Profiles | None = None) -> Iterator[ChunkLayout]:
    """Layouts of each degree that divides a site's devices, or the heads: those leave some to smaller groups.

    `job`: with one stage, and a replica on every device.
    """
    num_sites = len(job.layout.sites or ()) if job.layout.replicas == "across" else 1
    each_site, heads = (job.layout.data or 1) // num_sites, job.model.num_heads // (job.layout.tensor or 1)
    for degree in range(1, each_site + 1):
        if each_site % degree and heads % degree:
            continue
        pins = job.layout.model_copy(update={"data": each_site // degree * num_sites})
        try:
            yield chunk_layout(job.model_copy(update={"layout": pins}), longest, degree, profiles, uneven=True)
        except FarpipeError:
            continue


def plan_assigned(
    family: Family, groups: Sequence[DeviceGroup], sizes: Ints, options: BatchOptions, below_s: float = math.inf
) -> BatchPlan | None:
    """`placed_plans` of a family; None where the step is not below `below_s`."""
    costs = {layout.costs.context: layout.costs for layout in family.layouts}
    placed = placed_plans(costs, groups, family.num_devices, sizes, options, below_s)
    if not placed:
        return None
    placed.sort(key=lambda one: (-int(one.plan.batch.sequence_length.max()), -one.plan.step_s))
    plans = tuple(one.plan for one in placed)
    return BatchPlan(family.zero, family.dividing.layouts[-1], plans, places=tuple(placed))


def placed_plans(
    costs: Mapping[int, ChunkCosts],
    groups: Sequence[DeviceGroup],
    num_devices: int,
    sizes: Ints,
    options: BatchOptions,
    below_s: float = math.inf,
) -> list[PlacedPlan]:
    """Chunks of whole documents in every group; it begins when all of its devices are done with the larger ones.

    `costs` by degree. Empty where the step is not below `below_s`; InfeasibleError where documents do not fit.
    """
    free_s, found = np.zeros(num_devices), dict[int, PlacedPlan]()
    whole = replace(options, num_slices=1, several_pipelines=False)
    for index in _by_device(groups):
        group = groups[index]
        plan = plan_sequences(costs[group.degree], sizes[group.documents], whole).numbered(group.documents)
        devices = slice(group.first_device, group.first_device + group.degree)
        begin_s = float(free_s[devices].max())
        if begin_s + plan.step_s >= below_s:
            return []
        free_s[devices] = begin_s + _work_s(plan)
        found[index] = PlacedPlan(group.first_device, begin_s, costs[group.degree], plan)
    return [found[index] for index in range(len(groups))]


def _by_device(groups: Sequence[DeviceGroup]) -> list[int]:
    """Numbers of groups, given the largest first: device by device, so that a step too long is soon known.

    A group comes behind the larger ones that share devices with it.
    """
    order: dict[int, None] = {}

    def add(last: int) -> None:
        begin, end = groups[last].first_device, groups[last].first_device + groups[last].degree
        for index, one in enumerate(groups[:last]):
            if index not in order and one.first_device < end and begin < one.first_device + one.degree:
                add(index)
        order[last] = None

    for last in sorted(range(len(groups)), key=lambda index: groups[index].degree):
        if last not in order:
            add(last)
    return list(order)


def _work_s(plan: SequencePlan) -> float:
    """Seconds of a plan's actions in its one stage."""
    stages = [pipeline.problem.stages[0] for pipeline in plan.pipelines]
    return sum(sum(map(np.sum, (one.forward_s, one.input_grad_s, one.weight_grad_s))) for one in stages)
