"""Costs that farpipe's policy weighs: money and time of a placement in one figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from farpipe.fleet.job import JobPlacement, JobState, Kind
from farpipe.fleet.meter import SiteTariff
from farpipe.fleet.policies.protocol import View
from farpipe.fleet.quotes import Devices
from farpipe.fleet.snapshot import SiteState, Space
from farpipe.planning.cost.money import BYTES_PER_GB, SECONDS_PER_HOUR

GRAMS_PER_TONNE = 1e6


class Objective(NamedTuple):
    """Kinds of money that count, and the worth of an hour of a job's completion."""

    rent: bool = True
    egress: bool = True
    carbon_usd_per_t: float = 0.0
    hour_value: float = 128.0
    """Device-hours, at the fleet's mean cost of one, that an hour of completion time is worth."""
    horizon_s: float = 6 * SECONDS_PER_HOUR
    """A stop has to be repaid within so long: prices change."""


class _Rejected(NamedTuple):
    """Running jobs by name for which no change paid in a view."""

    since_s: float
    sites: Mapping[str, SiteState]
    rates: Mapping[str, float]
    space: Space
    jobs: dict[str, JobState]


class _Priced(NamedTuple):
    """Figures that hold as long as prices and the power of devices do."""

    tariffs: Mapping[str, SiteTariff]
    watts: float
    hour_usd: float
    device_hours: dict[str, float]
    ranked: dict[tuple[Kind, int], Sequence[tuple[float, str, JobPlacement]]]
    rejected: dict[object, _Rejected]


@dataclass(frozen=True)
class Worth:
    """Costs of placements in one view."""

    view: View
    objective: Objective

    @cached_property
    def watts(self) -> float:
        """Power of one device, by the present placements; turns a site's price into a price of devices."""
        placements = [job.placement for job in self.view.active if job.placement]
        watts = sum(p.all_power_w for p in placements)
        return watts / max(1, sum(p.num_devices for p in placements)) or 400.0

    @property
    def hour_usd(self) -> float:
        """Worth of an hour of a job's completion time."""
        return self._priced.hour_usd

    @cached_property
    def _priced(self) -> "_Priced":
        """Figures at the present prices: those of the last view if they and the power of devices are the same."""
        known, tariffs = self.view.state.cache.priced, self.view.state.tariffs
        last: _Priced | None = known.get(self.objective)
        if last is None or last.tariffs is not tariffs or last.watts != self.watts:
            costs = [self.device_usd(site, self.view.usd_per_mwh(site)) for site in self.view.state.sites]
            hour_usd = self.objective.hour_value * max(sum(map(abs, costs)) / max(len(costs), 1), 1e-6)
            last = known[self.objective] = _Priced(tariffs, self.watts, hour_usd, {}, {}, {})
        return last

    def device_usd(self, site: str, usd_per_mwh: float) -> float:
        """A device-hour at a site when energy there costs so much."""
        rent = self.view.rent_usd_per_device_hour(site) if self.objective.rent else 0.0
        carbon = self.view.carbon_g_per_kwh(site) / GRAMS_PER_TONNE * self.objective.carbon_usd_per_t
        return rent + self.watts / 1e3 * (usd_per_mwh / 1e3 + carbon)

    def usd_per_h(self, placement: JobPlacement) -> float:
        """Money of a job per hour on `placement`, at the present prices."""
        total = sum(w / 1e6 * self.view.usd_per_mwh(site) for site, w in placement.power_w.items())
        if self.objective.carbon_usd_per_t:
            carbon = sum(w / 1e3 * self.view.carbon_g_per_kwh(site) for site, w in placement.power_w.items())
            total += carbon / GRAMS_PER_TONNE * self.objective.carbon_usd_per_t
        if self.objective.rent:
            total += sum(number * self.view.rent_usd_per_device_hour(site) for site, number in placement.devices)
        if self.objective.egress:
            sent = placement.link_bytes_per_s.items()
            total += sum(r * SECONDS_PER_HOUR / BYTES_PER_GB * self.view.egress_usd_per_gb(link) for link, r in sent)
        return total

    def of_step(self, placement: JobPlacement) -> float:
        """Money of a step and what its time is worth: the figure that is minimised."""
        return (self.usd_per_h(placement) + self.hour_usd) * placement.step_s

    def hour_at(self, placement: JobPlacement) -> float:
        """Money and worth of an hour at the one site of `placement`, to a few last bits.

        Power goes with the devices, whatever runs on them.
        """
        priced, site = self._priced, placement.sites[0]
        usd = priced.device_hours.get(site)
        if usd is None:
            usd = priced.device_hours[site] = self.usd_per_h(placement) / placement.num_devices
        return placement.num_devices * usd + priced.hour_usd

    def ranked(self, kind: Kind, num_devices: int) -> Sequence[tuple[float, str, JobPlacement]]:
        """Quotes for so many devices at each site that could run them, the least `of_step` first: that figure to a few
        last bits, the site and the quote."""
        known, key = self._priced.ranked, (kind, num_devices)
        found = known.get(key)
        if found is None:
            quotes = self.view.at_one_site(kind, num_devices).items()
            found = known[key] = sorted((self.hour_at(quote) * quote.step_s, site, quote) for site, quote in quotes)
        return found

    def rejected(
        self, space: Space, changes: object
    ) -> tuple[dict[str, JobState], Sequence[str] | None, dict[str, JobState]]:
        """Running jobs by name for which none of `changes` paid in the last view, the sites with more free devices than
        then (None if `space` is the same), and the jobs of this view, to be filled.

        Nothing else makes a change at one site pay at these prices: what it saves only falls while a job runs.
        """
        known, state, last = self._priced.rejected, self.view.state, self._priced.rejected.get(changes)
        holds = last and last.sites is state.sites and last.rates is state.rates and last.since_s <= state.now_s
        before, found = last if last and holds else None, dict[str, JobState]()
        if before and before.space == space:
            return before.jobs, None, before.jobs
        known[changes] = _Rejected(state.now_s, state.sites, state.rates, space.copy(), found)
        if not before:
            return {}, [], found
        fuller = [site for site, number in space.devices.items() if number > before.space.devices[site]]
        return before.jobs, fuller, found

    def transfer_usd(self, placement: JobPlacement) -> float:
        """Egress of the checkpoint that is moved to where the job starts."""
        if not self.objective.egress or not placement.moved_bytes:
            return 0.0
        moved = placement.moved_bytes.items()
        return sum(size / BYTES_PER_GB * self.view.egress_usd_per_gb(link) for link, size in moved)

    def best(self, job: JobState, placements: Sequence[JobPlacement]) -> JobPlacement | None:
        """The placement on which the rest of `job` is worth most."""
        hours_left = job.left_at(self.view.now_s) / SECONDS_PER_HOUR

        def cost(placement: JobPlacement) -> tuple[float, float, float, Devices]:
            rest = self.of_step(placement) * hours_left + self.transfer_usd(placement)
            return rest, placement.step_s, placement.startup_s, placement.devices

        return min(placements, key=cost) if len(placements) > 1 else next(iter(placements), None)
