"""Speed of the fleet's decisions and simulation.

    python -m benchmarks.fleet.fleet_speed [--jobs N] [--policies bace,farpipe]

10,000 jobs over 12 sites on one core (limit for BACE: a minute), and the latency of a decision with 1,000 jobs in the
queue of 12 full sites (limit: 50 ms at the 99th percentile, warm): jobs end and come, and the fleet decides. All times
are CPU time of one core, so that what else runs on the machine counts less.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.fleet.fleet_traces import RawJob, as_jobs, at_load
from farpipe.fleet.events import Event, JobEnded, JobStarted, JobSubmitted, Price, PriceChanged
from farpipe.fleet.job import FleetJob
from farpipe.fleet.policies import policy_of
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.simulator import Simulator
from farpipe.fleet.state import FleetState, first_state
from farpipe.spec import Cluster, preset_site
from farpipe.spec.cluster import SiteLink

SITES = [f"s{index}" for index in range(12)]
DEVICES = 64
HOUR_S = 3600.0


def cluster() -> Cluster:
    """Twelve sites of 64 A100, all linked."""
    sites = tuple(preset_site(name, "a100-80gb", DEVICES) for name in SITES)
    pairs = [(a, b) for a in SITES for b in SITES if a != b]
    links = [SiteLink(source=a, target=b, latency_s=0.03, bandwidth_bytes_per_s=6e8) for a, b in pairs]
    return Cluster(sites=sites, links=tuple(links))


def trace(num_jobs: int, quotes: PlannerQuotes, load: float) -> list[FleetJob]:
    """Poisson arrivals, lognormal durations, requests of 8 to 64 devices; half to twice of that is accepted."""
    draw, now, raw = random.Random(0), 0.0, []
    for _ in range(num_jobs):
        now += draw.expovariate(1 / 300)
        number = draw.choices([8, 16, 32, 64], [8, 4, 2, 1])[0]
        raw.append(RawJob(now, draw.lognormvariate(9, 1.5), number, "tenant"))
    return as_jobs(at_load(raw, len(SITES) * DEVICES, load), lambda kind, n: _step_s(quotes, kind, n))


def _step_s(quotes: PlannerQuotes, kind, number: int) -> float:  # type: ignore[no-untyped-def]
    placement = quotes.placement(kind, (("s0", number),), {})
    assert placement is not None
    return placement.step_s


def prices(hours: int) -> list[Event]:
    """Every hour another price at every site."""
    draw = random.Random(1)
    return [PriceChanged(h * HOUR_S, {s: Price(draw.uniform(10, 100), 300.0) for s in SITES}) for h in range(hours)]


def simulated(policy: str, num_jobs: int, quotes: PlannerQuotes) -> dict[str, float]:
    """Seconds for a whole simulation at load 0.9."""
    jobs = trace(num_jobs, quotes, 0.9)
    events = prices(int(jobs[-1].submit_s / HOUR_S * 1.2))
    begin = time.process_time()
    outcome = Simulator(first_state(cluster(), policy_of(policy), quotes)).run(jobs, events)
    seconds = time.process_time() - begin
    return {"jobs": num_jobs, "seconds": round(seconds, 1), "finished": len(outcome.jcts_s)}


def latency(policy: str, quotes: PlannerQuotes, num_queued: int = 1000) -> dict[str, float]:
    """Quantiles of one decision's seconds with so many jobs queued: a job ends, another is submitted, 200 times.

    The same 200 events are played twice: before the first time no quote is known (`cold`), before the second all are.
    """
    jobs = trace(num_queued + 400, quotes, 0.9)
    state: FleetState = first_state(cluster(), policy_of("fcfs"), quotes)
    state, _ = state.handle(prices(1)[0])
    for job in jobs[: num_queued + 150]:
        state, _ = state.handle(JobSubmitted(state.now_s, _now(job, state)))
    quotes = PlannerQuotes(cluster())
    world = replace(state.world, quotes=quotes, best_steps={})
    state = FleetState(**vars(state) | {"policy": policy_of(policy), "world": world})
    cold, warm = (_turns(state, jobs[num_queued + 150 :]) for _ in range(2))
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
    given = parser.parse_args()
    quotes = PlannerQuotes(cluster())
    names = given.policies.split(",")
    found = {"decision latency": [{"policy": name} | latency(name, quotes) for name in names]}
    if given.jobs:
        found["simulation"] = [{"policy": name} | simulated(name, given.jobs, quotes) for name in names]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
