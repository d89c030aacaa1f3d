"""Stops where checkpoints take long to move, with and without deadlines: python -m benchmarks.fleet.fleet_slow_moves

Three sites of 32 A100 and 80 jobs at a load of 1, on links of 8 Mbit/s to 8 Gbit/s; checkpoints of 1B to 70B
parameters move at half a link's rate. The same jobs come without deadlines and with one for a quarter of them, 1.1 to 3
times their length (on what they ask for) after they are submitted. Mean completion time in h, jobs that end in time,
and the paired change of `farpipe` against each other policy with a 95 % interval over the draws.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from benchmarks.fleet.fleet_speed import HOUR_S, cluster_of
from benchmarks.fleet.fleet_tables import head, line
from benchmarks.fleet.fleet_traces import RawJob, as_jobs, at_load
from farpipe.fleet.job import FleetJob
from farpipe.fleet.policies import policy_of
from farpipe.fleet.policies.farpipe_policy import FarpipePolicy
from farpipe.fleet.policies.protocol import Policy
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.simulator import Simulator
from farpipe.fleet.state import first_state
from farpipe.optical.confidence import mean_interval
from farpipe.spec import Cluster, preset_site

RATES: Final = (1e6, 1e7, 1e8, 1e9)
"""Bytes/s of every link."""
NUM_JOBS: Final = 80
SITES: Final = {"num_sites": 3, "num_devices": 32}


class Figures(NamedTuple):
    """One simulation."""

    mean_h: float
    num_in_time: int


def policies() -> dict[str, Policy]:
    """The policies of the table."""
    return {
        "srtf": policy_of("srtf"),
        "bace": policy_of("bace"),
        "farpipe": policy_of("farpipe"),
        "farpipe without stops": FarpipePolicy(preempts=False),
    }


def jobs_of(seed: int, *, with_deadlines: bool) -> list[FleetJob]:
    """Jobs of 8 to 32 devices, some of which may have twice as many, lognormal lengths of 2.5 h in the median."""
    draw, now_s, raw = random.Random(f"slow moves {seed}"), 0.0, list[RawJob]()
    for _ in range(NUM_JOBS):
        now_s += draw.expovariate(1.0)
        raw.append(RawJob(now_s, draw.lognormvariate(9.1, 1.0), draw.choice((8, 8, 16, 16, 32)), "tenant"))
    raw = at_load(raw, SITES["num_sites"] * SITES["num_devices"], 1.0)
    big = preset_site("s0", "a100-80gb", 512)
    alone = PlannerQuotes(Cluster(sites=(big,)))

    def step_s(kind, number: int) -> float:  # type: ignore[no-untyped-def]
        placement = alone.placement(kind, (("s0", number),), {})
        assert placement is not None
        return placement.step_s

    jobs = as_jobs(raw, step_s, shrink=1, grow=2)
    slack = [draw.uniform(1.1, 3.0) if draw.random() < 0.25 else None for _ in jobs]
    if not with_deadlines:
        return jobs
    return [
        replace(job, deadline_s=job.submit_s + times * was.duration_s) if times else job
        for job, was, times in zip(jobs, raw, slack, strict=True)
    ]


def figures(cluster: Cluster, quotes: PlannerQuotes, policy: Policy, jobs: Sequence[FleetJob]) -> Figures:
    """Mean completion time and deadlines met."""
    data = Simulator(first_state(cluster, policy, quotes)).run(jobs).to_data()
    return Figures(data["mean_jct_s"] / HOUR_S, data["num_deadlines_met"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--draws", type=int, default=10)
    given = parser.parse_args()
    names = list(policies())
    head("link", "deadlines", *names, *(f"`farpipe` against {n}, %" for n in names if n != "farpipe"))
    for rate in RATES:
        cluster = cluster_of(**SITES, bytes_per_s=rate)
        quotes = PlannerQuotes(cluster)
        for with_deadlines in (False, True):
            found: dict[str, list[Figures]] = {name: [] for name in names}
            for seed in range(given.draws):
                jobs = jobs_of(seed, with_deadlines=with_deadlines)
                for name, policy in policies().items():
                    found[name].append(figures(cluster, quotes, policy, jobs))
            cells = []
            for name in names:
                ours = sum(f.mean_h for f in found[name]) / given.draws
                cells.append(
                    f"{ours:.1f}" + (f" ({sum(f.num_in_time for f in found[name])})" if with_deadlines else "")
                )
            for name in (n for n in names if n != "farpipe"):
                changes = [100 * (a.mean_h / b.mean_h - 1) for a, b in zip(found["farpipe"], found[name], strict=True)]
                span = mean_interval(changes)
                cells.append(f"{(span.low + span.high) / 2:+.1f} ± {(span.high - span.low) / 2:.1f}")
            line([f"{8 * rate / 1e6:,.0f} Mbit/s", "a quarter" if with_deadlines else "none", *cells])


if __name__ == "__main__":
    main()
