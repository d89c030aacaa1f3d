"""Lists and logs of others for ``farpipe import``: jobs of a scheduler, steps of a training."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from zoneinfo import ZoneInfo

import typer

from farpipe.cli.output import console, expect_new, log, print_json
from farpipe.core.errors import InputError, UsageError
from farpipe.core.spec import load_job
from farpipe.core.strict import write_text
from farpipe.core.units import format_seconds
from farpipe.interop.job_lists import as_trace, read_jobs_of
from farpipe.interop.logs import is_log, read_log, read_log_of
from farpipe.interop.printed_arguments import arguments_of
from farpipe.interop.steady_steps import Measured, log_data, measured, rows_of
from farpipe.interop.step_log import StepLog
from farpipe.report.tables import TableView, to_rich


def import_lists(files: Sequence[Path], given: Mapping[str, str], output: Path | None, as_json: bool) -> bool:
    """True if the first of `files` is a list of jobs, which then was written or printed as a fleet reads it."""
    name = given.get("zone", "UTC")
    try:
        zone = ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise InputError(f"--set zone={name}: no time zone; expected a name such as Europe/Zurich") from None
    if (read := read_jobs_of(files[0], zone)) is None:
        return False
    if len(files) > 1:
        raise UsageError(f"{files[1]}: a list of jobs is one file")
    if odd := next((key for key in given if key != "zone"), None):
        raise UsageError(f"--set {odd}={given[odd]}: expected zone=, the time zone of times that name none")
    text, notes = as_trace(read[1])
    notes.append(f"times without a zone are taken as {name} (--set zone=...)")
    if output is not None:
        expect_new(output)
        write_text(output, text)
    if as_json:
        print_json({"format": "farpipe/import/1", "of": read[0], "csv": text, "notes": notes})
    elif output is None:
        typer.echo(text, nl=False)
    for note in (f"{read[0]}: {text.count(chr(10)) - 1:,} rows", *notes):
        log(note)
    return True


def import_log(path: Path, job: Path | None, output: Path | None, as_json: bool) -> bool:
    """True if `path` is the log of a training, whose steps then were written as CSV, printed as JSON or summed up."""
    if not is_log(path):
        return False
    found = read_log(path) if job is None else read_log_of(path, load_job(job))
    steps = measured(found, str(path))
    if output is not None:
        expect_new(output)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([("attempt", "step", "step_s", "kind"), *rows_of(found)])
        write_text(output, text.getvalue())
    if as_json:
        print_json(log_data(found, steps))
    else:
        console().print(to_rich(_table(found, steps)))
    if job is None:
        if path.is_file() and arguments_of(path):
            log(f"its arguments as a job: `farpipe import {path} -o JOB.toml`")
        log(f"the prediction beside it: `farpipe check JOB --log {path}`")
    return True


def _size(size: int | str) -> str:
    return size if isinstance(size, str) else f"{size:,}"


def _table(found: StepLog, steps: Measured) -> TableView:
    """Figures of the step, the training and its devices, by the log."""
    rows = [("step", format_seconds(steps.step_s), f"median of {steps.num_steps} steps, +- {steps.spread:.1%}")]
    batch, length = found.facts.get("global_batch"), found.facts.get("sequence_length")
    if batch and length:
        rows.append(("tokens", f"{batch * length / steps.step_s:,.0f} /s", f"{batch} x {length} a step"))
    if found.memory_bytes:
        rows.append(("memory", f"{found.memory_bytes / 2**30:.1f} GiB", "the largest of any device, by its allocator"))
    if found.tflops:
        middle = sorted(found.tflops)[len(found.tflops) // 2]
        rows.append(("rate", f"{middle:.0f} TFLOP/s", "per device, by the framework's count"))
    rows += [(name.replace("_", " "), _size(size), "by the log") for name, size in found.sizes.items()]
    rows += [("note", "", note) for note in steps.notes]
    return TableView(f"Steps, by {found.framework}", ("", "measured", ""), tuple(rows), frozenset({1}))
