"""One pipeline step over a WAN: farpipe next to torch.distributed.pipelining over gloo. Prints JSON.

Four ranks at two sites, asleep. *near*: F = 20 ms, B = 40 ms, messages of 0.5 MB, 16 microbatches, 20 ms one way and
200 Mbit/s between ranks 1 and 2. *far*: 40 and 80 ms, 4 MB, 12 microbatches, 50 ms and 1 Gbit/s. farpipe's links are
emulated in its transport; gloo's connection between the two ranks really goes through a relay that delays and paces it
(see gloo_relay.py). A step is from the first rank's start to the last rank's end, without optimizer; medians over the
steps after warm-up. zb-2p splits B into I and W of equal length; the other orders do the same work as torch's in the
same actions.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared.sleeping_ranks import NUM_RANKS, SITES, two_by_two

NEAR, FAR = 1, 2  # the ranks on both sides of the WAN
NUM_STEPS, NUM_SKIPPED_STEPS = 8, 3


@dataclass(frozen=True)
class Case:
    """One step and one WAN."""

    forward_s: float
    backward_s: float
    message_bytes: int
    num_microbatches: int
    latency_s: float
    bytes_per_s: float


CASES = {"near": Case(0.020, 0.040, 500_000, 16, 0.020, 25e6), "far": Case(0.040, 0.080, 4_000_000, 12, 0.050, 125e6)}


def main() -> None:
    print(
        json.dumps({name: side_by_side(name) for name in CASES} | {"wan_of_torch": "TCP relay between two gloo ranks"})
    )


def side_by_side(case: str) -> dict[str, Any]:
    """Both engines on one case; the ratios are to torch's 1F1B with and without the WAN."""
    ours = {method: farpipe_step(CASES[case], method) for method in ("1f1b", "gpipe", "eager", "zb-2p")}
    torchs = {name: torch_step(case, name) for name in ("Schedule1F1B", "ScheduleGPipe")}
    without_wan = torch_step(case, "Schedule1F1B", wan=False)
    torch_s, no_wan_s = torchs["Schedule1F1B"]["measured_s"], without_wan["measured_s"]
    return {
        "farpipe": ours,
        "torch": torchs | {"Schedule1F1B without WAN": without_wan},
        "over_torch_1f1b": {name: round(step["measured_s"] / torch_s, 3) for name, step in ours.items()},
        "over_torch_1f1b_without_wan": {
            name: round(step["measured_s"] / no_wan_s, 3) for name, step in (ours | torchs).items()
        },
    }


def farpipe_step(case: Case, method: str) -> dict[str, float]:
    """Predicted and measured seconds of a step."""
    from farpipe.core.schedule.library import order
    from farpipe.core.simulate import simulate
    from farpipe.engine.launch.run import run
    from farpipe.engine.run_spec import RunSpec

    problem = make_problem(case)
    schedule = order(method, problem)
    spec = RunSpec.bare(problem=problem, schedule=schedule, sites=SITES, num_steps=NUM_STEPS, device="sleep")
    with tempfile.TemporaryDirectory() as folder:
        measured_s = run(spec, Path(folder) / "run").makespan_s
    predicted_s = simulate(problem, schedule).makespan_s
    error = (predicted_s - measured_s) / measured_s
    return {"predicted_s": round(predicted_s, 4), "measured_s": round(measured_s, 4), "error": round(error, 4)}


def make_problem(case: Case) -> Any:
    from farpipe.core.step import Link

    half_s = case.backward_s / 2
    wan = Link(latency_s=case.latency_s, bandwidth_bytes_per_s=case.bytes_per_s)
    return two_by_two(wan, case.message_bytes, (case.forward_s, half_s, half_s), case.num_microbatches)


def torch_step(case: str, name: str, *, wan: bool = True) -> dict[str, float]:
    """Measured seconds of a step with one of torch's schedules."""
    import torch.distributed as dist
    from gloo_relay import Relay

    from farpipe.engine.launch.launcher import launch

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if wan:
        Relay(store, NEAR, FAR, CASES[case].latency_s, CASES[case].bytes_per_s)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, case, name, str(store.port), "wan" if wan else "no wan", folder]
        launch(lambda _: command, NUM_RANKS, log_dir=Path(folder), env={"GLOO_SOCKET_IFNAME": "lo"})
        steps = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    spans = [max(end for _, end in step) - min(start for start, _ in step) for step in zip(*steps, strict=True)]
    return {"measured_s": round(median(spans[NUM_SKIPPED_STEPS:]), 4)}


def torch_rank(case: Case, name: str, port: int, wan: bool, folder: Path) -> None:
    """One rank of torch's pipeline; leaves start and end of every step in `folder`."""
    import torch
    import torch.distributed as dist
    from gloo_relay import ShapedStore
    from torch.distributed import pipelining

    rank = int(os.environ["RANK"])
    inner = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    store = ShapedStore(inner, rank, (NEAR, FAR)) if wan else inner
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    shape = (1, case.message_bytes // 4)
    stage = pipelining.PipelineStage(sleeping_module(torch, case), rank, NUM_RANKS, torch.device("cpu"))
    schedule = getattr(pipelining, name)(stage, case.num_microbatches, loss_fn=lambda y, _: y.sum())
    whole = torch.zeros(case.num_microbatches, shape[1])
    steps = []
    for _ in range(NUM_STEPS):
        dist.barrier()
        start_s = time.monotonic()
        schedule.step(*([whole] if rank == 0 else []), **({"target": whole} if rank == NUM_RANKS - 1 else {}))
        steps.append((start_s, time.monotonic()))
    (folder / f"{rank}.json").write_text(json.dumps(steps))
    assert not wan or rank not in (NEAR, FAR) or store.num_rewritten > 0, "gloo went around the relay"
    dist.destroy_process_group()


def sleeping_module(torch: Any, case: Case) -> Any:
    """A module that takes as long as the case says and hands its input on."""

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            time.sleep(case.forward_s)
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gy: Any) -> Any:
            time.sleep(case.backward_s)
            return gy * 1.0, torch.zeros(1)

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: Any) -> Any:
            return Sleep.apply(x, self.weight)

    return Stage()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        case_name, schedule_name, port_text, wan_text, folder_text = sys.argv[1:]
        torch_rank(CASES[case_name], schedule_name, int(port_text), wan_text == "wan", Path(folder_text))
    else:
        main()
