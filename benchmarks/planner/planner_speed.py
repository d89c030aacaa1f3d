"""Time of the planner, and step times of its plans: CPU seconds of a plan and of `farpipe plan`, and of a quote.

Every job is planned in a process of its own, cold, and once more in the same process, warm. Budgets on two idle cores:
64 GPUs at two sites 0.3 s (cold 1 s), 160 in five 0.5 s, 640 in five 2 s, 405B on 3 x 1024 5 s, 405B on 16,384 in one
3 s; a quote 5 ms. With --command it measures the whole command: until its verdict, and until it ends.

Machines of one kind differ by two between themselves. So a fixed piece of pure Python is timed beside every job, and
what its seconds would be where that piece takes UNIT_S is what marks are compared with.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.shared.jobs import job_head, link_table

A100, H100 = "a100-80gb", "h100"
SETTINGS = "zero1 = true\nsequence_parallel = true"
OFF = "zero1 = false\nsequence_parallel = false"
JOBS: dict[str, tuple[str, int, int, list[int], float, float, str, str]] = {
    "13B, 64 in two": ("llama-2-13b", 4096, 256, [32] * 2, 20, 100, A100, OFF),
    "8B, 2 x 16, thin": ("llama-3-8b", 4096, 256, [16] * 2, 40, 5, A100, OFF),
    "7B, 4 x 8": ("llama-2-7b", 4096, 256, [8] * 4, 30, 10, A100, OFF),
    "70B, 2 x 64": ("llama-3-70b", 8192, 256, [64] * 2, 30, 100, H100, OFF),
    "70B, 2 x 64, ZeRO-1": ("llama-3-70b", 8192, 256, [64] * 2, 30, 100, H100, SETTINGS),
    "405B, 3 x 256": ("llama-3-405b", 8192, 512, [256] * 3, 20, 400, H100, OFF),
    "13B, 160 in five": ("llama-2-13b", 4096, 512, [32] * 5, 20, 100, A100, ""),
    "13B, 640 in five": ("llama-2-13b", 4096, 1024, [128] * 5, 20, 100, A100, ""),
    "405B, 3 x 512": ("llama-3-405b", 8192, 2048, [512] * 3, 20, 400, H100, ""),
    "405B, 3 x 1024": ("llama-3-405b", 8192, 2048, [1024] * 3, 20, 400, H100, ""),
    "405B, 8 x 2048": ("llama-3-405b", 8192, 4096, [2048] * 8, 20, 400, H100, ""),
    "405B, 16384 in one": ("llama-3-405b", 8192, 2048, [16384], 20, 400, H100, ""),
    "405B at 128k, 1024 in one": ("llama-3-405b", 131072, 32, [1024], 20, 400, H100, ""),
}
"""Model, sequence length, batch, devices by site, latency in ms, Gbit/s, device, further keys of [training]."""
TIMEOUT_S = 600.0
UNIT_S = 0.56
"""CPU seconds of `unit_s` on the machine that marks are for."""
UNIT_COUNT = 10_000_000
MARKS = {
    "13B, 64 in two": (0.8, 1.5),
    "13B, 160 in five": (1.2, 2.0),
    "13B, 640 in five": (2.0, 3.0),
    "405B, 3 x 512": (None, 6.0),
}
"""CPU seconds of the command until its verdict, and with everything, that are aimed at where the unit is UNIT_S."""


def _squares(count: int) -> int:
    x = 0
    for i in range(count):
        x += i * i
    return x


def unit_s() -> float:
    """CPU seconds of a fixed piece of pure Python: how fast this machine is now."""
    began_s = time.process_time()
    _squares(UNIT_COUNT)
    return time.process_time() - began_s


def job_text(name: str) -> str:
    """The job as TOML; latencies grow with the sites' numbers, so that orders of sites differ."""
    model, length, batch, sites, latency_ms, gbit, device, training = JOBS[name]
    text = [job_head(model, length, batch, sites, device, training)]
    for one in range(len(sites)):
        for other in range(one):
            delay = latency_ms * (1 + 0.1 * (one + other))
            text.append(link_table(f"s{other}", f"s{one}", f"{delay} ms", f"{gbit} Gbit/s"))
    return "".join(text)


def measure(name: str) -> dict[str, Any]:
    """One line of the table; prints of this process are its result."""
    began_s = time.process_time()
    from farpipe import planning
    from farpipe.core.spec import parse_job
    from farpipe.planning import Planner

    job = parse_job(job_text(name))
    plan = planning.plan(job)
    cold_s, warm_s = time.process_time() - began_s, time.process_time()
    planning.plan(job)
    warm_s = time.process_time() - warm_s
    planner, request = Planner(), job.request
    estimate = planner.quote(request, job.cluster)
    quotes = []
    for index in range(20):
        rates = {link.name: link.bandwidth_bytes_per_s * (1 - index / 100) for link in job.cluster.links}
        began_s = time.process_time()
        planner.quote(request, job.cluster, bytes_per_s=rates)
        quotes.append(time.process_time() - began_s)
    at, unit = plan.layout, unit_s()
    return {
        "job": name,
        "unit, CPU s": round(unit, 3),
        f"plan, cold, at {UNIT_S} s a unit": round(cold_s / unit * UNIT_S, 2),
        "plan, cold, CPU s": round(cold_s, 2),
        "warm": round(warm_s, 2),
        "quote, CPU ms": round(1000 * min(quotes), 2),
        "quoted step, s": round(estimate.step_s, 3),
        "step, s": round(plan.prediction.step_s, 3),
        "plan": f"{plan.where}: p{at.pipeline} d{at.data} t{at.tensor}, {plan.schedule.method}",
    }


def command_s(name: str) -> tuple[float, float]:
    """CPU seconds of `farpipe plan` in a process of its own until its verdict is on the screen, and until it ends.

    Modules come from Python's cache, as in an installation: to compile those of farpipe takes 0.2 s.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.toml")
        job.write_text(job_text(name))
        command = [sys.executable, "-m", "farpipe", "plan", str(job), "-o", str(Path(folder, "plan.json"))]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        before = os.times()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as run:
            assert run.stdout is not None
            verdict = run.stdout.readline()
            fields = Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()
            run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, f"{name}: {run.returncode}"
    assert verdict, f"{name}: no verdict"
    after = os.times()
    all_s = after.children_user + after.children_system - before.children_user - before.children_system
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), all_s


def measure_command(name: str, runs: int) -> dict[str, Any]:
    """One line of the table of commands: medians of `runs`, after one that is not counted, each with its own unit."""
    command_s(name)
    measured = [(unit_s(), *command_s(name)) for _ in range(runs)]
    at_unit = [(verdict / unit * UNIT_S, everything / unit * UNIT_S) for unit, verdict, everything in measured]
    unit, *seconds = (round(statistics.median(each), 3) for each in zip(*measured, strict=True))
    told = dict(zip(("verdict", "everything"), seconds, strict=True))
    medians = (round(statistics.median(each), 2) for each in zip(*at_unit, strict=True))
    scaled = dict(zip(told, medians, strict=True))
    marks = dict(zip(told, MARKS[name], strict=True))
    return {"job": name, "unit, CPU s": unit, "CPU s": told, f"at {UNIT_S} s a unit": scaled, "marks": marks}


def main() -> None:
    """Measure all jobs, or one in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=JOBS)
    parser.add_argument("--jobs", nargs="*", choices=JOBS, default=list(JOBS))
    parser.add_argument("--command", action="store_true", help="the whole command, for the jobs that have marks")
    parser.add_argument("--runs", type=int, default=5, help="of each command")
    chosen = parser.parse_args()
    if chosen.command:
        marked = [name for name in chosen.jobs if name in MARKS]
        print(json.dumps({"commands": [measure_command(name, chosen.runs) for name in marked]}, indent=1))
        return
    if chosen.job:
        print(json.dumps(measure(chosen.job)))
        return
    table = []
    for name in chosen.jobs:
        command = [sys.executable, "-m", "benchmarks.planner.planner_speed", "--job", name]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S)
        table.append(json.loads(run.stdout))
        print(json.dumps(table[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"plans": table}, indent=1))


if __name__ == "__main__":
    main()
