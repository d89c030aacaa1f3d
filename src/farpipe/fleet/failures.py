"""Ends of attempts that did not go well: failures and their budget, and starts and stops that nobody confirms."""

from typing import Final

from farpipe.fleet.copies import go_on_from_newest
from farpipe.fleet.events import Cancel, Command, JobFailed, Preempt
from farpipe.fleet.job import JobState
from farpipe.fleet.replacing import replace
from farpipe.fleet.snapshot import Snapshot, State, queued, settled
from farpipe.fleet.stops import stopped

MAX_WHY: Final = 2000
"""Letters of a failure's reason that are kept."""
CANCELLED: Final = "cancelled by its owner"


def failed(state: State, job: JobState, event: JobFailed) -> tuple[State, list[Command]]:
    """The state once the settled `job` has failed: it goes back to the queue, or is given up."""
    why = event.why[:MAX_WHY]
    if job.leaves:  # however its attempt ends, its owner ended it
        return state.without_job(replace(job, last_failure=why), "cancel", _cancelled(why)), []
    if event.is_final:
        return state.without_job(replace(job, last_failure=why), "fail", why), []
    num_steps = job.num_stored if event.num_steps is None else event.num_steps
    waiting = go_on_from_newest(state, replace(queued(job, num_steps), reserved=None))
    return _again_or_given_up(state, _paused(state, waiting, why))


def has_stopped(state: State, job: JobState, num_steps: float | None, why: str = "") -> tuple[State, list[Command]]:
    """The state once nothing of the settled, stopping `job` runs any more; its checkpoint has `num_steps`."""
    if job.leaves:
        return state.without_job(job, "cancel", _cancelled(why)), []
    waiting = go_on_from_newest(state, queued(job, job.num_stored if num_steps is None else num_steps))
    if waiting.num_failures >= state.world.stops.max_failures:
        return _again_or_given_up(state, replace(waiting, reserved=None))
    return state.with_job(waiting, "stopped", why), []


def _cancelled(why: str) -> str:
    return f"{CANCELLED}; {why}" if why else CANCELLED


def end_overdue(state: State) -> tuple[State, list[Command]]:
    """End the starts and stops whose limits are over: a start has failed and is stopped, a stop counts as over."""
    commands, stops = list[Command](), state.world.stops
    for name in [job.name for job in state.jobs.values() if _is_overdue(state, job)]:
        job, further = settled(state, name), list[Command]()
        if job.phase == "stopping":
            why = f"its stop was not confirmed within {stops.stop_limit_s:g} s of its expected end"
            state, further = has_stopped(state, job, None, why)
        else:
            why = f"its start was not confirmed within {stops.start_limit_s:g} s of its expected end"
            further = [Preempt(name, job.attempt, why)]
            waiting = stopped(state, _paused(state, job, why))
            if waiting.phase == "stopping":
                state = state.with_job(waiting, "preempt", why)
            else:
                state, more = _again_or_given_up(state, waiting)
                further += more
        commands += further
    return state, commands


def _is_overdue(state: Snapshot, job: JobState) -> bool:
    if job.placement is None:
        return False
    if job.phase == "stopping":
        return state.now_s > job.stopped_by_s + state.world.stops.stop_limit_s
    due_s = job.since_s + job.placement.startup_s + state.world.stops.start_limit_s
    return job.phase == "starting" and state.now_s > due_s


def _paused(state: Snapshot, job: JobState, why: str) -> JobState:
    """A job that has failed once more, and is not started again at once if that was not the first time in a row."""
    goes_on = job.num_failures > 0 and job.num_done < job.failed_at + job.job.num_steps / 100
    number, failed_at = (job.num_failures + 1, job.failed_at) if goes_on else (1, job.num_done)
    not_before_s = state.now_s + state.world.stops.pause_s(number)
    return replace(job, num_failures=number, failed_at=failed_at, not_before_s=not_before_s, last_failure=why)


def _again_or_given_up(state: State, job: JobState) -> tuple[State, list[Command]]:
    """A queued job that has failed: it will be tried again unless it has used up its failures."""
    if job.num_failures < state.world.stops.max_failures:
        return state.with_job(job, "fail", job.last_failure), []
    share, of_what = job.num_done / job.job.num_steps, f": {job.last_failure}" if job.last_failure else ""
    why = f"given up at {share:.0%} of its steps after {job.num_failures:,} failures in a row{of_what}"
    return state.without_job(job, "fail", why), [Cancel(job.name, job.attempt, why)]
