"""Predicted and measured step over the kernel's own TCP: four ranks in network namespaces, 1F1B, eager, greedy and
auto. Prints JSON.

Two sites of two ranks, backward takes twice as long as forward, stages sleep. `error` is (predicted - measured) /
measured of the median step, the first three left out; `slowest` that of the slowest of them. `first_s` is the first
step, in which TCP has to find the rate. With `--case 0` or `--case 1` only one distance is measured. Needs root and
/dev/net/tun.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from kernel_wan import print_where_possible

METHODS = ("1f1b", "eager", "greedy", "auto")
SITES = ("west", "west", "east", "east")
NUM_STEPS, NUM_SKIPPED_STEPS = 12, 3
SEARCH_S = 10.0


class Case(NamedTuple):
    """A distance, and work for which it matters."""

    latency_s: float
    bit_per_s: float
    message_bytes: float
    forward_s: float
    num_microbatches: int


CASES = (Case(0.020, 200e6, 0.5e6, 0.020, 16), Case(0.050, 1e9, 4e6, 0.040, 12))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=int, choices=range(len(CASES)))
    parser.add_argument("--method", choices=METHODS)
    only = parser.parse_args()
    cases = CASES if only.case is None else CASES[only.case : only.case + 1]
    methods = (only.method,) if only.method else METHODS
    print_where_possible(lambda: {"steps": [measure(case, method) for case in cases for method in methods]})


def measure(case: Case, method: str) -> dict[str, Any]:
    """One row of the table."""
    from farpipe.emulate import Wan, links_of_problem
    from farpipe.plan.orders import find_order
    from farpipe.run.run import run
    from farpipe.runtime.run_spec import RunSpec
    from farpipe.simulate import simulate

    problem = make_problem(case)
    schedule = find_order(problem, method, time_limit_s=SEARCH_S).schedule
    predicted_s = simulate(problem, schedule).makespan_s
    spec = RunSpec(
        problem=problem, schedule=schedule, sites=SITES, num_steps=NUM_STEPS, device="sleep", emulate_links=False
    )
    name = f"benchmark{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder, Wan.up(("west", "east"), links_of_problem(problem), name=name) as wan:
        measured_s = run(spec, Path(folder) / "run", wan=wan).makespan_s
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        dropped = sum(link["dropped_full"] for link in wan.status()["links"].values())
    steps_s = [json.loads(line)["makespan_s"] for line in lines]
    return {
        "latency_ms": case.latency_s * 1e3,
        "mbit_per_s": case.bit_per_s / 1e6,
        "order": method,
        "predicted_s": round(predicted_s, 4),
        "measured_s": round(measured_s, 4),
        "error": round((predicted_s - measured_s) / measured_s, 4),
        "slowest": round(predicted_s / max(steps_s[NUM_SKIPPED_STEPS:]) - 1, 4),
        "first_s": round(steps_s[0], 4),
        "packets_dropped": dropped,
    }


def make_problem(case: Case) -> Any:
    from farpipe.step import Hop, Link, Problem, Rank, Stage, Transfer

    link = Link(latency_s=case.latency_s, bandwidth_bytes_per_s=case.bit_per_s / 8)
    across = [Transfer(link=name, bytes=case.message_bytes) for name in ("west>east", "east>west")]
    work = {"forward_s": case.forward_s, "input_grad_s": case.forward_s, "weight_grad_s": case.forward_s}
    free = Hop()  # inside a site: memory of one machine
    return Problem(
        num_microbatches=case.num_microbatches,
        ranks=(Rank(),) * len(SITES),
        stages=tuple(Stage(rank=rank, **work) for rank in range(len(SITES))),
        links={"west>east": link, "east>west": link},
        hops=(free, Hop(forward=across[0], backward=across[1]), free),
    )


if __name__ == "__main__":
    main()
