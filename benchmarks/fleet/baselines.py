"""Policies that only comparisons need: the baselines of BACE-Pipe's paper, Atlas, one region, any place.

`farpipe fleet` has them by their entry points where the folders are on the path:
PYTHONPATH=.:benchmarks/fleet/entry_points farpipe fleet compare FLEET.toml --jobs JOBS.csv --policy lcf,ldf,bace
"""

import zlib
from collections.abc import Callable
from typing import Final

from farpipe.fleet.job import JobPlacement, JobState
from farpipe.fleet.policies import POLICIES, orders, places
from farpipe.fleet.policies.protocol import Policy, View
from farpipe.fleet.policies.queueing import QueuePolicy
from farpipe.fleet.quotes import Devices
from farpipe.fleet.snapshot import Space
from farpipe.planning.cost.money import SECONDS_PER_HOUR


def cheapest_region(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """One site, the one with the cheapest electricity (LCF of BACE-Pipe's paper)."""
    found = places.running(view, space, job, places.alone(space, num_devices))
    return min(found, key=lambda devices: view.usd_per_mwh(devices[0][0]), default=None)


def largest_region(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """One site, the one with most free devices (LDF of BACE-Pipe's paper)."""
    found = places.running(view, space, job, places.alone(space, num_devices))
    return max(found, key=lambda devices: space.devices[devices[0][0]], default=None)


def delay_first(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """The place with the shortest step, whatever it costs (CR-LDF of BACE-Pipe's paper)."""
    return _least(view, space, job, num_devices, lambda placement: placement.step_s)


def cost_first(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """The cheapest electricity per step, whatever the links do to its time (CR-LCF of BACE-Pipe's paper)."""
    return _least(view, space, job, num_devices, lambda placement: places.electricity_usd_per_step(view, placement))


def _least(view: View, space: Space, job: JobState, num: int, cost: Callable[[JobPlacement], float]) -> Devices | None:
    found = [*places.alone(space, num), *places.wide(view, space, job, num, view.usd_per_mwh)]
    return places.cheapest(places.quoted(view, space, job, found), cost)


def atlas(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """Atlas-like: the fewest sites, the largest free ones first, whatever the links do to the step."""
    pipelines = places.wide(view, space, job, num_devices, lambda site: -space.devices[site])
    possible = (devices for devices in pipelines if view.start(space, job, devices))
    return largest_region(view, space, job, num_devices) or next(possible, None)


def anywhere(view: View, space: Space, job: JobState, num_devices: int) -> Devices | None:
    """Any place that is possible, drawn by a number made of the job and the hour."""
    found = [*places.alone(space, num_devices), *places.wide(view, space, job, num_devices, lambda site: 0.0)]
    possible = places.running(view, space, job, found)
    drawn = zlib.crc32(f"{job.name} {view.now_s // SECONDS_PER_HOUR:.0f}".encode())
    return possible[drawn % len(possible)] if possible else None


LCF: Final = QueuePolicy("lcf", orders.by_arrival, cheapest_region, fastest=True, when_blocked="wait")
LDF: Final = QueuePolicy("ldf", orders.by_arrival, largest_region, fastest=True, when_blocked="wait")
CR_LCF: Final = QueuePolicy("cr-lcf", orders.by_arrival, cost_first, fastest=True, when_blocked="wait")
CR_LDF: Final = QueuePolicy("cr-ldf", orders.by_arrival, delay_first, fastest=True, when_blocked="wait")
SINGLE_REGION: Final = QueuePolicy("single-region", orders.by_arrival, places.single_region, when_blocked="wait")
RANDOM: Final = QueuePolicy("random", orders.by_arrival, anywhere)
ATLAS: Final = QueuePolicy("atlas", orders.by_arrival, atlas)
BASELINES: Final[dict[str, Policy]] = {
    policy.name: policy for policy in (LCF, LDF, CR_LCF, CR_LDF, SINGLE_REGION, RANDOM, ATLAS)
}
COMPARED: Final[dict[str, Policy]] = {**POLICIES, **BASELINES}
"""The policies that benchmarks compare: farpipe's own and these."""
