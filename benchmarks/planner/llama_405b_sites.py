"""Llama-3.1-405B in FP8 over several sites: the share of one site's throughput, by bandwidth, distance and sites.

The training of MLPerf v5.0's submission on 1,024 H200 in one site (batch 1152, TP4 PP8 VP8 CP2), whose logs have a step
of 25.36 s, as `recipes/llama_405b_two_sites.toml` has it: exact synchronous training, messages in bf16. Each line is a
plan that is free in all but what is trained; the first is the submission's layout.

    python -m benchmarks.planner.llama_405b_sites [--only WORD]
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.jobs import link_table, site_table
from farpipe import planning
from farpipe.core.schedule.bounds import lower_bound_s, period_bound_s
from farpipe.core.spec import Job, parse_job

RECIPE: Final = Path(__file__).parents[2] / "recipes" / "llama_405b_two_sites.toml"
MEASURED_S: Final = 25.36
"""Step of the submission on 1,024 H200 in one site, median of the logs; mlcommons/training_results_v5.0."""
SUBMITTED: Final = f"""tensor = 4
pipeline = 8
virtual = 8
context = 2
data = 16
layers = {[1, *[2] * 62, 1]}
"""

Sites = Sequence[tuple[str, int]]
"""Device and number of devices of each site."""


def job(
    sites: Sites, latency: str = "10 ms", bandwidth: str = "200 Gbit/s", layout: str = "", *, barrier: bool = True
) -> Job:
    """The recipe's training on `sites`, every two of which have a link; `layout`: lines of pins."""
    training = RECIPE.read_text(encoding="utf-8").partition("[[cluster.sites]]")[0]
    text = f"{training}barrier = {str(barrier).lower()}\n[layout]\n{layout}\n"
    for index, (device, count) in enumerate(sites):
        text += site_table(f"s{index}", device, count)
    for one, other in combinations(range(len(sites)), 2):
        text += link_table(f"s{one}", f"s{other}", latency, bandwidth)
    return parse_job(text)


def settings() -> Iterator[tuple[str, Job]]:
    """The submission, one site, and the grid."""
    one, two, four = [("h200", 1024)], [("h200", 512)] * 2, [("h200", 256)] * 4
    yield "1 x 1024, submitted layout", job(one, layout=SUBMITTED)
    yield "1 x 1024", job(one)
    for bandwidth in (10, 25, 50, 100, 200, 400):
        yield f"2 x 512, 10 ms, {bandwidth} Gbit/s", job(two, bandwidth=f"{bandwidth} Gbit/s")
    for latency in (1, 5, 25, 50):
        yield f"2 x 512, {latency} ms, 200 Gbit/s", job(two, f"{latency} ms")
    for bandwidth in (200, 400):
        yield f"4 x 256, 10 ms, {bandwidth} Gbit/s", job(four, bandwidth=f"{bandwidth} Gbit/s")
    mixed = [("h200", 512), ("h200", 256), ("h100", 256)]
    yield "512 H200 + 256 H200 + 256 H100, 10 ms, 200 Gbit/s", job(mixed)
    yield "1 x 1024, no barrier", job(one, barrier=False)
    for bandwidth in (200, 400):
        yield (
            f"2 x 512, 10 ms, {bandwidth} Gbit/s, no barrier",
            job(two, bandwidth=f"{bandwidth} Gbit/s", barrier=False),
        )


def measure(name: str, described: Job) -> dict[str, Any]:
    """One line of the table; planned twice, the second time is told."""
    planning.plan(described)
    began_s = time.process_time()
    plan = planning.plan(described)
    cpu_s, at = time.process_time() - began_s, plan.layout
    bound_s = (lower_bound_s if described.training.barrier else period_bound_s)(plan.problem)
    return {
        "setting": name,
        "step, s": round(plan.prediction.step_s, 3),
        "its layout's bound, s": round(bound_s + plan.prediction.overhead_s, 3),
        "sites used": len({place.site for place in plan.placements}),
        "layout": f"p{at.pipeline} v{at.virtual} d{at.data} t{at.tensor} c{at.context} mbs{at.microbatch_size}",
        "order": plan.schedule.method,
        "bubble": round(plan.prediction.bubble_ratio, 4),
        "plan, warm, CPU s": round(cpu_s, 2),
    }


def main() -> None:
    """Plan every setting, or those whose name has a word in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    wanted, table = parser.parse_args().only, []
    for name, described in settings():
        if wanted in name:
            table.append(measure(name, described))
            print(json.dumps(table[-1]), file=sys.stderr, flush=True)
    one_site_s = next((line["step, s"] for line in table if line["setting"] == "1 x 1024"), None)
    for line in table:  # without a barrier beside one site with one, too
        line["of one site's throughput"] = one_site_s and round(one_site_s / line["step, s"], 4)
        line["of the measured one"] = round(MEASURED_S / line["step, s"], 4)
    print(json.dumps({"measured on 1 x 1024, s": MEASURED_S, "llama 405b": table}, indent=1))


if __name__ == "__main__":
    main()
