"""Ranks over sites, for every workload; of a job that trains on chunks layers over stages, sequences over replicas."""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.spec import Cluster, ContextExchange, Job, Site, differing_keys
from farpipe.core.units import counted
from farpipe.planning.cost import JobCosts, Layout, Placement, place_evenly
from farpipe.planning.cost.chunk_profile import ChunkProfile
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.cost.job_chunks import job_chunk_costs
from farpipe.planning.workload.chunk import Floats, Ints

MAX_SITES: Final = 6
"""Largest number of sites in one pipeline."""


class ChunkLayout(NamedTuple):
    """Ranks of the stages, and costs of chunks there."""

    layout: Layout
    placements: tuple[Placement, ...]
    costs: ChunkCosts

    @property
    def use(self) -> str:
        """``one site``, ``pipeline over sites`` or ``replicas across sites``."""
        if self.layout.replica_sites:
            return "replicas across sites"
        return "pipeline over sites" if len({one.site for one in self.placements}) > 1 else "one site"

    @property
    def kind(self) -> str:
        """The same; ``, no pipeline`` is added for one stage."""
        return self.use + ", no pipeline" * (self.costs.num_stages == 1)

    @property
    def devices_per_stage(self) -> int:
        """Devices that have each stage of one replica: tensor degree x devices that share chunks."""
        return self.layout.tensor * self.layout.context

    @property
    def devices(self) -> dict[str, int]:
        """Devices of all replicas by site."""
        ranks = Counter({placement.rank: placement.site for placement in self.placements}.values())
        for site in self.layout.replica_sites[1:]:
            ranks[site] = self.layout.pipeline
        return {site: number * self.devices_per_stage * self.layout.data_inside for site, number in ranks.items()}

    @property
    def num_devices(self) -> int:
        """Devices of all replicas."""
        return sum(self.devices.values())

    def to_figures(self) -> dict[str, int | dict[str, int]]:
        """The figures of ``--json``: `num_stages`, `devices_per_stage`, `devices`."""
        return {
            "num_stages": len(self.placements),
            "devices_per_stage": self.devices_per_stage,
            "devices": self.devices,
        }


Profiles = Mapping[str, ChunkProfile]
"""Measured chunk times of every device by name."""


def chunk_costs(job: Job, longest: int, context: int | None = None) -> ChunkCosts:
    """Costs of chunks in a job's own layout, with its own `context` where none is given; errors as for `chunk_layout`.

    ZeRO-1 and sequence parallelism are taken where the job leaves them open.
    """
    settled = job.model_copy(update={"training": job.training.decided()})
    return chunk_layout(settled, longest, context or job.layout.context or 1).costs


def chunk_layout(
    job: Job, longest: int, context: int = 1, profiles: Profiles | None = None, *, uneven: bool = False
) -> ChunkLayout:
    """The stages of a job for chunks: pinned degrees, else one rank for each device (or `context` of them).

    Ranks are on the sites in their order, as many as devices; layers so that the slowest stage is as fast as can be.
    Stages go round the ranks `layout.virtual` times; with replicas across sites each of them has whole pipelines.
    InputError for pins that chunks can't keep and a `context` that divides neither heads nor devices (`uneven`: that
    does not divide devices or exceeds the heads), InfeasibleError when there are too few devices.
    """
    return placed_layout(job, *pinned_layout(job, context, uneven=uneven), longest, profiles)


def placed_layout(
    job: Job, layout: Layout, sites: Sequence[Site], longest: int, profiles: Profiles | None = None
) -> ChunkLayout:
    """Degrees on the site of every rank, with layers and costs; errors as for `chunk_layout`."""
    costs = JobCosts(job.model, job.training)
    layers = job.layout.layers or _balanced(job, costs, layout, sites, longest, profiles)
    placements = place_evenly([site.name for site in sites], layers)
    return ChunkLayout(layout, placements, _costs(job, costs, layout, placements, longest, profiles))


def _costs(
    job: Job,
    costs: JobCosts,
    layout: Layout,
    placements: tuple[Placement, ...],
    longest: int,
    profiles: Profiles | None,
) -> ChunkCosts:
    whole = replace(layout, context=1, context_exchange="ring")  # laws of chunks are divided by `context` themselves
    return job_chunk_costs(costs, whole, placements, job.cluster, longest, layout.context, profiles)


def degrees_of_chunks(
    num_ranks: int, data: int, tensor: int, context: int, virtual: int, homes: tuple[str, ...]
) -> Layout:
    """Layout with these degrees, whose chunks `context` devices share by Ulysses."""
    exchange: ContextExchange = "ring" if context == 1 else "ulysses"
    return Layout(num_ranks, data, tensor, virtual, 1, 1, homes, context, exchange)


def pinned_layout(job: Job, context: int, *, uneven: bool = False) -> tuple[Layout, list[Site]]:
    """Degrees of `chunk_layout`, and the site of every rank."""
    pins = job.layout
    tensor, data, virtual = pins.tensor or 1, pins.data or 1, pins.virtual or 1
    order = [job.cluster.site(name) for name in pins.sites or [site.name for site in job.cluster.sites]]
    homes = tuple(site.name for site in order) if pins.replicas == "across" and len(order) > 1 else ()
    if homes:
        _expect_identical(order)
    if data % max(1, len(homes)):
        raise InputError(f"layout.data: {data} replicas can't be shared out evenly over {len(homes)} sites")
    each = tensor * context * (data // max(1, len(homes)))
    room = {site.name: site.num_devices // each for site in order}
    if homes:
        order, room = order[:1], {order[0].name: min(room.values())}
    most = min(sum(room.values()), job.model.num_layers // virtual)
    num_ranks = pins.pipeline or (len(pins.layers) // virtual if pins.layers else most)
    if num_ranks > sum(room.values()) or num_ranks < 1:
        raise InfeasibleError(
            f"no place for {counted(num_ranks or 1, 'rank')} of {counted(each, 'device')} each: there is room for "
            f"{sum(room.values())} at {', '.join(f'{site.name} ({site.num_devices})' for site in order)}"
        )
    if not (uneven and job.model.num_kv_heads >= tensor * context):
        _expect_shared(job, tensor, context, order)
    roomy = sorted((site for site in order if room[site.name]), key=lambda site: -room[site.name])[:num_ranks]
    sites = place_ranks([site for site in order if site in roomy], num_ranks, each)
    assert sites is not None
    return degrees_of_chunks(num_ranks, data, tensor, context, virtual, homes), sites


def _expect_identical(sites: Sequence[Site]) -> None:
    """InputError where one site's pipelines can't stand for those of all."""
    for site in sites[1:]:
        if keys := differing_keys(sites[0], site):
            raise InputError(
                f"layout.replicas: whole pipelines at each of several sites need identical sites: {sites[0].name} and "
                f'{site.name} differ in {", ".join(keys)}; pin layout.sites, or replicas = "inside"'
            )


def _expect_shared(job: Job, tensor: int, context: int, sites: Sequence[Site]) -> None:
    """InputError where the devices that share chunks have no whole heads each, or leave some of a site over."""
    if context == 1 or _is_shared(job, tensor * context, sites):
        return
    fit = [str(c) for c in range(1, sites[0].num_devices + 1) if _is_shared(job, tensor * c, sites)]
    beside = f" beside tensor {tensor}" if tensor > 1 else ""
    raise InputError(
        f"{context} devices for each stage{beside} (Ulysses): they must divide the model's {job.model.num_heads} heads "
        f"and {job.model.num_kv_heads} key heads, and the devices of every site "
        f"({', '.join(str(site.num_devices) for site in sites)}); take {', '.join(fit) or 'another tensor degree'}"
    )


def _is_shared(job: Job, num_devices: int, sites: Sequence[Site]) -> bool:
    return job.model.divides_heads(num_devices) and not any(site.num_devices % num_devices for site in sites)


def _balanced(
    job: Job,
    costs: JobCosts,
    layout: Layout,
    sites: Sequence[Site],
    longest: int,
    profiles: Profiles | None,
) -> tuple[int, ...]:
    """Layers one by one to the stage that stays fastest: the least time of the slowest, for layers are identical."""
    num_layers, count = job.model.num_layers, layout.num_stages
    if count > num_layers:
        raise InfeasibleError(f"{count} stages are too many for {num_layers} layers; pin layout.pipeline lower")
    start = [num_layers // count + (i < num_layers % count) for i in range(count)]
    one = _costs(job, costs, layout, place_evenly([site.name for site in sites], start), longest, profiles)
    tokens = float(job.training.sequence_length)
    total = [stage.laws.total for stage in one.stages]
    of_layer = [stage.layer.total for stage in one.stages]

    def seconds(index: int, num: int) -> float:
        ends = total[index] + of_layer[index].times(-start[index])
        law = ends + of_layer[index].times(num)
        return law.pair_s * tokens**2 / 2 + law.token_s * tokens + law.fixed_s

    layers = [1] * count
    for _ in range(num_layers - count):
        layers[min(range(count), key=lambda i: (seconds(i, layers[i] + 1), i))] += 1
    return tuple(layers)


def shares(costs: ChunkCosts, lengths: Ints, num_replicas: int) -> list[Ints]:
    """Numbers of the sequences of every replica, ascending; each has at least one.

    The longest first, each to the replica that has least to do (Graham's LPT, at most 4/3 of the best); a sequence
    takes what it takes on the rank that is slowest over all. InfeasibleError for fewer sequences than replicas.
    """
    if lengths.size < num_replicas:
        raise InfeasibleError(f"{num_replicas} replicas can't share {lengths.size} sequences; each needs one")
    if num_replicas == 1:
        return [np.arange(lengths.size)]
    return longest_first(sequence_seconds(costs, lengths), np.zeros(num_replicas))


def longest_first(seconds: Floats, free_s: Floats) -> list[Ints]:
    """Numbers of the tasks of every machine, ascending, where machine m is free from `free_s` [m] on: Graham's LPT."""
    found: list[list[int]] = [[] for _ in free_s]
    busy = [(begin_s, 0, machine) for machine, begin_s in enumerate(free_s.tolist())]
    heapq.heapify(busy)
    for index in np.argsort(-seconds, kind="stable").tolist():
        total_s, count, machine = heapq.heappop(busy)
        found[machine].append(index)
        heapq.heappush(busy, (total_s + float(seconds[index]), count + 1, machine))
    return [np.array(sorted(mine), np.int64) for mine in found]


def sequence_seconds(costs: ChunkCosts, lengths: Ints) -> Floats:
    """Forward and backward of every sequence, without fixed times, on the rank that is slowest over all: [num]."""
    tokens = lengths.astype(np.float64)
    pairs = tokens**2 / 2
    laws = [stage.laws.total for stage in costs.folded.stages]
    rows = [law.token_s * tokens + law.pair_s * pairs for law in laws]
    return max(rows, key=lambda row: float(row.sum()))


def slowest_rate(cluster: Cluster, ring: Sequence[Site]) -> float:
    """Bytes per second of the slowest link around; 0 where one is missing, in either direction."""
    links = [
        cluster.link(*ends) for a, b in pairwise((*ring, ring[0])) for ends in ((a.name, b.name), (b.name, a.name))
    ]
    there = [link.bandwidth_bytes_per_s for link in links[::2] if link is not None]
    return min(there) if None not in links else 0.0


def place_ranks(order: Sequence[Site], num_ranks: int, devices_per_rank: int) -> list[Site] | None:
    """The site of every pipeline rank, in proportion to what the sites hold; None when they can't hold them.

    A rank with all its tensor- and data-parallel devices is on one site. Every site of `order` gets at least one rank.
    """
    counts = [0] * len(order)
    if not share_ranks(num_ranks, [site.num_devices // devices_per_rank for site in order], counts):
        return None
    return [site for site, count in zip(order, counts, strict=True) for _ in range(count)]


def share_ranks(num_ranks: int, most: Sequence[int], counts: list[int]) -> bool:
    """Fill `counts`: ranks of every site, in proportion to `most` of them; False where that many don't fit.

    Every site gets one rank at least, and `most` at most. Plain loops, for `lattice_kernel` compiles them.
    """
    total, given = 0, 0
    for number in most:
        if number < 1:
            return False
        total += number
    if total < num_ranks or num_ranks < len(most):
        return False
    for k in range(len(most)):
        counts[k] = max(1, int(num_ranks * most[k] / total))
        given += counts[k]
    while given != num_ranks:
        step = 1 if given < num_ranks else -1
        best, gain = -1, -math.inf
        for k in range(len(most)):
            lack = step * (num_ranks * most[k] / total - counts[k])
            if (counts[k] < most[k] if step > 0 else counts[k] > 1) and lack > gain:
                best, gain = k, lack
        counts[best] += step
        given += step
    return True
