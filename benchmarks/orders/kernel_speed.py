"""Speed of the simulator (million actions per second on one core) and of the checker (ms for 10,000 actions), and what
loading costs a fresh process. Prints JSON. `--against CHECKOUT`: the simulator's speed in pairs with another commit's.

The limit to hold this against: an action reads and writes about 100 bytes of tables, so memory alone would allow some
hundred million a second on a core with 10 GB/s.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np

from farpipe.core.schedule import check
from farpipe.core.schedule.library import order
from farpipe.core.simulate.simulate import play
from farpipe.core.step import Hop, Link, Problem, Rank, Schedule, Stage, Transfer
from farpipe.core.step.arrays import step_arrays

LOAD = """
import time; begin = time.perf_counter()
from farpipe.core.step import Problem, Rank, Stage
from farpipe.core.schedule import check
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
stage = Stage(rank=0, forward_s=1, input_grad_s=1, weight_grad_s=1)
problem = Problem(num_microbatches=1, ranks=(Rank(),), stages=(stage,))
simulate(problem, order("1f1b", problem))
print(time.perf_counter() - begin)
"""


def chain(num_ranks: int, num_microbatches: int) -> Problem:
    """Equal stages, a link of its own for every hop and direction."""
    ends = [(a, b) for r in range(num_ranks - 1) for a, b in ((r, r + 1), (r + 1, r))]
    links = {f"s{a}>s{b}": Link(latency_s=0.01, bandwidth_bytes_per_s=1e9) for a, b in ends}
    hops = [
        Hop(forward=Transfer(link=f"s{r}>s{r + 1}", bytes=1e6), backward=Transfer(link=f"s{r + 1}>s{r}", bytes=1e6))
        for r in range(num_ranks - 1)
    ]
    stages = [Stage(rank=r, forward_s=1, input_grad_s=1, weight_grad_s=1) for r in range(num_ranks)]
    ranks = (Rank(),) * num_ranks
    return Problem(num_microbatches=num_microbatches, ranks=ranks, stages=tuple(stages), links=links, hops=tuple(hops))


def split(schedule: Schedule) -> Schedule:
    """The schedule with every B done as I and W."""
    orders = [
        [a if a.kind == "F" else a._replace(kind=k) for a in o for k in ("F" if a.kind == "F" else "IW")]
        for o in schedule.ranks
    ]
    return Schedule(schedule.num_microbatches, tuple(map(tuple, orders)), schedule.method)


@cache
def _split_1f1b(num_ranks: int, num_microbatches: int) -> tuple[Problem, Schedule]:
    problem = chain(num_ranks, num_microbatches)
    return problem, split(order("1f1b", problem))


def actions_per_second(num_ranks: int, num_microbatches: int, *, shared: bool, repeats: int = 15) -> float:
    """The best of `repeats`; `shared` treats every link as if several ranks fed it."""
    problem, schedule = _split_1f1b(num_ranks, num_microbatches)
    codes, begin = schedule.codes, schedule.begin
    arrays = step_arrays(problem)
    arrays = dataclasses.replace(arrays, shared=np.full_like(arrays.shared, shared))
    play(arrays, codes, begin)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        play(arrays, codes, begin)
        times.append(time.perf_counter() - start)
    return codes.size / min(times)


def check_ms(num_ranks: int, num_microbatches: int, repeats: int = 15) -> float:
    """All six rules for 1F1B with split backwards, the best of `repeats`."""
    plain = chain(num_ranks, num_microbatches)
    problem = plain.model_copy(update={"ranks": (Rank(memory_bytes=1e9),) * num_ranks})
    schedule = split(order("1f1b", problem))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        check(problem, schedule)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def load_seconds() -> float:
    """Imports and the first simulation in a fresh process whose kernel is cached, the best of three."""
    runs = [subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True) for _ in range(4)]
    return min(float(run.stdout) for run in runs)


SIZES = [(4, 64), (16, 256), (64, 1024), (64, 4096)]
REPEATS = {4: 400, 16: 60, 64: 9}
WORKER = """
import sys
import kernel_speed
for line in sys.stdin:
    p, m, shared, repeats = map(int, line.split())
    print(kernel_speed.actions_per_second(p, m, shared=bool(shared), repeats=repeats), flush=True)
"""


class Checkout:
    """A process that measures one checkout by its own copy of this file."""

    def __init__(self, root: Path) -> None:
        (script,) = root.glob("benchmarks/**/kernel_speed.py")
        paths = os.pathsep.join(map(str, (root / "src", script.parent, root)))
        command, environment = [sys.executable, "-c", WORKER], {**os.environ, "PYTHONPATH": paths}
        self._process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment)

    def ask(self, num_ranks: int, num_microbatches: int, *, shared: bool) -> float:
        """Million actions per second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{num_ranks} {num_microbatches} {shared:d} {REPEATS[num_ranks]}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline()) / 1e6


def against(root: Path) -> list[dict[str, object]]:
    """Medians of both, and of the ratio of each pair, this checkout's speed over the other's; measured in turns."""
    pair = [Checkout(root), Checkout(Path(__file__).parents[2])]
    rows: list[dict[str, object]] = []
    for (p, m), shared in ((size, shared) for shared in (False, True) for size in SIZES):
        found = []
        for turn in range(9 if p < 64 else 5 if m < 4096 else 3):
            figures = [one.ask(p, m, shared=shared) for one in pair[:: -1 if turn % 2 else 1]]
            found.append(figures[:: -1 if turn % 2 else 1])
        other, own = (statistics.median(column) for column in zip(*found, strict=True))
        ratio = statistics.median(b / a for a, b in found)
        rows.append({"size": f"{p} x {m}", "shared": shared, "other": other, "own": own, "ratio": ratio})
    return rows


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--against"]:
        print(json.dumps(against(Path(sys.argv[2])), indent=1))
        return
    million = {f"{p} x {m}": round(actions_per_second(p, m, shared=False) / 1e6, 1) for p, m in SIZES}
    shared = {f"{p} x {m}": round(actions_per_second(p, m, shared=True) / 1e6, 1) for p, m in SIZES}
    result = {
        "benchmark": "kernel_speed",
        "million_actions_per_s": million,
        "million_actions_per_s_all_links_shared": shared,
        "check_ms": {f"{p} x {m}": round(check_ms(p, m), 2) for p, m in [(8, 417), (64, 53), (64, 1024)]},
        "load_s": round(load_seconds(), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
