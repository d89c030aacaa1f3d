"""Effect of each event on the state, before the policy is asked."""

from collections.abc import Callable
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.spec.part import MAX_BANDWIDTH, MAX_DEVICES
from farpipe.core.strict import nearest
from farpipe.fleet.admission import why_refused
from farpipe.fleet.copies import go_on_from_newest, with_copying, without_copying
from farpipe.fleet.events import (
    AttemptEvent,
    Cancel,
    CheckpointStored,
    Command,
    DevicesChanged,
    Event,
    Happened,
    JobCancelled,
    JobEnded,
    JobFailed,
    JobStarted,
    JobStopped,
    JobSubmitted,
    LinkChanged,
    Preempt,
    PriceChanged,
    Replan,
    SiteBack,
    SiteLost,
    StepReported,
    Tick,
)
from farpipe.fleet.failures import CANCELLED, end_overdue, failed, has_stopped
from farpipe.fleet.job import JobPlacement, JobState, Phase
from farpipe.fleet.replacing import replace
from farpipe.fleet.snapshot import Snapshot, State, placed, queued, settled
from farpipe.fleet.stops import planned, stopped, without_reservations

STEP_SECONDS: Final = (1e-6, 1e7)
"""Least and most that a step can take."""
MAX_FIGURE: Final = 1e6
"""Largest price or carbon intensity, as in series."""

Result = tuple[State, list[Command]]


def apply_event(state: State, event: Event) -> Result[State]:
    """The state once `event` has happened, and the commands that follow from it alone."""
    handler: Callable[[Any, Any], Any] | None = _HANDLERS.get(type(event))
    if handler is None:
        raise InputError(f"unknown event {type(event).__name__}{nearest(type(event).__name__, _NAMES)}")
    changed: Result[State] = handler(state, event)
    return changed


def _submitted(state: State, event: JobSubmitted) -> Result[State]:
    job = event.job
    if job.fault:
        raise InputError(f"job {job.name!r}: {job.fault}")
    ended = state.ended.get(job.name)
    if ended is not None and ended.job == job:
        return state, []  # the same submission again, late
    if job.name in state.jobs:
        if state.jobs[job.name].job != job:
            raise InputError(f"job {job.name!r}: there is another job of that name; give each its own")
        return state, []  # the same submission again
    attempt = ended.attempt if ended is not None else 0
    if why := why_refused(state, job):
        why = f"job {job.name!r}: {why}"
        state = state.noted(Happened(job.name, "submit", "queued"), Happened(job.name, "refuse", why=why))
        return replace(state, ended=state.ended.plus(job, attempt)), [Cancel(job.name, attempt, why)]
    state = replace(state, ended=state.ended.without(job.name))
    return state.with_job(JobState(job, since_s=state.now_s, attempt=attempt), "submit"), []


def _attempt(state: State, event: AttemptEvent) -> JobState | None:
    """The settled job; None if the attempt that the event is about is over."""
    if event.name in state.ended:
        return None
    job = settled(state, event.name)
    if event.attempt > job.attempt:
        raise InputError(f"attempt {event.attempt} of job {event.name!r} has not begun; the newest is {job.attempt}")
    return job if event.attempt == job.attempt and job.placement is not None else None


def _started(state: State, event: JobStarted) -> Result[State]:
    job = _attempt(state, event)
    if job is None or job.placement is None or job.phase != "starting":
        return state, []
    account = replace(placed(job, job.placement, "running"), stored_at=job.placement.sites[0])
    state = with_copying(state.with_job(account), [job.name])
    return state.noted(Happened(job.name, "run", "running", state.jobs[job.name].placement)), []


def _reported(state: State, event: StepReported) -> Result[State]:
    _expect(f"job {event.name!r}: step_s", event.step_s, *STEP_SECONDS)
    job = _attempt(state, event)
    if job is None or job.placement is None or job.phase == "stopping":
        return state, []
    _expect_running(job, "reports steps")
    _expect_steps(job, event.num_steps)
    if event.num_steps < job.num_reported:
        return state, []  # an earlier report, late
    job = placed(job, replace(job.placement, step_s=event.step_s), "running")
    return state.with_job(replace(job, num_done=event.num_steps, num_reported=event.num_steps)), []


def _ended(state: State, event: JobEnded) -> Result[State]:
    job = _attempt(state, event)
    if job is None:
        return state, []
    _expect_running(job, "has ended")
    return state.without_job(replace(job, num_done=float(job.job.num_steps)), "finish"), []


def _expect_running(job: JobState, what: str) -> None:
    if job.phase not in ("running", "stopping"):
        raise InputError(f"job {job.name!r} {what} before its attempt {job.attempt} has started")


def _expect_steps(job: JobState, num_steps: float | None) -> None:
    """InputError for steps that the job can't have done; reports and checkpoints may be ahead of what is believed."""
    if num_steps is not None:
        _expect(f"job {job.name!r}: num_steps", num_steps, 0.0, job.job.num_steps)


def _expect(what: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise InputError(f"{what}: expected from {least:g} to {most:g}, found {value:g}")


def _failed(state: State, event: JobFailed) -> Result[State]:
    job = _attempt(state, event)
    if job is None:
        return state, []
    _expect_steps(job, event.num_steps)
    return failed(state, job, event)


def _cancelled(state: State, event: JobCancelled) -> Result[State]:
    if event.name in state.ended:
        return state, []
    job, why = settled(state, event.name), CANCELLED
    if job.leaves:
        return state, []
    if job.placement is None or not state.world.stops.holds:
        return state.without_job(job, "cancel", why), [Cancel(event.name, job.attempt, why)]
    job = job if job.phase == "stopping" else stopped(state, job)
    job = replace(job, reserved=None, leaves=True)
    return state.with_job(job, "cancel", why), [Cancel(event.name, job.attempt, why)]


def _stored(state: State, event: CheckpointStored) -> Result[State]:
    if event.site not in state.sites:
        raise InputError(f"there is no site {event.site!r}{nearest(event.site, state.sites)}")
    job = _attempt(state, event)
    if job is None:
        return state, []
    _expect_running(job, "has stored a checkpoint")
    _expect_steps(job, event.num_steps)
    assert job.placement is not None
    if event.site == job.placement.sites[0]:
        job = replace(job, num_stored=max(job.num_stored, event.num_steps))
    else:
        steps = max(job.copies.get(event.site, 0.0), event.num_steps)
        job = replace(job, copies={**job.copies, event.site: steps})
    reported = max(job.num_reported, event.num_steps)
    return state.with_job(replace(job, num_done=max(job.num_done, reported), num_reported=reported)), []


def _stopped(state: State, event: JobStopped) -> Result[State]:
    job = _attempt(state, event)
    if job is None:
        return state, []
    if job.phase != "stopping":
        raise InputError(f"job {job.name!r} has stopped its attempt {job.attempt} without having been told to")
    _expect_steps(job, event.num_steps)
    return has_stopped(state, job, event.num_steps)


def _link(state: State, event: LinkChanged) -> Result[State]:
    if event.link not in state.rates:
        raise InputError(f"there is no link {event.link!r}{nearest(event.link, state.rates)}")
    _expect(f"link {event.link}: bytes/s", event.bytes_per_s, 0.0, MAX_BANDWIDTH)
    state = replace(state, rates={**state.rates, event.link: event.bytes_per_s})
    state = without_reservations(state, lambda placement: event.link in placement.links("starting"))
    state, names = without_copying(state, lambda placement: event.link in placement.copied_bytes_per_s)
    state, commands = _fit_link(state, event.link)
    return with_copying(state, names), commands


def _fit_link(state: State, link: str) -> Result[State]:
    """Every job on a changed link gets a new speed; all of them share what the link has in proportion."""
    users = [job for job in state.jobs.values() if job.placement and link in job.placement.links(job.phase)]
    commands: list[Command] = []
    wanted = sum(job.placement.links(job.phase)[link] for job in users if job.placement)
    for job in users:
        assert job.placement is not None
        share = state.rates[link] * job.placement.links(job.phase)[link] / wanted if wanted else 0.0
        state, command = _fit_job(state, job, link, share)
        commands.append(command)
    return state, commands


def _fit_job(state: State, job: JobState, link: str, share: float) -> tuple[State, Command]:
    """The job at the speed that its `share` of a link allows, or back in the queue; a start goes on where it is."""
    assert job.placement is not None
    space, mine = planned(state).space(), job.placement.link_bytes_per_s
    free = {name: max(0.0, space.rates[name]) + rate for name, rate in mine.items()}
    rates = {**free, link: share} if link in mine else free
    fitted = state.world.quotes.placement(job.job.kind, job.placement.devices, rates)
    if fitted is not None:
        fitted = replace(fitted, startup_s=0.0, startup_bytes_per_s=fitted.link_bytes_per_s)
        fitted = _start_left(state, job, fitted, link, share)
    account = settled(state, job.name)
    if fitted is None:
        account = replace(stopped(state, account), num_preemptions=job.num_preemptions + 1)
        why = "a link it needs is too slow"
        return state.with_job(account, "preempt", why), Preempt(job.name, job.attempt, why)
    fitted = replace(fitted, copied_bytes_per_s=job.placement.copied_bytes_per_s)
    return state.with_job(placed(account, fitted, job.phase), "replan"), Replan(job.name, job.attempt, fitted)


def _start_left(state: Snapshot, job: JobState, fitted: JobPlacement, link: str, share: float) -> JobPlacement | None:
    """`fitted` with what is left of a start, whose checkpoint gets `share` if it moves over `link`; None if it can't.

    All that a start consists of is taken to go on evenly. The links of its steps are others.
    """
    here = job.placement
    if job.phase != "starting" or here is None or here.startup_s <= 0:
        return fitted
    left = max(0.0, 1 - (state.now_s - job.since_s) / here.startup_s)
    seconds, sent = here.startup_s, dict(fitted.link_bytes_per_s)
    for name, size in here.moved_bytes.items():
        before = sent[name] = here.startup_bytes_per_s[name]
        if name == link:
            sent[name] = min(share, state.world.stops.transfer_share * state.rates[link])
        if sent[name] <= 0:
            return None
        seconds += size / sent[name] - size / before
    moved = {name: left * size for name, size in here.moved_bytes.items()}
    return replace(fitted, startup_s=left * seconds, startup_bytes_per_s=sent, moved_bytes=moved)


def _prices(state: State, event: PriceChanged) -> Result[State]:
    tariffs = dict(state.tariffs)
    for site, price in event.prices.items():
        if site not in tariffs:
            raise InputError(f"a price for site {site!r}, which is not in the fleet{nearest(site, tariffs)}")
        _expect(f"site {site}: USD/MWh", price.usd_per_mwh, -MAX_FIGURE, MAX_FIGURE)
        _expect(f"site {site}: g/kWh", price.carbon_g_per_kwh, 0.0, MAX_FIGURE)
        tariffs[site] = tariffs[site].changed(price, state.now_s)
    return replace(state, tariffs=tariffs), []


def _lost(state: State, event: SiteLost) -> Result[State]:
    return _site(state, event.site, is_up=False)


def _back(state: State, event: SiteBack) -> Result[State]:
    return _site(state, event.site, is_up=True)


def _devices(state: State, event: DevicesChanged) -> Result[State]:
    _expect(f"site {event.site}: devices", event.num_devices, 0, MAX_DEVICES)
    return _site(state, event.site, num_devices=event.num_devices)


def _site(state: State, name: str, **change: Any) -> Result[State]:
    if name not in state.sites:
        raise InputError(f"there is no site {name!r}{nearest(name, state.sites)}")
    state = replace(state, sites={**state.sites, name: replace(state.sites[name], **change)})
    state = without_reservations(state, lambda placement: _uses(placement, "starting", name))
    state, copying = without_copying(state, lambda placement: placement.copy_site == name)
    commands: list[Command] = []
    is_up = state.sites[name].is_up
    for job in _newest_first(state, name):
        if is_up and planned(state).space().devices[name] >= 0:
            break
        account = settled(state, job.name)
        account = stopped(state, account) if is_up else queued(account, account.num_stored)
        why = f"{name} has no devices for it any more" if is_up else f"{name} is lost"
        if job.leaves:
            state = state.without_job(account, "cancel", CANCELLED)
            continue  # it was stopping already
        what = "stopped" if job.phase == "stopping" else "preempt"
        state = state.with_job(replace(account, num_preemptions=job.num_preemptions + 1), what, why)
        commands += [Preempt(job.name, job.attempt, why)] if what == "preempt" else []
    for job in [job for job in state.jobs.values() if job.copies and job.phase == "queued" and job.reserved is None]:
        state = state.with_job(go_on_from_newest(state, settled(state, job.name)))
    return with_copying(state, copying), commands


def _uses(placement: JobPlacement, phase: Phase, site: str) -> bool:
    """True if it has devices at the site, or sends there or from there."""
    return site in placement.sites or any(site in link.split(">") for link in placement.links(phase))


def _newest_first(state: State, site: str) -> list[JobState]:
    """The jobs at `site`, those that have done least there first; of a lost one also those that load from there."""
    is_lost = not state.sites[site].is_up

    def needs(job: JobState) -> bool:
        here = job.placement
        if here is None or (job.phase == "stopping" and not is_lost):
            return False
        return _uses(here, job.phase, site) if is_lost else site in here.sites

    return sorted(filter(needs, state.jobs.values()), key=lambda job: -job.since_s)


def _tick(state: State, event: Tick) -> Result[State]:
    return end_overdue(state)


_HANDLERS: dict[type, Callable[[Any, Any], Any]] = {
    JobSubmitted: _submitted,
    JobStarted: _started,
    StepReported: _reported,
    JobEnded: _ended,
    JobFailed: _failed,
    JobStopped: _stopped,
    CheckpointStored: _stored,
    JobCancelled: _cancelled,
    LinkChanged: _link,
    PriceChanged: _prices,
    SiteLost: _lost,
    SiteBack: _back,
    DevicesChanged: _devices,
    Tick: _tick,
}
_NAMES = [kind.__name__ for kind in _HANDLERS]
