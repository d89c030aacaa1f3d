"""Documents on groups of neighbouring devices whose context degrees follow their lengths, in one stage.

As Megatron's dynamic context parallelism and FlexSP (arXiv 2412.01523): every document has the fewest devices that keep
it below a time, which is searched, or those that spend least on it. From both a local search moves the long documents
to other degrees. Larger groups come first, and smaller ones begin on devices that are done with them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from farpipe.cost.chunks import ChunkCosts
from farpipe.errors import FarpipeError, InfeasibleError
from farpipe.sequences.batch_options import BatchOptions
from farpipe.sequences.batch_plan import BatchPlan, GroupPlace, exchange_s
from farpipe.sequences.checkpointing import unrecomputed_tokens
from farpipe.sequences.chunk import Floats, Ints, as_load
from farpipe.sequences.layout import ChunkLayout, chunk_layout, longest_first, sequence_seconds
from farpipe.sequences.planner import SequencePlan, plan_sequences
from farpipe.spec import Job

_TRIED_SHARES: Final = np.geomspace(1, 64, 25)
"""Tried limits of a document's time: the batch's time, if all devices were always busy, over these."""
_NUM_MOVED: Final = 48
"""Number of documents, the longest, that the local search moves to other degrees."""
_MAX_PASSES: Final = 3
"""Number of times that it goes over them at most: a fourth found nothing in six batches."""
_MAX_PLANNED: Final = 4
"""Number of assignments of documents to groups, the best by the estimate, that are planned to the end: of degrees that
leave no device over, and of all."""
_NOT_WORTH: Final = 1.02
"""Ratio of an assignment's estimate to the step to beat above which it is dropped: estimates are about so exact."""


class DeviceGroup(NamedTuple):
    """Documents that `degree` neighbouring devices share."""

    first_device: int
    degree: int
    documents: Ints


@dataclass(frozen=True)
class _Family:
    """Layouts that differ in their context degree alone, ascending, and what each document takes in each."""

    zero: int
    layouts: list[ChunkLayout]
    seconds: Floats
    """[num_degrees, num_documents]"""

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
        return float((self.seconds * np.array(self.degrees)[:, None]).min(axis=0).sum()) / self.num_devices

    @cached_property
    def dividing(self) -> "_Family":
        """The degrees that leave no device over; itself where all do."""
        is_one = [layout.num_devices == self.layouts[0].num_devices for layout in self.layouts]
        layouts = [layout for layout, divides in zip(self.layouts, is_one, strict=True) if divides]
        return self if all(is_one) else _Family(self.zero, layouts, self.seconds[is_one])

    def assigned(self) -> list[tuple[float, list[DeviceGroup]]]:
        """`assignments` on the family's devices."""
        num_sites = max(1, len(self.layouts[0].layout.replica_sites))
        return assignments(self.seconds, self.degrees, self.num_devices, num_sites)


def document_seconds(costs: ChunkCosts, sizes: Ints, *, keeps_attention: bool = True) -> Floats:
    """Forward and backward of every document in one stage, infinite where it does not fit: [num].

    Packed with others up to the tokens that recompute nothing; longer ones are alone and recompute as many layers as
    they have to, keeping attention's results where that is faster.
    """
    stage, rank, load = costs.stages[0], costs.base.ranks[0], as_load(sizes)
    room = math.inf if rank.memory_bytes is None else rank.memory_bytes - rank.static_bytes
    limit = max(1, unrecomputed_tokens(costs))
    fixed_s = stage.laws.total.fixed_s * np.minimum(1.0, sizes / limit)
    beside = max(stage.working_bytes, stage.logit_bytes) * load.tokens
    missing = np.maximum(0.0, stage.held_bytes(load, 0) + beside - room)
    again_s = np.full(sizes.size, np.inf)
    for kind in stage.kinds(keeps_attention):
        layers = np.where(sizes > limit, np.ceil(missing / kind.saved_of(load)), 0.0)
        mine = np.where(layers > stage.num_layers, np.inf, layers * kind.layer_forward.of_load(load))
        again_s = np.minimum(again_s, mine)
    return np.asarray(sequence_seconds(costs, sizes) + fixed_s + again_s)


def fewest(seconds: Floats, costs: Floats, most_s: float) -> Ints:
    """Number of the degree with the least of `costs` that takes at most `most_s` for each document, else the fastest.

    `seconds`: [num_degrees, num_documents]; `costs`, of that shape or a column: devices, or seconds of all of them.
    """
    open_costs = np.where(seconds <= most_s, costs, np.inf)
    is_open = np.isfinite(open_costs).any(axis=0)
    return np.asarray(np.where(is_open, open_costs.argmin(axis=0), seconds.argmin(axis=0)))


def grouped(
    seconds: Floats, degrees: Sequence[int], num_devices: int, chosen: Ints, num_sites: int = 1
) -> tuple[Floats, list[DeviceGroup]]:
    """(seconds until each device is free, groups, the largest first) where document i has degree number `chosen[i]`.

    Those of one degree the longest first, each to the group that is free first. `seconds`: [num_degrees,
    num_documents], `degrees` ascending. Where one does not divide the devices of a site, the last of them are left to
    smaller groups.
    """
    free_s, each_site, groups = np.zeros(num_devices), num_devices // num_sites, []
    for number in reversed(range(len(degrees))):
        mine, degree = np.flatnonzero(chosen == number), degrees[number]
        if not mine.size:
            continue
        firsts = [s * each_site + first for s in range(num_sites) for first in range(0, each_site - degree + 1, degree)]
        free_of_groups = np.array([free_s[first : first + degree].max() for first in firsts])
        for index, part in enumerate(longest_first(seconds[number, mine], free_of_groups)):
            if part.size:
                groups.append(DeviceGroup(firsts[index], degree, mine[part]))
                end_s = free_of_groups[index] + seconds[number, mine[part]].sum()
                free_s[firsts[index] : firsts[index] + degree] = end_s
    return free_s, groups


def assignments(
    seconds: Floats, degrees: Sequence[int], num_devices: int, num_sites: int = 1, passes: int = _MAX_PASSES
) -> list[tuple[float, list[DeviceGroup]]]:
    """(makespan, groups) for the fewest devices and for the least seconds of all, improved by moving documents.

    A move, in so many `passes` over the longest documents, is kept where makespan and mean of the devices' seconds are
    less in sum: what is no longer spent lets the next moves shorten the makespan.
    """

    def placed(chosen: Ints) -> tuple[Floats, list[DeviceGroup]]:
        return grouped(seconds, degrees, num_devices, chosen, num_sites)

    def score(chosen: Ints) -> float:
        free_s = placed(chosen)[0]
        return float(free_s.max() + free_s.mean())

    devices, found = np.array(degrees, np.float64)[:, None], []
    ideal_s = float((seconds * devices).min(axis=0).sum()) / num_devices
    for costs in (devices, seconds * devices):
        starts = [fewest(seconds, costs, ideal_s / share) for share in _TRIED_SHARES]
        start = min(starts, key=lambda one: float(placed(one)[0].max()))
        free_s, groups = placed(_moved(start, seconds, score, passes))
        found.append((float(free_s.max()), groups))
    return found


def _moved(chosen: Ints, seconds: Floats, score: Callable[[Ints], float], passes: int) -> Ints:
    """The same after each of the longest documents, in turn, has gone to the degree with the least score."""
    longest, least = np.argsort(-seconds.min(axis=0), kind="stable")[:_NUM_MOVED].tolist(), score(chosen)
    for _ in range(passes):
        before = least
        for document in longest:
            for number in np.flatnonzero(np.isfinite(seconds[:, document])).tolist():
                other = chosen.copy()
                other[document] = number
                if number != chosen[document] and (its := score(other)) < least:
                    chosen, least = other, its
        if least == before:
            break
    return chosen


def plan_groups(jobs: Sequence[Job], sizes: Ints, options: BatchOptions, below_s: float) -> BatchPlan | None:
    """The best plan of a batch on groups of several degrees; None where it is not below `below_s`.

    `jobs`: with one stage on every device, for each stage of ZeRO and each use of the sites that is to be tried.
    Degrees that leave devices over compete with the best plan without them, for estimates put them first too often.
    """
    families, best = [one for job in jobs if (one := _family(job, sizes, options))], None
    for each in ([one.dividing for one in families], [one for one in families if one.dividing is not one]):
        if found := _best_of(each, sizes, options, below_s):
            best, below_s = found, found.step_s
    return best


def _best_of(families: Sequence[_Family], sizes: Ints, options: BatchOptions, below_s: float) -> BatchPlan | None:
    tried = [
        (least_s + one.outside_s, number, groups)
        for number, one in enumerate(families)
        if one.ideal_s + one.outside_s < below_s
        for least_s, groups in one.assigned()
    ]
    best = None
    for estimate_s, number, groups in sorted(tried, key=lambda each: each[:2])[:_MAX_PLANNED]:
        if estimate_s > _NOT_WORTH * below_s:
            break
        try:
            found = _planned(families[number], groups, sizes, options)
        except InfeasibleError:
            continue
        if found.step_s < below_s:
            best, below_s = found, found.step_s
    return best


def _family(job: Job, sizes: Ints, options: BatchOptions) -> _Family | None:
    """All degrees of a job; None for less than two, and where a document fits in none."""
    layouts = list(_layouts(job, int(sizes.max())))
    keeps = options.tries_keeping_attention
    seconds = np.array([document_seconds(layout.costs, sizes, keeps_attention=keeps) for layout in layouts])
    assert job.training.zero != "auto"
    is_one = len(layouts) > 1 and bool(np.isfinite(seconds).any(axis=0).all())
    return _Family(job.training.zero, layouts, seconds) if is_one else None


def _layouts(job: Job, longest: int) -> Iterator[ChunkLayout]:
    """Layouts of each degree that divides a site's devices, or the heads: those leave some to smaller groups."""
    num_sites = len(job.layout.sites or ()) if job.layout.replicas == "across" else 1
    each_site, heads = (job.layout.data or 1) // num_sites, job.model.num_heads // (job.layout.tensor or 1)
    for degree in range(1, each_site + 1):
        if each_site % degree and heads % degree:
            continue
        pins = job.layout.model_copy(update={"data": each_site // degree * num_sites})
        try:
            yield chunk_layout(job.model_copy(update={"layout": pins}), longest, degree, uneven=True)
        except FarpipeError:
            continue


def _planned(family: _Family, groups: Sequence[DeviceGroup], sizes: Ints, options: BatchOptions) -> BatchPlan:
    """Chunks of whole documents in every group; it begins when all of its devices are done with the larger ones."""
    free_s, found = np.zeros(family.num_devices), []
    whole = replace(options, num_slices=1, several_pipelines=False)
    for group in groups:
        layout = family.layouts[family.degrees.index(group.degree)]
        plan = plan_sequences(layout.costs, sizes[group.documents], whole).numbered(group.documents)
        devices = slice(group.first_device, group.first_device + group.degree)
        place = GroupPlace(group.first_device, float(free_s[devices].max()), layout)
        free_s[devices] = place.begin_s + _work_s(plan)
        found.append((place, plan))
    found.sort(key=lambda one: (-int(one[1].batch.sequence_length.max()), -one[1].step_s))
    places, plans = zip(*found, strict=True)
    widest = family.dividing.layouts[-1]
    kind = "replicas across sites" if widest.layout.replica_sites else "one site"
    return BatchPlan(f"{kind}, groups of devices", family.zero, widest, plans, places=places)


def _work_s(plan: SequencePlan) -> float:
    """Seconds of a plan's actions in its one stage."""
    stages = [pipeline.problem.stages[0] for pipeline in plan.pipelines]
    return sum(sum(map(np.sum, (one.forward_s, one.input_grad_s, one.weight_grad_s))) for one in stages)
