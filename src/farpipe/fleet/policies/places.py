"""Places of a job of a given size, one site or a pipeline over several, and rules for which of them it gets."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise, permutations

from farpipe.fleet.job import JobPlacement, JobState
from farpipe.fleet.policies.protocol import View
from farpipe.fleet.quotes import Devices
from farpipe.fleet.snapshot import Space
from farpipe.planning.cost.money import SECONDS_PER_HOUR
from farpipe.planning.workload.layout import MAX_SITES as MAX_PLANNED

Preference = Callable[[str], float]
"""Order of sites: the least figure is filled first."""

QUANTUM = 8
"""Devices of a job come to a site in multiples of this: machines are not divided between pipeline stages."""
MAX_SITES = 3
"""Largest number of sites of a pipeline, if that many can hold the job."""
MAX_COMBINED = 12
"""Number of sites, those with most room, of which pairs and triples are looked at: of 100 there are 166,650."""


def alone(space: Space, num_devices: int) -> list[Devices]:
    """Every site that has room for the whole job."""
    return [((site, num_devices),) for site, free in space.devices.items() if free >= num_devices]


def max_sites(devices: Iterable[int], min_devices: int) -> int:
    """Most sites of a pipeline for a job of `min_devices`: three, or the planner's bound where no three hold it."""
    largest = sorted(devices)[-MAX_SITES:]
    quantum = min(QUANTUM, min_devices)
    holds = sum(number // quantum * quantum for number in largest) >= min_devices
    return MAX_SITES if holds else MAX_PLANNED


def has_room(space: Space, num_devices: int, most: int) -> bool:
    """True if two or more sites, `most` at most, together have room in whole quanta; no link is looked at."""
    quantum = min(QUANTUM, num_devices)
    free = sorted(max(0, number) // quantum * quantum for number in space.devices.values())
    return num_devices >= 2 * quantum and sum(free[-most:]) >= num_devices


def across(space: Space, num_devices: int, most: int, preference: Preference) -> Iterator[Devices]:
    """Pipelines over two or more sites, `most` at most, that together have room, the fewest sites first.

    Of every set of up to three sites one division, which fills the preferred sites first, in the order along which the
    narrowest link has most left; of larger sets one for every first site.
    """
    quantum = min(QUANTUM, num_devices)
    free = {site: number // quantum * quantum for site, number in space.devices.items() if number >= quantum}
    for path in _paths(space, free, num_devices, min(most, num_devices // quantum)):
        shares = _filled(sorted(path, key=preference), free, num_devices, quantum)
        if all(shares.values()):
            yield tuple((site, shares[site]) for site in path)


def _paths(space: Space, free: Mapping[str, int], num_devices: int, most: int) -> Iterator[tuple[str, ...]]:
    """Linked sites with room."""
    roomiest = sorted(sorted(free, key=lambda site: (-free[site], site))[:MAX_COMBINED])
    for count in range(2, min(most, MAX_SITES, len(free)) + 1):
        for chosen in combinations(roomiest, count):
            if sum(free[site] for site in chosen) >= num_devices and (path := _widest(space, chosen)):
                yield path
    if most > MAX_SITES:
        grown = (_grown(space, free, (first,), num_devices) for first in sorted(free))
        yield from (path for path in grown if MAX_SITES < len(path) <= most)


def _grown(space: Space, free: Mapping[str, int], path: tuple[str, ...], num_devices: int) -> tuple[str, ...]:
    """`path`, longer by the linked site with most room, then by the widest link, until it has room; empty if none."""
    left = num_devices - sum(free[site] for site in path)
    if left <= 0:
        return path
    rates = {site: narrowest(space, (path[-1], site)) for site in sorted(free) if site not in path}
    linked = [site for site, rate in rates.items() if rate > 0]
    if not linked:
        return ()
    best = max(linked, key=lambda site: (min(free[site], left), rates[site]))
    return _grown(space, free, (*path, best), num_devices)


def _filled(order: Sequence[str], free: Mapping[str, int], num_devices: int, quantum: int) -> dict[str, int]:
    """Devices by site: the first sites are filled, but every site behind them keeps a quantum."""
    shares, left = {}, num_devices
    for place, site in enumerate(order):
        behind = quantum * (len(order) - place - 1)
        shares[site] = max(0, min(free[site], left - behind))
        left -= shares[site]
    return shares if left == 0 else dict.fromkeys(order, 0)


def _widest(space: Space, sites: Sequence[str]) -> tuple[str, ...]:
    """The order of the sites whose narrowest link has most left; empty if they are not linked."""
    best: tuple[float, tuple[str, ...]] = (0.0, ())
    for path in permutations(sites):
        if path[0] < path[-1]:  # the reverse is the same pipeline
            best = max(best, (narrowest(space, path), path))
    return best[1] if best[0] > 0 else ()


def narrowest(space: Space, path: Sequence[str]) -> float:
    """Bytes/s left on the narrowest link of a path, both directions of every hop counted."""
    rates, least = space.rates, math.inf
    for a, b in pairwise(path):
        least = min(least, rates.get(f"{a}>{b}", 0.0), rates.get(f"{b}>{a}", 0.0))
    return least


def is_stall_free(view: View, space: Space, job: JobState, devices: Devices) -> bool:
    """True if no inter-site hop is slower than the job's computation (A / B <= tau in the words of BACE-Pipe)."""
    if len(devices) == 1:
        return True
    needed = view.quotes.needed_rate(job.job.kind, sum(number for _, number in devices))
    return needed is not None and narrowest(space, [site for site, _ in devices]) >= needed


Place = Callable[[View, Space, JobState, int], Devices | None]
"""The place of a job on so many devices; None if there is none."""


def single_region(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """One site, the one that has least to spare."""
    return min(running(view, space, job, alone(space, num_devices)), key=_left_over(space), default=None)


def compact(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """One site if there is one; else the fewest sites whose links don't slow the job."""
    pipelines = _free_of_stalls(view, space, job, num_devices)
    possible = (devices for devices in pipelines if view.start(space, job, devices))
    return single_region(view, space, job, num_devices) or next(possible, None)


def bace(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """BACE-Pipe's: of the paths that don't stall the pipeline the one with the cheapest electricity."""
    found = [*alone(space, num_devices), *_free_of_stalls(view, space, job, num_devices)]
    placed = quoted(view, space, job, found)
    return cheapest(placed, lambda placement: electricity_usd_per_step(view, placement))


def electricity_usd_per_step(view: View, placement: JobPlacement) -> float:
    """Electricity of a step at the present prices."""
    return electricity_usd_per_h(view, placement) * placement.step_s / SECONDS_PER_HOUR


def electricity_usd_per_h(view: View, placement: JobPlacement) -> float:
    """Electricity of a job per hour at the present prices."""
    return sum(watts / 1e6 * view.usd_per_mwh(site) for site, watts in placement.power_w.items())


def wide(view: View, space: Space, job: JobState, num_devices: int, preference: Preference) -> Iterator[Devices]:
    """Pipelines for the job over so many sites as it may need."""
    return across(space, num_devices, max_sites(view.empty.devices.values(), job.job.min_devices), preference)


def _free_of_stalls(view: View, space: Space, job: JobState, num_devices: int) -> Iterator[Devices]:
    if view.quotes.needed_rate(job.job.kind, num_devices) is not None:
        pipelines = wide(view, space, job, num_devices, view.usd_per_mwh)
        yield from (devices for devices in pipelines if is_stall_free(view, space, job, devices))


def cheapest(placed: Iterable[JobPlacement], cost: Callable[[JobPlacement], float]) -> Devices | None:
    """The cheapest; of equals the one with fewer sites and the shorter step."""
    best = min(placed, key=lambda p: (cost(p), len(p.devices), p.step_s, p.devices), default=None)
    return best.devices if best else None


def quoted(view: View, space: Space, job: JobState, found: Iterable[Devices]) -> list[JobPlacement]:
    """The places at which the job can start now."""
    return [placement for devices in found if (placement := view.start(space, job, devices))]


def running(view: View, space: Space, job: JobState, found: Iterable[Devices]) -> list[Devices]:
    """The devices at which the job can start now."""
    return [placement.devices for placement in quoted(view, space, job, found)]


def _left_over(space: Space) -> Callable[[Devices], tuple[int, str]]:
    return lambda devices: (space.devices[devices[0][0]], devices[0][0])
