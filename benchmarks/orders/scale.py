"""The search on large steps: best named order, greedy and auto as step time / (m (F + I + W)), the bound,
and the seconds and memory it takes, from 64 to 32,768 ranks times microbatches; two sites, a time limit of 10 s.

F, I, W = 76, 93, 41; latency and message each twice a forward; as many microbatches fit as there are ranks. The limits
to hold this against are the lower bound, the time limit, and memory linear in ranks times microbatches. Every size runs
in a process of its own, whose peak memory is told. Two more tables: equal times and a latency of one forward, where
greedy wastes a slot; and 100,000 microbatches, whose orders repeat a steady state. The picture needs
matplotlib (the extra ``plot``).
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.orders.delay_aware_orders import two_sites
from farpipe.planning.search import search

SIZES = [(4, 16), (8, 16), (8, 32), (16, 64), (32, 128), (64, 256), (64, 512)]
EQUAL, LONG = [(16, 64), (32, 128)], [(4, 100_000), (8, 100_000)]
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "scale.svg"
TIMES, DELAY, TIME_LIMIT_S, LONG_S = (76, 93, 41), (2, 2), 10.0, 600.0
EQUAL_TIMES, EQUAL_DELAY = (1, 1, 1), (1, 0)


def measure(num_ranks: int, num_microbatches: int, equal: bool = False) -> dict[str, Any]:
    """One line of the table."""
    search(two_sites((1, 2, 1), (1, 1), 2, 4, 4), 1.0)  # compile
    times, delay = (EQUAL_TIMES, EQUAL_DELAY) if equal else (TIMES, DELAY)
    problem = two_sites(times, delay, num_ranks, num_ranks, num_microbatches)
    begin_s = time.perf_counter()
    found = search(problem, TIME_LIMIT_S)
    elapsed_s = time.perf_counter() - begin_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ideal_s = num_microbatches * float(sum(times))
    row: dict[str, Any] = {"p": num_ranks, "m": num_microbatches}
    if (num_ranks, num_microbatches) not in LONG:
        named, greedy = (search(problem, LONG_S, methods=[method]) for method in ("named", "greedy"))
        row |= {"best named": round(named.timeline.makespan_s / ideal_s, 4), "which": named.schedule.method}
        row["greedy"] = round(greedy.timeline.makespan_s / ideal_s, 4)
    return row | {
        "auto": round(found.timeline.makespan_s / ideal_s, 4),
        "bound": round(found.lower_bound_s / ideal_s, 4),
        "gap": f"{found.gap:.2%}",
        "made by": found.schedule.method,
        "first answer, s": round(found.history[0].elapsed_s, 3),
        "final answer, s": round(elapsed_s, 2),
        "peak, MiB": round(peak_mib),
    }


def in_a_process(num_ranks: int, num_microbatches: int, equal: bool = False) -> dict[str, Any]:
    """Result of `measure` in a process of its own."""
    size = ("--size", str(num_ranks), str(num_microbatches))
    command = [sys.executable, "-m", "benchmarks.orders.scale", *size, *["--equal"] * equal]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=LONG_S)
    row: dict[str, Any] = json.loads(run.stdout)
    return row


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds and memory against ranks times microbatches."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "farpipe", "font.size": 9, "axes.titlesize": 9}
    from matplotlib import pyplot

    sizes = [row["p"] * row["m"] for row in rows]
    figure, (seconds, memory) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for name, label in (("first answer, s", "first answer"), ("final answer, s", "final answer")):
        seconds.plot(sizes, [row[name] for row in rows], marker="o", label=label)
    seconds.axhline(TIME_LIMIT_S, color="grey", linewidth=0.8, linestyle="--", label="time limit")
    memory.plot(sizes, [row["peak, MiB"] for row in rows], marker="o", color="tab:green")
    seconds.set(xscale="log", yscale="log", ylabel="seconds", title="Time of a search")
    memory.set(xscale="log", ylabel="MiB", ylim=(0, None), title="Peak memory of the process")
    for axes in (seconds, memory):
        axes.set_xlabel("ranks x microbatches")
        axes.grid(alpha=0.3)
    seconds.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, draw and print."""
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    options.add_argument("--size", nargs=2, type=int, metavar=("RANKS", "MICROBATCHES"), help="this size only")
    options.add_argument("--equal", action="store_true", help="with --size: equal times, a latency of one forward")
    options.add_argument("--plot", type=Path, default=PICTURE, help="where the picture goes")
    chosen = options.parse_args()
    if chosen.size:
        print(json.dumps(measure(*chosen.size, equal=chosen.equal)))
        return
    rows = [in_a_process(*size) for size in SIZES]
    found: dict[str, Any] = {"benchmark": "scale", "time limit, s": TIME_LIMIT_S, "step time / ideal": rows}
    found["equal times"] = [in_a_process(*size, equal=True) for size in EQUAL]
    found["100,000 microbatches"] = [in_a_process(*size) for size in LONG]
    try:
        draw(rows, chosen.plot)
        found["picture"] = chosen.plot.name
    except ImportError as error:
        print(f"no picture: {error}; it needs farpipe[plot]", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
