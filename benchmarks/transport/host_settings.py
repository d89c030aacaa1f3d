"""Cost of a host's TCP settings: predicted and measured 1F1B steps over the kernel's own TCP. Prints JSON.

The cases of wan_prediction.py (20 ms at 200 Mbit/s, 50 ms at 1 Gbit/s) on hosts with these settings:

    tuned        tcp_slow_start_after_idle=0, buffers up to 64 MB; BBR, which the transport renews
    untuned      Linux's own (slow start after idleness, buffers up to 4 and 6 MB); BBR, which the transport renews
    bbr          as untuned, but BBR as the kernel runs it: it is not renewed
    cubic        as untuned, where BBR is not allowed: CUBIC
    tuned-cubic  as tuned, where BBR is not allowed: CUBIC

Every figure is (predicted - measured) / measured, except `predicted_s`: of the first step, of the median of the others,
of the slowest of the others. With several --rounds the settings are measured in rotation, figures are medians over the
rounds (the slowest: the largest). Needs root and /dev/net/tun.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.engine.wan_prediction import CASES, Case, make_problem
from benchmarks.shared.kernel_wan import print_where_possible
from benchmarks.shared.sleeping_ranks import SITES

NUM_STEPS = 14
DEFAULTS = {"tcp_slow_start_after_idle": "1", "tcp_wmem": "4096 16384 4194304", "tcp_rmem": "4096 131072 6291456"}
HOSTS = ("tuned", "untuned", "bbr", "cubic", "tuned-cubic")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=int, choices=range(len(CASES)))
    parser.add_argument("--host", choices=HOSTS, action="append")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    given = parser.parse_args()
    cases = CASES if given.case is None else CASES[given.case : given.case + 1]
    print_where_possible(lambda: {"steps": [row for case in cases for row in measure_case(case, given)]})


def measure_case(case: Case, given: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each host."""
    hosts = given.host or HOSTS
    found: dict[str, list[dict[str, Any]]] = {host: [] for host in hosts}
    for _ in range(given.rounds):
        for host in hosts:
            found[host].append(measure(case, host, given.steps))
            print(json.dumps(found[host][-1]), file=sys.stderr, flush=True)
    return [summary(rows) for rows in found.values()]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {name: round(statistics.median(row[name] for row in rows), 4) for name in ("first", "later")}
    kept = {name: rows[0][name] for name in ("latency_ms", "mbit_per_s", "host", "predicted_s")}
    return kept | medians | {"slowest": max(row["slowest"] for row in rows)}


def measure(case: Case, host: str, num_steps: int) -> dict[str, Any]:
    """One run."""
    from farpipe.core.simulate import simulate
    from farpipe.engine.launch.run import run
    from farpipe.engine.links import Wan, links_of_problem
    from farpipe.engine.links.tun import in_namespace
    from farpipe.engine.run_spec import RunSpec
    from farpipe.planning.planner.orders import find_order

    problem = make_problem(case)
    schedule = find_order(problem, "1f1b").schedule
    predicted_s = simulate(problem, schedule).makespan_s
    spec = RunSpec.bare(
        problem=problem, schedule=schedule, sites=SITES, num_steps=num_steps, device="sleep", emulate_links=False
    )
    program = ("-m", "benchmarks.transport.host_settings", "rank", host)
    with (
        tempfile.TemporaryDirectory() as folder,
        Wan.up(("west", "east"), links_of_problem(problem), name=f"benchmark{os.getpid()}") as wan,
    ):
        if not host.startswith("tuned"):
            for place in wan.namespaces.values():
                in_namespace(place.name, set_defaults)
        run(spec, Path(folder) / "run", wan=wan, rank_program=program)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    errors = [predicted_s / json.loads(line)["makespan_s"] - 1 for line in lines]
    return {
        "latency_ms": case.latency_s * 1e3,
        "mbit_per_s": case.bit_per_s / 1e6,
        "host": host,
        "predicted_s": round(predicted_s, 4),
        "first": round(errors[0], 4),
        "later": round(statistics.median(errors[1:]), 4),
        "slowest": round(min(errors[1:]), 4),
        "all": [round(error, 3) for error in errors],
    }


def set_defaults() -> None:
    for name, value in DEFAULTS.items():
        (Path("/proc/sys/net/ipv4") / name).write_text(value)


def run_rank(host: str) -> None:
    """A rank that takes the congestion control of `host`."""
    import socket

    import typer

    from farpipe.engine.launch import rank_main
    from farpipe.engine.transport import dialler, tcp

    if host == "bbr":
        tcp.BBR_RENEWED_S = float("inf")
    elif host.endswith("cubic"):
        dialler.suit_to_pauses = lambda sock: sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    typer.run(rank_main.main)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        host = sys.argv[2]
        del sys.argv[1:3]
        run_rank(host)
    else:
        main()
