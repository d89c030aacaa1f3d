"""The main road in a few minutes: measure, plan, simulate and train a small model over two emulated sites.

Every step is a farpipe command that you could have typed; this script only chooses a job that fits the machine, shows
the commands and adds up what came out. It trains on Python's own standard library, once with farpipe's plan and once
with plain 1F1B.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from farpipe.core.cpu_share import other_work

RUN_DIR = Path("runs/demo")

JOB = """\
# A small Llama-like model over two sites that are {latency} ms apart. Written by recipes/demo.py for {cores} cores.

[model]
name = "demo"
num_layers = 8
hidden = 256
num_heads = 8
num_kv_heads = 4
ffn_hidden = 704
vocab_size = 256

[training]
sequence_length = 128
global_batch = 24
microbatch_size = 2
num_steps = {steps}
precision = "fp32"
learning_rate = 2e-3

[data]
source = "stdlib"

[[cluster.sites]]
name = "zurich"
device = "cpu"
num_devices = {ranks_per_site}

[[cluster.sites]]
name = "lugano"
device = "cpu"
num_devices = {ranks_per_site}

[[cluster.links]]
between = ["zurich", "lugano"]
latency = "{latency} ms"
bandwidth = "200 Mbit/s"

[layout]
sites = ["zurich", "lugano"]
pipeline = {ranks}
data = 1
tensor = 1
"""


def farpipe(*arguments: object) -> None:
    """Show a command and run it; the demo ends with the command's exit code when it fails."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ farpipe {' '.join(words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "farpipe", *words], check=False).returncode
    if code:
        sys.exit(code)


def write_job() -> int:
    """Write a job for this machine: one rank per site, two where there are four cores; returns the number of ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks_per_site = 2 if cores >= 4 else 1
    facts = {"cores": cores, "ranks_per_site": ranks_per_site, "ranks": 2 * ranks_per_site}
    RUN_DIR.mkdir(parents=True)
    (RUN_DIR / "job.toml").write_text(JOB.format(steps=30, latency=60 // ranks_per_site, **facts), encoding="utf-8")
    return 2 * ranks_per_site


def figures(run: str) -> dict[str, Any]:
    """What came out of one run."""
    summary = json.loads((RUN_DIR / run / "summary.json").read_text(encoding="utf-8"))
    plan = json.loads((RUN_DIR / run / "plan.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = summary | {
        "predicted_s": plan["prediction"]["step_s"],
        "method": plan["schedule"]["method"],
    }
    return found


def conclude() -> None:
    """One line about what farpipe's plan was worth."""
    planned, plain = figures("planned"), figures("1f1b")
    doubt = other_work(min(planned["cpu_share"], plain["cpu_share"]))
    print(
        f"\n{planned['method']} took {planned['step_s'] / plain['step_s']:.0%} of plain 1F1B's step time; "
        f"predicted were {planned['predicted_s'] / plain['predicted_s']:.0%}.\n"
        f"Loss {planned['first_loss']:.2f} -> {planned['last_loss']:.2f} (planned), "
        f"{plain['first_loss']:.2f} -> {plain['last_loss']:.2f} (1F1B).\n"
        f"Open {RUN_DIR / 'report.html'} in a browser."
    )
    if doubt:
        print(f"{doubt} Run it again when the machine is quiet.")


def main() -> None:
    """The whole road."""
    begin = time.monotonic()
    shutil.rmtree(RUN_DIR, ignore_errors=True)
    ranks = write_job()
    job, plan, profile = (RUN_DIR / name for name in ("job.toml", "plan.json", "profile.json"))
    farpipe("profile", job, "--processes", ranks, "--output", profile)
    farpipe("plan", job, "--profile", profile, "--output", plan)
    farpipe("simulate", plan)
    farpipe("train", plan, "--run-dir", RUN_DIR / "planned")
    farpipe("train", job, "--profile", profile, "--set", "schedule.method=1f1b", "--run-dir", RUN_DIR / "1f1b")
    farpipe("report", RUN_DIR / "planned", RUN_DIR / "1f1b", "--output", RUN_DIR / "report.html")
    conclude()
    print(f"All of it took {time.monotonic() - begin:.0f} s.")


if __name__ == "__main__":
    main()
