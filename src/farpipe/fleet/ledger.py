"""Settling a job's account: what it has used and done since it came into its phase."""

from dataclasses import replace

from farpipe.fleet.job import JobState, Phase, Placement
from farpipe.fleet.meter import bill
from farpipe.fleet.snapshot import Snapshot


def settled(state: Snapshot, name: str) -> JobState:
    """The job as of now: steps done, time queued and money spent up to this moment."""
    job, now_s = state.job(name), state.now_s
    if job.placement is None:
        return replace(job, queued_s=job.total_queued_s(now_s), since_s=now_s)
    spent = bill(
        state.tariffs,
        state.world.egress_usd_per_gb,
        job.placement,
        job.phase,
        state.meters[name],
        job.since_s,
        now_s,
    )
    return replace(job, num_done=job.done_at(now_s), since_s=now_s, spent=job.spent.plus(spent))


def queued(job: JobState, num_lost: float = 0.0) -> JobState:
    """A settled job without devices; `num_lost` steps are to be done again."""
    stored_at = job.placement.sites[0] if job.placement and job.phase == "running" else job.stored_at
    num_done = max(0.0, job.num_done - num_lost)
    return replace(job, phase="queued", placement=None, num_done=num_done, stored_at=stored_at)


def placed(job: JobState, placement: Placement, phase: Phase) -> JobState:
    """A settled job on `placement`."""
    first = job.since_s if job.first_start_s is None else job.first_start_s
    return replace(job, phase=phase, placement=placement, first_start_s=first)
