"""Views of a run directory for tables, pages and traces."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farpipe.cli.shown import of_a_device, plan_report
from farpipe.errors import InputError
from farpipe.plan import Plan
from farpipe.report.page import write_report
from farpipe.report.plan_tables import trust_note
from farpipe.report.summary import typical
from farpipe.report.trace import write_trace
from farpipe.report.views import RunView
from farpipe.run.directory import how_it_ended
from farpipe.runtime.figures.metrics import (
    METRICS_NAME,
    PLAN_NAME,
    RUN_NAME,
    STEP_PLAN_NAME,
    SUMMARY_NAME,
    TIMELINE_NAME,
    read_metrics,
)
from farpipe.runtime.run_spec import RunSpec
from farpipe.sequences import StepPlan
from farpipe.simulate import Timeline, simulate
from farpipe.step import LightPaths
from farpipe.strict import read_text

PAGE_NAME = "report.html"
TRACE_NAME = "trace.json"


@dataclass(frozen=True)
class LoadedRun:
    """A run directory: the plan that it ran, and what it shows."""

    plan: Plan
    view: RunView
    broken_off: str = ""
    """Progress of a run that has no end, and the last words of its ranks; empty: it ended."""


def load_run(run_dir: Path) -> LoadedRun:
    """Read a run directory, whole or broken off; InputError when it is none, or something is damaged."""
    if not (run_dir / PLAN_NAME).is_file():
        raise no_run(run_dir)
    plan = Plan.load(run_dir / PLAN_NAME)
    metrics = [*read_metrics(run_dir / METRICS_NAME)] if (run_dir / METRICS_NAME).exists() else []
    view = RunView(
        name=plan.schedule.method,
        problem=plan.problem,
        predicted=simulate(plan.problem, plan.schedule, checked=True),
        measured=Timeline.load(run_dir / TIMELINE_NAME) if (run_dir / TIMELINE_NAME).exists() else None,
        metrics=metrics,
        step_overhead_s=overhead_s(plan, run_dir),
        sites=plan.sites,
        trust=trust_note(plan) if plan.is_rough and _device(run_dir) != "sleep" else "",
        **of_a_device(plan, _device(run_dir)),
    )
    view = view if plan.job.data.packing is None else _on_chunks(view, run_dir)
    view = _over_light_paths(view, plan, run_dir)
    whole = (run_dir / SUMMARY_NAME).exists()
    return LoadedRun(plan, view, "" if whole else how_it_ended(run_dir, len(metrics)))


def load_runs(run_dirs: Sequence[Path]) -> list[LoadedRun]:
    """Several run directories; runs of one order have their folder in their name, which distinguishes them."""
    runs = [load_run(run_dir) for run_dir in run_dirs]
    of_order = Counter(run.view.name for run in runs)
    return [
        run if of_order[run.view.name] == 1 else replace(run, view=replace(run.view, name=f"{run.view.name}, {folder}"))
        for run, folder in zip(runs, run_dirs, strict=True)
    ]


def _on_chunks(view: RunView, run_dir: Path) -> RunView:
    """The view of a training on chunks: what is shown is the step that the timeline is of, by the plan that it had."""
    view = replace(view, device_flops=0.0, device_peak=0.0)
    if not (run_dir / STEP_PLAN_NAME).exists():
        return view
    step, costs = StepPlan.load(run_dir / STEP_PLAN_NAME), RunSpec.load(run_dir / RUN_NAME).chunk_costs
    if costs is None:
        raise InputError(f"{run_dir / RUN_NAME}: does not say what chunks cost, but {STEP_PLAN_NAME} is there")
    problem = step.problem(costs)
    facts = _facts_of_the_step(view, run_dir)
    return replace(
        view,
        problem=problem,
        predicted=simulate(problem, step.schedule, checked=True),
        chunks=step.chunks,
        recomputed=step.recomputed,
        predicted_held_bytes=facts.get("predicted_held_bytes", ()),
        measured_held_bytes=facts.get("measured_held_bytes", ())[: problem.num_ranks],
    )


def _over_light_paths(view: RunView, plan: Plan, run_dir: Path) -> RunView:
    """The view of a run whose messages had light paths: what is shown is the step that the timeline is of."""
    paths = _light_paths(run_dir)
    if paths is None:
        return view

    problem = paths.problem(plan.problem, _timeline_step(run_dir))
    return replace(view, problem=problem, predicted=simulate(problem, plan.schedule, checked=True))


def _light_paths(run_dir: Path) -> LightPaths | None:
    return RunSpec.load(run_dir / RUN_NAME).light_paths if (run_dir / RUN_NAME).exists() else None


def _timeline_step(run_dir: Path) -> int:
    """The step that the timeline is of; 0 for a run that has no end."""
    path = run_dir / SUMMARY_NAME
    return int(json.loads(read_text(path))["timeline_step"] or 0) if path.exists() else 0


def _facts_of_the_step(view: RunView, run_dir: Path) -> dict[str, Any]:
    """Figures of the metrics about the chunks of the step that the timeline is of."""
    if not (run_dir / SUMMARY_NAME).exists():
        return {}
    shown = json.loads(read_text(run_dir / SUMMARY_NAME))["timeline_step"]
    return next((line["chunks"] for line in view.metrics if line["step"] == shown and "chunks" in line), {})


def no_run(folder: Path) -> InputError:
    """Error for a folder in which nothing was ever trained."""
    return InputError(f"{folder}: not a run directory: it has no {PLAN_NAME}; `farpipe train` makes one")


def overhead_s(plan: Plan, run_dir: Path) -> float:
    """Time of a step of this run besides the pipeline; a rehearsal has no optimizer."""
    return 0.0 if _device(run_dir) == "sleep" else plan.prediction.overhead_s


def _device(run_dir: Path) -> str | None:
    """Device on which the run computed; None where its run file is not there."""
    return RunSpec.load(run_dir / RUN_NAME).device if (run_dir / RUN_NAME).exists() else None


def write_results(run_dir: Path) -> LoadedRun:
    """Make the trace and the report page of a run in its directory."""
    run = load_run(run_dir)
    write_pages([run], run_dir / PAGE_NAME, run_dir / TRACE_NAME)
    return run


def write_pages(runs: Sequence[LoadedRun], page: Path, trace: Path) -> None:
    """Write the page about `runs` and the trace of the first."""
    first = runs[0].view
    timelines = {"predicted": first.predicted} | ({"measured": first.measured} if first.measured else {})
    write_trace(timelines, trace, first.problem)
    notices = tuple(run.broken_off for run in runs if run.broken_off)
    write_report(plan_report(runs[0].plan, [run.view for run in runs], notices), page)


def summary_json(run_dir: Path) -> dict[str, Any]:
    """``summary.json`` of a finished run, with the prediction beside it."""
    plan = Plan.load(run_dir / PLAN_NAME)
    summary: dict[str, Any] = json.loads(read_text(run_dir / SUMMARY_NAME))
    lit = typical(load_run(run_dir).view, "predicted_makespan_s") if _light_paths(run_dir) else None
    makespan_s = plan.prediction.makespan_s if lit is None else lit
    return summary | {
        "predicted_makespan_s": makespan_s,
        "predicted_step_s": makespan_s + overhead_s(plan, run_dir),
    }
