"""Work of a large search against the plans that it finds, on random clusters that nothing was tuned on.

Llama-3 70B and 405B over two to eight sites of 128 to 1,024 devices of three kinds, links of 2 to 80 ms and 25 to 400
Gbit/s between neighbours and half of the other pairs. Every job is planned with each `--work` (`MAX_WORK` of
`farpipe.planning.planner.search`, actions), the last of which is the one to compare with.

    python -m benchmarks.planner.search_budget --seeds 7 8 --draws 20 --work 1e6 2e6 3e6 8e6
"""

import argparse
import itertools
import json
import random
import sys
import time
from typing import Any
from unittest import mock

from benchmarks.shared.jobs import job_head, link_table, site_table
from farpipe import planning
from farpipe.core.spec import Job, parse_job

SAME = 1e-6
"""Relative difference of two steps that counts as none."""


def drawn(rng: random.Random) -> Job:
    """A job over a random cluster."""
    model, batch = rng.choice(["llama-3-70b", "llama-3-405b", "llama-3-405b"]), rng.choice([512, 1152, 2304])
    parts, count = [job_head(model, 8192, batch, (), "", "")], rng.choice([2, 3, 4, 5, 6, 8])
    for site in range(count):
        device = rng.choice(["h100", "h100", "h200", "a100-80gb"]) if rng.random() < 0.4 else "h100"
        parts.append(site_table(f"s{site}", device, rng.choice([128, 256, 512, 1024])))
    for one, other in itertools.combinations(range(count), 2):
        if other == one + 1 or rng.random() < 0.5:
            latency, rate = rng.choice([2, 5, 10, 20, 40, 80]), rng.choice([25, 50, 100, 200, 400])
            parts.append(link_table(f"s{one}", f"s{other}", f"{latency} ms", f"{rate} Gbit/s"))
    return parse_job("".join(parts))


def measure(job: Job, works: list[float]) -> dict[str, list[float]]:
    """Steps and CPU seconds of the plans with every limit."""
    found: dict[str, list[float]] = {"step, s": [], "CPU s": []}
    for work in works:
        with mock.patch.object(sys.modules["farpipe.planning.planner.search"], "MAX_WORK", work):
            began_s = time.process_time()
            found["step, s"].append(round(planning.plan(job).prediction.step_s, 5))
            found["CPU s"].append(round(time.process_time() - began_s, 2))
    return found


def main() -> None:
    """Plan every draw with every limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8])
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--work", type=float, nargs="+", default=[1e6, 2e6, 3e6, 8e6])
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in chosen.seeds:
        rng = random.Random(seed)
        for draw in range(chosen.draws):
            job = drawn(rng)
            of_sites = [site.num_devices for site in job.cluster.sites]
            rows.append({"seed": seed, "draw": draw, "devices": of_sites, **measure(job, chosen.work)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    table = []
    for place, work in enumerate(chosen.work):
        excess = [row["step, s"][place] / row["step, s"][-1] - 1 for row in rows]
        slower = sum(one > SAME for one in excess)
        cpu_s = sum(row["CPU s"][place] for row in rows)
        table.append(
            {"work": work, "jobs": len(rows), "slower": slower, "worst": max(excess), "CPU s": round(cpu_s, 1)}
        )
    print(json.dumps({"table": table, "draws": rows}, indent=1))


if __name__ == "__main__":
    main()
