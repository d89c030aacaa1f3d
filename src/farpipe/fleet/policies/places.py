"""Rules of placement: which of the places that a job of a given size could have it gets."""

import zlib
from collections.abc import Callable, Iterable, Iterator

from farpipe.cost.money import SECONDS_PER_HOUR
from farpipe.fleet.job import JobState, Placement
from farpipe.fleet.policies.paths import across, alone, is_stall_free
from farpipe.fleet.policies.protocol import View
from farpipe.fleet.quotes import Devices
from farpipe.fleet.space import Space

Place = Callable[[View, Space, JobState, int], Devices | None]
"""The place of a job on so many devices; None if there is none."""

MAX_SITES = 3


def single_region(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """One site, the one that has least to spare."""
    return min(_running(view, space, job, alone(space, num_devices)), key=_left_over(space), default=None)


def compact(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """One site if there is one; else the fewest sites whose links don't slow the job."""
    return single_region(view, space, job, num_devices) or next(_free_of_stalls(view, space, job, num_devices), None)


def delay_first(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """The place with the shortest step, whatever it costs."""
    return _least(view, space, job, num_devices, lambda placement: placement.step_s)


def cost_first(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """The cheapest electricity per step, whatever the links do to its time."""
    return _least(view, space, job, num_devices, lambda placement: electricity_usd_per_step(view, placement))


def bace(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """BACE-Pipe's: of the paths that don't stall the pipeline the one with the cheapest electricity."""
    found = [*alone(space, num_devices), *_free_of_stalls(view, space, job, num_devices)]
    placed = _quoted(view, space, job, found)
    return _first(placed, lambda placement: electricity_usd_per_step(view, placement))


def atlas(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """Atlas-like: the fewest sites, the largest free ones first, whatever the links do to the step."""
    whole = _running(view, space, job, alone(space, num_devices))
    if whole:
        return max(whole, key=lambda devices: space.devices[devices[0][0]])
    wide = across(space, num_devices, MAX_SITES, lambda site: -space.devices[site])
    return next((devices for devices in wide if _quote(view, space, job, devices)), None)


def anywhere(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """Any place that is possible, drawn by a number made of the job and the hour."""
    found = [*alone(space, num_devices), *across(space, num_devices, MAX_SITES, lambda site: 0.0)]
    possible = _running(view, space, job, found)
    drawn = zlib.crc32(f"{job.name} {view.now_s // SECONDS_PER_HOUR:.0f}".encode())
    return possible[drawn % len(possible)] if possible else None


def electricity_usd_per_step(view: View, placement: Placement) -> float:
    """Electricity of a step at the present prices."""
    return electricity_usd_per_h(view, placement) * placement.step_s / SECONDS_PER_HOUR


def electricity_usd_per_h(view: View, placement: Placement) -> float:
    """Electricity of a job per hour at the present prices."""
    return sum(watts / 1e6 * view.usd_per_mwh(site) for site, watts in placement.power_w.items())


def _least(view: View, space: Space, job: JobState, num: int, cost: Callable[[Placement], float]) -> Devices | None:
    wide = across(space, num, MAX_SITES, view.usd_per_mwh)
    return _first(_quoted(view, space, job, [*alone(space, num), *wide]), cost)


def _free_of_stalls(view: View, space: Space, job: JobState, num_devices: int) -> Iterator[Devices]:
    wide = across(space, num_devices, MAX_SITES, view.usd_per_mwh)
    return (devices for devices in wide if is_stall_free(view, space, job, devices))


def _first(placed: Iterable[Placement], cost: Callable[[Placement], float]) -> Devices | None:
    """The cheapest; of equals the one with fewer sites and the shorter step."""
    best = min(placed, key=lambda p: (cost(p), len(p.devices), p.step_s, p.devices), default=None)
    return best.devices if best else None


def _quote(view: View, space: Space, job: JobState, devices: Devices) -> Placement | None:
    return view.start(space, job, devices)


def _quoted(view: View, space: Space, job: JobState, found: Iterable[Devices]) -> list[Placement]:
    return [placement for devices in found if (placement := _quote(view, space, job, devices))]


def _running(view: View, space: Space, job: JobState, found: Iterable[Devices]) -> list[Devices]:
    return [placement.devices for placement in _quoted(view, space, job, found)]


def _left_over(space: Space) -> Callable[[Devices], tuple[int, str]]:
    return lambda devices: (space.devices[devices[0][0]], devices[0][0])
