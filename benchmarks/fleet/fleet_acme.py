"""A fleet under a mix like that of Acme's LLM cluster.

    FARPIPE_DATA=folder python -m benchmarks.fleet.fleet_acme [--starts N]

The regions of fleet_comparison.py with 512 devices each; 300 jobs of 8 to 1,024 devices (`acme_like`) at load 1.2, half
to twice their request accepted; 40 % of the jobs fail at a random point of their work and are not tried again, under
every policy the same ones. Mean JCT is that of the jobs that finish; `lost`: share of the device-hours of jobs that
failed.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.fleet.fleet_case import REGIONS, Row, StepTimes, jobs_of, resumed, scenario
from benchmarks.fleet.fleet_traces import acme_like, at_load
from farpipe.fleet.play import play
from farpipe.fleet.policies import policy_of
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.simulator import Failures

POLICIES = ("fcfs", "easy", "srtf", "bace", "farpipe")
DEVICES, NUM_JOBS, LOAD, FAILING = 512, 300, 1.2, 0.4
HOUR_S = 3600.0


class Bench:
    """Runs cells; objects that cells share are made once."""

    def __init__(self) -> None:
        self._steps, self._quotes = StepTimes(), PlannerQuotes(scenario(devices=DEVICES).cluster)

    def run(self, name: str, start: int) -> Row:
        """The row of one policy and start."""
        case = replace(scenario(start, devices=DEVICES), failures=Failures(final_share=FAILING, seed=start))
        raw = at_load(acme_like(NUM_JOBS, start, mean_gap_s=600.0), len(REGIONS) * DEVICES, LOAD)
        outcome = play(case, jobs_of(raw, self._steps), policy_of(name), quotes=self._quotes, tick_s=0.0)
        data, held = outcome.to_data(), sum(outcome.spent.device_s.values())
        lost = sum(sum(r.final.spent.device_s.values()) for r in outcome.records if r.final and r.jct_s is None)
        return {
            "policy": name,
            "start": start,
            "finished": data["num_finished"],
            "mean_h": data["mean_jct_s"] / HOUR_S,
            "p95_h": data["p95_jct_s"] / HOUR_S,
            "queued_max_h": data["max_wait_s"] / HOUR_S,
            "lost": lost / held,
            "total_usd": data["total_usd"],
            "utilization": data["utilization"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after so long; the next call goes on")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "farpipe_fleet_comparison")
    given = parser.parse_args()
    bench = Bench()
    wanted = [(f"{p}|{s}", partial(bench.run, p, s)) for s in range(given.starts) for p in POLICIES]
    rows = resumed(given.folder / "acme.jsonl", wanted, given.seconds).values()
    for name in POLICIES:
        mine = [row for row in rows if row["policy"] == name]
        columns = [column for column in mine[0] if column not in ("key", "policy", "start")] if mine else []
        means = {column: round(statistics.fmean(row[column] for row in mine), 3) for column in columns}
        print(json.dumps({"policy": name, "starts": len(mine)} | means))


if __name__ == "__main__":
    main()
