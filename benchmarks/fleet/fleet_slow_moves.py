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
from itertools import product
from typing import Final

from benchmarks.fleet.fleet_case import Row, StepTimes
from benchmarks.fleet.fleet_speed import HOUR_S, cluster_of
from benchmarks.fleet.fleet_tables import change, head, line, mean_of
from benchmarks.fleet.fleet_traces import RawJob, as_jobs, at_load
from farpipe.core.spec import Cluster
from farpipe.fleet.job import FleetJob
from farpipe.fleet.policies import policy_of
from farpipe.fleet.policies.farpipe_policy import FarpipePolicy
from farpipe.fleet.policies.protocol import Policy
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.simulator import Simulator
from farpipe.fleet.state import first_state

RATES: Final = (1e6, 1e7, 1e8, 1e9)
"""Bytes/s of every link."""
NUM_JOBS: Final = 80
SITES: Final = {"num_sites": 3, "num_devices": 32}


def policies() -> dict[str, Policy]:
    """The policies of the table."""
    return {
        "srtf": policy_of("srtf"),
        "bace": policy_of("bace"),
        "farpipe": policy_of("farpipe"),
        "farpipe without stops": FarpipePolicy(preempts=False),
    }


def jobs_of(seed: int, steps: StepTimes, *, with_deadlines: bool) -> list[FleetJob]:
    """Jobs of 8 to 32 devices, some of which may have twice as many, lognormal lengths of 2.5 h in the median."""
    draw, now_s, raw = random.Random(f"slow moves {seed}"), 0.0, list[RawJob]()
    for _ in range(NUM_JOBS):
        now_s += draw.expovariate(1.0)
        raw.append(RawJob(now_s, draw.lognormvariate(9.1, 1.0), draw.choice((8, 8, 16, 16, 32)), "tenant"))
    raw = at_load(raw, SITES["num_sites"] * SITES["num_devices"], 1.0)
    jobs = as_jobs(raw, steps, shrink=1, grow=2)
    slack = [draw.uniform(1.1, 3.0) if draw.random() < 0.25 else None for _ in jobs]
    if not with_deadlines:
        return jobs
    return [
        replace(job, deadline_s=job.submit_s + times * was.duration_s) if times else job
        for job, was, times in zip(jobs, raw, slack, strict=True)
    ]


def rows_of(cluster: Cluster, draws: Sequence[Sequence[FleetJob]]) -> list[Row]:
    """A row for each policy and draw of jobs."""
    quotes, rows = PlannerQuotes(cluster), list[Row]()
    for (start, jobs), (name, policy) in product(enumerate(draws), policies().items()):
        data = Simulator(first_state(cluster, policy, quotes)).run(jobs).to_data()
        figures = {"mean_h": data["mean_jct_s"] / HOUR_S, "num_in_time": data["num_deadlines_met"]}
        rows.append({"policy": name, "start": start} | figures)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--draws", type=int, default=10)
    given = parser.parse_args()
    names, steps = list(policies()), StepTimes()
    others = [name for name in names if name != "farpipe"]
    traces = {has: [jobs_of(seed, steps, with_deadlines=has) for seed in range(given.draws)] for has in (False, True)}
    head("link", "deadlines", *names, *(f"`farpipe` against {name}, %" for name in others))
    for rate, has in product(RATES, traces):
        rows = rows_of(cluster_of(**SITES, bytes_per_s=rate), traces[has])
        in_time = {name: sum(row["num_in_time"] for row in rows if row["policy"] == name) for name in names}
        means = (f"{mean_of(rows, name, 'mean_h'):.1f}" + (f" ({in_time[name]})" if has else "") for name in names)
        against = (change(rows, "farpipe", name, "mean_h") for name in others)
        line([f"{8 * rate / 1e6:,.0f} Mbit/s", "a quarter" if has else "none", *means, *against])


if __name__ == "__main__":
    main()
