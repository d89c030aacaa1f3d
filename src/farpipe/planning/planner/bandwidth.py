"""Bandwidth sensitivity: which links between sites bound the step, and what more or less bandwidth would change.

A message of a microbatch occupies its link for x seconds, and the slowest rank computes tf + tb seconds on it. While
x <= tf + tb the link keeps up, and extra forwards hide its delay; beyond, the step is link-bound: it grows with x
whatever the order (GeoPipe, arXiv 2510.12064, calls the point between both the bandwidth to pay for).
"""

from dataclasses import dataclass
from typing import Final

from farpipe.core.simulate import Timeline
from farpipe.core.spec import Cluster
from farpipe.core.step import Problem


@dataclass(frozen=True)
class LinkBound:
    """A link between sites that can't carry a microbatch's messages while the slowest rank computes."""

    link: str
    message_s: float
    """x: what the messages of one microbatch occupy it."""
    pace_s: float
    """tf + tb of the slowest rank."""
    enough_bytes_per_s: float
    """The bandwidth from which on it is not link-bound."""


def link_bytes(problem: Problem, timeline: Timeline) -> dict[str, float]:
    """Bytes that all replicas together send over each link in a step.

    A link between sites that nothing names is one of the ring that a collective there goes round, all with the same
    bytes.
    """
    sizes = timeline.link_bytes()
    named = {name for _, transfer in problem.transfers() for name, _ in problem.shares(transfer)}
    around = max((size for name, size in sizes.items() if problem.between_sites[name]), default=0.0)
    return sizes | {name: around for name in problem.links if problem.between_sites[name] and name not in named}


def link_bounds(problem: Problem, timeline: Timeline) -> list[LinkBound]:
    """The links between sites that bound the step; collectives, which do not come once a microbatch, are left out."""
    found = []
    pace_s = float(timeline.busy_s.max()) / problem.num_microbatches
    sizes = timeline.hop_bytes()
    for name, link in problem.links.items():
        size = sizes[name] / problem.num_microbatches
        message_s = link.occupied_s(size)
        if problem.between_sites[name] and message_s > pace_s:
            found.append(LinkBound(name, message_s, pace_s, size / pace_s))
    return found


MOST_BYTES_PER_S: Final = 1e300
"""Bandwidth of a link that is unlimited: about as much as a float holds."""


def with_bandwidth(cluster: Cluster, factor: float) -> Cluster:
    """The same with `factor` times the bandwidth of every link between sites."""
    links = [
        link.model_copy(update={"bandwidth_bytes_per_s": min(link.bandwidth_bytes_per_s * factor, MOST_BYTES_PER_S)})
        for link in cluster.links
    ]
    return cluster.model_copy(update={"links": tuple(links)})
