"""Layouts for a batch of documents: the site sets and degrees of every search, with what chunks ask of them."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Final

from farpipe.core.spec import Job
from farpipe.planning.cost import memory
from farpipe.planning.cost.adapters import trained_model_params
from farpipe.planning.cost.flops import step_flops
from farpipe.planning.cost.transfer import ring_bytes
from farpipe.planning.planner.candidates import (
    ZERO_STAGES,
    Candidate,
    context_degrees_of_chunks,
    figures,
    largest_sites,
    pipeline_degrees,
    placed,
    power,
    tensor_degrees,
    with_pins,
)
from farpipe.planning.planner.search import LARGE
from farpipe.planning.planner.site_sets import Sites, SiteSet
from farpipe.planning.workload.chunk import Ints
from farpipe.planning.workload.layout import degrees_of_chunks

_USED: Final = 0.4
"""Share of the devices' peak that computing takes, about: it orders site sets of which links may take as long."""


def document_layouts(job: Job, sizes: Ints, most_replicas: float) -> list[Candidate]:
    """Degrees on the best site sets of each kind, as for sequences of one length; of sets that differ in names alone on
    one."""
    if len([*job.used_sites()]) == 1:
        job = with_pins(job, replicas=None)  # whole pipelines at each of one site
    sites, different = Sites(largest_sites(job), int(sizes.sum())), dict[object, SiteSet]()
    for one in sorted(sites.site_sets(sites.whole, every_order=True), key=partial(_about_s, sites, sizes)):
        names = [sites.sites[index].name for index in one.sites]
        different.setdefault((one.kind, figures(job.cluster, min(names, names[::-1]))), one)
    chosen = sites.chosen(different.values(), LARGE.per_kind)
    return [found for one in chosen for found in _with_degrees(job, sites, one, most_replicas)]


def _about_s(sites: Sites, sizes: Ints, site_set: SiteSet) -> tuple[float, float]:
    """About the seconds of a step on these sites, computing and sending one after the other; and what all links take.

    A pipeline waits for its slowest link, replicas sum gradients over theirs.
    """
    job, whole = sites.job, sites.whole
    flops = step_flops(job.model, int(sizes.mean()) + 1, sizes.size)
    work_s = flops / (_USED * sum(power(sites.sites[index]) for index in site_set.sites))
    if site_set.homes:
        gradients = trained_model_params(job.model, job.training) * memory.gradient_bytes(job.training)
        slowest = min(float(whole.rate[pair]) for pair in pairwise((*site_set.homes, site_set.homes[0])))
        links_s = [ring_bytes("all-reduce", gradients, len(site_set.homes)) / slowest]
    else:
        weight = sites.weight(whole)
        links_s = [float(weight[ends]) for hop in pairwise(site_set.order) for ends in (hop, hop[::-1])]
    return work_s + max(links_s, default=0.0), sum(links_s)


def _with_degrees(job: Job, sites: Sites, site_set: SiteSet, most_replicas: float) -> Iterator[Candidate]:
    """Candidates of all degrees. Chunks are as many as a pipeline likes, so it has all ranks that the sites hold; of
    equally many ranks it has most replicas."""
    used, homes = [sites.sites[index] for index in site_set.sites], len(site_set.homes)
    path = site_set.order if job.layout.sites else min(site_set.order, site_set.order[::-1])
    order, names = [sites.sites[index] for index in path], tuple(site.name for site in used) * bool(homes)
    least, virtual = min(site.num_devices for site in used), job.layout.virtual or 1
    for tensor in tensor_degrees(job, used):
        for context in context_degrees_of_chunks(job, tensor, least // tensor):
            num_ranks = 0
            for inside in range(least // (tensor * context), 0, -1):
                data, rooms = inside * max(1, homes), [site.num_devices // (tensor * context * inside) for site in used]
                room = min(rooms) if homes else sum(rooms)
                most = max(pipeline_degrees(job, order, room, virtual, every=True), default=0)
                if job.layout.data in (None, data) and data <= most_replicas and most > num_ranks:
                    num_ranks = most
                    layout = degrees_of_chunks(num_ranks, data, tensor, context, virtual, names)
                    candidate = placed(job, order, layout, in_v=False, linked=True)
                    yield from [candidate] if candidate is not None else []


def jobs_of_groups(job: Job, sizes: Ints) -> list[Job]:
    """Jobs with one stage and a replica on every device, for ZeRO-1 and 3 where that is open; none for pinned degrees
    or several stages on a rank.

    Tensors are divided only where that is pinned.
    """
    pins = job.layout
    if {pins.context, pins.data} != {None} or (pins.virtual or 1) > 1:
        return []
    plain = with_pins(job, tensor=pins.tensor or 1, context=1)
    found = [
        with_pins(plain, context=None, pipeline=1, data=one.layout.data, sites=one.order, replicas=replicas)
        for one in document_layouts(plain, sizes, math.inf)
        for replicas in ["across" if one.layout.replica_sites else "inside"]
        if one.layout.pipeline == 1
    ]
    trainings = dict.fromkeys((job.training.decided(), job.training.decided(ZERO_STAGES[1])))
    return [one.model_copy(update={"training": each}) for one in found for each in trainings]
