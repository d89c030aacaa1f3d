"""From a plan to a run and from a run directory back to what can be shown."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farpipe.errors import InputError
from farpipe.strict import parse_json, read_text

if TYPE_CHECKING:
    from farpipe.plan import Plan
    from farpipe.report import RunView
    from farpipe.runtime.run_spec import RunSpec

PLAN_NAME = "plan.json"
JOB_NAME = "job.toml"


@dataclass(frozen=True)
class LoadedRun:
    """A run directory: the plan that it ran, and what it shows."""

    plan: "Plan"
    view: "RunView"


def load_run(run_dir: Path) -> LoadedRun:
    """Read a run directory; InputError when something is missing or damaged."""
    from farpipe.plan import Plan
    from farpipe.report import RunView
    from farpipe.runtime.metrics import METRICS_NAME, TIMELINE_NAME
    from farpipe.simulate import Timeline, simulate

    plan = Plan.load(run_dir / PLAN_NAME)
    view = RunView(
        name=plan.schedule.method,
        problem=plan.problem,
        predicted=simulate(plan.problem, plan.schedule),
        measured=Timeline.load(run_dir / TIMELINE_NAME),
        metrics=load_metrics(run_dir / METRICS_NAME),
        step_overhead_s=plan.prediction.overhead_s,
        sites=plan.sites,
    )
    return LoadedRun(plan, view)


def load_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``."""
    lines = [parse_json(line, f"{path}:{number}") for number, line in enumerate(read_text(path).splitlines(), 1)]
    if not all(isinstance(line, dict) for line in lines):
        raise InputError(f"{path}: every line must be an object")
    return lines


def run_spec_of(plan: "Plan", **settings: Any) -> "RunSpec":
    """What the ranks have to know to run `plan`; `settings` are further fields of RunSpec.

    InputError for what the engine can't run yet: data- and tensor-parallel plans.
    """
    from farpipe.runtime.run_spec import RunSpec

    layout = plan.layout
    for name in ("data", "tensor"):
        if getattr(layout, name) != 1:
            raise InputError(
                f"the engine runs pipelines only as yet, and the plan has {name} = {getattr(layout, name)}; "
                f"plan again with layout.{name} = 1"
            )
    return RunSpec(
        problem=plan.problem,
        schedule=plan.schedule,
        sites=plan.sites,
        model=plan.job.model,
        training=plan.job.training.model_copy(update={"microbatch_size": layout.microbatch_size}),
        data=plan.job.data,
        partition=tuple((p.first_layer, p.end_layer) for p in plan.placements),
        **settings,
    )


def write_inputs(plan: "Plan", run_dir: Path) -> None:
    """Put the plan, and the job as the user wrote it, into a run directory."""
    from farpipe.strict import write_text

    plan.save(run_dir / PLAN_NAME)
    if plan.job.text:
        write_text(run_dir / JOB_NAME, plan.job.text)


def write_results(run_dir: Path) -> LoadedRun:
    """Make the trace and the report page of a finished run."""
    from farpipe.cli.shown import plan_report
    from farpipe.report import write_report, write_trace

    run = load_run(run_dir)
    assert run.view.measured is not None
    write_trace({"predicted": run.view.predicted, "measured": run.view.measured}, run_dir / "trace.json")
    write_report(plan_report(run.plan, [run.view]), run_dir / "report.html")
    return run


def summary_json(run_dir: Path) -> dict[str, Any]:
    """``summary.json`` of a finished run, with the prediction beside it."""
    from farpipe.plan import Plan
    from farpipe.runtime.metrics import SUMMARY_NAME

    predicted = Plan.load(run_dir / PLAN_NAME).prediction
    summary: dict[str, Any] = json.loads(read_text(run_dir / SUMMARY_NAME))
    return summary | {"predicted_makespan_s": predicted.makespan_s, "predicted_step_s": predicted.step_s}
