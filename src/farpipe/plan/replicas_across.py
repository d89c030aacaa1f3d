"""The other use of a second site: a replica of the whole pipeline at each, and gradients that cross between them.

Replicas first reduce inside their site, then one exchange between the sites follows, a ring over the sites for every
stage: 2 (n - 1)/n of its gradients over each link, as soon as the stage's own reduction is done, one stage after the
other. This is an estimate to compare with, not a plan: plans pipeline across sites.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from farpipe.cost import JobCosts, memory
from farpipe.plan.candidates import Candidate
from farpipe.plan.evaluate import Evaluated, evaluate
from farpipe.simulate import Timeline
from farpipe.simulate.lowering import REDUCE
from farpipe.spec import Job, Link, Site


@dataclass(frozen=True)
class Exchange:
    """A step of replicas that exchange their gradients between sites."""

    sites: tuple[str, ...]
    step_s: float
    bytes_per_link: float
    """Over each link of the ring in a step."""


def replicas_across(job: Job, alone: Sequence[Evaluated], costs: JobCosts) -> Exchange | None:
    """A replica at each site that is like the first one, with the layout of what is best there `alone`.

    None where there are no two equal sites with links around, or their share of the batch is no whole number of
    microbatches.
    """
    if not alone:
        return None
    best = min(alone, key=lambda result: result.step_s)
    home = best.candidate.sites[0]
    sites = [site for _, site in job.used_sites() if _alike(site, home)]
    ring = [job.cluster.link(one.name, other.name) for one, other in zip(sites, [*sites[1:], sites[0]], strict=True)]
    num_microbatches, rest = divmod(best.candidate.layout.num_microbatches, len(sites))
    links = [link for link in ring if link is not None]
    if len(sites) < 2 or rest or len(links) < len(sites):
        return None
    share = job.training.model_copy(update={"global_batch": job.training.global_batch // len(sites)})
    layout = replace(best.candidate.layout, num_microbatches=num_microbatches)
    candidate = Candidate(layout, best.candidate.sites, best.candidate.in_v)
    mine = evaluate(job.model_copy(update={"training": share}), candidate, JobCosts(job.model, share, costs.profiles))
    return _exchange(mine, costs, sites, links) if isinstance(mine, Evaluated) else None


def _alike(site: Site, other: Site) -> bool:
    return site.model_copy(update={"name": ""}) == other.model_copy(update={"name": ""})


def _exchange(mine: Evaluated, costs: JobCosts, sites: Sequence[Site], links: Sequence[Link]) -> Exchange:
    """The slowest link sets the ring's pace, and each of its 2 (n - 1) steps takes the longest latency."""
    count = len(sites)
    rate = min(link.bandwidth_bytes_per_s for link in links)
    latency_s = 2 * (count - 1) * max(link.latency_s for link in links)
    sizes = [2 * (count - 1) / count * size for size in _gradient_bytes(mine, costs)]
    free_s, end_s = 0.0, mine.timeline.makespan_s
    for ready_s, size in sorted(zip(_reduced_s(mine.timeline, len(sizes)), sizes, strict=True)):
        free_s = max(free_s, ready_s) + size / rate
        end_s = max(end_s, free_s + latency_s)
    return Exchange(tuple(site.name for site in sites), end_s + mine.overhead_s, math.fsum(sizes))


def _gradient_bytes(mine: Evaluated, costs: JobCosts) -> list[float]:
    """Of every stage of one replica."""
    last, size = len(mine.placements) - 1, memory.gradient_bytes(costs.training.precision)
    found = []
    for index, placement in enumerate(mine.placements):
        site, ends = mine.candidate.sites[placement.rank], {"embedding": index == 0, "head": index == last}
        cost = costs.stage(mine.candidate.layout, site, placement.num_layers, placement.recompute, **ends)
        found.append(float(size * cost.num_params))
    return found


def _reduced_s(timeline: Timeline, num_stages: int) -> list[float]:
    """When every stage's gradients are ready at its site: after its last action, or its reduction inside the site."""
    ready = np.zeros(num_stages)
    np.maximum.at(ready, timeline.actions["stage"], timeline.actions["end_s"])
    reduced = timeline.messages[timeline.messages["kind"] == REDUCE]
    np.maximum.at(ready, reduced["stage"], reduced["arrival_s"])
    return [float(one) for one in ready]
