"""``farpipe check``: the log of a training beside the prediction of its job; exit 5 outside the tolerance."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farpipe.cli.options import AsJson, ProfileFiles, Why
from farpipe.cli.output import check_folder, console, expect_new, log, print_json, status
from farpipe.cli.shown import load_profiles, plan_report, planned_view, show_derivation
from farpipe.errors import InputError, ToleranceError

if TYPE_CHECKING:
    from farpipe.interop.comparison import Comparison
    from farpipe.interop.logs import StepLog
    from farpipe.report import RunReport, TableView


def check(
    job: Annotated[Path, typer.Argument(help="The job, with the degrees that it ran with; see `farpipe import`.")],
    log_file: Annotated[Path, typer.Option("--log", help="Its log, a folder of TensorBoard or a run of farpipe.")],
    tolerance: Annotated[float, typer.Option(min=0.0, help="Largest error without exit code 5.")] = 0.10,
    calibrate: Annotated[
        Path | None, typer.Option(help="Write the job here with devices as fast as the log says.")
    ] = None,
    links: Annotated[
        list[Path] | None, typer.Option(help="Measurement of the link between the sites, as `import` reads it.")
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="Trace of torch.profiler, or nsys' SQLite export: measured layers instead of modelled ones; those of "
            "all ranks of a pipeline: the measured timeline too.",
        ),
    ] = None,
    profile: ProfileFiles = None,
    html: Annotated[Path | None, typer.Option(help="Write both as one HTML page.")] = None,
    why: Why = False,
    as_json: AsJson = False,
) -> None:
    """Compare a training's own log with what farpipe predicts for it: step time, memory, where the seconds go."""
    from farpipe.interop.comparison import calibrated, compare
    from farpipe.interop.link_tests import with_measured_links
    from farpipe.interop.log_tables import is_table
    from farpipe.interop.logs import read_log_of
    from farpipe.interop.steady_steps import measured
    from farpipe.interop.trace_files import read_all
    from farpipe.interop.traces import profile_of_any
    from farpipe.report import to_rich, write_report
    from farpipe.runtime.figures.metrics import METRICS_NAME
    from farpipe.spec import load_job
    from farpipe.strict import write_text

    log_file = log_file / METRICS_NAME if log_file.is_dir() and not is_table(log_file) else log_file
    check_folder(html, keeping=(job, log_file))
    wanted = load_job(job)
    wanted, units = with_measured_links(wanted, links) if links else (wanted, ())
    found = read_log_of(log_file, wanted)
    steps = measured(found, str(log_file))
    traces = read_all(trace or [])
    profiles, told = profile_of_any(traces, wanted) if traces and not profile else ([], ())
    with status("predicting the step"):
        comparison = compare(wanted, steps, found, profiles or load_profiles(wanted, profile or []), traces)
    comparison = replace(comparison, notes=(*comparison.notes, *units, *told))
    if html is not None:
        write_report(_page(comparison, found), html)
    if as_json:
        print_json(comparison.to_data())
    else:
        console().print(to_rich(table_of(comparison)))
        if why:
            show_derivation(comparison.plan, comparison.costs, console())
    if calibrate is not None:
        expect_new(calibrate)
        try:
            with status("calibrating"):
                fitted, factor = calibrated(wanted, steps.step_s)
        except ValueError as error:
            raise InputError(f"{log_file}: {error}") from None
        write_text(calibrate, f"# Rates of the devices times {factor:.4g}, by {log_file.name}.\n{fitted.to_toml()}")
        log(f"devices at {factor:.3g} of their modelled rate: written to {calibrate}")
    if abs(comparison.error) > tolerance:
        raise ToleranceError(f"the prediction is {comparison.error:+.1%} off, outside {tolerance:.0%}")


def _page(comparison: "Comparison", log: "StepLog") -> "RunReport":
    """The page of the job's plan, with the comparison before its tables and the log's steps beside the prediction."""
    lines = [
        {"step": step, "step_s": seconds}
        for attempt in log.attempts
        for step, seconds in zip(attempt.steps, attempt.seconds, strict=True)
    ]
    view = planned_view(comparison.plan, measured=comparison.timeline, metrics=lines)
    report = plan_report(comparison.plan, [view], costs=comparison.costs)
    return replace(report, plan_tables=(table_of(comparison), *report.plan_tables))


def table_of(comparison: "Comparison") -> "TableView":
    """Measured, predicted, seconds by kind, suspects and notes."""
    from farpipe.report import TableView
    from farpipe.units import format_percent, format_seconds

    measured, expected = comparison.measured, comparison.plan.prediction
    spread = f"median of {measured.num_steps} steps, +- {measured.spread:.1%}"
    rows = [
        ("measured", format_seconds(measured.step_s), spread),
        ("predicted", format_seconds(expected.step_s), f"{comparison.error:+.1%} of the measured"),
    ]
    for kind, seconds in comparison.seconds.items():
        less = "less than predicted" if seconds < 0 else ""
        rows.append((f"  {kind.replace('_', ' ')}", format_seconds(abs(seconds)), less))
    if (seen := comparison.timeline) is not None:
        waits_s = seen.exposed_s.sum(axis=1).mean()
        text = f"traced pipeline: bubble {format_percent(seen.bubble_ratio)}, {format_seconds(waits_s)} of it exposed"
        rows.append(("measured", format_seconds(seen.makespan_s), text))
    rows += [("perhaps", f"{suspect.effect_s:+.3g} s", suspect.what) for suspect in comparison.suspects]
    rows += [("note", "", note) for note in (*measured.notes, *comparison.notes)]
    return TableView("Measured and predicted", ("", "time", ""), tuple(rows), frozenset({1}))
