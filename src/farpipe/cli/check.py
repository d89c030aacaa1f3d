"""``farpipe check``: the log of a training beside the prediction of its job; exit 5 outside the tolerance."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farpipe.cli.options import AsJson, Full, JobKeys, ProfileFiles, job_with, with_groups
from farpipe.cli.output import check_folder, console, expect_new, log, print_json, status
from farpipe.core.errors import InputError, ToleranceError, UsageError
from farpipe.core.strict import write_text
from farpipe.core.units import format_percent, format_seconds
from farpipe.report.tables import TableView, to_rich

if TYPE_CHECKING:
    from farpipe.core.spec import Job
    from farpipe.interop.comparison import Comparison
    from farpipe.interop.step_log import StepLog
    from farpipe.planning import Plan
    from farpipe.report.views import RunReport


@dataclass(frozen=True)
class CheckOptions:
    """A job with the log and the measurements that it is compared with."""

    job: Annotated[Path, typer.Argument(help="The job, with the degrees that it ran with; see `farpipe import`.")]
    log_file: Annotated[Path, typer.Option("--log", help="Its log, a folder of TensorBoard or a run of farpipe.")]
    given: JobKeys = None
    tolerance: Annotated[float, typer.Option(min=0.0, help="Largest relative error; beyond it the exit code is 5.")] = (
        0.10
    )
    calibrate: Annotated[Path | None, typer.Option(help="Write the job here with device speeds fitted to the log.")] = (
        None
    )
    links: Annotated[
        list[Path] | None, typer.Option(help="Measurement of the link between the sites, as `import` reads it.")
    ] = None
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="Trace of torch.profiler: measured layers instead of modelled ones; those of "
            "all ranks of a pipeline: the measured timeline too.",
        ),
    ] = None
    profile: ProfileFiles = None
    html: Annotated[Path | None, typer.Option(help="Write both as one HTML page.")] = None
    full: Full = False
    as_json: AsJson = False

    @property
    def log(self) -> Path:
        """The log; of a run of farpipe its metrics."""
        from farpipe.engine.figures.metrics import METRICS_NAME
        from farpipe.interop.log_tables import is_table

        if not self.log_file.is_dir() or is_table(self.log_file):
            return self.log_file
        if not (metrics := self.log_file / METRICS_NAME).is_file():
            raise InputError(f"{self.log_file}: has neither a run's {METRICS_NAME} nor TensorBoard's files")
        return metrics


@with_groups
def check(options: CheckOptions) -> None:
    """Compare a training's log with farpipe's prediction: step time, memory, where the seconds go.

    --json has measured_step_s, predicted_step_s, error = (predicted - measured) / measured, and seconds by kind, whose
    sum is the measured step. Exit code 3: the log's sizes differ from the job's; 5: outside the tolerance.
    """
    from farpipe.interop.log_sizes import OtherTrainingError, pinned_by
    from farpipe.report.page import write_report

    check_folder(options.html, keeping=(options.job, options.log))
    try:
        job, steps, comparison = _compared(options)
    except OtherTrainingError as error:
        if options.as_json:
            other = {key: {"log": log, "job": job} for key, (log, job) in error.found.items()}
            print_json({"format": "farpipe/check/1", "is_comparable": False, "differences": other})
        raise
    if options.html is not None:
        write_report(_page(comparison, steps), options.html)
    _show(comparison, options)
    is_close = abs(comparison.error) <= options.tolerance
    if is_close and not options.as_json:
        typer.echo(f"The prediction agrees with the log: {comparison.error:+.1%}, within {options.tolerance:.0%}.")
    if options.calibrate is not None:
        _write_calibrated(job, pinned_by(steps.sizes, job)[0], comparison.measured.step_s, options)
    if not is_close:
        raise ToleranceError(f"the prediction is {comparison.error:+.1%} off, outside {options.tolerance:.0%}")


def _compared(options: CheckOptions) -> "tuple[Job, StepLog, Comparison]":
    """The job with measured links, its log, and that beside the prediction."""
    from farpipe.cli.compiling import compilation_announced
    from farpipe.cli.planned import load_profiles
    from farpipe.interop.comparison import compare
    from farpipe.interop.logs import read_log_of
    from farpipe.interop.measured_links import with_measured_links
    from farpipe.interop.steady_steps import measured
    from farpipe.interop.trace_files import read_trace
    from farpipe.interop.traces import profile_of_any

    job = job_with(options.job, options.given)
    if options.full and job.data.packing is not None:
        raise UsageError(
            "--full can't be used with data.packing: it follows microbatches of one length; leave out `packing`"
        )
    job, units = with_measured_links(job, options.links) if options.links else (job, ())
    found = read_log_of(options.log, job)
    steps, given = measured(found, str(options.log)), options.profile or []
    traces = [*map(read_trace, options.trace or [])]
    profiles, notes = profile_of_any(traces, job) if traces and not given else ([], ())
    with compilation_announced(), status("predicting the step"):
        comparison = compare(job, steps, found, profiles or load_profiles(job, given), traces)
    return job, found, replace(comparison, notes=(*comparison.notes, *units, *notes))


def _show(comparison: "Comparison", options: CheckOptions) -> None:
    from farpipe.report.shown import show_derivation

    if options.as_json:
        print_json(comparison.to_data() | comparison.plan.job.model.size_data)
        return
    console().print(to_rich(table_of(comparison)))
    if options.full:
        show_derivation(comparison.plan, comparison.planned.costs, console())


def _write_calibrated(job: "Job", ran: "Job", step_s: float, options: CheckOptions) -> None:
    """Write the job with devices as fast as the log says, which is of the job `ran`, with the log's degrees."""
    from farpipe.interop.comparison import calibrated

    path = options.calibrate
    assert path is not None
    expect_new(path)
    try:
        with status("calibrating"):
            fitted, factor = calibrated(ran, step_s)
        fitted = fitted.model_copy(update={"layout": job.layout, "training": job.training})
    except ValueError as error:
        raise InputError(f"{options.log}: {error}") from None
    write_text(path, f"# Rates of the devices times {factor:.4g}, by {options.log.name}.\n{fitted.to_toml()}")
    log(f"devices at {factor:.3g} of their modelled rate: written to {path}")


def _page(comparison: "Comparison", log: "StepLog") -> "RunReport":
    """The page of the job's plan, with the comparison before its tables and the log's steps beside the prediction."""
    from farpipe.planning.explain import explained
    from farpipe.report.shown import plan_report, planned_view

    lines = [
        {"step": step, "step_s": seconds}
        for attempt in log.attempts
        for step, seconds in zip(attempt.steps, attempt.seconds, strict=True)
    ]
    step_s = comparison.measured.step_s
    view = planned_view(comparison.plan, measured=comparison.timeline, measured_s=step_s, metrics=lines)
    report = plan_report(explained(comparison.planned), [view], costs=comparison.planned.costs)
    return replace(report, plan_tables=(table_of(comparison), *report.plan_tables))


def _guess(plan: "Plan") -> tuple[str, ...]:
    return (plan.job.model.guess_note,) if plan.job.model.guess else ()


def table_of(comparison: "Comparison") -> "TableView":
    """Measured, predicted, seconds by kind, suspects and notes."""
    from farpipe.planning.explain.derivation import part_name

    measured, expected = comparison.measured, comparison.plan.prediction
    spread = f"median of {measured.num_steps} steps, +- {measured.spread:.1%}"
    rows = [
        ("measured", format_seconds(measured.step_s), spread),
        ("predicted", format_seconds(expected.step_s), f"{comparison.error:+.1%} of the measured"),
    ]
    for kind, seconds in comparison.seconds.items():
        less = "less than predicted" if seconds < 0 else ""
        rows.append((f"  {part_name(kind)}", format_seconds(abs(seconds)), less))
    if (seen := comparison.timeline) is not None:
        waits_s = seen.exposed_s.sum(axis=1).mean()
        text = f"traced pipeline: bubble {format_percent(seen.bubble_ratio)}, {format_seconds(waits_s)} of it exposed"
        rows.append(("measured", format_seconds(seen.makespan_s), text))
    rows += [("perhaps", f"{suspect.effect_s:+.3g} s", suspect.what) for suspect in comparison.suspects]
    rows += [("note", "", note) for note in (*measured.notes, *comparison.notes, *_guess(comparison.plan))]
    return TableView("Measured and predicted", ("", "time", ""), tuple(rows), frozenset({1}))
