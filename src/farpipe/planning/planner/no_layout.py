"""Reasons why the pins of a job, its batch and the devices of its sites allow no layout."""

import math
from itertools import combinations
from typing import Final

from farpipe.core.spec import Job, differing_keys
from farpipe.core.units import counted
from farpipe.planning.planner.candidates import context_degrees, data_degrees, shapes, tensor_degrees

MAX_PAIRS_LISTED: Final = 3
"""Largest number of pairs of heterogeneous sites that a message names."""


def why_none(job: Job) -> str:
    """Reason why the job's pins, its batch and the sites' devices allow no layout."""
    pins = job.layout
    if pins.sites and (missing := job.cluster.missing_link([job.cluster.site(name) for name in pins.sites])):
        return (
            f"layout.sites: {' > '.join(pins.sites)} needs a link from {missing[0]} to {missing[1]}; "
            "add it to cluster.links or choose another order"
        )
    if pins.replicas == "across" and (obstacle := why_no_replicas(job)):
        return f'layout.replicas = "across": {obstacle}'
    if obstacle := _why_too_few(job):
        return f"layout: {obstacle}"
    if pins.replicas == "across":
        return (
            'layout.replicas = "across": data and training.global_batch must be multiples of the number of sites, and '
            "every site must have pipeline x tensor x context devices for each of its replicas"
        )
    if obstacle := _why_no_experts(job) or _why_no_stages(job):
        return obstacle
    degrees = [degree for degree in (pins.data, pins.tensor, pins.context) if degree]
    largest = max((site for _, site in job.used_sites()), key=lambda site: site.num_devices)
    all_in_v = all(in_v for _, in_v in shapes(job))
    pair = f"; schedule.method = {job.schedule!r} needs two ranks at least, choose '1f1b' for one" if all_in_v else ""
    return (
        f"layout: no placement of the pinned degrees on the {counted(len(job.cluster.sites), 'site')}: every pipeline "
        f"rank needs its {counted(math.prod(degrees), 'device')} on one site (the largest, {largest.name}, has "
        f"{largest.num_devices}), every site in the order at least one rank, and every stage at least one of the "
        f"{job.model.num_layers} layers{pair}"
    )


def _why_too_few(job: Job) -> str:
    """The pinned degrees for which a site or the cluster has too few devices; empty if they have enough."""
    pins = job.layout
    twins = (pins.tensor or 1) * (pins.context or 1)
    if small := [name for name in pins.sites or () if job.cluster.site(name).num_devices < twins]:
        return (
            f"every pipeline rank needs {twins} devices (tensor x context) at its site, {small[0]} has "
            f"{job.cluster.site(small[0]).num_devices}; give it more or leave it out of layout.sites"
        )
    sequences = (pins.num_microbatches or 0) * (job.training.microbatch_size or 0)
    data = pins.data or (job.training.global_batch // sequences if sequences else 1)
    needed, there = (pins.pipeline or 1) * twins * data, job.cluster.num_devices
    if needed <= there:
        return ""
    context = f" x context {pins.context}" if pins.context else ""
    return (
        f"pipeline {pins.pipeline or 1} x data {data} x tensor {pins.tensor or 1}{context} needs {needed} devices, the "
        f"cluster has {there}; add {counted(needed - there, 'device')} or pin less"
    )


def _why_no_experts(job: Job) -> str:
    """Reason why no rank that the other pins and the devices allow can share the pinned experts; empty if one can."""
    pins, degree, experts = job.layout, job.layout.expert or 1, job.model.experts
    most = job.cluster.num_devices // (pins.pipeline or 1)
    widths = [t * c for t in tensor_degrees(job, job.cluster.sites) for c in context_degrees(job, most)]
    shares = {data * width for width in widths for data in data_degrees(job, most // width)}
    if experts is None or not shares or any(size % degree == 0 for size in shares):
        return ""
    able = [e for e in range(1, degree) if not experts.num_experts % e and any(size % e == 0 for size in shares)]
    return (
        f"layout.expert: {degree} does not divide the devices (data x context x tensor) that a rank can have, "
        f"{max(shares)} at most; {', '.join(map(str, able))} would"
    )


def _why_no_stages(job: Job) -> str:
    """Reason why no rank can have the stages of `layout.layers`; empty where their number on a rank is pinned."""
    pins = job.layout
    if pins.layers is None or pins.stages_per_rank is not None:
        return ""
    count = len(pins.layers)
    open_ones = "two stages" if count % 2 == 0 else "one stage"
    return (
        f"layout.layers: no placement of its {count} stages with at most {open_ones} on a rank; pin layout.pipeline to "
        f"have more on each: {', '.join(str(p) for p in range(1, count) if not count % p)} divide {count}"
    )


def why_no_replicas(job: Job) -> str:
    """The key or link that keeps the job's sites from having a whole pipeline each; empty if nothing does."""
    pairs = list(combinations([site for _, site in job.used_sites()], 2))
    if not pairs:
        return "replicas at each of several sites need two sites at least; add one or leave it out"
    identical = [(a, b) for a, b in pairs if not differing_keys(a, b)]
    if any(job.cluster.missing_link(pair) is None for pair in identical):
        return ""  # two sites are a ring, and every ring has two that are
    if identical:
        source, target = job.cluster.missing_link(identical[0]) or (identical[0][0].name, identical[0][1].name)
        return f"replicas at each of several sites need links both ways: there is none from {source} to {target}"
    listed = [f"{a.name} and {b.name} differ in {', '.join(differing_keys(a, b))}" for a, b in pairs[:MAX_PAIRS_LISTED]]
    more = f"; and {len(pairs) - MAX_PAIRS_LISTED} further pairs" if len(pairs) > MAX_PAIRS_LISTED else ""
    return f"replicas at each of several sites need identical sites: {'; '.join(listed)}{more}"
