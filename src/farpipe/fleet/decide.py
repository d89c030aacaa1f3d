"""The policy's part of a transition: it is asked, and what it wants is done as far as it is possible."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from farpipe.fleet.commands import Command, Migrate, Preempt, Resize, Start
from farpipe.fleet.job import JobState, Placement
from farpipe.fleet.ledger import placed, queued, settled
from farpipe.fleet.policies.protocol import Decision, Policy, View
from farpipe.fleet.snapshot import State
from farpipe.fleet.space import Space
from farpipe.fleet.starting import start_on


def decide(state: State, policy: Policy) -> tuple[State, list[Command]]:
    """The state after what the policy decides, and the commands for it; what can't be is in `refusals`."""
    try:
        decisions = list(policy.decide(View(state)))
        known = [_known(state, decision) for decision in decisions]
    except Exception as error:
        return replace(state, refusals=(f"{policy.name} failed: {type(error).__name__}: {error}",)), []
    space, commands, refusals = state.space(), list[Command](), [why for why in known if why]
    for decision in _stops_first([d for d, why in zip(decisions, known, strict=True) if not why]):
        done = _apply(state, space, decision)
        if isinstance(done, str):
            refusals.append(done)
        elif done is not None:
            state, command = done
            commands.append(command)
    return replace(state, refusals=tuple(refusals)), commands


def _known(state: State, decision: Decision) -> str:
    """Reason for which a decision makes no sense at all; empty if it does."""
    name, devices = decision.name, decision.devices
    if name not in state.jobs:
        return f"{name}: no such job"
    if devices is None:
        return ""
    sites = [site for site, _ in devices]
    if len(set(sites)) != len(sites) or not set(sites) <= set(state.sites):
        return f"{name}: sites {sites} are unknown, or one is there twice"
    job, number = state.jobs[name].job, sum(count for _, count in devices)
    if not job.min_devices <= number <= job.max_devices:
        return f"{name}: {number} devices; it wants from {job.min_devices} to {job.max_devices}"
    return ""


def _stops_first(decisions: Sequence[Decision]) -> chain[Decision]:
    stops = [decision for decision in decisions if decision.devices is None]
    return chain(stops, [decision for decision in decisions if decision.devices is not None])


def _apply(state: State, space: Space, decision: Decision) -> tuple[State, Command] | str | None:
    """Do one decision, in `space` as well; the reason if it is not possible, None if there is nothing to do."""
    job = state.jobs[decision.name]
    if decision.devices is None:
        return _stop(state, space, job, decision.why)
    if job.placement is not None and job.placement.devices == decision.devices:
        return None
    before = job.placement, job.phase
    if before[0] is not None:
        space.give(before[0], before[1])
    placement = start_on(state.world, space, job, decision.devices)
    if placement is None:
        if before[0] is not None:
            space.take(before[0], before[1])
        return f"{job.name}: {_show(decision)} is not free, or can't run the job"
    space.take(placement, "starting")
    return _go(state, job, placement)


def _stop(state: State, space: Space, job: JobState, why: str) -> tuple[State, Command] | None:
    if job.placement is None:
        return None
    space.give(job.placement, job.phase)
    stopped = queued(settled(state, job.name))
    return state.with_job(replace(stopped, num_preemptions=job.num_preemptions + 1)), Preempt(job.name, why)


def _go(state: State, job: JobState, placement: Placement) -> tuple[State, Command]:
    account = placed(settled(state, job.name), placement, "starting")
    if job.placement is None:
        return state.with_job(replace(account, num_starts=job.num_starts + 1)), Start(job.name, placement)
    if set(job.placement.sites) == set(placement.sites):
        return state.with_job(account), Resize(job.name, placement)
    return state.with_job(replace(account, num_moves=job.num_moves + 1)), Migrate(job.name, placement)


def _show(decision: Decision) -> str:
    return " > ".join(f"{number} at {site}" for site, number in decision.devices or ())
