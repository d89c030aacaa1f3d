"""Views of a run directory for tables, pages and traces."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farpipe.core.errors import InputError
from farpipe.core.simulate import Timeline, simulate
from farpipe.engine.figures.metrics import (
    METRICS_NAME,
    PLAN_NAME,
    RUN_NAME,
    STEP_PLAN_NAME,
    SUMMARY_NAME,
    TIMELINE_NAME,
    Summary,
    read_metrics,
)
from farpipe.engine.launch.directory import how_it_ended
from farpipe.engine.run_spec import RunSpec
from farpipe.planning import Plan, PlanDocument
from farpipe.planning.workload import StepPlan
from farpipe.report.page import write_report
from farpipe.report.plan_tables import trust_note
from farpipe.report.shown import of_a_device, plan_report
from farpipe.report.summary import typical
from farpipe.report.trace import write_trace
from farpipe.report.views import RunView

PAGE_NAME = "report.html"
TRACE_NAME = "trace.json"


@dataclass(frozen=True)
class LoadedRun:
    """A run directory: the plan that it ran, and what it shows."""

    document: PlanDocument
    """The plan with its explanation."""
    view: RunView
    broken_off: str = ""
    """Progress of a run that has no end, and the last words of its ranks; empty: it ended."""


def load_run(run_dir: Path) -> LoadedRun:
    """Read a run directory, whole or broken off; InputError when it is none, or something is damaged."""
    if not (run_dir / PLAN_NAME).is_file():
        raise no_run(run_dir)
    document = PlanDocument.load(run_dir / PLAN_NAME)
    plan = document.plan
    metrics = [*read_metrics(run_dir / METRICS_NAME)] if (run_dir / METRICS_NAME).exists() else []
    spec, summary = _spec(run_dir), _summary(run_dir)
    device = None if spec is None else spec.device
    view = RunView(
        name=plan.schedule.method,
        problem=plan.problem,
        predicted=simulate(plan.problem, plan.schedule, checked=True),
        measured=Timeline.load(run_dir / TIMELINE_NAME) if (run_dir / TIMELINE_NAME).exists() else None,
        metrics=metrics,
        step_overhead_s=_overhead_s(plan, spec),
        sites=plan.sites,
        trust=trust_note(document) if document.explanation.is_rough and device != "sleep" else "",
        **of_a_device(plan, device),
    )
    if plan.job.data.packing is not None:
        view = _on_chunks(view, run_dir, spec, summary)
    if spec is not None and spec.light_paths is not None:  # what is shown is the step that the timeline is of
        shown = summary.timeline_step if summary is not None else None
        problem = spec.light_paths.problem(plan.problem, shown or 0)
        view = replace(view, problem=problem, predicted=simulate(problem, plan.schedule, checked=True))
    return LoadedRun(document, view, "" if summary else how_it_ended(run_dir, len(metrics)))


def _spec(run_dir: Path) -> RunSpec | None:
    """RunSpec that the ranks of the run have read; None where its file is not there, as of a user's own pipeline."""
    return RunSpec.load(run_dir / RUN_NAME) if (run_dir / RUN_NAME).exists() else None


def _summary(run_dir: Path) -> Summary | None:
    """Results of the run; None for one that has no end."""
    return Summary.load(run_dir / SUMMARY_NAME) if (run_dir / SUMMARY_NAME).exists() else None


def load_runs(run_dirs: Sequence[Path]) -> list[LoadedRun]:
    """Several run directories; runs of one order have their folder in their name, which distinguishes them."""
    runs = [load_run(run_dir) for run_dir in run_dirs]
    of_order = Counter(run.view.name for run in runs)
    return [
        run if of_order[run.view.name] == 1 else replace(run, view=replace(run.view, name=f"{run.view.name}, {folder}"))
        for run, folder in zip(runs, run_dirs, strict=True)
    ]


def _on_chunks(view: RunView, run_dir: Path, spec: RunSpec | None, summary: Summary | None) -> RunView:
    """The view of a training on chunks: what is shown is the step that the timeline is of, by the plan that it had."""
    view = replace(view, device_flops=0.0, device_peak=0.0)
    if not (run_dir / STEP_PLAN_NAME).exists():
        return view
    step = StepPlan.load(run_dir / STEP_PLAN_NAME)
    if spec is None or spec.chunk_costs is None:
        raise InputError(f"{run_dir / RUN_NAME}: does not say what chunks cost, but {STEP_PLAN_NAME} is there")
    problem, shown = spec.problem_of(step), None if summary is None else summary.timeline_step
    facts: dict[str, Any] = next(
        (line["chunks"] for line in view.metrics if line["step"] == shown and "chunks" in line), {}
    )
    return replace(
        view,
        problem=problem,
        predicted=simulate(problem, step.schedule, checked=True),
        chunks=step.chunks,
        drawn_step=shown,
        recomputed=step.recomputed,
        keeps_attention=step.keeps_attention,
        predicted_held_bytes=facts.get("predicted_held_bytes", ()),
        measured_held_bytes=facts.get("measured_held_bytes", ())[: problem.num_ranks],
    )


def no_run(folder: Path) -> InputError:
    """Error for a folder in which nothing was ever trained."""
    return InputError(f"{folder}: not a run directory: it has no {PLAN_NAME}; `farpipe train` makes one")


def _overhead_s(plan: Plan, spec: RunSpec | None) -> float:
    """Time of a step of this run besides the pipeline; a rehearsal has no optimizer."""
    return 0.0 if spec is not None and spec.device == "sleep" else plan.prediction.overhead_s


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
    write_report(plan_report(runs[0].document, [run.view for run in runs], notices), page)


def summary_json(run_dir: Path) -> dict[str, Any]:
    """``summary.json`` of a finished run, with the prediction beside it."""
    plan, spec = Plan.load(run_dir / PLAN_NAME), _spec(run_dir)
    is_lit = spec is not None and spec.light_paths is not None
    lit = typical(load_run(run_dir).view, "predicted_makespan_s") if is_lit else None
    makespan_s = plan.prediction.makespan_s if lit is None else lit
    return Summary.load(run_dir / SUMMARY_NAME).to_data() | {
        "predicted_makespan_s": makespan_s,
        "predicted_step_s": makespan_s + _overhead_s(plan, spec),
    }
