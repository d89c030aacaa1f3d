"""Stops that take time: devices are held until nothing runs on them, and who comes next has reserved them.

Policies see the fleet as it will be when all stops are over (`planned`): devices of a job that stops are free, those of
a reservation are taken. So a decision to stop one job for another needs no second thought when the devices get free.
"""

from collections.abc import Callable

from farpipe.fleet.events import Command, Start
from farpipe.fleet.job import JobPlacement, JobState
from farpipe.fleet.replacing import replace
from farpipe.fleet.snapshot import ROUNDING, Snapshot, Space, State, placed, queued, settled


def as_planned(job: JobState) -> JobState:
    """The job as it will be when its stop is over: starting on what it has reserved, or in the queue."""
    if job.reserved is not None:
        return replace(job, phase="starting", placement=job.reserved, reserved=None)
    return replace(job, phase="queued", placement=None) if job.phase == "stopping" else job


def planned(state: State) -> State:
    """The fleet when all stops are over, without the jobs that then leave."""
    if not state.world.stops.holds:
        return state
    return replace(state, jobs={name: as_planned(job) for name, job in state.jobs.items() if not job.leaves})


def stopped(state: Snapshot, job: JobState) -> JobState:
    """A settled job that is told to stop: in the queue, or ``stopping`` where that takes time."""
    stops = state.world.stops
    if not stops.holds or job.placement is None or job.phase == "stopping":
        return queued(job)
    seconds = stops.stop_s
    if job.phase == "running":
        seconds += stops.checkpoint_s(state.world.quotes.state_bytes(job.job.kind), job.placement.num_devices)
    by_s = state.now_s + seconds
    return replace(queued(job), phase="stopping", placement=job.placement, stopped_by_s=by_s)


def started(job: JobState, placement: JobPlacement) -> JobState:
    """A settled job that begins its next attempt on `placement`; checkpoints of steps that it does again are void."""
    account = replace(placed(job, placement, "starting"), reserved=None)
    copies = {site: steps for site, steps in account.copies.items() if steps <= account.num_done}
    done = account.num_done
    return replace(account, num_stored=done, num_reported=done, copies=copies, attempt=job.attempt + 1)


def start_reserved(state: State) -> tuple[State, list[Command]]:
    """Start every job whose reserved devices are free now; one whose links have got too thin loses its reservation."""
    commands = list[Command]()
    if not state.world.stops.holds:
        return state, commands
    for name in [job.name for job in state.jobs.values() if job.reserved is not None and job.phase == "queued"]:
        account, space = settled(state, name), state.space()
        placement = account.reserved
        assert placement is not None
        if not space.has(placement.devices):
            continue
        if not _carries(space, placement):
            state = state.with_job(replace(account, reserved=None))
            continue
        account = started(account, placement)
        account = replace(account, num_starts=account.num_starts + 1)
        state = state.with_job(account, "start")
        commands.append(Start(name, account.attempt, placement))
    return state, commands


def _carries(space: Space, placement: JobPlacement) -> bool:
    return all(space.rates[link] >= rate * (1 - ROUNDING) for link, rate in placement.links("starting").items())


def without_reservations(state: State, touched: Callable[[JobPlacement], bool]) -> State:
    """The same without the reservations that a change has touched: the policy decides anew."""
    for job in [job for job in state.jobs.values() if job.reserved is not None and touched(job.reserved)]:
        state = state.with_job(replace(settled(state, job.name), reserved=None))
    return state
