"""Predicted and measured step over the kernel's own TCP: four ranks in network namespaces, 1F1B, eager, greedy and
auto. Prints JSON.

Two sites of two ranks, backward takes twice as long as forward, stages sleep. `error` is (predicted - measured) /
measured of the median step, the first three left out; `slowest` that of the slowest of them. `first_s` is the first
step, in which TCP has to find the rate. With `--case 0` or `--case 1` only one distance is measured. Needs root and
/dev/net/tun.

Where the time goes, of the median step: `message_ms` from a message's start to its arrival (median), `explained_ms` the
latency and the bytes at the share of the rate that messages get, `late_ms` how much longer than planned an action took
(ranks wake late), `emulator_cpu_share` CPU time of the process behind the links over wall time. `--through plain`
leaves out TLS, `--through transport` the kernel's links as well: the transport itself then delays what arrives.
"""

import argparse
import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared.kernel_wan import print_where_possible
from benchmarks.shared.sleeping_ranks import SITES, two_by_two

METHODS = ("1f1b", "eager", "greedy", "auto")
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
    parser.add_argument("--through", choices=("tls", "plain", "transport"), default="tls")
    only = parser.parse_args()
    cases = CASES if only.case is None else CASES[only.case : only.case + 1]
    methods = (only.method,) if only.method else METHODS
    print_where_possible(
        lambda: {"steps": [measure(case, method, only.through) for case in cases for method in methods]}
    )


def measure(case: Case, method: str, through: str = "tls") -> dict[str, Any]:
    """One row of the table."""
    from farpipe.core.simulate import Timeline, simulate
    from farpipe.engine.launch.run import run
    from farpipe.engine.links import Wan, links_of_problem
    from farpipe.engine.run_spec import RunSpec
    from farpipe.planning.planner.orders import find_order

    problem, is_kernel = make_problem(case), through != "transport"
    schedule = find_order(problem, method, time_limit_s=SEARCH_S).schedule
    predicted_s = simulate(problem, schedule).makespan_s
    spec = RunSpec.bare(
        problem=problem,
        schedule=schedule,
        sites=SITES,
        num_steps=NUM_STEPS,
        device="sleep",
        emulate_links=not is_kernel,
    )
    name = f"benchmark{os.getpid()}"
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        sites, links = ("west", "east"), links_of_problem(problem)
        wan = stack.enter_context(Wan.up(sites, links, name=name)) if is_kernel else None
        before, begin_s = wan.status() if wan else {"cpu_s": 0.0}, time.monotonic()
        measured_s = run(spec, run_dir, wan=wan, allow_plaintext=through == "plain").makespan_s
        after, end_s = wan.status() if wan else {"cpu_s": 0.0, "links": {}}, time.monotonic()
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        timeline = Timeline.load(run_dir / "timeline.json")
        dropped = sum(link["dropped_full"] for link in after["links"].values())
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
        "through": through,
        **account(case, timeline),
        "emulator_cpu_share": round((after["cpu_s"] - before["cpu_s"]) / (end_s - begin_s), 3),
    }


def account(case: Case, timeline: Any) -> dict[str, float]:
    """Parts of a measured step, milliseconds."""
    import numpy as np

    from farpipe.core.step import KINDS
    from farpipe.engine.transport.tcp import PACED_SHARE

    far = timeline.messages[timeline.messages["bytes"] > 0]
    actions, both = timeline.actions, KINDS.index("B")
    planned_s = np.where(actions["kind"] == both, 2, 1) * case.forward_s
    seconds = {
        "message_ms": np.median(far["arrival_s"] - far["start_s"]),
        "explained_ms": case.latency_s + case.message_bytes * 8 / (PACED_SHARE * case.bit_per_s),
        "late_ms": np.mean(actions["end_s"] - actions["start_s"] - planned_s),
    }
    return {name: round(float(value) * 1e3, 2) for name, value in seconds.items()}


def make_problem(case: Case) -> Any:
    from farpipe.core.step import Link

    link = Link(latency_s=case.latency_s, bandwidth_bytes_per_s=case.bit_per_s / 8)
    return two_by_two(link, case.message_bytes, (case.forward_s,) * 3, case.num_microbatches)


if __name__ == "__main__":
    main()
