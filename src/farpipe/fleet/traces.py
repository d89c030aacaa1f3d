"""Jobs from files: JOBS.csv, or a list of objects in JSON."""

import math
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

from farpipe.core.arguments import expect_kind
from farpipe.core.errors import InputError
from farpipe.core.strict import as_utc, nearest, parse_json, read_csv, read_text
from farpipe.fleet.job import MAX_STEPS, FleetJob, Kind, timed_kind

_OF_FILE: Final = ("sequence_length", "global_batch", "num_steps")
"""Columns that may be empty where the model is a job.toml, which says them."""
_KIND: Final = ("model", *_OF_FILE)
_SIZES: Final = ("min_devices", "max_devices")
_TIMED: Final = ("duration_s", "devices")
"""Instead of model, batch, steps and sizes."""
COLUMNS: Final = ("job", "submit_s", *_KIND, *_SIZES, "tenant", "deadline_s", *_TIMED)
"""Columns of JOBS.csv; tenant and deadline may be empty. All seconds are on the clock that begins with the trace."""


def read_jobs(path: Path | str, start: datetime | None = None) -> list[FleetJob]:
    """The jobs of a trace, by submission; InputError names file, line and column of whatever is wrong.

    A file whose name ends in ``.json`` has a list of objects with the columns of JOBS.csv as keys. With `start`, the
    moment of second 0, a time in ISO 8601 may stand for seconds.
    """
    expect_kind("read_jobs: path", path, (str, Path), "the path of a JOBS.csv")
    rows = _json_rows(path) if Path(path).suffix == ".json" else _csv_rows(path)
    jobs: dict[str, FleetJob] = {}
    for place, row in rows:
        job = _read_row({name: (row.get(name) or "").strip() for name in COLUMNS}, place, Path(path).parent, start)
        if job.name in jobs:
            raise InputError(f"{place}: there is already a job {job.name!r}")
        jobs[job.name] = job
    if not jobs:
        raise InputError(f"{path}: there is no job in it")
    return sorted(jobs.values(), key=lambda job: (job.submit_s, job.name))


def _needed(names: Collection[str]) -> tuple[str, ...]:
    return ("job", "submit_s", *(_TIMED if "duration_s" in names else (*_KIND, *_SIZES)))


def _csv_rows(path: Path | str) -> Iterator[tuple[str, dict[str, str]]]:
    """(place, cells by column) of every line."""
    found, rows = read_csv(path)
    for name in found:
        if name not in COLUMNS:
            raise InputError(f"{path}: line 1: unknown column {name!r}{nearest(name, COLUMNS)}")
    for name in _needed(found):
        if name not in found:
            raise InputError(f"{path}: line 1: column {name!r} is missing; expected {','.join(_needed(found))}")
    yield from rows


def _json_rows(path: Path | str) -> Iterator[tuple[str, dict[str, str]]]:
    """(place, values as text by column) of every object."""
    rows = parse_json(read_text(path), str(path))
    if not isinstance(rows, list):
        raise InputError(f"{path}: expected a list of jobs, found {type(rows).__name__}")
    for index, row in enumerate(rows):
        place = f"{path}: jobs[{index}]"
        if not isinstance(row, dict):
            raise InputError(f"{place}: expected an object with the keys {', '.join(COLUMNS)}")
        for name in row:
            if name not in COLUMNS:
                raise InputError(f"{place}: unknown key {name!r}{nearest(name, COLUMNS)}")
        for name in _needed(row):
            if name in _OF_FILE and row.get(name) is None:
                continue
            if not isinstance(row.get(name), int | float | str) or isinstance(row[name], bool):
                raise InputError(f"{place}: {name}: expected text or a number, found {row.get(name)!r}")
        yield place, {name: "" if row.get(name) is None else str(row[name]) for name in COLUMNS}


def _read_row(row: Mapping[str, str], place: str, folder: Path, start: datetime | None) -> FleetJob:
    if not row["job"]:
        raise InputError(f"{place}: job: empty; every job needs a name of its own")
    kind, num_steps, least, most = _timed(row, place) if row["duration_s"] else _trained(row, place, folder)
    job = FleetJob(
        name=row["job"],
        kind=kind,
        submit_s=_moment(row["submit_s"], f"{place}: submit_s", start),
        num_steps=num_steps,
        min_devices=least,
        max_devices=most,
        tenant=row["tenant"],
        deadline_s=_moment(row["deadline_s"], f"{place}: deadline_s", start) if row["deadline_s"] else None,
    )
    if job.fault:
        raise InputError(f"{place}: {job.fault}")
    return job


def _trained(row: Mapping[str, str], place: str, folder: Path) -> tuple[Kind, int, int, int]:
    """Kind, steps, least and most devices of a job that the planner quotes."""
    from farpipe.fleet.requests import read_kind

    length, batch, steps = (_count(row[key], f"{place}: {key}") if row[key] else None for key in _OF_FILE)
    least, most = (_count(row[key], f"{place}: {key}") for key in _SIZES)
    try:
        kind, steps_of_file = read_kind(row["model"], folder, length, batch)
    except (ValueError, InputError) as error:
        raise InputError(f"{place}: model: {error}") from None
    num_steps = steps or steps_of_file
    if num_steps is None:
        raise InputError(f"{place}: num_steps: empty, and {row['model']} is no job.toml that says it")
    return kind, num_steps, least, most


def _timed(row: Mapping[str, str], place: str) -> tuple[Kind, int, int, int]:
    """The same of a job of which only the duration on so many devices is known; a step is a second there."""
    if given := [key for key in _KIND if row[key]]:
        raise InputError(f"{place}: {given[0]}: leave it empty where duration_s says how long the job takes")
    devices = _count(row["devices"], f"{place}: devices")
    least, most = (_count(row[key], f"{place}: {key}") if row[key] else devices for key in _SIZES)
    num_steps = math.ceil(_seconds(row["duration_s"], f"{place}: duration_s", MAX_STEPS))
    return timed_kind(devices), max(1, num_steps), least, most


def _count(text: str, place: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"{place}: expected a whole number, found {text[:40]!r}") from None
    if not 1 <= value <= MAX_STEPS:
        raise InputError(f"{place}: expected 1 to {MAX_STEPS:,}, found {text[:40]}")
    return value


def _moment(text: str, place: str, start: datetime | None) -> float:
    """Seconds after `start`, written so or as a time."""
    if start is None or text[4:5] != "-":  # a time begins with the year
        return _seconds(text, place)
    seconds = (as_utc(text, place) - start).total_seconds()
    if seconds < 0:
        raise InputError(
            f"{place}: {text} is before [clock] start, {start:%Y-%m-%dT%H:%M:%S}Z; let the clock start then"
        )
    return seconds


def _seconds(text: str, place: str, most: float = 1e10) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{place}: expected seconds, found {text[:40]!r}") from None
    if not 0 <= value <= most:
        raise InputError(f"{place}: expected seconds from 0 to {most:g}, found {text[:40]!r}")
    return value
