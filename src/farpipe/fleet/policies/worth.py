"""Costs that farpipe's policy weighs: money and time of a placement in one figure, and waiting out a dear hour."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from farpipe.cost.money import BYTES_PER_GB, SECONDS_PER_HOUR
from farpipe.fleet.job import JobState, Placement
from farpipe.fleet.policies.protocol import View
from farpipe.fleet.quotes import Devices

GRAMS_PER_TONNE = 1e6


class Objective(NamedTuple):
    """Kinds of money that count, and the worth of an hour of a job's completion."""

    rent: bool = True
    egress: bool = True
    carbon_usd_per_t: float = 0.0
    hour_value: float = 8.0
    """Device-hours, at the fleet's mean cost of one, that an hour of completion time is worth."""
    horizon_s: float = 6 * SECONDS_PER_HOUR
    """A stop has to be repaid within so long: prices change."""
    forecast_h: float = 6.0
    """Hours whose mean price counts, the present one and yesterday's for the next; 1: the present price alone."""


@dataclass(frozen=True)
class Worth:
    """Costs of placements in one view, forecasts included."""

    view: View
    objective: Objective

    @cached_property
    def watts(self) -> float:
        """Of one device, by the placements that there are; for a site's price as a price of devices."""
        placements = [job.placement for job in self.view.active if job.placement]
        watts = sum(sum(p.power_w.values()) for p in placements)
        return watts / max(1, sum(p.num_devices for p in placements)) or 400.0

    @cached_property
    def hour_usd(self) -> float:
        """Worth of an hour of a job's completion time."""
        costs = [self.device_usd(site, self.view.usd_per_mwh(site)) for site in self.view.state.sites]
        return self.objective.hour_value * max(sum(map(abs, costs)) / max(len(costs), 1), 1e-6)

    def device_usd(self, site: str, usd_per_mwh: float) -> float:
        """A device-hour at a site when energy there costs so much."""
        rent = self.view.rent_usd_per_device_hour(site) if self.objective.rent else 0.0
        carbon = self.view.carbon_g_per_kwh(site) / GRAMS_PER_TONNE * self.objective.carbon_usd_per_t
        return rent + self.watts / 1e3 * (usd_per_mwh / 1e3 + carbon)

    def usd_per_h(self, placement: Placement) -> float:
        """Money of a job per hour on `placement`, at the mean of the prices now and those expected soon."""
        total = sum(w / 1e6 * self.soon(site) for site, w in placement.power_w.items())
        if self.objective.carbon_usd_per_t:
            carbon = sum(w / 1e3 * self.view.carbon_g_per_kwh(site) for site, w in placement.power_w.items())
            total += carbon / GRAMS_PER_TONNE * self.objective.carbon_usd_per_t
        if self.objective.rent:
            total += sum(number * self.view.rent_usd_per_device_hour(site) for site, number in placement.devices)
        if self.objective.egress:
            sent = placement.link_bytes_per_s.items()
            total += sum(r * SECONDS_PER_HOUR / BYTES_PER_GB * self.view.egress_usd_per_gb(link) for link, r in sent)
        return total

    def soon(self, site: str) -> float:
        """USD/MWh of a site's energy over the next hours: now, and the same hours of the day before."""
        if site not in self._soon:
            self._soon[site] = self.view.expected(site, max(1, round(self.objective.forecast_h)))
        return self._soon[site]

    @cached_property
    def _soon(self) -> dict[str, float]:
        return {}

    def of_step(self, placement: Placement) -> float:
        """Money of a step and what its time is worth: the figure that is minimised."""
        return (self.usd_per_h(placement) + self.hour_usd) * placement.step_s

    @cached_property
    def usual_usd(self) -> float:
        """Price of a device-hour if every job may wait for the cheapest hours of a day that have room for all.

        Yesterday's prices of all sites, and the devices that jobs would take: the price at which they all have some.
        """
        sites, view = self.view.state.sites, self.view
        wanted = sum(job.job.max_devices for job in (*view.queue, *view.active))
        offers = sorted((self.device_usd(s, p), sites[s].usable) for s in sites for p in view.day(s))
        left = wanted / max(1, sum(site.usable for site in sites.values())) * sum(n for _, n in offers)
        for usd, number in offers:
            left -= number
            if left <= 0:
                return usd
        return float("inf")

    def is_dear(self, placement: Placement, margin: float = 0.0) -> bool:
        """True if an hour here costs more than waiting it out: the usual price, and the worth of the hour."""
        here = sum(number * self.device_usd(site, self.view.usd_per_mwh(site)) for site, number in placement.devices)
        return here > placement.num_devices * self.usual_usd * (1 + margin) + self.hour_usd

    def transfer_usd(self, placement: Placement) -> float:
        """Egress of the checkpoint that is moved to where the job starts."""
        sent, steps = placement.startup_bytes_per_s, placement.link_bytes_per_s
        if not self.objective.egress or sent is steps:
            return 0.0
        more = {link: (rate - steps.get(link, 0.0)) * placement.startup_s for link, rate in sent.items()}
        return sum(size / BYTES_PER_GB * self.view.egress_usd_per_gb(link) for link, size in more.items())

    def best(self, job: JobState, placements: Iterable[Placement]) -> Placement | None:
        """The placement on which the rest of `job` is worth most."""
        hours_left = job.left_at(self.view.now_s) / SECONDS_PER_HOUR

        def cost(placement: Placement) -> tuple[float, float, Devices]:
            rest = self.of_step(placement) * hours_left + self.transfer_usd(placement)
            return rest, placement.step_s, placement.devices

        return min(placements, key=cost, default=None)
