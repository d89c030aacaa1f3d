"""The second list: what 2 hosts of 8 GPUs each run by `farpipe prepare` and torchrun, and the table of what they found.

The first call writes the jobs to FOLDER, which both hosts see, and prints the commands; the next one reads the runs.
"""

import statistics
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.gpu.checks import Outcome
from benchmarks.gpu.machine import Machine, Run, largest_difference

NUM_RANKS: Final = 16
LINK: Final = 'latency = "0.1 ms"\nbandwidth = "100 Gbit/s"'


class Item(NamedTuple):
    """A run of the list, and the check that it is for."""

    number: int
    name: str
    method: str
    layout: str
    training: dict[str, object]
    expected: str


ITEMS: Final = (
    Item(2, "1f1b", "1f1b", f"pipeline = {NUM_RANKS}", {}, "step within 10 % of the plan"),
    Item(2, "zb-2p", "zb-2p", f"pipeline = {NUM_RANKS}", {}, "losses as 1f1b's to 1e-6"),
    Item(7, "tensor", "1f1b", "pipeline = 8\ntensor = 2\ndata = 1", {}, "losses as fsdp's to 1e-3"),
    Item(7, "fsdp", "1f1b", "pipeline = 2\ndata = 8\ntensor = 1", {"zero": 3}, "losses as 1f1b's to 1e-3"),
    Item(9, "replicas", "1f1b", "pipeline = 8\ndata = 2", {}, "step within 10 % of the plan"),
    Item(
        10, "checkpoints", "1f1b", f"pipeline = {NUM_RANKS}", {"checkpoint_every_steps": 2}, "losses as 1f1b's, equal"
    ),
    Item(11, "int8", "eager", f"pipeline = {NUM_RANKS}", {"wire_type": "int8"}, "step within 10 % of the plan"),
)
LIKE: Final = {"zb-2p": ("1f1b", 1e-6), "tensor": ("fsdp", 1e-3), "fsdp": ("1f1b", 1e-3), "checkpoints": ("1f1b", 0.0)}
"""The run that another's losses should equal, and within what."""


def write(machine: Machine) -> str:
    """Write the jobs; the commands in words."""
    lines = []
    for item in ITEMS:
        tables = machine.tables(NUM_RANKS, sites=2, method=item.method, link=LINK, layout=item.layout)
        job = machine.job(item.name, tables, global_batch=64, num_steps=10, **item.training)
        lines.append(f"farpipe prepare {job} --run-dir {machine.folder / 'runs' / item.name}  # check {item.number}")
    return "\n".join([*lines, "then on each host the torchrun command that `prepare` prints, and this command again"])


def read(folder: Path) -> list[tuple[Item, Outcome]]:
    """What the runs in `folder` have found."""
    runs = {item.name: Run(folder / "runs" / item.name, 0, 0.0, "") for item in ITEMS}
    return [(item, _outcome(item.name, runs)) for item in ITEMS]


def _outcome(name: str, runs: dict[str, Run]) -> Outcome:
    run = runs[name]
    if len(run.losses) < 10:
        return Outcome("not run", None)
    if name in LIKE:
        other, limit = LIKE[name]
        found = largest_difference(run.losses, runs[other].losses)
        return Outcome(f"{found:.1e} from {other}", found <= limit)
    ratio = statistics.median(line["makespan_s"] for line in run.lines[4:]) / run.plan["prediction"]["makespan_s"]
    return Outcome(f"{ratio:.2f} of the predicted step", abs(ratio - 1) <= 0.1)
