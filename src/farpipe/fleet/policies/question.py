"""The question of an exact placement: one job, one size, what is free, and what all its placements have in common."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from farpipe.fleet.job import JobState, Placement
from farpipe.fleet.policies.paths import QUANTUM
from farpipe.fleet.policies.places import electricity_usd_per_h, electricity_usd_per_step
from farpipe.fleet.policies.protocol import View
from farpipe.fleet.quotes import Devices
from farpipe.fleet.space import Space


@dataclass(frozen=True)
class Question:
    """One job on so many devices out of a space: what all its placements have in common."""

    view: View
    space: Space
    job: JobState
    num_devices: int
    unit: int
    """Every site has a multiple of so many devices."""
    usd_per_h: Mapping[str, float]
    """Electricity of one unit, by site that has one free."""
    best_step_s: float
    """No placement is faster than the whole job at its fastest site."""
    needed_rate: float

    def free_units(self, site: str) -> int:
        """Units that are free at a site."""
        return self.space.devices[site] // self.unit

    def linked(self, a: str, b: str) -> bool:
        """True if a hop between two sites never slows the job."""
        rates = self.space.rates
        return min(rates.get(f"{a}>{b}", 0.0), rates.get(f"{b}>{a}", 0.0)) >= max(self.needed_rate, 1e-9)

    def cost(self, placement: Placement) -> tuple[float, int, float, Devices]:
        """The least is the best: electricity per step; of equals fewer sites, and the shorter step."""
        usd = electricity_usd_per_step(self.view, placement)
        return usd, len(placement.devices), placement.step_s, placement.devices

    def better(self, devices: Devices, best: Placement | None) -> Placement | None:
        """The job on `devices` if it can be there and that is better than `best`; else `best`."""
        found = self.view.start(self.space, self.job, devices)
        if found is None or (best is not None and self.cost(best) <= self.cost(found)):
            return best
        return found


def ask(view: View, space: Space, job: JobState, num_devices: int) -> Question:
    """The question where `job` is to run; power is taken to be in proportion to the devices."""
    unit = math.gcd(num_devices, QUANTUM)
    kind, whole = job.job.kind, float(num_devices)
    quotes = {s: view.quotes.placement(kind, ((s, num_devices),), {}) for s, n in space.devices.items() if n >= unit}
    found = {site: placement for site, placement in quotes.items() if placement is not None}
    return Question(
        view=view,
        space=space,
        job=job,
        num_devices=num_devices,
        unit=unit,
        usd_per_h={site: electricity_usd_per_h(view, p) / whole * unit for site, p in found.items()},
        best_step_s=min((placement.step_s for placement in found.values()), default=math.inf),
        needed_rate=view.quotes.needed_rate(kind, num_devices) or math.inf,
    )
