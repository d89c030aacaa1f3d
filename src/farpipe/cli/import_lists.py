"""Lists that a fleet is simulated with: jobs of a scheduler, prices and carbon of a market, for ``farpipe import``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from zoneinfo import ZoneInfo

import typer

from farpipe.cli.output import expect_new, log, print_json
from farpipe.errors import InputError, UsageError
from farpipe.interop.job_lists import as_trace, read_jobs_of
from farpipe.interop.price_lists import as_table, read_prices
from farpipe.strict import write_text


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
    text, notes = as_trace(read[1])
    return read[0], text, [*notes, f"times without a zone are those of {name} (--set zone=...)"]


def _prices(files: Sequence[Path], given: Mapping[str, str]) -> tuple[str, str, list[str]] | None:
    read = {file: found for file in files if (found := read_prices(file, given)) is not None}
    if not read:
        return None
    if len(read) < len(files) or len({measure for measure, _ in read.values()}) > 1:
        raise UsageError(f"{', '.join(map(str, files))}: prices go into one table, carbon into another, jobs apart")
    text = as_table([point for _, points in read.values() for point in points])
    measure = next(iter(read.values()))[0]
    carbon = f"carbon: {given.get('carbon', 'direct')} (--set carbon=direct or life-cycle)"
    return measure, text, [carbon] if measure == "g/kWh" else []
