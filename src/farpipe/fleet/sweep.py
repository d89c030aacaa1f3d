"""A grid of simulations: loads, link rates, policies and seeds; every point is a row that can be found again."""

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from farpipe.errors import InputError, UsageError
from farpipe.fleet.events import Event, LinkChanged
from farpipe.fleet.job import FleetJob
from farpipe.fleet.outcome import Outcome
from farpipe.fleet.play import play
from farpipe.fleet.policies import policy_of
from farpipe.fleet.quotes import Quotes
from farpipe.fleet.scenario import Scenario

COLUMNS = (
    *("mean_jct_s", "median_jct_s", "p95_jct_s", "p99_wait_s", "max_wait_s", "utilization", "num_finished"),
    *("total_usd", "num_moves", "num_preemptions", "num_refused"),
)
"""Of `Outcome.to_data`, as they are."""


class Point(NamedTuple):
    """One simulation of a grid."""

    policy: str
    load: float | None
    """Offered load; None: the trace as it is."""
    bandwidth: float
    """Factor on every link's rate."""
    seed: int
    """0: the trace as it is; others deal its jobs out to the same times in another order."""


def grid(
    policies: Sequence[str], loads: Sequence[float], bandwidths: Sequence[float], seeds: Sequence[int]
) -> list[Point]:
    """All points; UsageError for an unknown policy and for a load or factor that is not positive."""
    for name in policies:
        policy_of(name)
    for what, values in (("load", loads), ("bandwidth factor", bandwidths)):
        for value in values:
            if not 0 < value < 1e6:
                raise UsageError(f"a {what} is more than zero, found {value:g}")
    found: list[float | None] = [*loads] or [None]
    return [Point(*point) for point in product(policies, found, bandwidths, seeds)]


def key_of(scenario: Scenario, jobs: Sequence[FleetJob], version: str) -> str:
    """Key that rows of the same fleet, trace and version of farpipe have in common."""
    digest = hashlib.sha256(version.encode())
    for part in (scenario.cluster, scenario.events, scenario.stops, scenario.failures, scenario.idle_power_w):
        digest.update(repr(part).encode())
    digest.update(scenario.hop_quotes.encode())
    digest.update(
        repr((sorted(scenario.policy_parameters.items()), sorted(scenario.tenant_shares.items()), list(jobs))).encode()
    )
    return digest.hexdigest()[:16]


def row_at(scenario: Scenario, jobs: Sequence[FleetJob], point: Point, quotes: Quotes) -> dict[str, Any]:
    """The figures of one point."""
    trace = dealt(jobs, point.seed)
    if point.load is not None:
        trace = at_load(trace, scenario, quotes, point.load)
    outcome = play(with_bandwidth(scenario, point.bandwidth), trace, point.policy, quotes=quotes)
    return point._asdict() | figures(outcome)


def figures(outcome: Outcome) -> dict[str, Any]:
    """An outcome as one row: times, money and energy of all sites together."""
    data = outcome.to_data()
    money = {f"{kind}_usd": sum(by_site.values()) for kind, by_site in data["money"].items()}
    energy = {f"{kind}_kwh": sum(by_site.values()) for kind, by_site in data["energy_kwh"].items()}
    return {name: data[name] for name in COLUMNS} | money | energy | {"carbon_g": sum(data["carbon_g"].values())}


def dealt(jobs: Sequence[FleetJob], seed: int) -> list[FleetJob]:
    """The jobs in another order at the same times; seed 0: as they are. Deadlines keep their distance."""
    if seed == 0:
        return list(jobs)
    order = list(jobs)
    random.Random(f"deal {seed}").shuffle(order)
    return [_moved(job, at.submit_s) for job, at in zip(order, jobs, strict=True)]


def _moved(job: FleetJob, submit_s: float) -> FleetJob:
    deadline_s = None if job.deadline_s is None else job.deadline_s + submit_s - job.submit_s
    return replace(job, submit_s=submit_s, deadline_s=deadline_s)


def offered_load(jobs: Sequence[FleetJob], scenario: Scenario, quotes: Quotes) -> float:
    """Device-seconds of all jobs on the least devices that they want, over those between first and last submission."""
    span_s = jobs[-1].submit_s - jobs[0].submit_s if jobs else 0.0
    if span_s <= 0:
        raise InputError("a trace needs two jobs at different times to have an offered load")
    work = sum(_device_s(job, scenario, quotes) for job in jobs)
    return work / (scenario.cluster.num_devices * span_s)


def _device_s(job: FleetJob, scenario: Scenario, quotes: Quotes) -> float:
    """On as few devices as it runs on at one site; a job that fits none counts nothing."""
    for number in (job.min_devices, job.max_devices):
        placed = (quotes.placement(job.kind, ((site.name, number),), {}) for site in scenario.cluster.sites)
        if times := [placement.step_s for placement in placed if placement]:
            return job.num_steps * number * min(times)
    return 0.0


def at_load(jobs: Sequence[FleetJob], scenario: Scenario, quotes: Quotes, load: float) -> list[FleetJob]:
    """The same jobs, submitted faster or slower so that `offered_load` is `load`."""
    factor, begin = offered_load(jobs, scenario, quotes) / load, jobs[0].submit_s
    return [_moved(job, begin + (job.submit_s - begin) * factor) for job in jobs]


def with_bandwidth(scenario: Scenario, factor: float) -> Scenario:
    """The same with every link faster by `factor`, changes of links included."""
    cluster = scenario.cluster
    links = tuple(
        link.model_copy(update={"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s * factor}) for link in cluster.links
    )
    events: Iterable[Event] = (
        replace(event, bytes_per_s=event.bytes_per_s * factor) if isinstance(event, LinkChanged) else event
        for event in scenario.events
    )
    return replace(scenario, cluster=cluster.model_copy(update={"links": links}), events=list(events))
