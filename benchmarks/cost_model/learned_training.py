"""The loop closed with stages that compute: a run teaches the next plans, and these are run as well.

A small Llama-like model in fp32 is trained on Python's standard library by two ranks, one at each of two sites, over an
emulated link of 30 ms and 100 Mbit/s. The first plan knows the catalogue's core; the next ones are made with
``--learned-from`` the first run. `error` is (predicted - measured) / measured of the median step (the first three steps
are left out); `again` the same for the first plan's own order with what its run taught. Limit on a quiet machine: 3 %.

    python -m benchmarks.cost_model.learned_training
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.shared.commands import farpipe
from benchmarks.shared.jobs import two_sites

JOB = (
    """
[model]
name = "small"
num_layers = 8
hidden = 256
num_heads = 8
num_kv_heads = 4
ffn_hidden = 704
vocab_size = 256
[training]
sequence_length = 128
global_batch = {batch}
microbatch_size = {size}
num_steps = 14
precision = "fp32"
learning_rate = 2e-3
[data]
source = "stdlib"
"""
    + two_sites("west", "east", 1, "30 ms", "100 Mbit/s")
    + """\
[layout]
sites = ["west", "east"]
replicas = "inside"
pipeline = 2
virtual = {virtual}
data = 1
tensor = 1
"""
)
FIRST = {"batch": 16, "size": 2, "virtual": 1}
NEXT = {
    "the same job": FIRST,
    "two stages per rank": FIRST | {"virtual": 2},
    "twice the batch": FIRST | {"batch": 32},
}
TIMEOUT_S = 240.0


def main() -> None:
    """The first run, and those that it teaches; one line as each ends."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [measure("first, nothing learned", FIRST, folder)]
        rows += [
            measure(f"learned: {what}", job, folder, "--learned-from", folder / "run0") for what, job in NEXT.items()
        ]
    print(json.dumps({"plans": rows}))


def measure(name: str, figures: dict[str, int], folder: Path, *learned: object) -> dict[str, Any]:
    """One plan and its run, in `folder`."""
    number = len(list(folder.glob("run*")))
    job, plan, run = folder / f"job{number}.toml", folder / f"plan{number}.json", folder / f"run{number}"
    job.write_text(JOB.format(**figures), encoding="utf-8")
    farpipe("plan", job, "--no-strategies", "--output", plan, *learned, timeout_s=TIMEOUT_S)
    farpipe("train", plan, "--run-dir", run, timeout_s=TIMEOUT_S)
    planned, summary = (json.loads(path.read_text(encoding="utf-8")) for path in (plan, run / "summary.json"))
    predicted_s, measured_s = planned["prediction"]["step_s"], summary["step_s"]
    row = {
        "plan": name,
        "order": planned["schedule"]["method"],
        "layers": [stage["end_layer"] - stage["first_layer"] for stage in planned["placements"]],
        "predicted_s": round(predicted_s, 4),
        "measured_s": round(measured_s, 4),
        "error": round(predicted_s / measured_s - 1, 4),
        "told": [line for line in planned["advice"] if line.startswith("Learned")],
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    main()
