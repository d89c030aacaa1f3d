"""Traffic between sites that no order avoids: a bound that needs neither a partition nor a Problem."""

from collections import Counter
from itertools import pairwise

from farpipe.cost import JobCosts, memory
from farpipe.cost.links import ring_links
from farpipe.cost.transfer import narrowed_bytes, ring_bytes
from farpipe.plan.candidates import Candidate
from farpipe.spec import Cluster


def inter_site_traffic_s(costs: JobCosts, candidate: Candidate, cluster: Cluster) -> float:
    """The least time for which the busiest link between sites is in use in a step; 0 at one site."""
    return (
        _gradients_s(costs, candidate, cluster)
        if candidate.layout.replica_sites
        else _hops_s(costs, candidate, cluster)
    )


def _gradients_s(costs: JobCosts, candidate: Candidate, cluster: Cluster) -> float:
    """Seconds of the gradients that every site sends to the next one."""
    homes, precision, num_params = candidate.layout.replica_sites, costs.training.precision, costs.model.num_params
    num_bytes = ring_bytes("all-reduce", num_params * memory.gradient_bytes(precision), len(homes))
    if costs.training.zero1:
        num_bytes = num_bytes / 2 + ring_bytes("all-gather", num_params * memory.element_bytes(precision), len(homes))
    return num_bytes / min(link.bandwidth_bytes_per_s for link in ring_links(cluster, homes))


def _hops_s(costs: JobCosts, candidate: Candidate, cluster: Cluster) -> float:
    """All messages of all replicas but one: that one need not wait for the others."""
    layout = candidate.layout
    names = [candidate.sites[rank].name for rank in candidate.ranks]
    directions = Counter(ends for a, b in pairwise(names) if a != b for ends in ((a, b), (b, a)))
    size = layout.data * narrowed_bytes(memory.boundary_bytes(costs.model, costs.training, layout), costs.training)
    found = [0.0]
    for ends, number in directions.items():
        link = cluster.link(*ends)
        if link is not None:
            found.append((number * layout.num_microbatches - 1) * size / link.bandwidth_bytes_per_s)
    return max(found)


def inter_site_bytes(costs: JobCosts, candidate: Candidate) -> dict[str, float]:
    """Bytes of a step over every directed link between sites, all replicas together."""
    layout = candidate.layout
    if layout.replica_sites:
        precision, num_params, homes = costs.training.precision, costs.model.num_params, layout.replica_sites
        size = ring_bytes("all-reduce", num_params * memory.gradient_bytes(precision), len(homes))
        if costs.training.zero1:
            size = size / 2 + ring_bytes("all-gather", num_params * memory.element_bytes(precision), len(homes))
        return {f"{a}>{b}": size for a, b in zip(homes, (*homes[1:], homes[0]), strict=True)}
    names = [candidate.sites[rank].name for rank in candidate.ranks]
    size = layout.data * narrowed_bytes(memory.boundary_bytes(costs.model, costs.training, layout), costs.training)
    directed = Counter(ends for a, b in pairwise(names) if a != b for ends in ((a, b), (b, a)))
    return {f"{a}>{b}": number * layout.num_microbatches * size for (a, b), number in directed.items()}
