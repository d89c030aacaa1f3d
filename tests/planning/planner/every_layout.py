"""Every layout that a job allows, over every order of every set of sites: what the planner's search is held against."""

from dataclasses import replace
from itertools import combinations, permutations

from farpipe.core.spec import differing_keys
from farpipe.planning.cost import Layout
from farpipe.planning.planner.candidates import (
    Candidate,
    context_exchanges,
    data_degrees,
    microbatches,
    pipeline_degrees,
    shapes,
    tensor_degrees,
)
from farpipe.planning.workload.layout import MAX_SITES, place_ranks, slowest_rate


def candidates(job):
    """Every layout that the job's pins, its batch and the sites' devices allow."""
    wanted = job.layout.replicas
    found = [] if wanted == "across" else list(_inside(job))
    found += [] if wanted == "inside" else list(_across(job))
    return found


def _inside(job):
    """Pipelines over one or several sites; the replicas of a rank are where the rank is."""
    for order in site_orders(job.cluster, job.layout.sites):
        for layout, in_v in _layouts(job, order):
            sites = place_ranks(order, layout.pipeline, layout.devices_per_rank)
            if sites is not None:
                yield Candidate(layout, tuple(sites), in_v)


def _across(job):
    """Whole pipelines at each of several sites, equally many, as far as the smallest of them has devices."""
    for homes in replica_sites(job.cluster, job.layout.sites):
        smallest, names = min(homes, key=lambda site: site.num_devices), tuple(site.name for site in homes)
        for layout, in_v in _layouts(job, (smallest,), len(homes)):
            spread = replace(layout, replica_sites=names)
            if place_ranks((smallest,), spread.pipeline, spread.devices_per_rank) is not None:
                yield Candidate(spread, homes[:1] * spread.pipeline, in_v)


def _layouts(job, order, times=1):
    """Layouts and whether they are in a V, on `times` the devices of `order` with as many replicas at least."""
    context, expert = job.layout.context or 1, job.layout.expert or 1
    num_devices = times * sum(site.num_devices for site in order) // context
    for tensor in tensor_degrees(job, order):
        for data in (d for d in data_degrees(job, num_devices // tensor) if d % times == 0):
            for microbatch_size, num_microbatches in microbatches(job, data):
                for virtual, in_v in shapes(job):
                    for pipeline in pipeline_degrees(job, order, num_devices // (tensor * data), virtual):
                        if pipeline > 1 or not in_v:
                            degrees = (pipeline, data, tensor, virtual, microbatch_size, num_microbatches)
                            for method in context_exchanges(job, tensor, context):
                                yield Layout(*degrees, (), context, method, expert), in_v


def site_orders(cluster, pinned):
    """Every order of every set of up to MAX_SITES sites with neighbours linked in both directions; fewer first."""
    if pinned is not None:
        order = tuple(cluster.site(name) for name in pinned)
        if cluster.missing_link(order) is None:
            yield order
        return
    for size in range(1, min(len(cluster.sites), MAX_SITES) + 1):
        for chosen in combinations(cluster.sites, size):
            for order in permutations(chosen):
                if cluster.missing_link(order) is None:
                    yield order


def replica_sites(cluster, pinned):
    """Every set of two and more sites that can each have whole replicas, as the ring with the fastest slowest link.

    They are alike in all but name and number of devices, so that one pipeline stands for all. With `pinned` all of
    those and no others.
    """
    sites = cluster.sites if pinned is None else tuple(cluster.site(name) for name in pinned)
    sizes = range(2, min(len(sites), MAX_SITES) + 1) if pinned is None else [len(sites)]
    for chosen in (chosen for size in sizes if size > 1 for chosen in combinations(sites, size)):
        if not any(differing_keys(chosen[0], site) for site in chosen[1:]):
            rings = [(chosen[0], *rest) for rest in permutations(chosen[1:])]
            best = max(rings, key=lambda ring: slowest_rate(cluster, ring))
            if slowest_rate(cluster, best):
                yield best
