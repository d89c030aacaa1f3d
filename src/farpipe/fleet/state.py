"""The fleet's pure core: `FleetState.handle(event)` gives the next state and the commands that lead to it.

No clock, no files, no randomness: time comes with the events, speeds from the quotes, choices from the policy. The same
core runs the simulator and a service.
"""

from dataclasses import dataclass, replace

from farpipe.cost.money import egress_of
from farpipe.errors import InputError
from farpipe.fleet.commands import Cancel, Command
from farpipe.fleet.decide import decide
from farpipe.fleet.events import Event, Price
from farpipe.fleet.facts import take_in
from farpipe.fleet.meter import SiteTariff
from farpipe.fleet.policies.protocol import Policy
from farpipe.fleet.quotes import Quotes, StopCosts
from farpipe.fleet.snapshot import SiteState, Snapshot, World
from farpipe.spec import Cluster


@dataclass(frozen=True, kw_only=True)
class FleetState(Snapshot):
    """Everything that decides what the fleet does next."""

    policy: Policy

    def handle(self, event: Event) -> tuple["FleetState", list[Command]]:
        """The state after `event` and after what the policy makes of it, and the commands that this takes.

        InputError for an event that can't be: of an earlier time, about a job, site or link that nobody knows.
        """
        if not event.time_s >= self.now_s:
            raise InputError(
                f"event {type(event).__name__} at {event.time_s:g} s: the fleet's clock is at {self.now_s:g} s already"
            )
        state, commands = take_in(replace(self, now_s=event.time_s, closed=(), refusals=()), event)
        if any(isinstance(command, Cancel) for command in commands) and state.jobs is self.jobs:
            return state, commands  # nothing that the policy could act on
        state, further = decide(state, self.policy)
        return state, commands + further


def first_state(cluster: Cluster, policy: Policy, quotes: Quotes, stops: StopCosts | None = None) -> FleetState:
    """A fleet without jobs on `cluster`; a price that a site does not have counts as nothing."""
    tariffs = {}
    for site in cluster.sites:
        p = site.prices
        price = Price(p.electricity_usd_per_mwh or 0.0, p.carbon_g_per_kwh or 0.0)
        tariffs[site.name] = SiteTariff(p.rent_usd_per_device_hour or 0.0, p.pue, price, 0.0)
    egress = {name: price or 0.0 for name, price in egress_of(cluster).items()}
    world = World(quotes, stops or StopCosts(), {link.name: link.latency_s for link in cluster.links}, egress)
    return FleetState(
        world=world,
        policy=policy,
        now_s=0.0,
        sites={site.name: SiteState(site.num_devices) for site in cluster.sites},
        rates={link.name: link.bandwidth_bytes_per_s for link in cluster.links},
        tariffs=tariffs,
    )
