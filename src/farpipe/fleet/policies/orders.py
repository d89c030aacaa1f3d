"""Rules of order: who is looked at first, the least key first."""

import math
from collections.abc import Callable, Mapping, Sequence

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


def by_work_left(view: View, jobs: Sequence[JobState], power: float = 1.0) -> list[float]:
    """Device-seconds that the rest of it takes on the most devices that it may have, these to the `power`."""
    return [
        (job.job.num_steps - job.num_done if job.placement is None else job.left_at(view.now_s))
        * view.best_step_s(job.job)
        * job.job.max_devices**power
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


def bace_priority(view: View, jobs: Sequence[JobState], ageing_s: float = math.inf) -> list[float]:
    """Priorities of BACE-Pipe, the largest first, as summaries of arXiv 2605.25375 have them.

    (1 - a)(1 - I) + a(1 - D): I work that is left, D inter-site rate needed, each as a share of the most in the queue;
    a the share of the links that is in use. Whoever has queued for `ageing_s` has 1 more; the paper has no ageing.
    """
    congestion = _congestion(view)
    work = _shares(by_work_left(view, jobs))
    rates = _shares([view.quotes.needed_rate(job.job.kind, job.job.max_devices) or 0.0 for job in jobs])
    ages = [job.total_queued_s(view.now_s) / ageing_s for job in jobs]
    triples = zip(work, rates, ages, strict=True)
    return [-(1 - congestion) * (1 - left) - congestion * (1 - rate) - age for left, rate, age in triples]


def _congestion(view: View) -> float:
    """Share of all links' rates that is reserved."""
    whole = sum(view.rates.values())
    return 1 - sum(view.space().rates.values()) / whole if whole else 0.0


def _shares(values: Sequence[float]) -> list[float]:
    """Each value as a share of the largest."""
    most = max(values, default=0.0) or 1.0
    return [value / most for value in values]
