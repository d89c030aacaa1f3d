"""Reason for which a job waits, and the smallest change that would start it: asked of the policy that decides."""

from collections.abc import Iterable, Iterator
from typing import Final

from farpipe.fleet.events import Start
from farpipe.fleet.job import JobState
from farpipe.fleet.replacing import replace
from farpipe.fleet.state import FleetState, decide

LOOKED_AT: Final = 16
"""Jobs ahead in the queue, and jobs next to end, that are tried one by one."""


def why_unstarted(state: FleetState, name: str) -> str:
    """The reason for which the queued job `name` does not start now: others, or a fleet in which it never would."""
    if (job := state.jobs[name]).not_before_s > state.now_s:
        last = f"; the last failure: {job.last_failure}" if job.last_failure else ""
        times = f"{job.num_failures} times in a row"
        return f"it has failed {times} and is not started before {job.not_before_s:.0f} s{last}"
    if job.reserved is not None:
        stopping = [other.name for other in state.jobs.values() if other.phase == "stopping"]
        return f"it has reserved {job.reserved.where} and starts when {', '.join(stopping[:LOOKED_AT])} have stopped"
    if not _starts(state, state.jobs[name], ()):
        return _nowhere(state, state.jobs[name])
    return f"{state.policy.name} keeps it waiting for others; were it alone it would start"


def why_waiting(state: FleetState, name: str) -> str:
    """`why_unstarted`, and what would start the job now.

    The policy is asked again about the same moment without another queued job, without a running one, and with less
    devices for the job; nothing is changed.
    """
    if state.jobs[name].reserved is not None:
        return why_unstarted(state, name)
    job, others = state.jobs[name], [other for other in state.jobs.values() if other.name != name]
    changes = [_without_queue(state, job, others), _after_ends(state, job, others), _smaller(state, job, others)]
    helps = " or ".join(filter(None, changes))
    return why_unstarted(state, name) + (f"; so it would now with {helps}" if helps else "")


def _starts(state: FleetState, job: JobState, others: Iterable[JobState]) -> bool:
    """True if the policy starts `job` with `others` and nobody else in the fleet."""
    jobs = {one.name: one for one in (*others, job)}
    alone = replace(state, jobs={name: jobs[name] for name in state.jobs if name in jobs})
    after, commands = decide(alone, state.policy)
    if (now := after.jobs[job.name]).reserved is not None and now.phase == "queued":
        return True
    return any(isinstance(command, Start) and command.name == job.name for command in commands)


def _without_queue(state: FleetState, job: JobState, others: list[JobState]) -> str:
    queue = [other.name for other in others if other.phase == "queued"]
    if not queue or not _starts(state, job, [other for other in others if other.phase != "queued"]):
        return ""
    first = next(
        (name for name in queue[:LOOKED_AT] if _starts(state, job, [one for one in others if one.name != name])), None
    )
    return f"{first!r} out of the queue" if first else f"the {len(queue)} other queued jobs gone"


def _after_ends(state: FleetState, job: JobState, others: list[JobState]) -> str:
    """The first running job whose end would do, or the fewest that end one after the other."""
    ends = sorted((end_s, other.name) for other in others if (end_s := other.end_s()) is not None)
    for end_s, name in ends[:LOOKED_AT]:
        if _starts(state, job, [other for other in others if other.name != name]):
            return f"the devices of {name!r}, which would end at {end_s:.0f} s"
    for count in range(2, min(len(ends), LOOKED_AT) + 1):
        gone = {name for _, name in ends[:count]}
        if _starts(state, job, [other for other in others if other.name not in gone]):
            return f"the devices of the next {count} jobs to end, the last of them at {ends[count - 1][0]:.0f} s"
    return ""


def _smaller(state: FleetState, job: JobState, others: list[JobState]) -> str:
    """The largest number of devices, by halves, with which it would start."""
    for number in _halves(job.job.min_devices):
        if _starts(state, replace(job, job=replace(job.job, min_devices=number)), others):
            return f"min_devices {number}"
    return ""


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number


def _nowhere(state: FleetState, job: JobState) -> str:
    """Reason for which the policy would not start the job in a fleet without any other."""
    if state.has_lost_checkpoint(job):
        return f"its checkpoint is at {job.stored_at}, which is lost: it waits until that is back, or is cancelled"
    alone, _ = decide(replace(state, jobs={job.name: job}), state.policy)
    lost = [site for site, known in state.sites.items() if not known.is_up]
    least, largest = job.job.min_devices, max(site.num_devices for site in state.sites.values())
    why = f"{state.policy.name} starts it nowhere, even were it alone"
    drained = [site for site, known in state.sites.items() if known.is_up and not known.num_devices]
    if least > largest:
        links = "" if drained or lost else f", and no links wide enough for {state.policy.name}"
        why += f": its {least} devices are more than the {largest} of a site{links}"
    why += f"; drained: {', '.join(drained)}" if drained else ""
    return why + (f"; lost: {', '.join(lost)}" if lost else "") + "".join(f"; {text}" for text in alone.refusals)


class Waits:
    """Reasons for which one job waits, as they change; to be called with every state of a simulation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.found: list[tuple[float, str]] = []
        """(time, reason from then on; empty: it no longer waits)."""

    def __call__(self, state: FleetState, event: object) -> None:
        job = state.jobs.get(self.name)
        why = why_waiting(state, self.name) if job is not None and job.phase == "queued" else ""
        if why != (self.found[-1][1] if self.found else ""):
            self.found.append((state.now_s, why))
