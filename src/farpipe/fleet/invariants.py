"""Rules that hold in every state; checked after every event in tests, and by the conformance kit."""

import math

from farpipe.fleet.snapshot import Snapshot


def broken(state: Snapshot) -> list[str]:
    """Every invariant that `state` breaks, in words; empty if it is sound."""
    found = [state.space().overdrawn()]
    for name, job in state.jobs.items():
        if name in state.ended:
            found.append(f"{name} has ended and is still there")
        if (job.placement is None) != (job.phase == "queued"):
            found.append(f"{name} is {job.phase} with placement {job.placement}")
        if job.placement is not None:
            number = job.placement.num_devices
            if not job.job.min_devices <= number <= job.job.max_devices:
                found.append(f"{name} has {number} devices, from {job.job.min_devices} to {job.job.max_devices}")
            if len(set(job.placement.sites)) != len(job.placement.sites):
                found.append(f"{name} is at one site twice: {job.placement.devices}")
            if not (job.placement.step_s > 0 and math.isfinite(job.placement.step_s)):
                found.append(f"{name} has steps of {job.placement.step_s} s")
        if not 0 <= job.num_done <= job.job.num_steps:
            found.append(f"{name} has done {job.num_done} of {job.job.num_steps} steps")
        if not 0 <= job.since_s <= state.now_s:
            found.append(f"{name} is as of {job.since_s} s at {state.now_s} s")
    return [why for why in found if why]
