"""Plans with all sets of operations open to recomputation, beside none, attention's core and full recomputation alone.

Jobs that are short of memory: step time with `recompute = "auto"` as it is, and with its sets taken away.
"""

import json
import time
from unittest import mock

from benchmarks.shared.jobs import job_head, link_table
from farpipe import planning
from farpipe.core.spec import parse_job

JOBS = {
    "8B, 4 x A100-40GB": ("llama-3-8b", 8192, 64, [4], "a100-40gb", ""),
    "8B at 64k, 8 x H100": ("llama-3-8b", 65536, 16, [8], "h100", ""),
    "13B, 8 x A100-40GB": ("llama-2-13b", 4096, 128, [8], "a100-40gb", ""),
    "70B, 2 x 12 H100": ("llama-3-70b", 8192, 96, [12, 12], "h100", ""),
    "70B, 2 x 16 H100, no ZeRO": ("llama-3-70b", 8192, 128, [16, 16], "h100", "zero = 0"),
    "175B, 64 A100, no flash": ("gpt3-175b", 2048, 128, [64], "a100-80gb", "flash_attention = false"),
    "Mixtral 8x7B, 32 H100": ("mixtral-8x7b", 8192, 128, [32], "h100", ""),
}
"""Model, sequence length, batch, devices by site, device, further keys of [training]."""
FEW = ("none", "selective", "full")


def job_text(name: str) -> str:
    """The job as TOML: sites 20 ms and 100 Gbit/s apart."""
    model, length, batch, sites, device, training = JOBS[name]
    text = job_head(model, length, batch, sites, device, training)
    if len(sites) > 1:
        text += link_table("s0", "s1", "20 ms", "100 Gbit/s")
    return text


def planned(name: str) -> tuple[float, float, list[str]]:
    """Seconds of the step, CPU seconds of the second plan, and what its stages recompute."""
    job = parse_job(job_text(name))
    planning.plan(job)
    began_s = time.process_time()
    plan = planning.plan(job)
    return plan.prediction.step_s, time.process_time() - began_s, sorted(set(plan.recompute))


def main() -> None:
    """One line for each job."""
    for name in JOBS:
        step_s, cpu_s, modes = planned(name)
        with mock.patch("farpipe.planning.planner.partition.every_mode", _few):
            few_s, few_cpu_s, few_modes = planned(name)
        line = {"job": name, "step_s": round(step_s, 4), "recompute": modes, "plan, CPU s": round(cpu_s, 2)}
        few = {"step_s": round(few_s, 4), "recompute": few_modes, "plan, CPU s": round(few_cpu_s, 2)}
        print(json.dumps(line | {"without sets": few, "gain": f"{100 * (few_s / step_s - 1):.1f} %"}), flush=True)


def _few(model: object, training: object) -> tuple[str, ...]:
    return FEW if not getattr(training, "flash_attention") else ("none", "full")  # noqa: B009


if __name__ == "__main__":
    main()
