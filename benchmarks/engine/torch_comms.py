"""Receives placed by torch or by farpipe, in torch's own _PipelineScheduleRuntime over gloo. Prints JSON.

Four ranks, asleep: two stages each, 8 microbatches, F = 10 ms and B = 20 ms a stage, and every message takes so many
milliseconds. A rank's sends and receives run in one queue, one after the other, as in a communicator of NCCL: a
receive whose message is far off holds up the sends behind it (pytorch #188833), and gloo's sends wait for their
receives, as large ones do in NCCL. *torch*: its own lowering of the order; *farpipe*: `farpipe export --format
torch-csv-comms`. The bubble of the warm-up is what a rank idles before its first backward, mean over ranks; medians
over the steps after the first. torch's `defer_pp_recv` did not end here, seen once: every rank waited.
"""

import json
import multiprocessing
import os
import queue
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from statistics import mean, median
from typing import Any

NUM_RANKS, NUM_STAGES, NUM_MICROBATCHES = 4, 8, 8
FORWARD_S, BACKWARD_S = 0.010, 0.020
DELAYS_S = (0.002, 0.020)
CASES = [(delay_s, lowering) for delay_s in DELAYS_S for lowering in ("torch", "farpipe")]
NUM_STEPS = 4
WIDTH = 256


def main() -> None:
    print(json.dumps({"predicted_s": {f"{1e3 * d:g} ms": predicted_s(d) for d in DELAYS_S}, "steps": measured()}))


def problem_of(delay_s: float) -> Any:
    from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer

    link = Link(latency_s=delay_s, bandwidth_bytes_per_s=1e12)
    names = [(f"{s % NUM_RANKS}>{(s + 1) % NUM_RANKS}") for s in range(NUM_STAGES)]
    hops = [
        Hop(forward=Transfer(link=f"a:{n}", bytes=1.0), backward=Transfer(link=f"b:{n}", bytes=1.0)) for n in names[:-1]
    ]
    half_s = BACKWARD_S / 2
    times = {"forward_s": FORWARD_S, "input_grad_s": half_s, "weight_grad_s": half_s}
    return Problem(
        num_microbatches=NUM_MICROBATCHES,
        ranks=(Rank(),) * NUM_RANKS,
        stages=tuple(Stage(rank=s % NUM_RANKS, **times) for s in range(NUM_STAGES)),
        links={f"{d}:{n}": link for n in names for d in "ab"},
        hops=tuple(hops),
    )


def predicted_s(delay_s: float) -> float:
    from farpipe.core.schedule.library import order
    from farpipe.core.simulate import simulate

    problem = problem_of(delay_s)
    return round(simulate(problem, order("interleaved", problem)).makespan_s, 4)


def measured() -> list[dict[str, Any]]:
    """Step, bubble of the warm-up and largest difference of a gradient from that of the plain model, by case."""
    import torch.distributed as dist
    from torch.distributed.pipelining import schedules  # before the fork: once is enough

    assert schedules
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for index, (delay_s, lowering) in enumerate(CASES):
            (folder / f"{index}.csv").write_text(text_of(delay_s, lowering))
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=rank_main, args=(rank, store.port, folder)) for rank in range(NUM_RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    return [
        {"delay_ms": 1e3 * delay_s, "receives placed by": lowering} | figures([rank[index] for rank in ranks])
        for index, (delay_s, lowering) in enumerate(CASES)
    ]


def text_of(delay_s: float, lowering: str) -> str:
    """The file that torch loads."""
    from farpipe.core.schedule.library import order
    from farpipe.core.schedule.torch_csv import to_torch_csv
    from farpipe.interop.torch_comms import to_torch_comms_csv

    problem = problem_of(delay_s)
    schedule = order("interleaved", problem)
    return to_torch_comms_csv(problem, schedule) if lowering == "farpipe" else to_torch_csv(schedule)


def figures(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Of one case, from all ranks."""
    spans = [
        max(end for _, end in ends) - min(start for start, _ in ends)
        for ends in zip(*(rank["steps"] for rank in ranks), strict=True)
    ]
    return {
        "step_s": round(median(spans[1:]), 4),
        "warm_up_bubble_s": round(mean(median(rank["bubbles"][1:]) for rank in ranks), 4),
        "gradient_error": max(rank["error"] for rank in ranks),
    }


class OneQueue:
    """Sends and receives of a rank one after the other, each message `delay_s` on its way."""

    def __init__(self, torch: Any, delay_s: float) -> None:
        self._dist, self._torch, self._delay_s = torch.distributed, torch, delay_s
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def batch(self, ops: list[Any], desc: str | None = None) -> list[Any]:
        """In place of torch's _batch_p2p: the operations queued, each with something to wait on."""
        return [self._put(op) for op in ops]

    def _put(self, op: Any) -> Any:
        done = threading.Event()
        self._queue.put((op, done))
        return done

    def _work(self) -> None:
        while True:
            op, done = self._queue.get()
            stamp = self._torch.tensor([time.monotonic()], dtype=self._torch.float64)
            if op.op is self._dist.isend:
                self._dist.send(stamp, group=op.group, group_dst=op.group_peer)
                self._dist.send(op.tensor, group=op.group, group_dst=op.group_peer)
            else:
                self._dist.recv(stamp, group=op.group, group_src=op.group_peer)
                self._dist.recv(op.tensor, group=op.group, group_src=op.group_peer)
                time.sleep(max(0.0, float(stamp) + self._delay_s - time.monotonic()))
            done.set()


def rank_main(rank: int, port: int, folder: Path) -> None:
    """One rank of torch's runtime; leaves its times and its gradients' error of every case in `folder`."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    found = [run_case(torch, rank, *case, folder / f"{index}.csv") for index, case in enumerate(CASES)]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run_case(torch: Any, rank: int, delay_s: float, lowering: str, file: Path) -> dict[str, Any]:
    from torch.distributed.pipelining import PipelineStage, schedules

    events: list[tuple[str, float]] = []
    modules = {s: sleeping(torch, s, events) for s in range(rank, NUM_STAGES, NUM_RANKS)}
    stages = [PipelineStage(module, s, NUM_STAGES, torch.device("cpu")) for s, module in modules.items()]
    runtime = schedules._PipelineScheduleRuntime(
        stages, NUM_MICROBATCHES, loss_fn=lambda y, t: ((y - t) ** 2).sum(), scale_grads=False
    )
    runtime._load_csv(str(file), format="compute_comms" if lowering == "farpipe" else "compute_only")
    schedules._batch_p2p = OneQueue(torch, delay_s).batch
    torch.manual_seed(1000)
    x, target = torch.randn(2, NUM_MICROBATCHES, WIDTH, dtype=torch.float64)
    steps, bubbles = [], []
    for _ in range(NUM_STEPS):
        for module in modules.values():
            module.zero_grad()
        torch.distributed.barrier()
        events.clear()
        start_s = time.monotonic()
        inputs, targets = ((x,) if rank == 0 else ()), ({"target": target} if rank == NUM_RANKS - 1 else {})
        runtime.step(*inputs, **targets)
        steps.append((start_s, time.monotonic()))
        first = next(i for i, (kind, _) in enumerate(events) if kind == "B")
        bubbles.append(events[first][1] - start_s - first * FORWARD_S)
    return {"steps": steps, "bubbles": bubbles, "error": difference(torch, modules, x, target)}


def difference(torch: Any, modules: dict[int, Any], x: Any, target: Any) -> float:
    """Largest difference of a gradient from the whole model's in one process."""
    whole = [sleeping(torch, s, [], asleep=False) for s in range(NUM_STAGES)]
    ((torch.nn.Sequential(*whole)(x) - target) ** 2).sum().backward()
    return max(float((m.map.weight.grad - whole[s].map.weight.grad).abs().max()) for s, m in modules.items())


def sleeping(torch: Any, stage: int, events: list[tuple[str, float]], asleep: bool = True) -> Any:
    """A linear map that takes FORWARD_S and BACKWARD_S, with weights by its stage; begins go to `events`."""

    class Sleep(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            events.append(("F", time.monotonic()))
            time.sleep(FORWARD_S * asleep)
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            events.append(("B", time.monotonic()))
            time.sleep(BACKWARD_S * asleep)
            return gradient * 1.0

    class Stage(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(stage)
            self.map = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)

        def forward(self, x: Any) -> Any:
            return Sleep.apply(self.map(x))

    return Stage()


if __name__ == "__main__":
    main()
