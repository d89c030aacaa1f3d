"""Copies of checkpoints at other sites: which site gets them over which link, and where a job goes on from.

A running job sends a checkpoint to one other site all the time, each over `StopCosts.copy_every_s` seconds. A lost site
takes its checkpoints along until it is back.
"""

from collections.abc import Callable, Iterable, Mapping

from farpipe.fleet.events import Happened
from farpipe.fleet.job import JobPlacement, JobState
from farpipe.fleet.replacing import replace
from farpipe.fleet.snapshot import Snapshot, State, placed, settled


def go_on_from_newest(state: State, job: JobState) -> JobState:
    """The queued job with its newest checkpoint at a site that is up; if there is none, it waits for its own site."""
    if job.stored_at is None or not job.copies:
        return job
    stored = {**job.copies, job.stored_at: job.num_done}
    within_reach = [site for site in stored if state.sites[site].is_up]
    if not within_reach:
        return job
    site = max(within_reach, key=lambda name: (stored[name], name == job.stored_at))
    num_done = stored.pop(site)
    return replace(job, stored_at=site, num_done=num_done, num_stored=min(job.num_stored, num_done), copies=stored)


def without_copying(state: State, stopped: Callable[[JobPlacement], bool]) -> tuple[State, list[str]]:
    """The same without the copying that `stopped` is true for, and the names of the jobs that did it."""
    placements = {job.name: job.placement for job in state.jobs.values() if job.phase == "running" and job.placement}
    names = [name for name, here in placements.items() if here.copied_bytes_per_s and stopped(here)]
    for name in names:
        state = _copying(state, name, {})
    return state, names


def with_copying(state: State, names: Iterable[str]) -> State:
    """The same with copies of the checkpoints of these jobs, as far as they run and a link has room for them."""
    if not state.world.stops.copy_every_s:
        return state
    for name in names:
        job = state.jobs.get(name)
        if job is not None and job.phase == "running" and job.placement is not None:
            state = _copying(state, name, _copies_sent(state, job, job.placement.sites[0]))
    return state


def copies_moved(before: Snapshot, now: Snapshot) -> list[Happened]:
    """Running jobs that go on as before, and send their copies elsewhere now, or none any more."""
    found = list[Happened]()
    for name, job in now.jobs.items() if now.world.stops.copy_every_s else ():
        was = before.jobs.get(name)
        if was is None or was is job or was.placement is None or job.placement is None:
            continue
        goes_on = (was.phase, was.attempt, was.placement.step_s) == (job.phase, job.attempt, job.placement.step_s)
        if goes_on and was.placement.copied_bytes_per_s != job.placement.copied_bytes_per_s:
            found.append(Happened(name, "copy", "running", job.placement))
    return found


def _copying(state: State, name: str, copied_bytes_per_s: Mapping[str, float]) -> State:
    job = settled(state, name)
    assert job.placement is not None
    return state.with_job(placed(job, replace(job.placement, copied_bytes_per_s=copied_bytes_per_s), "running"))


def _copies_sent(state: Snapshot, job: JobState, home: str) -> Mapping[str, float]:
    """Bytes/s to the site that a link with room reaches from `home` with the cheapest egress, then the most room."""
    rate = state.world.quotes.state_bytes(job.job.kind) / state.world.stops.copy_every_s
    links = {link: free for link, free in state.space().rates.items() if link.split(">")[0] == home}
    wide = [link for link, free in links.items() if free >= rate > 0]
    link = min(wide, key=lambda name: (state.world.egress_usd_per_gb.get(name, 0.0), -links[name]), default=None)
    return {} if link is None else {link: rate}
