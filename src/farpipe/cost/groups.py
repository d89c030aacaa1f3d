"""Replicas of a pipeline that are not alike: groups of them, each with its own sites, degrees and share of the batch.

Every group runs its own pipeline, so each has a Problem of its own; what joins them is the sum of their gradients after
the last backward. Layers that each group has on one stage are summed together, in a ring over the groups' sites: every
link of it carries 2 (n - 1)/n of the gradients for n sites (Patarasu and Yuan 2009), once, whatever the tensor
degrees: the replicas of a group have summed before, and its devices send the slices that they hold.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from farpipe.cost import memory
from farpipe.cost.layout import Layout, Placement
from farpipe.cost.links import ring_links
from farpipe.cost.stage import JobCosts
from farpipe.cost.step import StepCost, step_cost
from farpipe.cost.transfer import effective_site_link, ring_bytes
from farpipe.errors import InfeasibleError, InputError
from farpipe.spec import Cluster, Model


@dataclass(frozen=True)
class ReplicaGroup:
    """Replicas that are alike; a stage is at the site of its placement."""

    layout: Layout
    placements: tuple[Placement, ...]

    @property
    def num_sequences(self) -> int:
        """Its share of the batch: sequences of one step."""
        return self.layout.data * self.layout.microbatch_size * self.layout.num_microbatches


@dataclass(frozen=True)
class GroupReduce:
    """The sum of some layers' gradients over all groups."""

    stages: tuple[int, ...]
    """The stage that has these layers, of every group."""
    links: tuple[str, ...]
    """Of the ring; inside one site ``site>site``."""
    bytes: float
    """Over each of them."""
    seconds: float
    """From when all groups are ready, on empty links; the links are busy all the time."""


def group_costs(costs: JobCosts, groups: Sequence[ReplicaGroup], cluster: Cluster) -> list[StepCost]:
    """One step of every group on its own, before the sum over groups.

    Raises InputError when parts do not fit together or the shares do not add up to the batch, InfeasibleError when
    devices or a link are missing.
    """
    batch, shares = costs.training.global_batch, [group.num_sequences for group in groups]
    if sum(shares) != batch:
        told = " + ".join(map(str, shares))
        raise InputError(f"groups: their shares are {told} = {sum(shares)} sequences; training.global_batch is {batch}")
    _check_devices(groups, cluster)
    return [_alone(costs, group, cluster) for group in groups]


def _alone(costs: JobCosts, group: ReplicaGroup, cluster: Cluster) -> StepCost:
    training = costs.training.model_copy(update={"global_batch": group.num_sequences})
    return step_cost(costs.with_training(training), group.layout, group.placements, cluster)


def _check_devices(groups: Sequence[ReplicaGroup], cluster: Cluster) -> None:
    used = dict.fromkeys((site.name for site in cluster.sites), 0)
    for group in groups:
        for rank, name in {p.rank: p.site for p in group.placements}.items():
            used[name] += group.layout.of_rank(rank).devices_per_rank
    for site in cluster.sites:
        if used[site.name] > site.num_devices:
            raise InfeasibleError(
                f"site {site.name!r} has {site.num_devices} devices; all groups' ranks there need {used[site.name]}"
            )


def group_reduces(costs: JobCosts, groups: Sequence[ReplicaGroup], cluster: Cluster) -> list[GroupReduce]:
    """The sums of gradients over groups, from the first layers to the last; none for one group.

    InfeasibleError when two neighbours of a ring have no link.
    """
    if len(groups) == 1:
        return []
    width = memory.gradient_bytes(costs.training.precision)
    return [
        _reduce(costs, groups, stages, num_params * width, cluster)
        for stages, num_params in _parts(costs.model, groups)
    ]


def _parts(model: Model, groups: Sequence[ReplicaGroup]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Runs of layers, with embedding and head, that every group has on one stage: those stages, and parameters."""
    layers = [float(model.num_layer_params)] * model.num_layers
    params = [float(model.num_embedding_params), *layers, float(model.num_head_params)]
    stages = zip(*(_stage_of_part(group) for group in groups), strict=True)
    for key, run in groupby(zip(stages, params, strict=True), key=lambda one: one[0]):
        yield key, sum(num_params for _, num_params in run)


def _stage_of_part(group: ReplicaGroup) -> list[int]:
    """The stage of the embedding, of every layer and of the head."""
    inner = [index for index, p in enumerate(group.placements) for _ in range(p.num_layers)]
    return [0, *inner, len(group.placements) - 1]


def _reduce(
    costs: JobCosts, groups: Sequence[ReplicaGroup], stages: tuple[int, ...], num_bytes: float, cluster: Cluster
) -> GroupReduce:
    names = list(dict.fromkeys(g.placements[stage].site for g, stage in zip(groups, stages, strict=True)))
    if len(names) == 1:
        site = cluster.site(names[0])
        degrees = [g.layout.of_rank(g.placements[s].rank).tensor for g, s in zip(groups, stages, strict=True)]
        one, size = effective_site_link(site, costs.calibration(site)), len(groups)
        each = ring_bytes("all-reduce", num_bytes, size)
        seconds = 2 * (size - 1) * one.latency_s + each / (one.bandwidth_bytes_per_s * min(degrees))
        return GroupReduce(stages, (f"{site.name}>{site.name}",), each, seconds)
    links, size = ring_links(cluster, names), len(names)
    each = ring_bytes("all-reduce", num_bytes, size)
    seconds = each / min(link.bandwidth_bytes_per_s for link in links)
    seconds += 2 * (size - 1) * max(link.latency_s for link in links)
    return GroupReduce(stages, tuple(link.name for link in links), each, seconds)
