"""Predicted and measured step of a small model that really trains over the kernel's own TCP. Prints JSON.

Two sites of one core each, in network namespaces; stage times are measured first, in two processes at once. A step is
the makespan, without the optimizer; medians, the first three steps left out. What else runs on the cores makes a step
longer and is in the error. Needs root, /dev/net/tun and two free cores.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.shared.commands import farpipe
from benchmarks.shared.jobs import two_sites
from benchmarks.shared.kernel_wan import print_where_possible

CASES = (("20 ms", "200 Mbit/s"), ("50 ms", "1 Gbit/s"))
METHODS = ("1f1b", "eager", "zb-2p")
NUM_STEPS = 10

JOB = (
    """\
[model]
num_layers = 8
hidden = 256
num_heads = 8
num_kv_heads = 4
ffn_hidden = 704
vocab_size = 256

[training]
sequence_length = 128
global_batch = 32
microbatch_size = 4
precision = "fp32"

"""
    + two_sites("zurich", "lugano", 1, "{latency}", "{bandwidth}")
    + """\
[layout]
pipeline = 2
sites = ["zurich", "lugano"]
"""
)


def main() -> None:
    print_where_possible(measure_all)


def measure_all() -> dict[str, Any]:
    """The table."""
    with tempfile.TemporaryDirectory() as folder:
        return {"steps": [step for case in CASES for step in measure(Path(folder), *case)]}


def measure(folder: Path, latency: str, bandwidth: str) -> list[dict[str, Any]]:
    """The rows of one distance."""
    job, profile = folder / "job.toml", folder / "profile.json"
    job.write_text(JOB.format(latency=latency, bandwidth=bandwidth))
    if not profile.exists():  # the stage times are the same over any distance
        farpipe("profile", job, "--processes", 2, "--output", profile)
    rows = []
    for method in METHODS:
        run_dir = folder / f"{latency} {method}"
        where = ("--wan", "--run-dir", run_dir, "--steps", NUM_STEPS)
        options = (*where, "--profile", profile, "--set", f"schedule.method={method}")
        summary = json.loads(farpipe("train", job, *options, "--json"))
        measured_s, predicted_s = summary["makespan_s"], summary["predicted_makespan_s"]
        rows.append(
            {
                "latency": latency,
                "bandwidth": bandwidth,
                "order": method,
                "predicted_s": round(predicted_s, 4),
                "measured_s": round(measured_s, 4),
                "error": round((predicted_s - measured_s) / measured_s, 4),
            }
        )
    return rows


if __name__ == "__main__":
    main()
