"""Speed of the fleet's decisions and simulation.

    python -m benchmarks.fleet.fleet_speed [--jobs N] [--policies bace,farpipe] [--sites N --devices N]

Jobs over sites on one core, and the latency of a decision with 1,000 jobs in the queue of full sites (limit: 50 ms at
the 99th percentile, warm): jobs end and come, and the fleet decides. Jobs ask for an eighth of a site to all of it. All
times are CPU time of one core, so that what else runs on the machine counts less.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.fleet.fleet_traces import RawJob, as_jobs, at_load
from farpipe.core.spec import Cluster, preset_site
from farpipe.core.spec.cluster import SiteLink
from farpipe.fleet.events import Event, JobEnded, JobStarted, JobSubmitted, Price, PriceChanged
from farpipe.fleet.job import FleetJob
from farpipe.fleet.policies import policy_of
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.simulator import Simulator
from farpipe.fleet.snapshot import Cache
from farpipe.fleet.state import FleetState, first_state

HOUR_S = 3600.0


def cluster_of(num_sites: int, num_devices: int, bytes_per_s: float = 6e8) -> Cluster:
    """Sites of A100, all linked."""
    names = [f"s{index}" for index in range(num_sites)]
    sites = tuple(preset_site(name, "a100-80gb", num_devices) for name in names)
    pairs = [(a, b) for a in names for b in names if a != b]
    links = [SiteLink(source=a, target=b, latency_s=0.03, bandwidth_bytes_per_s=bytes_per_s) for a, b in pairs]
    return Cluster(sites=sites, links=tuple(links))


def trace(num_jobs: int, cluster: Cluster, quotes: PlannerQuotes, load: float) -> list[FleetJob]:
    """Poisson arrivals, lognormal durations, requests of an eighth of a site to all; half to twice that is accepted."""
    draw, now, raw = random.Random(0), 0.0, []
    most = 1 << cluster.sites[0].num_devices.bit_length() - 1
    for _ in range(num_jobs):
        now += draw.expovariate(1 / 300)
        number = draw.choices([most // 8, most // 4, most // 2, most], [8, 4, 2, 1])[0]
        raw.append(RawJob(now, draw.lognormvariate(9, 1.5), number, "tenant"))
    num_devices = sum(site.num_devices for site in cluster.sites)
    return as_jobs(at_load(raw, num_devices, load), lambda kind, n: _step_s(quotes, kind, n))


def _step_s(quotes: PlannerQuotes, kind, number: int) -> float:  # type: ignore[no-untyped-def]
    placement = quotes.placement(kind, (("s0", number),), {})
    assert placement is not None
    return placement.step_s


def prices(cluster: Cluster, hours: int) -> list[Event]:
    """Every hour another price at every site."""
    draw, names = random.Random(1), [site.name for site in cluster.sites]
    return [PriceChanged(h * HOUR_S, {s: Price(draw.uniform(10, 100), 300.0) for s in names}) for h in range(hours)]


def simulated(policy: str, num_jobs: int, cluster: Cluster, load: float = 0.9) -> dict[str, float]:
    """Seconds for a whole simulation."""
    quotes = PlannerQuotes(cluster)
    jobs = trace(num_jobs, cluster, quotes, load)
    events = prices(cluster, int(jobs[-1].submit_s / HOUR_S * 1.2))
    begin = time.process_time()
    outcome = Simulator(first_state(cluster, policy_of(policy), quotes)).run(jobs, events)
    seconds = time.process_time() - begin
    return {"jobs": num_jobs, "seconds": round(seconds, 1), "finished": len(outcome.jcts_s)}


def latency(policy: str, cluster: Cluster, num_queued: int = 1000) -> dict[str, float]:
    """Quantiles of one decision's seconds with so many jobs queued: a job ends, another is submitted, 200 times.

    The same 200 events are played twice: before the first time no quote is known (`cold`), before the second all are.
    """
    quotes, running = PlannerQuotes(cluster), 12 * len(cluster.sites)
    jobs = trace(num_queued + running + 250, cluster, quotes, 0.9)
    state: FleetState = first_state(cluster, policy_of("fcfs"), quotes)
    state, _ = state.handle(prices(cluster, 1)[0])
    first, later = jobs[: num_queued + running], jobs[num_queued + running :]
    state, _ = state.handle(*(JobSubmitted(state.now_s, _now(job, state)) for job in first))
    quotes = PlannerQuotes(cluster)
    world = replace(state.world, quotes=quotes)
    state = FleetState(**vars(state) | {"policy": policy_of(policy), "world": world, "cache": Cache()})
    cold, warm = (_turns(state, later) for _ in range(2))
    queued = sum(job.placement is None for job in state.jobs.values())
    return {
        "queued": queued,
        "p50_ms": warm[100],
        "p99_ms": warm[198],
        "cold_p99_ms": cold[198],
        "cold_max_ms": cold[199],
    }


def _turns(state: FleetState, later: Sequence[FleetJob]) -> list[float]:
    """Milliseconds of 200 decisions, sorted."""
    found, coming = [], iter(later)
    for turn in range(200):
        now_s = state.now_s + 100.0
        active = [job for job in state.jobs.values() if job.placement is not None]
        job = active[turn % len(active)]
        if turn % 2 and job.phase == "starting":
            state, _ = state.handle(JobStarted(now_s, job.name, job.attempt))
        event = JobEnded(now_s, job.name, job.attempt) if turn % 2 else JobSubmitted(now_s, _now(next(coming), state))
        begin = time.process_time()
        state, _ = state.handle(event)
        found.append(round(1e3 * (time.process_time() - begin), 2))
    return sorted(found)


def _now(job: FleetJob, state: FleetState) -> FleetJob:
    return FleetJob(**vars(job) | {"submit_s": state.now_s})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--policies", default="bace,farpipe")
    parser.add_argument("--sites", type=int, default=12)
    parser.add_argument("--devices", type=int, default=64)
    given = parser.parse_args()
    cluster, names = cluster_of(given.sites, given.devices), given.policies.split(",")
    found = {"decision latency": [{"policy": name} | latency(name, cluster) for name in names]}
    if given.jobs:
        found["simulation"] = [{"policy": name} | simulated(name, given.jobs, cluster) for name in names]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
