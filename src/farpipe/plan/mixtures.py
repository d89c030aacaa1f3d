"""Mixtures: a pipeline over each of two groups of sites, and replicas across the groups.

Each group trains a share of the batch on a pipeline of its own and the groups exchange gradients every step, layer by
layer between the sites that hold it. A closed form on top of simulated pipelines; the exchange is not hidden.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from farpipe.cost import JobCosts, memory
from farpipe.cost.transfer import ring_bytes
from farpipe.plan.evaluate import Evaluated
from farpipe.plan.guided import kind_of
from farpipe.plan.lattice import Lattice
from farpipe.plan.separate_sites import SideBySide, best_for_share, pins_one_layout, shares_of_batch, strongest
from farpipe.spec import Job

MAX_GROUP: Final = 2
"""Sites in a group."""
Group = tuple[str, ...]


@dataclass(frozen=True)
class Mixture(SideBySide):
    """Two groups of sites side by side, one step of the whole batch."""

    exchanged_bytes: Mapping[str, float]
    """Of one step, by directed link between the groups."""


def mixture(job: Job, costs: JobCosts) -> Mixture | None:
    """The most promising pair of groups, one of them of several sites at least; None where there is none.

    None as well with fewer than three sites and with pins on what would differ between the groups.
    """
    if pins_one_layout(job) or job.layout.replicas == "inside" or len(job.cluster.sites) < 3:
        return None
    times = _estimates_s(job, costs)
    pairs = [pair for pair in _pairs(job) if all(frozenset(group) in times for group in pair)]
    if not pairs:
        return None
    best = max(pairs, key=lambda pair: sum(1 / times[frozenset(group)] for group in pair))
    return _joined(job, costs, best, [times[frozenset(group)] for group in best])


def _pairs(job: Job) -> Iterator[tuple[Group, Group]]:
    """Two groups of the strongest sites that have no site in common, all of them together if possible."""
    names = [site.name for site in strongest(job.cluster.sites)]
    groups = [group for size in range(1, MAX_GROUP + 1) for group in combinations(names, size)]
    for one, other in combinations(groups, 2):
        if not set(one) & set(other) and len(one) + len(other) > 2:
            yield one, other


def _estimates_s(job: Job, costs: JobCosts) -> dict[frozenset[str], float]:
    """About what a step of the whole batch takes on a pipeline over each set of sites."""
    lattice = Lattice(job, costs)
    found = (promises[0] for promises in lattice.promises(lattice.whole, 1) if promises[0].use.kind != "replicas")
    return {frozenset(lattice.sites[index].name for index in one.use.order): one.step_s for one in found}


def _joined(job: Job, costs: JobCosts, pair: Sequence[Group], times: Sequence[float]) -> Mixture | None:
    shares = shares_of_batch(job.training.global_batch, times)
    if min(shares) == 0:
        return None
    found = [_alone(job, costs, group, share) for group, share in zip(pair, shares, strict=True)]
    if found[0] is None or found[1] is None:
        return None
    sent = _exchanged_bytes(job, found[0], found[1])
    links = {link.name: link for link in job.cluster.links}
    if not set(sent) <= set(links):
        return None
    seconds = (sent[name] / links[name].bandwidth_bytes_per_s + 2 * links[name].latency_s for name in sent)
    return Mixture((found[0], found[1]), tuple(shares), tuple(sent), max(seconds), sent)


def _alone(job: Job, costs: JobCosts, group: Group, batch: int) -> Evaluated | None:
    """The best pipeline over all sites of a group for so many sequences of a step; None: it does not fit."""
    found = best_for_share(job, costs, group, batch, "inside", 2)
    wanted = "alone" if len(group) == 1 else "pipelines"
    return next((one for one in found if kind_of(one.candidate) == wanted), None)


def _exchanged_bytes(job: Job, one: Evaluated, other: Evaluated) -> dict[str, float]:
    """By directed link the gradients that two pipelines sum: of every layer between the sites that hold it.

    The embedding and the head count as layers, each with its parameters.
    """
    sent: dict[str, float] = {}
    width = memory.gradient_bytes(job.training.precision)
    for here, there, num_params in zip(_homes(one), _homes(other), _params(job), strict=True):
        for link in (f"{here}>{there}", f"{there}>{here}"):
            sent[link] = sent.get(link, 0.0) + ring_bytes("all-reduce", num_params * width, 2)
    return sent


def _homes(found: Evaluated) -> list[str]:
    """The site of the embedding, of every layer and of the head."""
    sites = [placement.site for placement in found.placements for _ in range(placement.num_layers)]
    return [found.placements[0].site, *sites, found.placements[-1].site]


def _params(job: Job) -> list[float]:
    model = job.model
    layers = [float(model.num_layer_params)] * model.num_layers
    return [float(model.num_embedding_params), *layers, float(model.num_head_params)]
