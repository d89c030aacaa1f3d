"""Places for a job of a given size: one site, or a pipeline over several."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, permutations

from farpipe.fleet.job import JobState
from farpipe.fleet.policies.protocol import View
from farpipe.fleet.quotes import Devices
from farpipe.fleet.space import Space

Preference = Callable[[str], float]
"""Of sites: the least is filled first."""

QUANTUM = 8
"""A site has a multiple of so many of a job's devices: machines are not divided between pipeline stages."""


def alone(space: Space, num_devices: int) -> list[Devices]:
    """Every site that has room for the whole job."""
    return [((site, num_devices),) for site, free in space.devices.items() if free >= num_devices]


def across(space: Space, num_devices: int, max_sites: int, preference: Preference) -> Iterator[Devices]:
    """Pipelines over two or more sites that together have room, the fewest sites first.

    Of every set of sites one division, which fills the preferred sites first, in the order along which the narrowest
    link has most left.
    """
    quantum = min(QUANTUM, num_devices)
    free = {site: number // quantum * quantum for site, number in space.devices.items() if number >= quantum}
    for count in range(2, min(max_sites, len(free), num_devices // quantum) + 1):
        for chosen in combinations(sorted(free), count):
            if sum(free[site] for site in chosen) < num_devices:
                continue
            shares = _filled(sorted(chosen, key=preference), free, num_devices, quantum)
            path = _widest(space, chosen)
            if path and all(shares.values()):
                yield tuple((site, shares[site]) for site in path)


def _filled(order: Sequence[str], free: dict[str, int], num_devices: int, quantum: int) -> dict[str, int]:
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
    return best[1]


def narrowest(space: Space, path: Sequence[str]) -> float:
    """Bytes/s left on the narrowest link of a path, both directions of every hop counted."""
    names = (name for a, b in pairwise(path) for name in (f"{a}>{b}", f"{b}>{a}"))
    return min((space.rates.get(name, 0.0) for name in names), default=float("inf"))


def is_stall_free(view: View, space: Space, job: JobState, devices: Devices) -> bool:
    """True if no inter-site hop is slower than the job's computation (A / B <= tau in the words of BACE-Pipe)."""
    if len(devices) == 1:
        return True
    needed = view.quotes.needed_rate(job.job.kind, sum(number for _, number in devices))
    return needed is not None and narrowest(space, [site for site, _ in devices]) >= needed
