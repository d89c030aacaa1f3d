"""The fleet's pure core: `FleetState.handle(event)` gives the next state and the commands that lead to it.

No clock, no files, no randomness: time comes with the events, speeds from the quotes, choices from the policy. The same
core runs the simulator and a service.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from farpipe.core.errors import InputError
from farpipe.core.spec import Cluster
from farpipe.fleet.copies import copies_moved
from farpipe.fleet.event_effects import apply_event
from farpipe.fleet.events import Cancel, CheckpointStored, Command, Event, Migrate, Preempt, Price, Resize, Start
from farpipe.fleet.job import JobPlacement, JobState, devices_in_words
from farpipe.fleet.meter import SiteTariff
from farpipe.fleet.policies.protocol import Decision, Policy, View
from farpipe.fleet.quotes import Quotes, StopCosts
from farpipe.fleet.replacing import replace
from farpipe.fleet.snapshot import SiteState, Snapshot, Space, State, World, queued, settled, start_on
from farpipe.fleet.stops import as_planned, planned, start_reserved, started, stopped
from farpipe.planning.cost.money import egress_of


@dataclass(frozen=True, kw_only=True)
class FleetState(Snapshot):
    """Everything that decides what the fleet does next."""

    policy: Policy

    def handle(self, *events: Event) -> tuple["FleetState", list[Command]]:
        """The state after `events`, in this order, and after the policy's one decision, and the commands of both.

        `done` of the state says what they did, `closed` and `refusals` whom they ended and what they refused.
        `verdicts` has the reason for which an event is refused: it is of an earlier time, or about a job, site or link
        that nobody knows. The others count. An event of an attempt that is over changes nothing.
        """
        state, commands = self._after(events)
        if events and all(state.verdicts):
            return state, commands
        state, further = start_reserved(state)
        commands += further
        if not commands and all(isinstance(event, CheckpointStored) for event in events):
            return state, commands  # where checkpoints are is no reason to decide anew
        if len(events) == 1 and state.jobs is self.jobs and any(isinstance(command, Cancel) for command in commands):
            return state, commands  # nothing that the policy could act on
        state, further = decide(state, self.policy)
        return state.noted(*copies_moved(self, state)), commands + further

    def _after(self, events: Sequence[Event]) -> tuple["FleetState", list[Command]]:
        state, commands, verdicts = replace(self, closed=(), refusals=(), done=()), list[Command](), list[str]()
        for event in events:
            try:
                state, further = apply_event(state.at(event), event)
                commands += further
                verdicts.append("")
            except InputError as error:
                verdicts.append(str(error))
        return replace(state, verdicts=tuple(verdicts)), commands

    def at(self, event: Event) -> "FleetState":
        """The state at the time of `event`; InputError if that is before the fleet's clock."""
        if not self.now_s <= event.time_s < math.inf:
            raise InputError(
                f"event {type(event).__name__} at {event.time_s:g} s: the fleet's clock is at {self.now_s:g} s already"
            )
        return replace(self, now_s=event.time_s)


def first_state(cluster: Cluster, policy: Policy, quotes: Quotes, stops: StopCosts | None = None) -> FleetState:
    """A fleet without jobs on `cluster`; a price that a site does not have counts as nothing."""
    tariffs = {}
    for site in cluster.sites:
        p = site.prices
        price = Price(p.electricity_usd_per_mwh or 0.0, p.carbon_g_per_kwh or 0.0)
        tariffs[site.name] = SiteTariff(p.rent_usd_per_device_hour or 0.0, p.pue, price, 0.0)
    egress = {name: price or 0.0 for name, price in egress_of(cluster).items()}
    world = World(quotes, stops or StopCosts(), egress)
    return FleetState(
        world=world,
        policy=policy,
        now_s=0.0,
        sites={site.name: SiteState(site.num_devices) for site in cluster.sites},
        rates={link.name: link.bandwidth_bytes_per_s for link in cluster.links},
        tariffs=tariffs,
    )


def decide(state: State, policy: Policy) -> tuple[State, list[Command]]:
    """The state after what the policy decides, and the commands for it; what can't be is in `refusals`."""
    seen, state, num_before = planned(state), replace(state, decided_s=state.now_s, refusals=()), len(state.done)
    try:
        view = View(seen)
        decisions = list(policy.decide(view))
        known = [_known(seen, decision) for decision in decisions]
    except Exception as error:
        return state.refusing([f"{policy.name} failed: {type(error).__name__}: {error}"], num_before), []
    if not decisions:
        return state, []
    space, commands, refusals = view.space(), list[Command](), [why for why in known if why]
    for decision in _stops_first([d for d, why in zip(decisions, known, strict=True) if not why]):
        done = _apply(state, space, decision)
        if isinstance(done, str):
            refusals.append(done)
        elif done is not None:
            state, command = done
            commands += [command] if command is not None else []
    return state.refusing(refusals, num_before), commands


def _known(state: State, decision: Decision) -> str:
    """Reason for which a decision makes no sense at all; empty if it does."""
    name, devices = decision.name, decision.devices
    if name not in state.jobs:
        return f"{name}: no such job"
    if devices is None:
        return ""
    sites = [site for site, _ in devices]
    if len(set(sites)) != len(sites) or not set(sites) <= set(state.sites):
        return f"{name}: sites {sites} are unknown, or one appears twice"
    job, number = state.jobs[name].job, sum(count for _, count in devices)
    if not job.min_devices <= number <= job.max_devices:
        return f"{name}: {number} devices; it wants from {job.min_devices} to {job.max_devices}"
    pause_s = state.jobs[name].not_before_s - state.now_s
    return f"{name}: it pauses for {pause_s:g} s more, after its last failure" if pause_s > 0 else ""


def _stops_first(decisions: Sequence[Decision]) -> chain[Decision]:
    stops = [decision for decision in decisions if decision.devices is None]
    return chain(stops, [decision for decision in decisions if decision.devices is not None])


def _apply(state: State, space: Space, decision: Decision) -> tuple[State, Command | None] | str | None:
    """Do one decision, in `space` as well, which is that of all stops over; the reason if it is not possible, None if
    there is nothing to do."""
    job = state.jobs[decision.name]
    before = as_planned(job)
    if decision.devices is None:
        return _stop(state, space, job, decision.why)
    if before.placement is not None and before.placement.devices == decision.devices:
        return None
    if before.placement is not None:
        space.give(before.placement, before.phase)
    resting = queued(job) if state.world.stops.holds else job
    placement = start_on(state.world, space, resting, decision.devices)
    if placement is None:
        if before.placement is not None:
            space.take(before.placement, before.phase)
        return f"{job.name}: {devices_in_words(decision.devices)} is not free, or can't run the job"
    space.take(placement, "starting")
    return _reserve(state, job, placement) if state.world.stops.holds else _go(state, job, placement)


def _stop(state: State, space: Space, job: JobState, why: str) -> tuple[State, Command | None] | None:
    before = as_planned(job)
    if before.placement is None:
        return None
    space.give(before.placement, before.phase)
    if job.reserved is not None:
        return state.with_job(replace(settled(state, job.name), reserved=None)), None
    account = stopped(state, settled(state, job.name))
    account = replace(account, num_preemptions=job.num_preemptions + 1)
    return state.with_job(account, "preempt", why), Preempt(job.name, job.attempt, why)


def _reserve(state: State, job: JobState, placement: JobPlacement) -> tuple[State, Command | None]:
    """Start a job where nothing runs any more; else it gets the devices once they are free, and has stopped itself."""
    if job.placement is None and state.space().has(placement.devices):
        return _go(state, job, placement)
    account = replace(settled(state, job.name), reserved=placement)
    if job.phase in ("queued", "stopping"):
        return state.with_job(account), None
    assert job.placement is not None
    account = replace(account, num_moves=job.num_moves + (set(job.placement.sites) != set(placement.sites)))
    why = f"it moves to {placement.where}"
    return state.with_job(stopped(state, account), "preempt", why), Preempt(job.name, job.attempt, why)


def _go(state: State, job: JobState, placement: JobPlacement) -> tuple[State, Command]:
    account = started(settled(state, job.name), placement)
    if job.placement is None:
        account = replace(account, num_starts=job.num_starts + 1)
        return state.with_job(account, "start"), Start(job.name, account.attempt, placement)
    if set(job.placement.sites) == set(placement.sites):
        return state.with_job(account, "resize"), Resize(job.name, account.attempt, placement)
    account = replace(account, num_moves=job.num_moves + 1)
    return state.with_job(account, "migrate"), Migrate(job.name, account.attempt, placement)
