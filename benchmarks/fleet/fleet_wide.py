"""Jobs wider than a region: FARPIPE_DATA=folder python -m benchmarks.fleet.fleet_wide FILE.jsonl

The regions of fleet_comparison.py at load 0.6 with 200 jobs, of which every eighth is a 70B model that takes 96 to 128
devices, where a region has 64: it runs over several of them or not at all. `bace` has its pathfinder; `blind paths` is
`bace` that takes the cheapest path whatever its links do to the step; the others are as in the comparison. Links at
several multiples of what was measured. `wide`: those jobs alone; `slower`: their devices' hours over those that the
same steps take where nothing slows them. Runs that FILE.jsonl has are not done again.
"""

import argparse
import json
import statistics
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.fleet.baselines import COMPARED, cost_first
from benchmarks.fleet.fleet_case import Row, StepTimes, jobs_of, philly, resumed, scenario
from farpipe.fleet.job import FleetJob, Kind
from farpipe.fleet.outcome import FleetOutcome
from farpipe.fleet.play import play
from farpipe.fleet.policies import orders
from farpipe.fleet.policies.farpipe_policy import FarpipePolicy
from farpipe.fleet.policies.protocol import Policy
from farpipe.fleet.policies.queueing import QueuePolicy
from farpipe.fleet.quotes import PlannerQuotes

WIDE = Kind("llama-3-70b", 4096, 1024)
LEAST, MOST = 96, 128
HOUR_S = 3600.0


def policies() -> dict[str, Policy]:
    """By the names of the table."""
    named: dict[str, Policy] = {name: COMPARED[name] for name in ("bace", "srtf", "atlas", "random", "single-region")}
    blind = QueuePolicy("blind paths", orders.bace_priority, cost_first)
    return {"bace": named.pop("bace"), "blind paths": blind, **named, "farpipe": FarpipePolicy()}


def trace(start: int, steps: StepTimes) -> list[FleetJob]:
    """The jobs of a start, every eighth one a wide one that lasts as long on 128 devices."""
    jobs = jobs_of(philly(start, 0.6, num_jobs=200), steps)
    return [_widened(job, steps) if index % 8 == 3 else job for index, job in enumerate(jobs)]


def _widened(job: FleetJob, steps: StepTimes) -> FleetJob:
    seconds = min(24 * HOUR_S, job.num_steps * steps(job.kind, job.max_devices))
    num_steps = max(1, round(seconds / steps(WIDE, MOST)))
    return replace(job, kind=WIDE, min_devices=LEAST, max_devices=MOST, num_steps=num_steps)


def row(outcome: FleetOutcome, steps: StepTimes) -> dict[str, float]:
    """The figures of one simulation."""
    wide = [record for record in outcome.records if record.job.min_devices == LEAST]
    done = [record for record in wide if record.jct_s is not None]
    held = sum(sum(record.final.spent.device_s.values()) for record in done if record.final)
    needed = sum(record.job.num_steps * steps(WIDE, MOST) * MOST for record in done)
    data = outcome.to_data()
    return {
        "finished": data["num_finished"],
        "wide_finished": len(done),
        "wide": len(wide),
        "wide_h": statistics.fmean(r.jct_s or 0.0 for r in done) / HOUR_S if done else float("nan"),
        "mean_h": (data["mean_jct_s"] or float("nan")) / HOUR_S,
        "slower": held / needed if done else float("nan"),
        "egress_usd": sum(figure or 0.0 for figure in data["money"]["egress"].values()),
        "total_usd": data["total_usd"],
    }


class Bench:
    """Runs cells; objects that cells share are made once."""

    def __init__(self) -> None:
        self._steps, self._quotes = StepTimes(), dict[float, PlannerQuotes]()

    def run(self, rate: float, name: str, start: int) -> Row:
        """The row of one policy."""
        case = scenario(start, rate)
        quotes = self._quotes.setdefault(rate, PlannerQuotes(case.cluster))
        outcome = play(case, trace(start, self._steps), policies()[name], quotes=quotes, tick_s=0.0)
        return {"links": rate, "policy": name, "start": start} | row(outcome, self._steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--rates", default="1,2,4")
    parser.add_argument("--policies", default=",".join(policies()), help="only these, with commas between them")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long; the next call goes on")
    given = parser.parse_args()
    rates, names = [float(rate) for rate in given.rates.split(",")], given.policies.split(",")
    bench, cells = Bench(), list(product(rates, names, range(given.starts)))
    wanted = [(f"{rate}|{name}|{start}", partial(bench.run, rate, name, start)) for rate, name, start in cells]
    found = list(resumed(given.file, wanted, given.seconds).values())
    for rate, name in dict.fromkeys((line["links"], line["policy"]) for line in found):
        rows = [line for line in found if (line["links"], line["policy"]) == (rate, name)]
        columns = [column for column in rows[0] if column not in ("key", "links", "policy", "start")]
        mean = {column: round(statistics.fmean(line[column] for line in rows), 2) for column in columns}
        print(json.dumps({"links": rate, "policy": name, "starts": len(rows)} | mean))


if __name__ == "__main__":
    main()
