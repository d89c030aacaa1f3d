"""Predicted and measured steps over links that lose packets: 1F1B and the planned order, four ranks in network
namespaces. Prints JSON.

Two sites of two ranks, 20 ms and 200 Mbit/s apart, messages of half a megabyte, forward 20 ms and backward 40 ms a
stage; stages sleep. `error` is (predicted - measured) / measured, of the mean and of the 90 % step time; the first
three steps are left out. With `--loss` only one share. Needs root and /dev/net/tun.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.shared.kernel_wan import print_where_possible

LOSSES, METHODS = (0.0, 0.001, 0.01), ("1f1b", "auto")
NUM_STEPS, NUM_LEFT_OUT = 30, 3
SITE = """
[[cluster.sites]]
name = "{name}"
device = {{ name = "slow", memory = "80 GB", memory_bandwidth = "1000 GB/s", peak = {{ bf16 = "1 TFLOP/s" }} }}
num_devices = 2
devices_per_machine = 2
machine_link = {{ latency = "5 us", bandwidth = "200 GB/s" }}
"""
JOB = """
[model]
num_layers = 8
hidden = 512
num_heads = 8
ffn_hidden = 2048
vocab_size = 256

[training]
sequence_length = 512
global_batch = 16
microbatch_size = 1
precision = "bf16"
recompute = "none"

[layout]
pipeline = 4
data = 1
tensor = 1
virtual = 1
layers = [2, 2, 2, 2]
sites = ["west", "east"]

[[cluster.links]]
between = ["west", "east"]
latency = "20 ms"
bandwidth = "200 Mbit/s"
loss = {loss}

[schedule]
method = "{method}"
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loss", type=float, choices=LOSSES)
    parser.add_argument("--method", choices=METHODS)
    only = parser.parse_args()
    losses = LOSSES if only.loss is None else (only.loss,)
    methods = (only.method,) if only.method else METHODS
    print_where_possible(lambda: {"steps": [measure(loss, method) for loss in losses for method in methods]})


def plan_of(loss: float, method: str) -> Any:
    from farpipe import planning
    from farpipe.core.spec import parse_job
    from farpipe.planning.cost import MeasuredPart, completed_profile

    ends = MeasuredPart(1e-4, 1e-4)
    measured = {"layer": MeasuredPart(0.01, 0.02), "embedding": ends, "head": ends}
    sites = [SITE.format(name=name) for name in ("west", "east")]
    job = parse_job("".join([JOB.format(loss=loss, method=method), *sites]))
    return planning.plan(job, [completed_profile(job, job.cluster.sites[0], measured)])


def measure(loss: float, method: str) -> dict[str, Any]:
    """One row of the table."""
    from farpipe.engine.launch.run import run
    from farpipe.engine.launch.runs import run_spec_of
    from farpipe.engine.links import wan_of_cluster

    plan = plan_of(loss, method)
    spec = run_spec_of(plan, num_steps=NUM_STEPS, device="sleep", emulate_links=False)
    name = f"benchmark{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder, wan_of_cluster(plan.job.cluster, name=name) as wan:
        run(spec, Path(folder) / "run", wan=wan)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    steps_s = [json.loads(line)["makespan_s"] for line in lines][NUM_LEFT_OUT:]
    overhead_s, spread = plan.prediction.overhead_s, plan.prediction.spread
    alike_s = plan.prediction.makespan_s
    mean_s, p90_s = (spread.mean_s - overhead_s, spread.p90_s - overhead_s) if spread else (alike_s, alike_s)
    measured_s = statistics.fmean(steps_s), statistics.quantiles(steps_s, n=10)[-1]
    return {
        "loss": loss,
        "order": f"{method}: {plan.schedule.method}",
        "predicted_mean_s": round(mean_s, 3),
        "measured_mean_s": round(measured_s[0], 3),
        "error": round(mean_s / measured_s[0] - 1, 3),
        "predicted_p90_s": round(p90_s, 3),
        "measured_p90_s": round(measured_s[1], 3),
        "p90_error": round(p90_s / measured_s[1] - 1, 3),
    }


if __name__ == "__main__":
    main()
