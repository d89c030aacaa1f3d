"""Predicted and measured step and memory of two sites of two processes each, which share layers, weights, sequences or
experts, over the kernel's own TCP. Prints JSON.

    python -m benchmarks.engine.twin_prediction [--shares "FSDP 2"] [--kind mixtral] [--method auto] [--steps 4]

20 ms, 200 Mbit/s, within TLS between the sites; messages of half a megabyte for all processes of a rank together. A
small model trains: a Qwen3 (tensor 2 with sequence parallelism, ZeRO-3 over two replicas, or context 2 by Ulysses) or
each class of KINDS (expert 2 over two replicas or beside tensor 2, and one process a site: `alone`). Every action is
then made to last ACTION_S, longer than it computes: so two idle cores are enough for four processes, and times of
actions are known.
`error` is (predicted - measured) / measured of the median step, the first three left out; `slowest` that of the slowest
of them. `late_ms`: how much longer than ACTION_S an action took in the mean, `overrun` the share of actions that
computed longer: where it is not near 0, the machine was busy and `error` says nothing. `bytes_as_planned`: every link
between the sites carried exactly the plan's bytes in every step; `share_of_bytes`: what each process put on the link of
its site. `held` is what a microbatch leaves in memory after F, `state` weights, gradients and moments, both of the
process with the most, in bytes: tensors that autograd keeps, parameters left out, and tensors of the optimizer after
the last W; `planned_` what the plan says of that rank. Needs root and /dev/net/tun.
"""

import argparse
import atexit
import gc
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
from typing import Any, Final

if __package__ is None or __package__ == "":  # a rank is started by its path
    sys.path[0] = str(Path(__file__).parents[2])

from benchmarks.shared.kernel_wan import print_where_possible
from benchmarks.shared.twins import OF_EXPERTS, SHARES, SITES, plan_of, write_model

RANK_WORD = "--as-a-rank"
METHODS = ("1f1b", "auto")
KINDS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")
BESIDE_TENSOR = KINDS[:2]
ACTION_S = float(os.environ.get("FARPIPE_ACTION_S", "0.05"))
"""Time of every F, I and W; a B takes two of them. Processes of a run inherit it."""
NUM_STEPS, NUM_SKIPPED_STEPS, SEARCH_S = 12, 3, 10.0
NUM_MICROBATCHES: Final = 12
SHAPES = {"tensor 2": (12 * 16, 16, 128), "FSDP 2": (2 * 12 * 8, 8, 128), "context 2": (12 * 16, 16, 128)}
SHAPES |= {"expert 2": SHAPES["FSDP 2"], "tensor 2, expert 2": SHAPES["tensor 2"], "alone": SHAPES["tensor 2"]}
"""(global batch, microbatch, tokens): twelve microbatches in each replica."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", choices=SHARES)
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--kind", choices=("qwen3", *KINDS))
    parser.add_argument("--action-s", type=float, default=ACTION_S, help="longer ones for a busy machine")
    only = parser.parse_args()
    shares, methods = ([value] if value else every for value, every in ((only.shares, SHARES), (only.method, METHODS)))
    os.environ["FARPIPE_ACTION_S"] = str(only.action_s)
    cases = [(way, kind, method) for way, method in product(shares, methods) for kind in kinds(way, only.kind)]

    def measure_all() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return {"steps": [measure(Path(folder), *case, only.steps) for case in cases]}

    print_where_possible(measure_all)


def kinds(shares: str, only: str | None) -> list[str]:
    """Classes that train so."""
    able = (BESIDE_TENSOR if "tensor" in shares else KINDS) if shares in OF_EXPERTS else ("qwen3",)
    return [kind for kind in able if only in (None, kind)]


def measure(folder: Path, shares: str, kind: str, method: str, num_steps: int) -> dict[str, Any]:
    """One row of the table."""
    from farpipe.core.simulate import simulate
    from farpipe.engine.launch.run import run
    from farpipe.engine.launch.runs import run_spec_of
    from farpipe.engine.links import Wan, links_of_problem
    from farpipe.engine.transport.security.authority import make_throwaway
    from farpipe.planning.planner.orders import find_order

    if not (model := folder / kind).exists():
        write_model(model, 2, kind, hidden_size=64, intermediate_size=128)
    plan = plan_of(model, shares, SHAPES[shares])
    problem = with_times(plan.problem)
    schedule = find_order(problem, method, time_limit_s=SEARCH_S).schedule
    planned = simulate(problem, schedule)
    spec = run_spec_of(plan, num_steps=num_steps, emulate_links=False)
    spec = spec.with_plan(problem=problem, schedule=schedule)
    run_dir, certs = folder / f"{shares} {kind} {method}", folder / f"certs of {shares} {kind} {method}"
    make_throwaway(certs, SITES)
    program = (str(Path(__file__).resolve()), RANK_WORD, "--certs", str(certs))
    with Wan.up(SITES, links_of_problem(problem), name=f"twins{os.getpid()}") as wan:
        measured_s = run(spec, run_dir, wan=wan, allow_plaintext=True, rank_program=program).makespan_s
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    sent = {name: size for name, size in planned.link_bytes().items() if problem.between_sites[name]}
    slowest_s = max(line["makespan_s"] for line in lines[min(NUM_SKIPPED_STEPS, num_steps - 1) :])
    return {
        "shares": shares,
        "kind": kind,
        "order": method,
        "predicted_s": round(planned.makespan_s, 4),
        "measured_s": round(measured_s, 4),
        "error": round(planned.makespan_s / measured_s - 1, 4),
        "slowest": round(planned.makespan_s / slowest_s - 1, 4),
        **account(run_dir, spec.num_processes),
        **memory(run_dir, plan.problem, spec.num_processes),
        "bytes": sum(sent.values()),
        "bytes_as_planned": all(line["link_bytes"] | sent == line["link_bytes"] for line in lines),
    }


def with_times(problem: Any) -> Any:
    """The problem with known times of actions."""
    seconds = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), float(os.environ["FARPIPE_ACTION_S"]))
    return problem.model_copy(update={"stages": tuple(stage.model_copy(update=seconds) for stage in problem.stages)})


def account(run_dir: Path, num_processes: int) -> dict[str, Any]:
    """What the processes have counted."""
    counts = [json.loads((run_dir / f"counted-{process}.json").read_text()) for process in range(num_processes)]
    each = num_processes // len(SITES)
    totals = [sum(count["sent"] for count in counts[site * each :][:each]) for site in range(len(SITES))]
    shares = [count["sent"] / totals[process // each] for process, count in enumerate(counts)]
    num_actions = sum(count["actions"] for count in counts)
    return {
        "late_ms": round(1e3 * sum(count["late_s"] for count in counts) / num_actions, 2),
        "overrun": round(sum(count["overrun"] for count in counts) / num_actions, 3),
        "computed_ms": round(1e3 * median(count["computed_s"] / count["actions"] for count in counts), 1),
        "share_of_bytes": " ".join(f"{share:.3f}" for share in shares),
    }


def memory(run_dir: Path, problem: Any, num_processes: int) -> dict[str, int]:
    """Bytes of the process with the most, and what its rank was planned with."""
    counts = [json.loads((run_dir / f"counted-{process}.json").read_text()) for process in range(num_processes)]
    rows = {
        "held": problem.table("activation_bytes")[:, 0].tolist(),
        "state": [rank.static_bytes for rank in problem.ranks],
    }
    found: dict[str, int] = {}
    for name, planned in rows.items():
        most = max(range(num_processes), key=lambda process: counts[process][name])
        found |= {name: counts[most][name], f"planned_{name}": round(planned[most * len(SITES) // num_processes])}
    return found


class Held:
    """Bytes of tensors that autograd keeps of what is computed inside, but for parameters."""

    def __init__(self, module: Any) -> None:
        from torch.autograd.graph import saved_tensors_hooks

        self._own = {storage_of(parameter) for parameter in module.parameters()}
        self._sizes: dict[int, int] = {}
        self.hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Any) -> Any:
        address, size = storage_of(tensor)
        if (address, size) not in self._own:
            self._sizes[address] = size
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())


def storage_of(tensor: Any) -> tuple[int, int]:
    """Address and bytes of the memory of this process's part of a tensor."""
    local = getattr(tensor, "_local_tensor", tensor)
    storage = getattr(local, "elem", local).untyped_storage()  # of a collective that still runs
    return storage.data_ptr(), storage.nbytes()


def state_bytes() -> int:
    """Bytes of all that optimizers have: parameters, their gradients and moments."""
    import torch

    found = [each for each in gc.get_objects() if isinstance(each, torch.optim.Optimizer)]
    owned = [parameter for each in found for group in each.param_groups for parameter in group["params"]]
    moments = [value for each in found for state in each.state.values() for value in state.values()]
    tensors = [*owned, *(each.grad for each in owned if each.grad is not None), *moments]
    return sum(dict(map(storage_of, tensors)).values())


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
        def padded(stage: Any, microbatch: int, *arguments: Any, **options: Any) -> Any:
            depth[0] += 1
            begin_s = time.perf_counter()
            try:
                if work.__name__ != "forward" or microbatch < NUM_MICROBATCHES - 1 or counted["held"]:
                    return work(stage, microbatch, *arguments, **options)
                held = Held(stage.module)
                with held.hooks:
                    y = work(stage, microbatch, *arguments, **options)
                counted["held"] = held.num_bytes
                return y
            finally:
                depth[0] -= 1
                if depth[0] == 0:  # a backward inside an I is none of its own
                    if work.__name__ in ("weight_grad", "backward") and microbatch == NUM_MICROBATCHES - 1:
                        counted["ends"] += 1
                        counted["state"] = state_bytes() if counted["ends"] == NUM_SKIPPED_STEPS else counted["state"]
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
