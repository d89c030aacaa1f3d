"""The backend of torch.distributed on GPUs: a context on each process's own GPU alone, and CUDA tensors that arrive.

Every process makes its group before it chooses a GPU, as programs do, and sends CPU tensors over it first.
"""

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

NUM_RANKS: Final = 2
NUM_ELEMENTS: Final = 1 << 22
POLL_S: Final = 0.2
STAYS_S: Final = 2.0


def backend(device: str) -> tuple[dict[int, set[str]], bool]:
    """(GPUs by process, True if all that was sent came as it was)."""
    from benchmarks.gpu.machine import gpu_processes
    from farpipe.engine.launch.launcher import launch

    found: dict[int, set[str]] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            for pid, gpu in gpu_processes():
                found.setdefault(pid, set()).add(gpu)

    with tempfile.TemporaryDirectory() as folder:
        watching = threading.Thread(target=watch)
        watching.start()
        try:
            command = [sys.executable, "-m", "benchmarks.gpu.backend", folder, device]
            launch(lambda _: command, NUM_RANKS, log_dir=Path(folder))
        finally:
            ended.set()
            watching.join()
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    mine = {rank["pid"] for rank in ranks}
    return {pid: gpus for pid, gpus in found.items() if pid in mine}, all(rank["is_right"] for rank in ranks)


def rank_main(folder: Path, device: str) -> None:
    """One process: ring of two, from the host's memory and from the GPU's."""
    import torch
    import torch.distributed as dist

    import farpipe.torch

    farpipe.torch.register()
    rank = int(os.environ["RANK"])
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("farpipe", store=store, rank=rank, world_size=NUM_RANKS)
    is_right = exchange(rank, "cpu")
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        is_right &= exchange(rank, "cuda")
    time.sleep(STAYS_S)
    (folder / f"{rank}.json").write_text(json.dumps({"pid": os.getpid(), "is_right": is_right}))
    dist.destroy_process_group()


def exchange(rank: int, device: str) -> bool:
    """True if the other's numbers came, and their sum is right on both."""
    import torch
    import torch.distributed as dist

    mine = torch.arange(NUM_ELEMENTS, dtype=torch.float32, device=device) * (rank + 1)
    theirs = torch.empty_like(mine)
    work = dist.isend(mine, 1 - rank)
    dist.recv(theirs, 1 - rank)
    if work is not None:
        work.wait()
    total = mine.clone()
    dist.all_reduce(total)
    expected = torch.arange(NUM_ELEMENTS, dtype=torch.float32, device=device) * (2 - rank)
    return torch.equal(theirs, expected) and torch.equal(total, mine + expected)


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), sys.argv[2])
