"""The planner against layouts that people tuned: MLPerf Training's pre-training rows and Megatron-Bridge's dense ones.

For every row that `farpipe validate` carries: the step as measured; as predicted for the submitted layout; of the plan
that is free to choose everything but what is trained, under the same simulator; and whether the planner, told to use
the submitted degrees, finds a plan. Devices, batch, precision and switches of the training are the submission's.

    python -m benchmarks.planner.planner_against_winners [--only WORD]
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from farpipe import planning
from farpipe.core.errors import FarpipeError
from farpipe.core.spec import Job, Pins
from farpipe.planning import Plan
from farpipe.planning.planner.reference_points import ReferencePoint, load_points
from farpipe.planning.planner.validation import predict

GROUPS: Final = ("mlperf-hopper", "mlperf-blackwell", "mlperf-amd", "bridge-dense")
SOURCES: Final = {"mlperf": "MLPerf Training v4.1 to v5.1", "bridge": "Megatron-Bridge's performance pages"}
EQUAL: Final = 1e-6
"""Relative difference of two steps that counts as none."""


def points() -> Iterator[tuple[str, ReferencePoint]]:
    """Every row with the name of its group."""
    for group in load_points():
        if group.name in GROUPS:
            yield from ((group.name, point) for point in group.points)


def job_of(point: ReferencePoint, layout: Pins) -> Job:
    """The job of a row; with no pins the sizes of microbatches, ZeRO and recomputation are free too."""
    known = point.job()
    free = {"microbatch_size": None, "zero": "auto", "sequence_parallel": "auto", "recompute": "auto"}
    training = known.training if layout.tensor else known.training.model_copy(update=free)
    return Job(model=known.model, training=training, cluster=known.cluster, layout=layout)


def submitted(point: ReferencePoint) -> Pins:
    """The degrees of a row as pins."""
    at = point.job().layout
    degrees = ("pipeline", "data", "tensor", "virtual", "context", "expert", "num_microbatches")
    return Pins(**{name: getattr(at, name) for name in degrees}, layers=point.layers, replicas="inside")


def gain_from(point: ReferencePoint, plan: Plan) -> str:
    """Degrees, order and recomputation of a plan that differ from those of the row."""
    theirs, ours = point.job().layout, plan.layout
    names = {"pipeline": "p", "data": "d", "tensor": "t", "context": "c", "virtual": "v", "microbatch_size": "mbs "}
    changed = [f"{short}{getattr(ours, name)}" for name, short in names.items() if _differ(theirs, ours, name)]
    recomputing = sum(placement.recompute != "none" for placement in plan.placements)
    changed += [f"{recomputing} of {len(plan.placements)} stages recompute"] if recomputing else []
    return ", ".join([*changed, plan.schedule.method])


def _differ(theirs: Any, ours: Any, name: str) -> bool:
    return bool(getattr(theirs, name) != getattr(ours, name))


def measure(group: str, point: ReferencePoint) -> dict[str, Any]:
    """One line of the table."""
    theirs = predict(point)
    try:
        pinned = f"{planning.plan(job_of(point, submitted(point))).prediction.step_s:.3f}"
    except FarpipeError as error:
        pinned = str(error).splitlines()[0]
    free = job_of(point, Pins())
    planning.plan(free)
    began_s = time.process_time()
    plan = planning.plan(free)
    cpu_s = time.process_time() - began_s
    step_s = plan.prediction.step_s
    return {
        "row": str(point),
        "source": SOURCES[group.partition("-")[0]],
        "measured, s": point.step_s,
        "theirs, predicted, s": round(theirs.step_s, 4),
        "fits": theirs.fits,
        "their degrees, planned, s": pinned,
        "ours, s": round(step_s, 4),
        "gain": round(1 - step_s / theirs.step_s, 4),
        "never slower": step_s <= theirs.step_s * (1 + EQUAL),
        "ours differs in": gain_from(point, plan),
        "plan, warm, CPU s": round(cpu_s, 2),
    }


def main() -> None:
    """Measure every row, or those whose name has a word in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    wanted, table = parser.parse_args().only, []
    for group, point in points():
        if wanted in f"{group} {point}":
            table.append(measure(group, point))
            print(json.dumps(table[-1]), file=sys.stderr, flush=True)
    summary = {
        "rows": len(table),
        "plans that are never slower": sum(line["never slower"] for line in table),
        "mean gain": sum(line["gain"] for line in table) / max(1, len(table)),
        "slowest plan, CPU s": max((line["plan, warm, CPU s"] for line in table), default=0.0),
    }
    print(json.dumps({**summary, "winners": table}, indent=1))


if __name__ == "__main__":
    main()
