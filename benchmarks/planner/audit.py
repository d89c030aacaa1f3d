"""Audit of the planner's search: forty random jobs, each plan against 200 layouts of the job's own space.

Llama-2 7B and 13B, Llama-3 8B, 70B and 405B over one to four sites of one or two kinds of devices, bf16 or fp8. Of the
layouts half are drawn from those with the least estimates, half from all that the lattice knows, over all orders of
sites; each with one stage a rank, two in a V, or up to eight round robin. Each gets what a search's candidates get: the
best division of its layers, its recomputation, the quick orders; the five fastest are refined as the plan was. A plan
that is behind the best of them has missed it.

    python -m benchmarks.planner.audit --first 0 --jobs 40
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any, Final

from benchmarks.shared.jobs import job_head, link_table, site_table
from farpipe.core.errors import FarpipeError
from farpipe.core.spec import Job, parse_job
from farpipe.planning import find
from farpipe.planning.cost import JobCosts
from farpipe.planning.planner.candidates import MAX_VIRTUAL, Candidate, placed
from farpipe.planning.planner.evaluate import Evaluated, evaluate, whole
from farpipe.planning.planner.lattice import Estimate, Lattice
from farpipe.planning.planner.orders import QUICK
from farpipe.planning.planner.refinement import refined

NUM_LAYOUTS: Final = 200
KNOWN: Final = 400
"""Estimates of each set of sites that layouts are drawn from."""
NEAREST: Final = 60
"""Least estimates, whose shapes half of the layouts are drawn from."""
NEAR: Final = 0.06
"""Relative distance of a layout's step to the plan's up to which it is simulated: a short search of its order gains
that much at most on nearly all layouts."""
NUM_REFINED: Final = 5
"""Number of them, the fastest first, that are refined as the plan was."""
MODELS: Final = {
    "llama-2-7b": (4096, (16, 64)),
    "llama-2-13b": (4096, (32, 160)),
    "llama-3-8b": (8192, (16, 128)),
    "llama-3-70b": (8192, (64, 1024)),
    "llama-3-405b": (8192, (512, 8192)),
}
"""Sequence length, and the least and the most devices of all sites."""
MEMORY: Final = {"llama-3-405b": ("h100", "h200"), "llama-3-70b": ("h100", "h200", "a100-80gb")}
DEVICES: Final = ("a100-80gb", "h100", "h200")


def drawn(seed: int) -> str:
    """A random job as TOML."""
    rng = random.Random(seed)
    model = rng.choice(list(MODELS))
    length, (least, most) = MODELS[model]
    count = rng.choice([1, 1, 2, 2, 3, 4])
    device = rng.choice(MEMORY.get(model, DEVICES))
    others = [one for one in MEMORY.get(model, DEVICES) if one != device]
    sizes = [size for size in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if least <= size * count <= most]
    size = rng.choice(sizes)
    batch = rng.choice([1, 2, 4, 8]) * max(64, size * count // rng.choice([8, 4, 2]))
    training = "" if rng.random() < 0.5 else f"zero1 = {str(rng.random() < 0.7).lower()}"
    if device != "a100-80gb" and rng.random() < 0.3:
        training, others = f'{training}\nmatmul = "fp8"\nfp8_param_gather = true', [o for o in others if o[0] == "h"]
    parts = [job_head(model, rng.choice([length, length, 4 * length]), batch, (), "", training)]
    for site in range(count):
        mixed = bool(others) and site == count - 1 and rng.random() < 0.3
        parts.append(site_table(f"s{site}", rng.choice(others) if mixed else device, size))
    for one, other in combinations(range(count), 2):
        latency, rate = rng.choice([1, 5, 10, 20, 40, 80]), rng.choice([10, 25, 50, 100, 200, 400])
        parts.append(link_table(f"s{one}", f"s{other}", f"{latency} ms", f"{rate} Gbit/s"))
    return "".join(parts)


def layouts(job: Job, lattice: Lattice, rng: random.Random) -> Iterator[Candidate]:
    """NUM_LAYOUTS different layouts, half of those with the least estimates."""
    of_sets = lattice.estimates(lattice.whole, KNOWN, slack=1e6, every_order=True)
    every = sorted((one for of_set in of_sets for one in of_set), key=lambda one: one.step_s)
    best, seen = every[:NEAREST], set[object]()
    for turn in range(50 * NUM_LAYOUTS):
        candidate = _shaped(job, lattice, rng.choice(best if turn % 2 else every), rng)
        if candidate is None or (key := (candidate.where, candidate.layout, candidate.in_v)) in seen:
            continue
        seen.add(key)
        yield candidate
        if len(seen) == NUM_LAYOUTS:
            return


def _shaped(job: Job, lattice: Lattice, estimate: Estimate, rng: random.Random) -> Candidate | None:
    """The estimate's degrees on its sites with a random number of stages on every rank."""
    virtual, in_v = rng.choice([(1, False), (2, True), (2, True), *((v, False) for v in range(2, MAX_VIRTUAL + 1))])
    layout = replace(estimate.layout, virtual=virtual)
    if (layout.pipeline == 1) != (virtual == 1) and virtual > 1:
        return None
    return placed(job, [lattice.sites[index] for index in estimate.site_set.order], layout, in_v)


def at_their_best(job: Job, each: Iterable[Candidate], costs: JobCosts, plan_s: float) -> list[tuple[float, str]]:
    """Steps of the layouts that come within NEAR of the plan's, the fastest first, the NUM_REFINED first refined."""
    tried = (evaluate(job, one, costs, plan_s * (1 + NEAR), QUICK) for one in each)
    found = sorted((one for one in tried if isinstance(one, Evaluated)), key=lambda one: one.step_s)
    steps = [(_refined_s(job, one, costs), str(one.candidate)) for one in found[:NUM_REFINED]]
    return sorted([*steps, *((one.step_s, str(one.candidate)) for one in found[NUM_REFINED:])])


def _refined_s(job: Job, found: Evaluated, costs: JobCosts) -> float:
    try:
        return refined(job, whole(found), costs)[1].step_s
    except FarpipeError:  # the whole step fits in no order
        return math.inf


def audit(seed: int) -> dict[str, Any]:
    """One line of the table."""
    asked = parse_job(drawn(seed))
    began_s = time.process_time()
    try:
        planned = find(asked)[0]
    except FarpipeError as error:
        return {"seed": seed, "none": str(error).splitlines()[0]}
    cpu_s = time.process_time() - began_s
    job, costs, plan = planned.found.job, planned.found.costs, planned.plan
    step_s, rng = plan.prediction.step_s, random.Random(seed)
    each = list(layouts(job, Lattice(job, costs), rng))
    found = at_their_best(job, each, costs, step_s)
    best_s, best = min(found, default=(math.inf, ""))
    is_known = best_s < math.inf
    sites = ", ".join(f"{site.num_devices} {site.device.name}" for site in job.cluster.sites)
    return {
        "seed": seed,
        "job": f"{job.model.name}, {sites}, batch {job.training.global_batch} x {job.training.sequence_length}",
        "plan": f"{plan.where}: {plan.degrees}",
        "plan, s": round(step_s, 5),
        "CPU s": round(cpu_s, 2),
        "layouts": len(each),
        "near": len(found),
        "best of them, s": round(best_s, 5) if is_known else None,
        "best of them": best,
        "behind, %": round(100 * (step_s / best_s - 1), 3) if is_known else None,
    }


def main() -> None:
    """Audit some of the jobs; a line on stderr for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="seed of the first job")
    parser.add_argument("--jobs", type=int, default=40)
    chosen = parser.parse_args()
    table = []
    for seed in range(chosen.first, chosen.first + chosen.jobs):
        table.append(audit(seed))
        print(json.dumps(table[-1]), file=sys.stderr, flush=True)
    behind = [row["behind, %"] for row in table if row.get("behind, %") is not None]
    print(json.dumps({"jobs": table, "most behind, %": max(behind, default=None)}, indent=1))


if __name__ == "__main__":
    main()
