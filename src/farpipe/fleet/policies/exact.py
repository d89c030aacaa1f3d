"""The exact place of one job: the cheapest of all paths and divisions that don't stall it.

`places.bace` looks at one division and one path for every set of at most three sites. Here all are compared, over any
number of sites: up to six by enumeration with a bound, beyond by CP-SAT (`exact_paths`). How much dearer the place of
another rule is, is that rule's gap.
"""

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Final

from farpipe.fleet.job import JobState, Placement
from farpipe.fleet.policies.exact_paths import solved
from farpipe.fleet.policies.protocol import View
from farpipe.fleet.policies.question import Question, ask
from farpipe.fleet.quotes import Devices
from farpipe.fleet.space import Space

MAX_ENUMERATED: Final = 6
"""Sites; beyond, divisions and paths are too many."""
MAX_QUOTED: Final = 5000
"""Placements that one decision quotes at most."""


def exact(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """The place with the cheapest electricity per step of all that don't stall the job; None if there is none."""
    question = ask(view, space, job, num_devices)
    search = solved if len(question.usd_per_h) > MAX_ENUMERATED else enumerated
    best = search(question, _alone(question))
    return best.devices if best else None


def _alone(question: Question) -> Placement | None:
    best: Placement | None = None
    for site in question.usd_per_h:
        if question.space.devices[site] >= question.num_devices:
            best = question.better(((site, question.num_devices),), best)
    return best


def enumerated(question: Question, best: Placement | None) -> Placement | None:
    """The best of `best` and all pipelines over several sites, the divisions with the least bound first."""
    most_usd = math.inf if best is None else question.cost(best)[0]
    bounds = ((_bound(question, shares), shares) for shares in _divisions(question))
    num_quoted = 0
    for bound, shares in sorted(pair for pair in bounds if pair[0] < most_usd):
        if (best is not None and bound >= question.cost(best)[0]) or num_quoted >= MAX_QUOTED:
            return best
        by_site = dict(shares)
        for path in _paths(question, sorted(by_site)):
            num_quoted += 1
            best = question.better(tuple((site, by_site[site] * question.unit) for site in path), best)
    return best


def _bound(question: Question, shares: Devices) -> float:
    """The least electricity of a step on any path: no inter-site hop makes it shorter; a dear step is a long one."""
    hourly = sum(units * question.usd_per_h[site] for site, units in shares)
    return hourly * question.best_step_s / 3600 if hourly >= 0 else -math.inf


def _divisions(question: Question) -> Iterator[Devices]:
    """(site, units) of every division of the devices between two or more sites."""
    total = question.num_devices // question.unit
    if not any(question.linked(a, b) for a, b in combinations(question.usd_per_h, 2)):
        return
    for count in range(2, len(question.usd_per_h) + 1):
        for sites in combinations(sorted(question.usd_per_h), count):
            free = [question.free_units(site) for site in sites]
            for units in _compositions(total, free):
                yield tuple(zip(sites, units, strict=True))


def _compositions(total: int, free: list[int]) -> Iterator[tuple[int, ...]]:
    """Every division of `total` into a sum of one number from 1 to each of `free`."""
    if not free:
        if total == 0:
            yield ()
        return
    others = sum(free[1:])
    for first in range(max(1, total - others), min(free[0], total - len(free) + 1) + 1):
        for rest in _compositions(total - first, free[1:]):
            yield (first, *rest)


def _paths(question: Question, sites: list[str]) -> Iterator[tuple[str, ...]]:
    """Every order of the sites along links that don't stall the job, each and its reverse."""

    def grow(path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if len(path) == len(sites):
            yield path
        for site in sites:
            if site not in path and (not path or question.linked(path[-1], site)):
                yield from grow((*path, site))

    return grow(())
