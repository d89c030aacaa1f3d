"""`farpipe.torch.Pipeline` over a link that changes during a training, with and without `replan`. Prints JSON.

    python -m benchmarks.engine.torch_replan [--steps 10,25,25] [--first auto] [--scale 0.4]

Four ranks at two sites, asleep for F = 20 ms and B = 40 ms, 16 microbatches, messages of 0.5 MB (all of it times the
scale). The emulated link has 200 Mbit/s and 10 ms one way, then 50 Mbit/s and 60 ms, then again what it had. Both runs
begin with the best order for the link as it is at first, or with the one that --first names. A step is from the first
rank's begin to the last one's end; figures are medians of the last six steps of a phase.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.replan import ACTION_S, BAD, GOOD, LAST_STEPS, LINKS, MESSAGE_BYTES, NUM_MICROBATCHES, until
from benchmarks.engine.torch_side_by_side import Case, sleeping_module
from benchmarks.shared.sleeping_ranks import NUM_RANKS, SITES, two_by_two
from benchmarks.transport.torch_backend import store_of_launcher

SEARCH_S = 5.0
CLUSTER = """
[cluster]
sites = [{{ name = "west", device = "cpu", num_devices = 2 }}, {{ name = "east", device = "cpu", num_devices = 2 }}]
links = [{{ between = ["west", "east"], latency = "{latency_ms:g} ms", bandwidth = "{mbit_per_s:g} Mbit/s" }}]
"""
JOB = """
[model]
name = "small"
num_layers = 4
hidden = 256
num_heads = 8
ffn_hidden = 1024
vocab_size = 2048
[training]
sequence_length = 256
global_batch = 16
microbatch_size = 1
precision = "fp32"
[layout]
sites = ["west", "east"]
pipeline = 4
virtual = 1
"""


def main(asked: argparse.Namespace) -> None:
    found = {name: run(asked, replan=name == "with") for name in ("without", "with")}
    rows = [
        {"link": link, **{f"{name}_s": result["settled_s"][phase] for name, result in found.items()}}
        for phase, link in enumerate(LINKS)
    ]
    totals = {f"all steps {name}_s": result["total_s"] for name, result in found.items()}
    each = {f"every step {name}_s": result["steps_s"] for name, result in found.items()}
    print(json.dumps({"steps": rows, **totals, "steps in the old order": found["with"]["waited"], **each}))


def run(asked: argparse.Namespace, *, replan: bool) -> dict[str, Any]:
    """Seconds of the steps in every phase and in all, and how many were done in the order of the phase before."""
    from farpipe.engine.launch.launcher import launch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cluster.toml").write_text(cluster(asked))
        plan(asked).save(folder / "plan.json")
        words = [sys.executable, __file__, *sys.argv[1:], "--folder", name, *(["--replan"] if replan else [])]
        launch(lambda _: words, NUM_RANKS, log_dir=folder / "logs")
        spans = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
        log = folder / "run" / "replan.jsonl"
        events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    steps = [max(end for _, end in one) - min(begin for begin, _ in one) for one in zip(*spans, strict=True)]
    starts = [sum(asked.steps[:phase]) for phase in range(len(LINKS))]
    phases = [*zip(starts, [*starts[1:], len(steps)], strict=True)]
    return {
        "settled_s": [round(median(steps[max(start, end - LAST_STEPS) : end]), 3) for start, end in phases],
        "total_s": round(sum(steps), 1),
        "waited": [until(*phase, events) for phase in phases[1:]],
        "steps_s": [round(step, 3) for step in steps],
    }


def cluster(asked: argparse.Namespace) -> str:
    """The sites and the link as it is at first."""
    return CLUSTER.format(latency_ms=GOOD[0] * asked.scale * 1e3, mbit_per_s=GOOD[1] * 8e-6)


def plan(asked: argparse.Namespace) -> Any:
    """A plan whose step is this benchmark's, over the link as it is at first."""
    from farpipe import planning
    from farpipe.core.spec import parse_job
    from farpipe.core.step import Link
    from farpipe.planning.planner.orders import find_order

    case = case_of(asked)
    link = Link(latency_s=case.latency_s, bandwidth_bytes_per_s=case.bytes_per_s)
    times_s = (case.forward_s, case.backward_s, 0.0)  # a sleeping stage has its whole backward in I
    problem = two_by_two(link, case.message_bytes, times_s, NUM_MICROBATCHES)
    schedule = find_order(problem, asked.first, time_limit_s=SEARCH_S).schedule
    found = planning.plan(parse_job(JOB + cluster(asked)))
    return found.model_copy(update={"problem": problem, "schedule": schedule})


def case_of(asked: argparse.Namespace) -> Case:
    times_s = ACTION_S * asked.scale, 2 * ACTION_S * asked.scale
    return Case(*times_s, round(MESSAGE_BYTES * asked.scale), NUM_MICROBATCHES, GOOD[0] * asked.scale, GOOD[1])


def run_rank(asked: argparse.Namespace) -> None:
    """One rank; leaves begin and end of its steps. Rank 0 changes the link between two of them."""
    import torch
    import torch.distributed as dist

    import farpipe.torch
    from farpipe.engine.links import LinkShape

    rank, case = int(os.environ["RANK"]), case_of(asked)
    os.environ |= {"FARPIPE_SITE": SITES[rank], "FARPIPE_EMULATE": "1"}
    os.environ["FARPIPE_LINKS"] = str(asked.folder / "cluster.toml")
    dist.init_process_group("farpipe", store=store_of_launcher(rank), rank=rank, world_size=NUM_RANKS)
    stage = sleeping_module(torch, case)
    options = {"plan": asked.folder / "plan.json", "run_dir": asked.folder / "run", "replan": asked.replan}
    pipeline = farpipe.torch.Pipeline(stage, NUM_MICROBATCHES, lambda y, _: y.sum(), **options)
    whole = torch.zeros(NUM_MICROBATCHES, case.message_bytes // 4)
    changes = {asked.steps[0]: BAD, asked.steps[0] + asked.steps[1]: GOOD}
    spans = []
    for step in range(sum(asked.steps)):
        dist.barrier()
        if rank == 0 and step in changes:
            latency_s, rate = changes[step]
            for name in ("west>east", "east>west"):
                dist.group.WORLD.transport.change_link(name, LinkShape(latency_s * asked.scale, rate))
        start_s = time.monotonic()
        pipeline.step(*([whole] if rank == 0 else []), **({"target": whole} if rank == NUM_RANKS - 1 else {}))
        spans.append((start_s, time.monotonic()))
    (asked.folder / f"{rank}.json").write_text(json.dumps(spans))
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=lambda text: [int(part) for part in text.split(",")], default=[10, 25, 25])
    parser.add_argument("--first", default="auto")
    parser.add_argument("--scale", type=float, default=0.4)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--replan", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    found = arguments()
    run_rank(found) if found.folder else main(found)
