"""Layout of a job that trains on chunks: ranks over sites, layers so that no stage is slow."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from farpipe.cost import JobCosts, Layout, Placement, place_evenly
from farpipe.cost.chunk_profile import ChunkProfile
from farpipe.cost.chunks import ChunkCosts
from farpipe.cost.job_chunks import job_chunk_costs
from farpipe.errors import InfeasibleError, InputError
from farpipe.spec import Job, Site


class ChunkLayout(NamedTuple):
    """Ranks of the stages, and costs of chunks there."""

    layout: Layout
    placements: tuple[Placement, ...]
    costs: ChunkCosts


Profiles = Mapping[str, ChunkProfile]
"""By device."""


def chunk_costs(job: Job, longest: int, context: int = 1, profiles: Profiles | None = None) -> ChunkCosts:
    """The costs of `chunk_layout`; InputError where there are replicas, which divide a batch."""
    if (job.layout.data or 1) > 1:
        raise InputError("layout.data: a batch's chunks are planned for one pipeline; take 1 and divide the batch")
    return chunk_layout(job, longest, context, profiles).costs


def chunk_layout(job: Job, longest: int, context: int = 1, profiles: Profiles | None = None) -> ChunkLayout:
    """The stages of a job for chunks: pinned degrees, else one rank for each device (or `context` of them).

    Ranks are on the sites in their order, as many as devices; layers so that the slowest stage is as fast as can be.
    Stages go round the ranks `layout.virtual` times; with replicas across sites each of them has whole pipelines.
    InputError for pins that chunks can't keep, InfeasibleError when there are too few devices.
    """
    layout, sites = _layout(job, context)
    costs = JobCosts(job.model, job.training)
    layers = job.layout.layers or _balanced(job, costs, layout, sites, longest, context, profiles)
    placements = place_evenly([site.name for site in sites], layers)
    found = job_chunk_costs(costs, layout, placements, job.cluster, longest, context, profiles)
    return ChunkLayout(layout, placements, found)


def _layout(job: Job, context: int) -> tuple[Layout, list[Site]]:
    pins = job.layout
    tensor, data, virtual = pins.tensor or 1, pins.data or 1, pins.virtual or 1
    order = [job.cluster.site(name) for name in pins.sites or [site.name for site in job.cluster.sites]]
    homes = tuple(site.name for site in order) if pins.replicas == "across" and len(order) > 1 else ()
    if data % max(1, len(homes)):
        raise InputError(f"layout.data: {data} replicas can't be shared out evenly over {len(homes)} sites")
    each = tensor * context * (data // max(1, len(homes)))
    ranks = [site.num_devices // each for site in order]
    if homes:
        order, ranks = order[:1], [min(ranks)]
    most = min(sum(ranks), job.model.num_layers // virtual)
    num_ranks = pins.pipeline or (len(pins.layers) // virtual if pins.layers else most)
    if num_ranks > sum(ranks) or num_ranks < 1:
        raise InfeasibleError(
            f"{num_ranks or 1} ranks of {each} devices each need {(num_ranks or 1) * each}; the sites "
            f"{', '.join(f'{site.name} ({site.num_devices})' for site in order)} have room for {sum(ranks)} ranks"
        )
    sites = [site for site, count in zip(order, _shared_out(num_ranks, ranks), strict=True) for _ in range(count)]
    return Layout(num_ranks, data, tensor, virtual, 1, 1, homes), sites


def _shared_out(num_ranks: int, most: Sequence[int]) -> list[int]:
    """Ranks of every site, in proportion to what it can have; each site that can gets one if there are enough."""
    found = [0] * len(most)
    for _ in range(num_ranks):
        open_sites = [i for i, limit in enumerate(most) if found[i] < limit]
        found[min(open_sites, key=lambda i: ((found[i] + 1) / most[i], i))] += 1
    return found


def _balanced(
    job: Job,
    costs: JobCosts,
    layout: Layout,
    sites: Sequence[Site],
    longest: int,
    context: int,
    profiles: Profiles | None,
) -> tuple[int, ...]:
    """Layers one by one to the stage that stays fastest: the least time of the slowest, for layers are alike."""
    num_layers, count = job.model.num_layers, layout.num_stages
    if count > num_layers:
        raise InfeasibleError(f"{count} stages are too many for {num_layers} layers; pin layout.pipeline lower")
    start = [num_layers // count + (i < num_layers % count) for i in range(count)]
    one = job_chunk_costs(
        costs, layout, place_evenly([s.name for s in sites], start), job.cluster, longest, context, profiles
    )
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
