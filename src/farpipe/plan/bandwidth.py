"""Bandwidth sensitivity: which links between sites bound the step, and what more or less bandwidth would change.

A message of a microbatch occupies its link for x seconds, and the slowest rank computes tf + tb seconds on it. While
x <= tf + tb the link keeps up, and extra forwards hide its delay; beyond, the step is link-bound: it grows with x
whatever the order (GeoPipe, arXiv 2510.12064, calls the point between both the bandwidth to pay for).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from farpipe.plan.orders import best_order, try_quickly
from farpipe.simulate import Timeline, simulate
from farpipe.step import Link, Problem, Schedule


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


@dataclass(frozen=True)
class SensitivityPoint:
    """The step's pipeline if every link between sites had `factor` times its bandwidth; infinity: only distance."""

    factor: float
    makespan_s: float


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


def bandwidth_sensitivity(
    problem: Problem, factors: Iterable[float], method: str | None = None
) -> list[SensitivityPoint]:
    """The makespan by bandwidth of the links between sites, each time with the best named order, or with `method`'s.

    Where `method` does not fit memory, or no order does, there is no point. Orders that depend on the bandwidth are
    made anew for each.
    """
    points = []
    for factor in factors:
        scaled = with_bandwidth(problem, factor)
        timeline = best_order(scaled)[1] if method is None else try_quickly(method, scaled).timeline
        if timeline is not None:
            points.append(SensitivityPoint(factor, timeline.makespan_s))
    return points


def replayed(problem: Problem, schedule: Schedule, factor: float) -> SensitivityPoint:
    """The makespan of the same order with `factor` times the bandwidth between sites."""
    timeline = simulate(with_bandwidth(problem, factor), schedule, checked=True)
    return SensitivityPoint(factor, timeline.makespan_s)


def with_bandwidth(problem: Problem, factor: float) -> Problem:
    """The same with `factor` times the bandwidth between sites; infinity is as much as a float holds."""

    def change(name: str, link: Link) -> Link:
        if not problem.between_sites[name]:
            return link
        return link.model_copy(update={"bandwidth_bytes_per_s": min(link.bandwidth_bytes_per_s * factor, 1e300)})

    return problem.changed(links={name: change(name, link) for name, link in problem.links.items()})
