"""Changes that each event makes by itself, before the policy is asked."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from farpipe.errors import InputError
from farpipe.fleet.commands import Cancel, Command, Preempt, Replan
from farpipe.fleet.events import (
    DevicesChanged,
    Event,
    JobCancelled,
    JobEnded,
    JobFailed,
    JobStarted,
    JobSubmitted,
    LinkChanged,
    PriceChanged,
    SiteBack,
    SiteLost,
    StepReported,
    Tick,
)
from farpipe.fleet.job import JobState, Placement
from farpipe.fleet.ledger import placed, queued, settled
from farpipe.fleet.snapshot import State, smallest_change
from farpipe.strict import nearest

Result = tuple[State, list[Command]]


def take_in(state: State, event: Event) -> Result[State]:
    """The state once `event` has happened, and the commands that follow from it alone."""
    handler: Callable[[Any, Any], Any] | None = _HANDLERS.get(type(event))
    if handler is None:
        raise InputError(f"unknown event {type(event).__name__}{nearest(type(event).__name__, _NAMES)}")
    changed: Result[State] = handler(state, event)
    return changed


def _submitted(state: State, event: JobSubmitted) -> Result[State]:
    job = event.job
    known = state.jobs.get(job.name)
    if known is not None or job.name in state.ended:
        if known is not None and known.job != job:
            raise InputError(f"job {job.name!r}: there is another job of that name; give each its own")
        return state, []  # the same submission again
    if why := smallest_change(state, job):
        return replace(state, ended=state.ended | {job.name}), [Cancel(job.name, f"job {job.name!r}: {why}")]
    return state.with_job(JobState(job, since_s=state.now_s)), []


def _started(state: State, event: JobStarted) -> Result[State]:
    job = settled(state, event.name)
    if job.phase != "starting" or job.placement is None:
        raise InputError(f"job {event.name!r} has started, but it was {job.phase}")
    job = placed(job, job.placement, "running")
    return state.with_job(replace(job, stored_at=job.placement.sites[0] if job.placement else None)), []


def _reported(state: State, event: StepReported) -> Result[State]:
    job = settled(state, event.name)
    if not event.step_s > 0 or job.phase != "running" or job.placement is None:
        raise InputError(f"job {event.name!r} reports steps of {event.step_s:g} s while it is {job.phase}")
    return state.with_job(placed(job, replace(job.placement, step_s=event.step_s), "running")), []


def _ended(state: State, event: JobEnded) -> Result[State]:
    return state.without_job(settled(state, event.name)), []


def _failed(state: State, event: JobFailed) -> Result[State]:
    job = settled(state, event.name)
    if event.is_final:
        return state.without_job(job), []
    return state.with_job(queued(job, event.num_lost)), []


def _cancelled(state: State, event: JobCancelled) -> Result[State]:
    if event.name in state.ended:
        return state, []
    return state.without_job(settled(state, event.name)), [Cancel(event.name, "cancelled by its owner")]


def _link(state: State, event: LinkChanged) -> Result[State]:
    if event.link not in state.rates:
        raise InputError(f"there is no link {event.link!r}{nearest(event.link, state.rates)}")
    if not event.bytes_per_s >= 0:
        raise InputError(f"link {event.link}: a rate is zero or more, found {event.bytes_per_s:g}")
    state = replace(state, rates={**state.rates, event.link: event.bytes_per_s})
    return _fit_link(state, event.link)


def _fit_link(state: State, link: str) -> Result[State]:
    """Every job on a changed link gets a new speed; all of them share what the link has in proportion."""
    users = [job for job in state.jobs.values() if job.placement and link in job.placement.links(job.phase)]
    commands: list[Command] = []
    wanted = sum(job.placement.links(job.phase)[link] for job in users if job.placement)
    for job in users:
        assert job.placement is not None
        share = state.rates[link] * job.placement.links(job.phase)[link] / wanted if wanted else 0.0
        state, command = _fit_job(state, job, {link: share})
        commands.append(command)
    return state, commands


def _fit_job(state: State, job: JobState, rates: dict[str, float]) -> tuple[State, Command]:
    """The job at the speed that `rates` allow, or back in the queue."""
    assert job.placement is not None
    space, mine = state.space(), job.placement.link_bytes_per_s
    free = {name: max(0.0, space.rates[name]) + rate for name, rate in mine.items()}
    fitted = state.world.quotes.placement(job.job.kind, job.placement.devices, {**free, **rates})
    account = settled(state, job.name)
    if fitted is None or job.phase == "starting":
        stopped = replace(queued(account), num_preemptions=job.num_preemptions + 1)
        return state.with_job(stopped), Preempt(job.name, "a link it needs is too slow")
    fitted = replace(fitted, startup_s=0.0, startup_bytes_per_s=fitted.link_bytes_per_s)
    return state.with_job(placed(account, fitted, "running")), Replan(job.name, fitted)


def _prices(state: State, event: PriceChanged) -> Result[State]:
    tariffs = dict(state.tariffs)
    for site, price in event.prices.items():
        if site not in tariffs:
            raise InputError(f"a price for site {site!r}, which is not in the fleet{nearest(site, tariffs)}")
        tariffs[site] = tariffs[site].changed(price, state.now_s)
    return replace(state, tariffs=tariffs), []


def _lost(state: State, event: SiteLost) -> Result[State]:
    return _site(state, event.site, is_up=False, lost_s=event.checkpoint_s)


def _back(state: State, event: SiteBack) -> Result[State]:
    return _site(state, event.site, is_up=True)


def _devices(state: State, event: DevicesChanged) -> Result[State]:
    if event.num_devices < 0:
        raise InputError(f"site {event.site}: a number of devices is zero or more, found {event.num_devices}")
    return _site(state, event.site, num_devices=event.num_devices)


def _site(state: State, name: str, lost_s: float = 0.0, **change: Any) -> Result[State]:
    if name not in state.sites:
        raise InputError(f"there is no site {name!r}{nearest(name, state.sites)}")
    state = replace(state, sites={**state.sites, name: replace(state.sites[name], **change)})
    commands: list[Command] = []
    for job in _newest_first(state, name):
        if state.space().devices[name] >= 0:
            break
        account = settled(state, job.name)
        num_lost = _steps_in(job, job.placement, lost_s)
        stopped = replace(queued(account, num_lost), num_preemptions=job.num_preemptions + 1)
        state = state.with_job(stopped)
        commands.append(Preempt(job.name, f"{name} has no devices for it any more"))
    return state, commands


def _newest_first(state: State, site: str) -> list[JobState]:
    """The jobs at `site`, those that have done least there first."""
    there = [job for job in state.jobs.values() if job.placement and site in job.placement.sites]
    return sorted(there, key=lambda job: -job.since_s)


def _steps_in(job: JobState, placement: Placement | None, seconds: float) -> float:
    """Steps that a running job does in so many seconds."""
    return seconds / placement.step_s if placement is not None and job.phase == "running" else 0.0


def _tick(state: State, event: Tick) -> Result[State]:
    return state, []


_HANDLERS: dict[type, Callable[[Any, Any], Any]] = {
    JobSubmitted: _submitted,
    JobStarted: _started,
    StepReported: _reported,
    JobEnded: _ended,
    JobFailed: _failed,
    JobCancelled: _cancelled,
    LinkChanged: _link,
    PriceChanged: _prices,
    SiteLost: _lost,
    SiteBack: _back,
    DevicesChanged: _devices,
    Tick: _tick,
}
_NAMES = [kind.__name__ for kind in _HANDLERS]
