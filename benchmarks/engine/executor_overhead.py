"""CPU time of the engine per action, beside torch's own: no-op stages, 1F1B on two ranks. Prints JSON.

`cpu_us_per_action` is CPU time of the whole rank (executor, transport, their threads) over its actions, the mean of
both ranks; `executor_us_per_action` is the part of the thread that runs the actions. Every action sends or receives
one message of MESSAGE_BYTES. `alone_us_per_action` is a single rank without messages. The rest of a step (optimizer,
metrics) is not in it.

`torch` is the same with torch.distributed.pipelining over gloo, its runtime for orders of one's own
(`_PipelineScheduleRuntime`) and its `Schedule1F1B`: `main_us_per_action` is the thread that runs the actions,
`cpu_us_per_action` the whole process. Its stages do what torch can't do without: a forward that hands its input on and
a backward by autograd. So its first stage and its loss have more to do than ours; `autograd_us_per_action` is what
these modules take without a pipeline, to be subtracted. An action is a forward or a backward.
"""

import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

MESSAGE_BYTES = 4096
NUM_MICROBATCHES = 256
NUM_STEPS = 12
NUM_SKIPPED_STEPS = 2
NUM_RANKS = 2
TORCH_SCHEDULES = ("_PipelineScheduleRuntime", "Schedule1F1B")


def main() -> None:
    from farpipe.engine.launch.launcher import launch

    result = {"message_bytes": MESSAGE_BYTES, "num_microbatches": NUM_MICROBATCHES}
    for num_ranks in (1, NUM_RANKS):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, folder]
            launch(lambda _, command=command: command, num_ranks, log_dir=Path(folder))
            ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)]
        means = {key: round(sum(rank[key] for rank in ranks) / num_ranks, 2) for key in ranks[0]}
        if num_ranks == 1:
            result["alone_us_per_action"] = means["executor_us_per_action"]
        else:
            result |= means
    result["torch"] = {name: torch_means(name) for name in TORCH_SCHEDULES}
    print(json.dumps(result))


def torch_means(name: str) -> dict[str, float]:
    """The figures of one of torch's schedules, the mean of both ranks."""
    from torch.distributed import TCPStore

    from farpipe.engine.launch.launcher import launch

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder, name, str(store.port)]
        launch(lambda _: command, NUM_RANKS, log_dir=Path(folder), env={"GLOO_SOCKET_IFNAME": "lo"})
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    return {key: round(sum(rank[key] for rank in ranks) / NUM_RANKS, 2) for key in ranks[0]}


def make_problem(num_ranks: int):
    """Stages that take no time, messages of MESSAGE_BYTES."""
    from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer

    hop = Hop(forward=Transfer(link="a>b", bytes=MESSAGE_BYTES), backward=Transfer(link="a>b", bytes=MESSAGE_BYTES))
    return Problem(
        num_microbatches=NUM_MICROBATCHES,
        ranks=(Rank(),) * num_ranks,
        stages=tuple(Stage(rank=r, forward_s=0, input_grad_s=0, weight_grad_s=0) for r in range(num_ranks)),
        links={"a>b": Link(latency_s=0, bandwidth_bytes_per_s=1e9)},
        hops=(hop,) * (num_ranks - 1),
    )


def run_rank(folder: Path) -> None:
    """Time the steps of one rank and leave the figures in `folder`."""
    from farpipe.core.schedule.library import order
    from farpipe.engine.executor.executor import Executor
    from farpipe.engine.executor.peers import TensorPeers
    from farpipe.engine.rendezvous import rendezvous_from_env
    from farpipe.engine.stages.stage import SleepStage
    from farpipe.engine.transport import TransportConfig, connect

    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    problem = make_problem(num_ranks)
    with connect(rank, num_ranks, TransportConfig(), rendezvous_from_env()) as transport:
        executor = Executor(order("1f1b", problem), {rank: SleepStage(problem, rank)}, TensorPeers(transport))
        for step in range(NUM_STEPS):
            if step == NUM_SKIPPED_STEPS:
                start = (time.process_time(), time.thread_time(), time.perf_counter())
            transport.exchange(f"step {step}", b"", waiting_for="the other rank")
            executor.run(step)
        end = (time.process_time(), time.thread_time(), time.perf_counter())
    num_actions = (NUM_STEPS - NUM_SKIPPED_STEPS) * len(executor.program)
    cpu, thread, wall = ((b - a) / num_actions * 1e6 for a, b in zip(start, end, strict=True))
    figures = {"cpu_us_per_action": cpu, "executor_us_per_action": thread, "wall_us_per_action": wall}
    (folder / f"{rank}.json").write_text(json.dumps(figures))


def run_torch_rank(folder: Path, name: str, port: int) -> None:
    """The same with torch's pipeline."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    step = torch_step(name, rank, folder)
    for number in range(NUM_STEPS):
        if number == NUM_SKIPPED_STEPS:
            start = (time.process_time(), time.thread_time())
        dist.barrier()
        step()
    end = (time.process_time(), time.thread_time())
    num_actions = (NUM_STEPS - NUM_SKIPPED_STEPS) * 2 * NUM_MICROBATCHES
    cpu, main_thread = ((b - a) / num_actions * 1e6 for a, b in zip(start, end, strict=True))
    figures = {"cpu_us_per_action": cpu, "main_us_per_action": main_thread, "autograd_us_per_action": autograd_us(rank)}
    (folder / f"{rank}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def torch_step(name: str, rank: int, folder: Path):
    """A call that runs one step of torch's schedule `name` on this rank."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules

    stage = PipelineStage(noop_module(), rank, NUM_RANKS, torch.device("cpu"))
    if name == "Schedule1F1B":
        schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=total, scale_grads=False)
    else:
        schedule = schedules._PipelineScheduleRuntime([stage], NUM_MICROBATCHES, loss_fn=total, scale_grads=False)
        schedule._load_csv(str(written_order(folder, rank)), format="compute_only")
    whole = torch.zeros(NUM_MICROBATCHES, MESSAGE_BYTES // 4)
    arguments = ([whole] if rank == 0 else []), ({"target": whole} if rank == NUM_RANKS - 1 else {})
    return lambda: schedule.step(*arguments[0], **arguments[1])


def written_order(folder: Path, rank: int) -> Path:
    """The order that our executor runs, as a file that torch's runtime loads; for `rank` alone to write and read."""
    from farpipe.core.schedule.library import order
    from farpipe.core.schedule.torch_csv import to_torch_csv

    path = folder / f"order-{rank}.csv"
    path.write_text(to_torch_csv(order("1f1b", make_problem(NUM_RANKS))))
    return path


def noop_module():
    """Hands its input on; has a weight, for torch's backward begins at something that needs a gradient."""
    import torch

    class Noop(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return x + self.weight

    return Noop()


def total(output, target):
    """A loss whose gradient is contiguous, as torch wants it for sending."""
    return (output * output).sum()


def autograd_us(rank: int) -> float:
    """CPU microseconds per action of what `rank` has to compute, without a pipeline."""
    import torch

    module, x, gy = noop_module(), *torch.zeros(2, 1, MESSAGE_BYTES // 4)
    start = time.process_time()
    for _ in range(NUM_MICROBATCHES):
        y = module(x.detach().requires_grad_(rank > 0))
        torch.autograd.backward(*((total(y, None), None) if rank == NUM_RANKS - 1 else (y, gy)))
    return (time.process_time() - start) / (2 * NUM_MICROBATCHES) * 1e6


if __name__ == "__main__":
    if len(sys.argv) > 2:
        run_torch_rank(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    elif len(sys.argv) > 1:
        run_rank(Path(sys.argv[1]))
    else:
        main()
