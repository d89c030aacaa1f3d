"""Lists and logs of others for ``farpipe import``: jobs of a scheduler, prices and carbon, steps of a training."""

import csv
import io
import re
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
from farpipe.interop.price_lists import as_table, read_prices
from farpipe.interop.steady_steps import Measured, log_data, measured, rows_of
from farpipe.interop.step_log import StepLog
from farpipe.report.tables import TableView, to_rich


def import_lists(files: Sequence[Path], given: Mapping[str, str], output: Path | None, as_json: bool) -> bool:
    """True if `files` are lists of jobs or prices, which then were written or printed as a fleet reads them."""
    found = _jobs(files, given) or _prices(files, given)
    if found is None:
        return False
    form, text, notes = found
    if output is not None:
        expect_new(output)
        write_text(output, text)
    if as_json:
        print_json({"format": "farpipe/import/1", "of": form, "csv": text, "notes": notes})
    elif output is None:
        typer.echo(text, nl=False)
    for note in (f"{form}: {text.count(chr(10)) - 1:,} rows", *notes):
        log(note)
    return True


def _jobs(files: Sequence[Path], given: Mapping[str, str]) -> tuple[str, str, list[str]] | None:
    name = given.get("zone", "UTC")
    try:
        zone = ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise InputError(f"--set zone={name}: no time zone; expected a name such as Europe/Zurich") from None
    read = read_jobs_of(files[0], zone)
    if read is None:
        return None
    if len(files) > 1:
        raise UsageError(f"{files[1]}: a list of jobs is one file")
    _expect_known(given, r"zone", "zone=, the time zone of times that name none")
    text, notes = as_trace(read[1])
    return read[0], text, [*notes, f"times without a zone are those of {name} (--set zone=...)"]


def _prices(files: Sequence[Path], given: Mapping[str, str]) -> tuple[str, str, list[str]] | None:
    read = [found for file in files if (found := read_prices(file, given)) is not None]
    if not read:
        return None
    if len(read) < len(files) or len({measure for measure, _ in read}) > 1:
        raise UsageError(f"{', '.join(map(str, files))}: prices go into one table, carbon into another, jobs apart")
    _expect_known(given, r"carbon|[A-Z]{3}", "a currency in USD such as EUR=1.08, or carbon=")
    text = as_table([point for _, points in read for point in points])
    measure = read[0][0]
    carbon = f"carbon: {given.get('carbon', 'direct')} (--set carbon=direct or life-cycle)"
    return measure, text, [carbon] if measure == "g/kWh" else []


def _expect_known(given: Mapping[str, str], names: str, expected: str) -> None:
    """UsageError for a name of ``--set`` that these files leave without effect."""
    if odd := next((name for name in given if not re.fullmatch(names, name)), None):
        raise UsageError(f"--set {odd}={given[odd]}: expected {expected}")


def import_log(files: Sequence[Path], job: Path | None, output: Path | None, as_json: bool) -> bool:
    """True if `files` is the log of a training, whose steps then were written as CSV, printed as JSON or summed up."""
    logs = [file for file in files if is_log(file)]
    if not logs:
        return False
    if len(files) > 1:
        raise UsageError(f"{logs[0]}: it is a training's log: import it alone, or `farpipe check JOB --log {logs[0]}`")
    found = read_log(logs[0]) if job is None else read_log_of(logs[0], load_job(job))
    steps = measured(found, str(logs[0]))
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
        log(f"the prediction beside it: `farpipe check JOB --log {logs[0]}`")
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
