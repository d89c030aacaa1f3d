"""One pipeline step over a WAN: farpipe next to torch.distributed.pipelining over gloo. Prints JSON.

Four ranks at two sites, F = 20 ms and B = 40 ms asleep, messages of 0.5 MB, 16 microbatches, 20 ms one way and
200 Mbit/s between ranks 1 and 2. farpipe's links are emulated in its transport; gloo's connection between the two ranks
really goes through a relay that delays and paces it (see gloo_relay.py). A step is from the first rank's start to the
last rank's end, without optimizer; medians over the steps after warm-up. zb-2p splits B into I and W of 20 ms each; the
other orders do the same work as torch's in the same actions.
"""

import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

NUM_RANKS, NUM_MICROBATCHES = 4, 16
FORWARD_S, BACKWARD_S = 0.020, 0.040
MESSAGE_BYTES = 500_000
LATENCY_S, BYTES_PER_S = 0.020, 25e6
NEAR, FAR = 1, 2  # the ranks on both sides of the WAN
NUM_STEPS, NUM_WARM_UP_STEPS = 8, 3
SITES = ("west", "west", "east", "east")


def main() -> None:
    ours = {method: farpipe_step(method) for method in ("1f1b", "gpipe", "eager", "zb-2p")}
    torchs = {name: torch_step(name) for name in ("Schedule1F1B", "ScheduleGPipe")}
    without_wan = torch_step("Schedule1F1B", wan=False)
    torch_s = torchs["Schedule1F1B"]["measured_s"]
    print(
        json.dumps(
            {
                "farpipe": ours,
                "torch": torchs | {"Schedule1F1B without WAN": without_wan},
                "wan_of_torch": "TCP relay between the two gloo ranks",
                "eager_over_torch_1f1b": round(ours["eager"]["measured_s"] / torch_s, 3),
                "zb-2p_over_torch_1f1b": round(ours["zb-2p"]["measured_s"] / torch_s, 3),
            }
        )
    )


def farpipe_step(method: str) -> dict[str, float]:
    """Predicted and measured seconds of a step."""
    from farpipe.runtime.run import run
    from farpipe.runtime.run_spec import RunSpec
    from farpipe.schedule.library import order
    from farpipe.simulate import simulate

    problem = make_problem()
    schedule = order(method, problem)
    spec = RunSpec(problem=problem, schedule=schedule, sites=SITES, num_steps=NUM_STEPS, device="sleep")
    with tempfile.TemporaryDirectory() as folder:
        measured_s = run(spec, Path(folder) / "run").makespan_s
    predicted_s = simulate(problem, schedule).makespan_s
    error = measured_s / predicted_s - 1
    return {"predicted_s": round(predicted_s, 4), "measured_s": round(measured_s, 4), "error": round(error, 4)}


def make_problem() -> Any:
    from farpipe.problem import Hop, Link, Problem, Rank, Stage, Transfer

    stage = {"forward_s": FORWARD_S, "input_grad_s": BACKWARD_S / 2, "weight_grad_s": BACKWARD_S / 2}
    wan = Link(latency_s=LATENCY_S, bandwidth_bytes_per_s=BYTES_PER_S)
    across = [Transfer(link=name, bytes=MESSAGE_BYTES) for name in ("west>east", "east>west")]
    free = Hop()  # inside a site: memory of one machine
    return Problem(
        num_microbatches=NUM_MICROBATCHES,
        ranks=(Rank(),) * NUM_RANKS,
        stages=tuple(Stage(rank=rank, **stage) for rank in range(NUM_RANKS)),
        links={"west>east": wan, "east>west": wan},
        hops=(free, Hop(forward=across[0], backward=across[1]), free),
    )


def torch_step(name: str, *, wan: bool = True) -> dict[str, float]:
    """Measured seconds of a step with one of torch's schedules."""
    import torch.distributed as dist

    from farpipe.runtime.launch import launch
    from gloo_relay import Relay

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if wan:
        Relay(store, NEAR, FAR, LATENCY_S, BYTES_PER_S)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, name, str(store.port), "wan" if wan else "no wan", folder]
        launch(lambda _: command, NUM_RANKS, log_dir=Path(folder), env={"GLOO_SOCKET_IFNAME": "lo"})
        steps = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    spans = [max(end for _, end in step) - min(start for start, _ in step) for step in zip(*steps, strict=True)]
    return {"measured_s": round(median(spans[NUM_WARM_UP_STEPS:]), 4)}


def torch_rank(name: str, port: int, wan: bool, folder: Path) -> None:
    """One rank of torch's pipeline; leaves start and end of every step in `folder`."""
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining

    from gloo_relay import ShapedStore

    rank = int(os.environ["RANK"])
    inner = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    store = ShapedStore(inner, rank, (NEAR, FAR)) if wan else inner
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    shape = (1, MESSAGE_BYTES // 4)
    stage = pipelining.PipelineStage(sleeping_module(torch), rank, NUM_RANKS, torch.device("cpu"))
    schedule = getattr(pipelining, name)(stage, NUM_MICROBATCHES, loss_fn=lambda y, _: y.sum())
    whole = torch.zeros(NUM_MICROBATCHES, shape[1])
    steps = []
    for _ in range(NUM_STEPS):
        dist.barrier()
        start_s = time.monotonic()
        schedule.step(*([whole] if rank == 0 else []), **({"target": whole} if rank == NUM_RANKS - 1 else {}))
        steps.append((start_s, time.monotonic()))
    (folder / f"{rank}.json").write_text(json.dumps(steps))
    assert not wan or rank not in (NEAR, FAR) or store.num_rewritten > 0, "gloo went around the relay"
    dist.destroy_process_group()


def sleeping_module(torch: Any) -> Any:
    """A module that takes FORWARD_S and BACKWARD_S and hands its input on."""

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            time.sleep(FORWARD_S)
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gy: Any) -> Any:
            time.sleep(BACKWARD_S)
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
        torch_rank(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "wan", Path(sys.argv[4]))
    else:
        main()
