"""Jobs from files and from generators: JOBS.csv, the Philly trace mapped to models, Acme-like mixes."""

import csv
import io
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from farpipe.errors import InputError
from farpipe.fleet.job import FleetJob, Kind
from farpipe.strict import nearest, parse_json, read_text

MAX_STEPS: Final = 10**9
COLUMNS: Final = (
    *("job", "submit_s", "model", "sequence_length", "global_batch", "num_steps", "min_devices", "max_devices"),
    *("tenant", "deadline_s"),
)
"""Of JOBS.csv; tenant and deadline may be empty. All seconds are on the clock that begins with the trace."""


def read_jobs(path: Path | str) -> list[FleetJob]:
    """The jobs of a trace, by submission; InputError names file, line and column of whatever is wrong.

    A file whose name ends in ``.json`` has a list of objects with the columns of JOBS.csv as keys.
    """
    rows = _json_rows(path) if Path(path).suffix == ".json" else _csv_rows(path)
    jobs: dict[str, FleetJob] = {}
    for place, row in rows:
        job = _read_row(row, place, Path(path).parent)
        if job.name in jobs:
            raise InputError(f"{place}: there is already a job {job.name!r}")
        jobs[job.name] = job
    return sorted(jobs.values(), key=lambda job: (job.submit_s, job.name))


def _csv_rows(path: Path | str) -> Iterator[tuple[str, dict[str, str]]]:
    """(place, cells by column) of every line."""
    reader = csv.DictReader(io.StringIO(read_text(path)))
    found = reader.fieldnames or []
    for name in found:
        if name not in COLUMNS:
            raise InputError(f"{path}: line 1: unknown column {name!r}{nearest(name, COLUMNS)}")
    for name in COLUMNS[:-2]:
        if name not in found:
            raise InputError(f"{path}: line 1: column {name!r} is missing; expected {','.join(COLUMNS)}")
    yield from ((f"{path}: line {reader.line_num}", row) for row in reader)


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
        for name in COLUMNS[:-2]:
            if not isinstance(row.get(name), int | float | str) or isinstance(row[name], bool):
                raise InputError(f"{place}: {name}: expected text or a number, found {row.get(name)!r}")
        yield place, {name: "" if row.get(name) is None else str(row[name]) for name in COLUMNS}


def _read_row(row: dict[str, str], place: str, folder: Path) -> FleetJob:
    from farpipe.fleet.models import model_name

    if None in row or None in row.values():
        raise InputError(f"{place}: expected {len(COLUMNS)} columns")
    name = row["job"].strip()
    if not name:
        raise InputError(f"{place}: job: empty; every job needs a name of its own")
    counts = {key: _count(row[key], f"{place}: {key}") for key in COLUMNS[3:8]}
    if counts["num_steps"] > MAX_STEPS:
        raise InputError(f"{place}: num_steps: expected {MAX_STEPS:,} at most, found {counts['num_steps']:,}")
    if counts["min_devices"] > counts["max_devices"]:
        raise InputError(f"{place}: min_devices {counts['min_devices']} is more than max_devices")
    try:
        model = model_name(row["model"].strip(), folder)
    except (ValueError, InputError) as error:
        raise InputError(f"{place}: model: {error}") from None
    submit_s = _seconds(row["submit_s"], f"{place}: submit_s")
    deadline = (row.get("deadline_s") or "").strip()
    deadline_s = _seconds(deadline, f"{place}: deadline_s") if deadline else None
    if deadline_s is not None and deadline_s < submit_s:
        raise InputError(f"{place}: deadline_s {deadline_s:g} is before submit_s {submit_s:g}; both are on one clock")
    return FleetJob(
        name=name,
        kind=Kind(model, counts["sequence_length"], counts["global_batch"]),
        submit_s=submit_s,
        num_steps=counts["num_steps"],
        min_devices=counts["min_devices"],
        max_devices=counts["max_devices"],
        tenant=(row.get("tenant") or "").strip(),
        deadline_s=deadline_s,
    )


def _count(text: str, place: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"{place}: expected a whole number, found {text[:40]!r}") from None
    if not 1 <= value <= 1 << 40:
        raise InputError(f"{place}: expected 1 or more, found {value:.6g}")
    return value


def _seconds(text: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{place}: expected seconds, found {text[:40]!r}") from None
    if not 0 <= value <= 1e10:
        raise InputError(f"{place}: expected seconds from 0 to 1e10, found {text[:40]!r}")
    return value


SIZES: Final = {
    8: (Kind("llama-3.2-1b", 2048, 256),),
    16: (Kind("llama-3.2-1b", 2048, 256), Kind("llama-3.2-3b", 2048, 256), Kind("llama-3-8b", 4096, 256)),
    32: (Kind("llama-3.2-3b", 2048, 256), Kind("llama-3-8b", 4096, 256), Kind("llama-2-13b", 4096, 512)),
    64: (Kind("llama-2-13b", 4096, 512), Kind("qwen2.5-32b", 4096, 512), Kind("llama-3-70b", 4096, 1024)),
    128: (Kind("qwen2.5-32b", 4096, 512), Kind("llama-3-70b", 4096, 1024)),
    256: (Kind("llama-3-70b", 4096, 1024),),
}
"""Kinds of training by requested devices, in rotation: the rule of ours that maps sizes to models of 1.3B to 70B."""


@dataclass(frozen=True)
class RawJob:
    """A line of a cluster's trace."""

    submit_s: float
    duration_s: float
    num_devices: int
    tenant: str


def read_philly(path: Path | str, min_devices: int = 8) -> list[RawJob]:
    """Jobs of the Philly trace (Jeon et al., ATC 2019) with at least `min_devices`: submit_s, duration_s, num_gpus."""
    rows = csv.DictReader(io.StringIO(read_text(path)))
    jobs = []
    for row in rows:
        place = f"{path}: line {rows.line_num}"
        try:
            found = float(row["submit_s"]), float(row["duration_s"]), int(row["num_gpus"]), row["virtual_cluster"]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{place}: not a line of the Philly trace: {error}") from None
        if found[2] >= min_devices and found[1] > 0:
            jobs.append(RawJob(*found))
    return sorted(jobs, key=lambda job: job.submit_s)


def acme_like(num_jobs: int, seed: int, mean_gap_s: float) -> list[RawJob]:
    """Jobs like those of Acme's LLM cluster Kalos (Hu et al., NSDI 2024): few large ones, most of them short.

    Sizes are powers of two from 8 to 1024 whose shares halve with each doubling, durations lognormal, arrivals
    Poisson. Only the mean size and the range are the published ones.
    """
    draw = random.Random(f"acme {seed}")
    sizes = [8 << k for k in range(8)]
    jobs, now = [], 0.0
    for index in range(num_jobs):
        now += draw.expovariate(1 / mean_gap_s)
        size = draw.choices(sizes, [2.0**-k for k in range(8)])[0]
        jobs.append(RawJob(now, draw.lognormvariate(8.5, 1.5), size, f"tenant{index % 5}"))
    return jobs


def offered_load(jobs: Sequence[RawJob], num_devices: int) -> float:
    """Device-seconds asked for over those that there are between the first and the last submission."""
    span = jobs[-1].submit_s - jobs[0].submit_s
    return sum(job.duration_s * job.num_devices for job in jobs) / (num_devices * span)


def at_load(jobs: Sequence[RawJob], num_devices: int, load: float) -> list[RawJob]:
    """The same jobs, submitted faster or slower so that `offered_load` is `load`, the first one at zero."""
    factor = offered_load(jobs, num_devices) / load
    begin = jobs[0].submit_s
    return [RawJob((job.submit_s - begin) * factor, job.duration_s, job.num_devices, job.tenant) for job in jobs]


def as_jobs(
    raw: Sequence[RawJob], step_s: Callable[[Kind, int], float], *, shrink: int = 2, grow: int = 2
) -> list[FleetJob]:
    """Raw jobs as trainings that last as long on what was requested, by `step_s` of a kind on so many devices.

    They may have from a part (`shrink`) to a multiple (`grow`) of the requested devices; 1 and 1: rigid. What is
    trained goes by `SIZES`, in rotation; larger requests train what the largest size does.
    """
    jobs, num_of_size = list[FleetJob](), dict.fromkeys(SIZES, 0)
    for index, job in enumerate(raw):
        size = max(size for size in SIZES if size <= max(job.num_devices, min(SIZES)))
        kind = SIZES[size][num_of_size[size] % len(SIZES[size])]
        num_of_size[size] += 1
        steps = max(1, round(job.duration_s / step_s(kind, job.num_devices)))
        bounds = max(1, job.num_devices // shrink), job.num_devices * grow
        jobs.append(FleetJob(f"job{index}", kind, job.submit_s, steps, *bounds, tenant=job.tenant))
    return jobs
