"""The private names of torch.distributed.pipelining that tests use, in one place; and one rank that runs CSV orders.

As a script: ``torch_pipelining.py STORE_PORT FOLDER`` runs every ``*.csv`` of FOLDER and compares the gradients of this
rank's stages with those of the plain model; it ends with an error where they differ.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

PRIVATE_NAMES = ("_PipelineScheduleRuntime", "_Action")
WIDTH, ROWS_PER_MICROBATCH = 6, 2


def load(stages, num_microbatches, file, loss_fn, form="compute_only"):
    """torch's runtime with the order in `file`; torch adds the communication to one that has none."""
    runtime = schedules._PipelineScheduleRuntime(stages, num_microbatches, loss_fn=loss_fn, scale_grads=False)
    runtime._load_csv(str(file), format=form)
    return runtime


def parse(text):
    """An action as torch reads it."""
    return schedules._Action.from_str(text)


def make_module(stage):
    """A stage whose weights follow from its number."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def squared(output, target):
    """A loss that is a sum, so that it doesn't matter how the batch is cut."""
    return ((output - target) ** 2).sum()


def plain_gradients(num_stages, x, target):
    """Of the whole model in one process, by stage."""
    modules = [make_module(stage) for stage in range(num_stages)]
    squared(nn.Sequential(*modules)(x), target).backward()
    return [[parameter.grad for parameter in module.parameters()] for module in modules]


def run_file(file, rank):
    """Two steps with the order in `file`, their gradients added up; the largest difference from twice the plain one."""
    facts = json.loads(file.with_suffix(".json").read_text())
    num_stages, num_microbatches = len(facts["stage_ranks"]), facts["num_microbatches"]
    mine = [stage for stage, owner in enumerate(facts["stage_ranks"]) if owner == rank]
    torch.manual_seed(1000)
    x, target = torch.randn(2, ROWS_PER_MICROBATCH * num_microbatches, WIDTH, dtype=torch.float64)
    modules = {stage: make_module(stage) for stage in mine}
    stages = [PipelineStage(module, stage, num_stages, torch.device("cpu")) for stage, module in modules.items()]
    runtime = load(stages, num_microbatches, file, squared, facts.get("format", "compute_only"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            inputs = (x,) if 0 in mine else ()
            targets = {"target": target} if num_stages - 1 in mine else {}
            runtime.step(*inputs, **targets)
    if facts.get("traced"):
        profiler.export_chrome_trace(str(file.with_suffix(f".rank{rank}.trace.json")))
    expected = plain_gradients(num_stages, x, target)
    return max(
        float((parameter.grad - 2 * reference).abs().max())
        for stage, module in modules.items()
        for parameter, reference in zip(module.parameters(), expected[stage], strict=True)
    )


def main(port, folder):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    errors = {file.stem: run_file(file, rank) for file in sorted(folder.glob("*.csv"))}
    (folder / f"errors-{rank}.json").write_text(json.dumps(errors))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
