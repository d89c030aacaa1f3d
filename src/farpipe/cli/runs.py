"""Views of a run directory for tables, pages and traces."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farpipe.core.errors import InputError
from farpipe.core.simulate import simulate
from farpipe.engine.figures.metrics import RUN_NAME, STEP_PLAN_NAME
from farpipe.engine.launch.directory import how_it_ended
from farpipe.engine.launch.runs import Run
from farpipe.planning.workload import StepPlan
from farpipe.report.page import render, write_report
from farpipe.report.plan_tables import trust_note
from farpipe.report.shown import of_a_device, plan_report
from farpipe.report.summary import typical
from farpipe.report.trace import write_trace
from farpipe.report.views import RunReport, RunView

PAGE_NAME = "report.html"
TRACE_NAME = "trace.json"


@dataclass(frozen=True)
class LoadedRun:
    """A run, and what tables, pages and traces show of it."""

    run: Run
    view: RunView
    broken_off: str = ""
    """Progress of a run that has no end, and the last words of its ranks; empty: it ended."""


def load_run(run_dir: Path) -> LoadedRun:
    """Read a run directory, whole or broken off; InputError when it is none, or something is damaged."""
    return view_of(Run.load(run_dir))


def view_of(run: Run) -> LoadedRun:
    """What is shown of a run; InputError when the plan of a step on chunks is damaged."""
    plan, settings = run.plan, run.settings
    device = None if settings is None else settings.device
    lit = None if settings is None else settings.light_paths
    shown = 0 if run.summary is None else run.summary.timeline_step
    problem = plan.problem if lit is None else lit.problem(plan.problem, shown or 0)  # the step of the timeline
    view = RunView(
        name=plan.schedule.method,
        problem=problem,
        predicted=simulate(problem, plan.schedule, checked=True),
        measured=run.timeline,
        metrics=[*run.metrics],
        step_overhead_s=_overhead_s(run),
        sites=plan.sites,
        trust=trust_note(run.document) if run.document.explanation.is_rough and device != "sleep" else "",
        **of_a_device(plan, device),
    )
    if plan.job.data.packing is not None:
        view = _on_chunks(view, run)
    return LoadedRun(run, view, "" if run.summary else how_it_ended(run.run_dir, len(run.metrics)))


def load_runs(run_dirs: Sequence[Path]) -> list[LoadedRun]:
    """Several run directories; runs of one order have their folder in their name, which distinguishes them."""
    runs = [load_run(run_dir) for run_dir in run_dirs]
    of_order = Counter(run.view.name for run in runs)
    return [
        run if of_order[run.view.name] == 1 else replace(run, view=replace(run.view, name=f"{run.view.name}, {folder}"))
        for run, folder in zip(runs, run_dirs, strict=True)
    ]


def _on_chunks(view: RunView, run: Run) -> RunView:
    """The view of a training on chunks: what is shown is the step that the timeline is of, by the plan that it had."""
    view, path = replace(view, device_flops=0.0, device_peak=0.0), run.run_dir / STEP_PLAN_NAME
    if not path.exists():
        return view
    step = StepPlan.load(path)
    if run.settings is None or run.settings.chunk_costs is None:
        raise InputError(f"{run.run_dir / RUN_NAME}: does not say what chunks cost, but {STEP_PLAN_NAME} is there")
    problem, shown = run.settings.problem_of(step), None if run.summary is None else run.summary.timeline_step
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


def _overhead_s(run: Run) -> float:
    """Time of a step of this run besides the pipeline; a rehearsal has no optimizer."""
    is_rehearsal = run.settings is not None and run.settings.device == "sleep"
    return 0.0 if is_rehearsal else run.plan.prediction.overhead_s


def write_pages(runs: Sequence[LoadedRun], page: Path, trace: Path) -> None:
    """Write the page about `runs` and the trace of the first."""
    first = runs[0].view
    timelines = {"predicted": first.predicted} | ({"measured": first.measured} if first.measured else {})
    write_trace(timelines, trace, first.problem)
    write_report(_report(runs), page)


def page_of(run_dir: Path) -> str:
    """The page about one run, as HTML."""
    return render(_report([load_run(run_dir)]))


def _report(runs: Sequence[LoadedRun]) -> RunReport:
    notices = tuple(run.broken_off for run in runs if run.broken_off)
    return plan_report(runs[0].run.document, [run.view for run in runs], notices)


def summary_json(loaded: LoadedRun) -> dict[str, Any]:
    """``summary.json`` of a finished run, with the prediction beside it."""
    run = loaded.run
    assert run.summary is not None
    is_lit = run.settings is not None and run.settings.light_paths is not None
    lit = typical(loaded.view, "predicted_makespan_s") if is_lit else None
    makespan_s = run.plan.prediction.makespan_s if lit is None else lit
    predicted = {"predicted_makespan_s": makespan_s, "predicted_step_s": makespan_s + _overhead_s(run)}
    return run.summary.to_data() | predicted
