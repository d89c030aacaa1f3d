"""Rules of order: who is looked at first, the least key first."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from farpipe.fleet.job import JobState
from farpipe.fleet.policies.protocol import View

Keys = Callable[[View, Sequence[JobState]], list[float]]
"""A key for every job."""


def by_arrival(view: View, jobs: Sequence[JobState]) -> list[float]:
    """Times of submission."""
    return [job.job.submit_s for job in jobs]


def by_length(view: View, jobs: Sequence[JobState]) -> list[float]:
    """Seconds that the whole job takes on the most devices that it may have."""
    return [job.job.num_steps * view.best_step_s(job.job) for job in jobs]


def by_what_is_left(view: View, jobs: Sequence[JobState]) -> list[float]:
    """Seconds that the rest of it takes on the most devices that it may have."""
    return [job.left_at(view.now_s) * view.best_step_s(job.job) for job in jobs]


def by_work_left(view: View, jobs: Sequence[JobState]) -> list[float]:
    """Device-seconds that the rest of it takes on the most devices that it may have."""
    return [
        (job.job.num_steps - job.num_done if job.placement is None else job.left_at(view.now_s))
        * view.best_step_s(job.job)
        * job.job.max_devices
        for job in jobs
    ]


def tenants_excess(view: View, weights: Mapping[str, float]) -> dict[str, float]:
    """Excess of each tenant's devices in use over its share of them, as a part of that share; at least 0.

    Shares are as the `weights`, 1 where there is none, among the tenants that have jobs.
    """
    held = {job.job.tenant: 0 for job in view.state.jobs.values()}
    for job in view.active:
        held[job.job.tenant] += job.placement.num_devices if job.placement else 0
    per_weight = sum(held.values()) / sum(weights.get(tenant, 1.0) for tenant in held) if held else 0.0
    shares = {tenant: weights.get(tenant, 1.0) * per_weight for tenant in held}
    return {tenant: max(0.0, number / shares[tenant] - 1) if per_weight else 0.0 for tenant, number in held.items()}


def by_attained_service(view: View, jobs: Sequence[JobState]) -> list[float]:
    """Device-seconds that it has had so far."""
    return [device_s(view, job) for job in jobs]


def device_s(view: View, job: JobState) -> float:
    """Device-seconds up to now."""
    now = (view.now_s - job.since_s) * job.placement.num_devices if job.placement else 0.0
    return sum(job.spent.device_s.values()) + now


AGEING_S = 14 * 24 * 3600.0
"""After so long in the queue a job has gained as much as the largest normalised figure is worth. Not published; the
shorter it is, the nearer BACE comes to first come, first served."""


def bace_priority(view: View, jobs: Sequence[JobState]) -> list[float]:
    """BACE-Pipe's in our reading: what is left to compute and what it would take of the network, less its age."""
    return _bace(view, jobs, AGEING_S)


def bace_ageing(ageing_s: float) -> Keys:
    """The same with another time after which age outweighs the rest."""
    return partial(_bace, ageing_s=ageing_s)


def _bace(view: View, jobs: Sequence[JobState], ageing_s: float) -> list[float]:
    """Both figures are normalised by the largest in the queue. A job that fits a site takes nothing of the network."""
    left = by_work_left(view, jobs)
    demand = _demands(view, jobs)
    most_left, most_demand = max(left, default=0.0) or 1.0, max(demand, default=0.0) or 1.0
    ages = [job.total_queued_s(view.now_s) / ageing_s for job in jobs]
    return [a / most_left + b / most_demand - age for a, b, age in zip(left, demand, ages, strict=True)]


def _demands(view: View, jobs: Sequence[JobState]) -> list[float]:
    """Each job's need of inter-site rate over what the links have left on average; 0 where a free site can hold it."""
    space = view.space()
    largest = max(space.devices.values(), default=0)
    left = max(sum(space.rates.values()) / max(len(space.rates), 1), 1.0)
    wide = [job.job.min_devices > largest and bool(space.rates) for job in jobs]
    pairs = zip(jobs, wide, strict=True)
    return [(view.quotes.needed_rate(j.job.kind, j.job.max_devices) or 0.0) / left if w else 0.0 for j, w in pairs]
