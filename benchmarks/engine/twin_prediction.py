"""Predicted and measured step of two sites of two processes each, which share layers, weights, sequences or experts,
over the kernel's own TCP. Prints JSON.

    python -m benchmarks.engine.twin_prediction [--shares "FSDP 2"] [--method auto] [--steps 4]

20 ms, 200 Mbit/s, within TLS between the sites; messages of half a megabyte for all processes of a rank together. A
small Qwen3 trains (tensor 2 with sequence parallelism, ZeRO-3 over two replicas, or context 2 by Ulysses) or a Mixtral
given by numbers (expert 2 over two replicas), and every action is then made to last ACTION_S, longer than it computes:
so two idle cores are enough for four processes, and times of actions are known.
`error` is (predicted - measured) / measured of the median step, the first three left out; `slowest` that of the slowest
of them. `late_ms`: how much longer than ACTION_S an action took in the mean, `overrun` the share of actions that
computed longer: where it is not near 0, the machine was busy and `error` says nothing. `bytes_as_planned`: every link
between the sites carried exactly the plan's bytes in every step; `share_of_bytes`: what each process put on the link of
its site. Needs root and /dev/net/tun.
"""

import argparse
import atexit
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

if __package__ is None or __package__ == "":  # a rank is started by its path
    sys.path[0] = str(Path(__file__).parents[2])

from benchmarks.shared.kernel_wan import print_where_possible
from benchmarks.shared.twins import SHARES, SITES, plan_of, write_model

RANK_WORD = "--as-a-rank"
METHODS = ("1f1b", "auto")
ACTION_S = 0.05
"""Time of every F, I and W; a B takes two of them."""
NUM_STEPS, NUM_SKIPPED_STEPS, SEARCH_S = 12, 3, 10.0
SHAPES = {"tensor 2": (12 * 16, 16, 128), "FSDP 2": (2 * 12 * 8, 8, 128), "context 2": (12 * 16, 16, 128)}
SHAPES["expert 2"] = SHAPES["FSDP 2"]
"""(global batch, microbatch, tokens): twelve microbatches in each replica."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", choices=SHARES)
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    only = parser.parse_args()
    shares, methods = ([value] if value else every for value, every in ((only.shares, SHARES), (only.method, METHODS)))

    def measure_all() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder) / "model", 2, hidden_size=64, intermediate_size=128)
            return {"steps": [measure(Path(folder), *case, only.steps) for case in product(shares, methods)]}

    print_where_possible(measure_all)


def measure(folder: Path, shares: str, method: str, num_steps: int) -> dict[str, Any]:
    """One row of the table."""
    from farpipe.core.simulate import simulate
    from farpipe.engine.launch.run import run
    from farpipe.engine.launch.runs import run_spec_of
    from farpipe.engine.links import Wan, links_of_problem
    from farpipe.engine.transport.security.authority import make_throwaway
    from farpipe.planning.planner.orders import find_order

    plan = plan_of(folder, shares, SHAPES[shares])
    problem = with_times(plan.problem)
    schedule = find_order(problem, method, time_limit_s=SEARCH_S).schedule
    planned = simulate(problem, schedule)
    spec = run_spec_of(plan, num_steps=num_steps, emulate_links=False)
    spec = spec.with_plan(problem=problem, schedule=schedule)
    run_dir, certs = folder / f"{shares} {method}", folder / f"certs of {shares} {method}"
    make_throwaway(certs, SITES)
    program = (str(Path(__file__).resolve()), RANK_WORD, "--certs", str(certs))
    with Wan.up(SITES, links_of_problem(problem), name=f"twins{os.getpid()}") as wan:
        measured_s = run(spec, run_dir, wan=wan, allow_plaintext=True, rank_program=program).makespan_s
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    sent = {name: size for name, size in planned.link_bytes().items() if problem.between_sites[name]}
    slowest_s = max(line["makespan_s"] for line in lines[min(NUM_SKIPPED_STEPS, num_steps - 1) :])
    return {
        "shares": shares,
        "order": method,
        "predicted_s": round(planned.makespan_s, 4),
        "measured_s": round(measured_s, 4),
        "error": round(planned.makespan_s / measured_s - 1, 4),
        "slowest": round(planned.makespan_s / slowest_s - 1, 4),
        **account(run_dir, spec.num_processes),
        "bytes": sum(sent.values()),
        "bytes_as_planned": all(line["link_bytes"] | sent == line["link_bytes"] for line in lines),
    }


def with_times(problem: Any) -> Any:
    """The problem with known times of actions."""
    seconds = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), ACTION_S)
    return problem.model_copy(update={"stages": tuple(stage.model_copy(update=seconds) for stage in problem.stages)})


def account(run_dir: Path, num_processes: int) -> dict[str, Any]:
    """What the processes have counted."""
    counts = [json.loads((run_dir / f"counted-{process}.json").read_text()) for process in range(num_processes)]
    totals = [sum(count["sent"] for count in counts[site : site + 2]) for site in (0, 2)]
    shares = [count["sent"] / totals[process // 2] for process, count in enumerate(counts)]
    num_actions = sum(count["actions"] for count in counts)
    return {
        "late_ms": round(1e3 * sum(count["late_s"] for count in counts) / num_actions, 2),
        "overrun": round(sum(count["overrun"] for count in counts) / num_actions, 3),
        "computed_ms": round(1e3 * median(count["computed_s"] / count["actions"] for count in counts), 1),
        "share_of_bytes": " ".join(f"{share:.3f}" for share in shares),
    }


def rank() -> None:
    """One rank whose actions last as long as planned, and that counts what it sends."""
    import typer

    from farpipe.engine.executor.peers import TensorPeers
    from farpipe.engine.launch import rank_main
    from farpipe.engine.stages.stage import TorchStage

    sys.argv.remove(RANK_WORD)
    counted: Counter[str] = Counter()
    number, run_dir = os.environ["RANK"], Path(next(word for word in sys.argv if Path(word, "run.json").exists()))
    send, depth = TensorPeers.send, [0]

    def counting(self: Any, peer: int, kind: Any, tag: Any, tensor: Any) -> None:
        counted["sent"] += tensor.nbytes if kind in ("forward", "backward") else 0
        send(self, peer, kind, tag, tensor)

    def lasting(work: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def padded(*arguments: Any, **options: Any) -> Any:
            depth[0] += 1
            begin_s = time.perf_counter()
            try:
                return work(*arguments, **options)
            finally:
                depth[0] -= 1
                if depth[0] == 0:  # a backward inside an I is none of its own
                    wait(begin_s + seconds, counted, begin_s)

        return padded

    TensorPeers.send = counting  # type: ignore[method-assign]
    for name, times in {"forward": 1, "input_grad": 1, "weight_grad": 1, "backward": 2}.items():
        setattr(TorchStage, name, lasting(getattr(TorchStage, name), times * ACTION_S))
    atexit.register(lambda: (run_dir / f"counted-{number}.json").write_text(json.dumps(counted)))
    typer.run(rank_main.main)


def wait(end_s: float, counted: "Counter[str]", begin_s: float) -> None:
    """Sleep until an action is to end, and count how it went."""
    left_s = end_s - (now_s := time.perf_counter())
    counted["computed_s"] += now_s - begin_s  # type: ignore[assignment]
    counted["actions"] += 1
    counted["overrun"] += left_s < 0
    if left_s > 0:
        time.sleep(left_s)
    counted["late_s"] += time.perf_counter() - end_s  # type: ignore[assignment]


if __name__ == "__main__":
    rank() if RANK_WORD in sys.argv else main()
