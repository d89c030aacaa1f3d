"""The kill of leave_and_return.py with torchft, for comparison. Prints JSON.

Two replicas of a small model over gloo on loopback, without an emulated distance; a step takes 0.4 s on each. One is
killed (SIGKILL) 0.2 s into a step and started again after --away seconds. Needs torchft (pip install torchft-nightly).

    python -m benchmarks.engine.torchft_kill
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

STEP_S, NUM_STEPS, KILL_AFTER, LIMIT_S = 0.4, 40, 12, 240.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--away", type=float, default=5.0)
    parser.add_argument("--replica", type=int, help="for the replicas, which this script starts")
    parser.add_argument("--life", type=int, default=0, help="the same")
    parser.add_argument("--lighthouse", default="", help="the same")
    parser.add_argument("--folder", type=Path, help="the same")
    options = parser.parse_args()
    if options.replica is not None:
        replica(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), options.away)))


def replica(options: argparse.Namespace) -> None:
    """Train one replica; a line for every step."""
    import torch
    import torch.distributed as dist
    from torchft.ddp import DistributedDataParallel
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper
    from torchft.process_group import ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(250, 490), torch.nn.ReLU(), torch.nn.Linear(490, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wait_for(lambda: options.life == 0 or (options.folder / "go").exists())
    log = (options.folder / f"steps-{options.replica}.jsonl").open("a", buffering=1)
    log.write(json.dumps({"what": "starts", "at": time.monotonic()}) + "\n")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["inner"])),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        replica_id=f"replica{options.replica}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=options.lighthouse,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=60),
    )
    trained, optimizer = DistributedDataParallel(manager, model), OptimizerWrapper(manager, inner)
    while (step := manager.current_step()) < NUM_STEPS:
        begin_s = time.monotonic()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step * 2 + options.replica)
        loss = trained(torch.randn(64, 250, generator=generator)).square().mean()
        time.sleep(max(0.0, STEP_S - (time.monotonic() - begin_s)))
        loss.backward()
        optimizer.step()
        figures = {"what": "step", "step": step, "at": time.monotonic(), "counts": manager.current_step() > step}
        log.write(json.dumps(figures | {"members": manager.num_participants()}) + "\n")
    manager.shutdown(wait=False)
    os._exit(0)


def measure(folder: Path, away_s: float) -> dict[str, Any]:
    """Kill one of two replicas, and start it again."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=5000)
    words = [sys.executable, __file__, "--folder", str(folder), "--lighthouse", lighthouse.address()]

    def start(number: int, life: int) -> subprocess.Popen[bytes]:
        more = ["--replica", str(number), "--life", str(life)]
        return subprocess.Popen([*words, *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    processes = [start(0, 0), start(1, 0), start(1, 1)]
    try:
        wait_for(lambda: any(line.get("step") == KILL_AFTER for line in lines(folder, 1)))
        time.sleep(STEP_S / 2)
        killed_s = time.monotonic()
        processes[1].send_signal(signal.SIGKILL)
        time.sleep(away_s)
        (folder / "go").touch()
        wait_for(lambda: processes[0].poll() is not None)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    after = [line for line in lines(folder, 0) if line["what"] == "step" and line["at"] > killed_s]
    first = next(line for line in after if line["counts"])
    came_s = [line for line in lines(folder, 1) if line["what"] == "starts"][-1]["at"]
    both = [line["at"] for line in after if line["members"] == 2 and line["at"] > came_s]
    pairs = pairwise(after)
    return {
        "next step that counts, s": first["at"] - killed_s,
        "replicas in it": first["members"],
        "steps that did not count": sum(not line["counts"] for line in after),
        "back after, s": min(both) - came_s if both else None,
        "step afterwards, s": median(other["at"] - one["at"] for one, other in pairs),
    }


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for a condition, LIMIT_S at most."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)


def lines(folder: Path, number: int) -> list[dict[str, Any]]:
    """What a replica has written."""
    path = folder / f"steps-{number}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
