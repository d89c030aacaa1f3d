"""What the engine costs per action: no-op stages, 1F1B on two ranks over the real transport. Prints JSON.

`cpu_us_per_action` is CPU time of the whole rank (executor, transport, their threads) over its actions, the mean of
both ranks; `executor_us_per_action` is the part of the thread that runs the actions. Every action sends or receives
one message of MESSAGE_BYTES. `alone_us_per_action` is a single rank without messages. The rest of a step (optimizer,
metrics) is not in it.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

MESSAGE_BYTES = 4096
NUM_MICROBATCHES = 256
NUM_STEPS = 12
NUM_WARM_UP_STEPS = 2


def main() -> None:
    from farpipe.runtime.launch import launch

    result = {"message_bytes": MESSAGE_BYTES, "num_microbatches": NUM_MICROBATCHES}
    for num_ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, folder]
            launch(lambda _, command=command: command, num_ranks, log_dir=Path(folder))
            ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)]
        means = {key: round(sum(rank[key] for rank in ranks) / num_ranks, 2) for key in ranks[0]}
        if num_ranks == 1:
            result["alone_us_per_action"] = means["executor_us_per_action"]
        else:
            result |= means
    print(json.dumps(result))


def run_rank(folder: Path) -> None:
    """Time the steps of one rank and leave the figures in `folder`."""
    from farpipe.problem import Hop, Link, Problem, Rank, Stage, Transfer
    from farpipe.runtime.executor import Executor
    from farpipe.runtime.stage import SleepStage
    from farpipe.runtime.transport import TransportConfig, connect, rendezvous_from_env
    from farpipe.schedule.library import order

    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hop = Hop(forward=Transfer(link="a>b", bytes=MESSAGE_BYTES), backward=Transfer(link="a>b", bytes=MESSAGE_BYTES))
    problem = Problem(
        num_microbatches=NUM_MICROBATCHES,
        ranks=(Rank(),) * num_ranks,
        stages=tuple(Stage(rank=r, forward_s=0, input_grad_s=0, weight_grad_s=0) for r in range(num_ranks)),
        links={"a>b": Link(latency_s=0, bandwidth_bytes_per_s=1e9)},
        hops=(hop,) * (num_ranks - 1),
    )
    with connect(rank, num_ranks, TransportConfig(), rendezvous_from_env()) as transport:
        executor = Executor(order("1f1b", problem), {rank: SleepStage(problem, rank)}, transport)
        for step in range(NUM_STEPS):
            if step == NUM_WARM_UP_STEPS:
                start = (time.process_time(), time.thread_time(), time.perf_counter())
            transport.exchange(f"step {step}", b"", waiting_for="the other rank")
            executor.run(step)
        end = (time.process_time(), time.thread_time(), time.perf_counter())
    num_actions = (NUM_STEPS - NUM_WARM_UP_STEPS) * len(executor.program)
    cpu, thread, wall = ((b - a) / num_actions * 1e6 for a, b in zip(start, end, strict=True))
    figures = {"cpu_us_per_action": cpu, "executor_us_per_action": thread, "wall_us_per_action": wall}
    (folder / f"{rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    run_rank(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
