"""The loop closed: a plan with wrong assumptions is run, the run teaches the next plan, and that one is run as well.

A small model on four sleeping ranks at two sites over an emulated link. The job believes in the catalogue's core and in
a faster, nearer link; in truth layers, head and link are others (`TRUTH`). Every plan is `planning.plan`'s; what runs
are its placement and its order with the true times. `error` is (predicted - measured) / measured of the median step.
Limit: 3 % for plans after the first run.

    python -m benchmarks.cost_model.learned
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.shared.jobs import two_sites
from farpipe.planning import PlanDocument

NUM_STEPS = 6
JOB = (
    """
[model]
name = "small"
num_layers = 12
hidden = 256
num_heads = 8
num_kv_heads = 8
ffn_hidden = 1024
vocab_size = 2048
[training]
sequence_length = 256
global_batch = {batch}
microbatch_size = 1
precision = "fp32"
"""
    + two_sites("west", "east", 2, "5 ms", "400 Mbit/s")
    + """\
[layout]
sites = ["west", "east"]
replicas = "inside"
data = 1
pipeline = {pipeline}
"""
)
TRUTH = {"embedding": (3e-3, 0, 6e-3), "layer": (15e-3, 20e-3, 14e-3), "head": (27e-3, 27e-3, 24e-3)}
"""Seconds of F, I and W for one sequence; the cost model's are others, and in other proportions."""
TRUE_LATENCY_S, TRUE_BYTES_PER_S = 0.06, 10e6


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"plans": measure(Path(folder))}))


def measure(folder: Path) -> list[dict[str, Any]]:
    """The first plan; what is planned next after its run: the same job, a larger batch, other numbers of ranks."""
    from farpipe import planning
    from farpipe.core.spec import parse_job
    from farpipe.engine.launch.learned import learn

    job = parse_job(JOB.format(batch=16, pipeline=4))
    rows = [{"plan": "first, nothing learned"} | run(planning.plan(job), folder / "first")]
    learned = learn(folder / "first")
    rows[0]["told"] = list(learned.told)
    for name, batch, pipeline in (("the same job", 16, 4), ("twice the batch", 32, 4), ("three ranks", 16, 3)):
        other = learned.corrected(parse_job(JOB.format(batch=batch, pipeline=pipeline)))
        plan = planning.plan(other, learned.profiles)
        rows.append({"plan": f"learned: {name}"} | run(plan, folder / name))
    return rows


def run(plan: Any, run_dir: Path) -> dict[str, Any]:
    """The plan's placement and order, with the true times and links; the plan and all figures are in `run_dir`."""
    from farpipe.engine.launch.directory import write_inputs
    from farpipe.engine.launch.run import run as run_spec
    from farpipe.engine.run_spec import RunSpec
    from farpipe.planning.cost import JobCosts, step_cost

    job = plan.job
    costs = JobCosts(job.model, job.training, {"cpu": true_profile(job)})
    links = {"latency_s": TRUE_LATENCY_S, "bandwidth_bytes_per_s": TRUE_BYTES_PER_S}
    true_links = tuple(link.model_copy(update=links) for link in job.cluster.links)
    cluster = job.cluster.model_copy(update={"links": true_links})
    step = step_cost(costs, plan.layout, plan.placements, cluster)
    spec = RunSpec.bare(
        problem=step.problem, schedule=plan.schedule, sites=plan.sites, num_steps=NUM_STEPS, device="sleep"
    )
    summary = run_spec(spec, run_dir)
    write_inputs(PlanDocument(plan=plan), run_dir)
    predicted_s = plan.prediction.makespan_s
    return {
        "order": plan.schedule.method,
        "layers": [p.num_layers for p in plan.placements],
        "predicted_s": round(predicted_s, 4),
        "measured_s": round(summary.makespan_s, 4),
        "error": round(predicted_s / summary.makespan_s - 1, 4),
    }


def true_profile(job: Any) -> Any:
    from farpipe.planning.cost import PartTimes, Profile, model_shape

    figures = ("forward_s", "input_grad_s", "weight_grad_s")
    parts = {part: PartTimes(**dict(zip(figures, map(float, t), strict=True))) for part, t in TRUTH.items()}
    return Profile(
        device="cpu",
        shape=model_shape(job.model),
        precision="fp32",
        recompute="none",
        microbatch_size=1,
        sequence_length=job.training.sequence_length,
        optimizer_s_per_param=1e-9,
        action_overhead_s=0.0,
        **parts,
    )


if __name__ == "__main__":
    main()
