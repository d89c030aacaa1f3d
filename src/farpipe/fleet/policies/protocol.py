"""The protocol of policies: the view that a policy gets and the decisions that it returns."""

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple, Protocol

from farpipe.fleet.job import FleetJob, JobPlacement, JobState, Kind, sizes
from farpipe.fleet.quotes import Devices, Quotes
from farpipe.fleet.snapshot import Snapshot, Space, start_on, startup_s


class Decision(NamedTuple):
    """Decision about one job."""

    name: str
    devices: Devices | None
    """Sites and devices that it is to have, in pipeline order; None: it goes back to the queue."""
    why: str = ""


class View:
    """The fleet as a policy sees it; nothing in it is to be changed."""

    def __init__(self, state: Snapshot) -> None:
        self.state = state
        self.now_s = state.now_s

    @property
    def quotes(self) -> Quotes:
        """Speeds and demands."""
        return self.state.world.quotes

    @cached_property
    def queue(self) -> list[JobState]:
        """Jobs without devices that may start, in the order in which they were submitted; none that pauses."""
        return [job for job in self.state.jobs.values() if job.placement is None and job.not_before_s <= self.now_s]

    @cached_property
    def active(self) -> list[JobState]:
        """Jobs with devices."""
        return [job for job in self.state.jobs.values() if job.placement is not None]

    def space(self) -> Space:
        """Free devices and rates; the caller's own to try things in."""
        return self._space.copy()

    @cached_property
    def _space(self) -> Space:
        return self.state.space()

    @cached_property
    def empty(self) -> Space:
        """The space without jobs and with all sites, the lost ones too."""
        return Space({name: site.num_devices for name, site in self.state.sites.items()}, dict(self.state.rates))

    def fits_alone(self, job: FleetJob) -> bool:
        """True if a site, were it empty, could hold the job."""
        sites = self.state.sites
        return any(
            number <= sites[site].num_devices
            for number in reversed(sizes(job))
            for site in self.at_one_site(job.kind, number)
        )

    def start(self, space: Space, job: JobState, devices: Devices) -> JobPlacement | None:
        """The job starting on `devices` out of `space`, moving its checkpoint there included; None if it can't."""
        return start_on(self.state.world, space, job, devices)

    def at_one_site(self, kind: Kind, num_devices: int) -> Mapping[str, JobPlacement]:
        """Quotes for so many devices at each site that could run them, were it large enough; the fastest first."""
        known = self.state.cache.at_one_site
        found = known.get((kind, num_devices))
        if found is None:
            placed = filter(None, (self.quotes.placement(kind, ((s, num_devices),), {}) for s in self.state.sites))
            ranked = sorted(placed, key=lambda placement: placement.step_s)
            found = known[kind, num_devices] = {placement.sites[0]: placement for placement in ranked}
        return found

    def best_step_s(self, job: FleetJob) -> float:
        """The step on the most devices that `job` may have, were they at one site; infinite if it fits none."""
        fastest = next(iter(self.at_one_site(job.kind, job.max_devices).values()), None)
        return fastest.step_s if fastest else math.inf

    def usd_per_mwh(self, site: str) -> float:
        """Price of a device's energy at a site now, PUE included."""
        tariff = self.state.tariffs[site]
        return tariff.price.usd_per_mwh * tariff.pue

    def carbon_g_per_kwh(self, site: str) -> float:
        """Carbon of a device's energy at a site now, PUE included."""
        tariff = self.state.tariffs[site]
        return tariff.price.carbon_g_per_kwh * tariff.pue

    def stop_s(self, job: JobState, num_devices: int, *, moves: bool = False) -> float:
        """Seconds without steps that it takes to stop a running job and start it on so many devices at its site, or
        with `moves` at the end of the widest link, were that free."""
        stops, state_bytes = self.state.world.stops, self.quotes.state_bytes(job.job.kind)
        rate = stops.transfer_share * self.widest if moves else math.inf
        moved_s = state_bytes / rate if rate > 0 else math.inf
        return moved_s + startup_s(stops, state_bytes, job, num_devices)

    def rent_usd_per_device_hour(self, site: str) -> float:
        """Rent of a device."""
        return self.state.tariffs[site].rent_usd_per_device_hour

    def egress_usd_per_gb(self, link: str) -> float:
        """Price of what is sent over a directed link."""
        return self.state.world.egress_usd_per_gb[link]

    @property
    def rates(self) -> Mapping[str, float]:
        """Bytes/s of every directed link, reservations included."""
        return self.state.rates

    @cached_property
    def widest(self) -> float:
        """The rate of the widest link, reservations included."""
        return max(self.rates.values(), default=0.0)


class Policy(Protocol):
    """Decides who runs where.

    A policy keeps nothing between two calls: what counts is in the state, what saves time in the state's `cache`.
    """

    @property
    def name(self) -> str:
        """The policy's name."""

    def decide(self, view: View) -> Iterable[Decision]:
        """Decisions for now; jobs that are not named go on as they are.

        Stops are done first, the rest in the order given. What is not free by then is refused.
        """
