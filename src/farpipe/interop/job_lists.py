"""Jobs of a cluster, from what its scheduler lists: Slurm's sacct, Kubernetes, Kueue, Volcano, SkyPilot."""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.strict import parse_json, read_csv, read_text, shaped
from farpipe.interop.cells import head_of, number
from farpipe.interop.listed_jobs import ListedJob, jobs_of_kubernetes, moment, span_s
from farpipe.interop.yaml_files import yaml_documents

HEADER: Final = ("job", "submit_s", "duration_s", "devices", "tenant")
"""Columns of JOBS.csv of a job that is known by its duration."""


Reader = Callable[[str, Any, tzinfo], Iterator[ListedJob]]
"""Jobs from the place, the content and the time zone of times that name none."""


def read_jobs_of(path: Path, zone: tzinfo = UTC) -> tuple[str, list[ListedJob]] | None:
    """Scheduler that the file is of, and its jobs; None if it is none that is known.

    InputError names the place of a figure that can't be read, and a job that is there twice.
    """
    known = _form(head_of(path))
    if known is None:
        return None
    form, reader = known
    content = read_csv(path, "|") if reader is _slurm else _records(path)
    jobs = list[ListedJob]()
    found = reader(str(path), content, zone)
    while job := _next(found, f"{path}: [{len(jobs)}]", form):
        jobs.append(job)
    names = Counter(job.name for job in jobs)
    if twice := [name for name, count in names.items() if count > 1]:
        raise InputError(f"{path}: job {twice[0]!r} is there twice; list every job once (sacct: without --duplicates)")
    return form, jobs


def _next(jobs: Iterator[ListedJob], place: str, form: str) -> ListedJob | None:
    with shaped(place, f"a record of {form}"):
        return next(jobs, None)


def as_trace(jobs: Iterable[ListedJob]) -> tuple[str, list[str]]:
    """JOBS.csv of the jobs that ran on devices, and notes on its clock and on what was left out."""
    taken, left_out = list[tuple[datetime, ListedJob]](), Counter[str]()
    for job in jobs:
        if job.left_out:
            left_out[job.left_out] += 1
        elif job.num_devices < 1:
            left_out["without devices"] += 1
        elif job.submitted is None or job.duration_s is None:
            left_out["that have not ended, or have no times"] += 1
        elif job.duration_s <= 0:
            left_out["that end before they begin" if job.duration_s < 0 else "that never ran"] += 1
        else:
            taken.append((job.submitted, job))
    notes = [f"{count:,} jobs {reason}: left out" for reason, count in left_out.items()]
    if assumed := sum(job.is_start_assumed for _, job in taken):
        notes.append(f"{assumed:,} jobs without a start time: assumed to start when created")
    if not taken:
        raise InputError("no job that ran on devices and ended" + "".join(f"\n  {note}" for note in notes))
    begin = min(submitted for submitted, _ in taken)
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(HEADER)
    for submitted, job in sorted(taken, key=lambda pair: (pair[0], pair[1].name)):
        row = job.name, (submitted - begin).total_seconds(), job.duration_s, job.num_devices, job.tenant
        table.writerow(row)
    return file.getvalue(), [f'second 0 is [clock] start = "{begin:%Y-%m-%dT%H:%M:%S}" (UTC)', *notes]


def _form(head: str) -> tuple[str, Reader] | None:
    """Name and reader of the list that begins with `head`."""
    first = head.partition("\n")[0].strip()
    if "|" in first and {"JobID", "JobIDRaw"} & set(first.split("|")):
        return "Slurm's sacct", _slurm
    is_yaml = first.startswith(("apiVersion:", "items:", "---")) and "creationTimestamp:" in head  # no manifest
    known = _FORMS if is_yaml or head.lstrip()[:1] in ("[", "{") else ()
    return next(((form, reader) for marks, form, reader in known if all(mark in head for mark in marks)), None)


def _records(path: Path) -> list[Any]:
    text = read_text(path)
    if text.lstrip()[:1] in ("[", "{"):
        data = parse_json(text, str(path))
    else:
        documents = [one for one in yaml_documents(text, str(path)) if one is not None]
        data = documents[0] if len(documents) == 1 else documents
    key = "jobs" if isinstance(data, dict) and "jobs" in data else "items"
    rows = data.get(key, [data]) if isinstance(data, dict) else data
    if not isinstance(rows, list):
        raise InputError(f"{path}: {key}: expected a list, found {rows!r:.40}")
    return rows


Table = tuple[list[str], Iterator[tuple[str, dict[str, str]]]]
"""Columns, and rows, each with its place."""


def _slurm(source: str, table: Table, zone: tzinfo) -> Iterator[ListedJob]:
    """Lines of ``sacct -P`` (or ``-p``); those of steps (``12.batch``) are passed over."""
    names, rows = table
    ids = next(name for name in ("JobID", "JobIDRaw") if name in names)
    tres = next((name for name in ("AllocTRES", "ReqTRES", "AllocGRES", "ReqGRES") if name in names), None)
    elapsed = next((name for name in ("ElapsedRaw", "Elapsed") if name in names), None)
    if "Submit" not in names or "End" not in names or tres is None or elapsed is None:
        raise InputError(
            f"{source}: line 1: Submit, End, ElapsedRaw and AllocTRES are needed, found {', '.join(names)}; "
            "sacct -P --allocations --format=JobID,User,Account,Submit,End,ElapsedRaw,AllocTRES"
        )
    for place, row in rows:
        if "." in row[ids]:
            continue
        ended = row["End"] not in ("", "Unknown", "None")
        yield ListedJob(
            row[ids],
            moment(row["Submit"], f"{place}: Submit", zone),
            _elapsed_s(row[elapsed], f"{place}: {elapsed}") if ended else None,
            (_gpus_of_tres if tres.endswith("TRES") else _gpus_of_gres)(row[tres], f"{place}: {tres}"),
            row.get("Account") or row.get("User") or "",
        )


def _gpus_of_tres(text: str, place: str) -> int:
    """GPUs of ``billing=8,gres/gpu=8,gres/gpu:a100=8``: the total, else the sum over types."""
    counts = dict(part.split("=", 1) for part in text.split(",") if part.startswith("gres/gpu") and "=" in part)
    whole = [counts["gres/gpu"]] if "gres/gpu" in counts else list(counts.values())
    return round(sum(number(count, place) for count in whole))


def _gpus_of_gres(text: str, place: str) -> int:
    """GPUs of ``gpu:8`` or ``gpu:a100:8(S:0-1),craynetwork:1``, as Slurm before 20.11 lists them."""
    parts = (re.sub(r"\(.*?\)", "", part).removeprefix("gres:") for part in text.split(","))
    return round(sum(number(part.rpartition(":")[2], place) for part in parts if part.startswith("gpu:")))


def _slurm_json(source: str, rows: Sequence[Any], zone: tzinfo) -> Iterator[ListedJob]:
    """Jobs of ``sacct --json``."""
    for index, row in enumerate(rows):
        place, time = f"{source}: jobs[{index}]", row["time"]
        tres = row["tres"].get("allocated") or row["tres"].get("requested") or ()
        gpus = [one for one in tres if one["type"] == "gres" and str(one["name"]).partition(":")[0] == "gpu"]
        whole = [one for one in gpus if one["name"] == "gpu"] or gpus  # the total, else the sum over types
        yield ListedJob(
            str(row["job_id"]),
            moment(_plain(time["submission"]) or None, f"{place}: time.submission", zone),
            number(str(_plain(time["elapsed"])), f"{place}: time.elapsed") if _plain(time["end"]) else None,
            round(sum(number(str(_plain(one["count"])), f"{place}: tres") for one in whole)),
            str(row.get("account") or row.get("user") or ""),
        )


def _plain(value: Any) -> Any:
    """A figure of Slurm's JSON, which newer versions write as a table with ``number``."""
    return value["number"] if isinstance(value, dict) else value


def _elapsed_s(text: str, place: str) -> float:
    """Seconds of ``[days-]hours:minutes:seconds``, or as a number."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return number(text, place)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _skypilot(source: str, rows: Sequence[Any], zone: tzinfo) -> Iterator[ListedJob]:
    """Records of ``sky jobs queue -o json`` or ``sky queue -o json``."""
    for index, row in enumerate(rows):
        place = f"{source}: [{index}]"
        resources = str(row.get("resources") or row.get("cluster_resources"))
        ended = row.get("end_at") is not None
        spent = row.get("job_duration")
        seconds = number(str(spent), f"{place}: job_duration") if spent else None
        task = f".{row['task_id']}" if row.get("task_id") else ""
        yield ListedJob(
            f"{row['job_id']}{task}",
            moment(row.get("submitted_at"), f"{place}: submitted_at", zone),
            (seconds or span_s(row, "start_at", "end_at", place, zone)) if ended else None,
            _gpus_of_sky(resources),
            str(row.get("user_name") or row.get("username") or ""),
        )


def _gpus_of_sky(text: str) -> int:
    """Accelerators of ``2x[H100:8]``, ``1x[A100]`` (one), ``1x(gpus=H100:8, cpus=8+)`` or ``1x AWS(p4d, {'A100': 8})``.

    Cores and memory (``1x[CPU:4+]``) are none; of several that may be taken the first counts.
    """
    match = re.match(r"(\d+)x[^\[(]*([\[(])(.*)[\])]", text)
    if match is None:
        return 0
    # instance types stand in round brackets, too: there an accelerator is marked
    mark = r"(?:^|,)\s*" if match[2] == "[" else r"(?:\bgpus=|\{)"
    found = re.search(
        mark + r"'?(?!(?:v?cpu|mem|disk)\b)([a-z][\w.-]*)'?(?::\s*(\d+(?:\.\d+)?))?\s*(?=[,}]|$)", match[3], re.I
    )
    return int(match[1]) * math.ceil(float(found[2] or 1)) if found else 0


_FORMS: Final[tuple[tuple[tuple[str, ...], str, Reader], ...]] = (
    (('"submission"', '"job_id"'), "Slurm's sacct", _slurm_json),
    (('"submitted_at"', '"job_id"'), "SkyPilot", _skypilot),
    (("kueue.x-k8s.io/", "metadata"), "Kueue", jobs_of_kubernetes),
    (("batch.volcano.sh/", "metadata"), "Volcano", jobs_of_kubernetes),
    (('"apiVersion"', '"kind": "List"'), "Kubernetes", jobs_of_kubernetes),
    (('"apiVersion"', '"kind"', '"creationTimestamp"'), "Kubernetes", jobs_of_kubernetes),
    (("apiVersion:", "kind:", "creationTimestamp:"), "Kubernetes", jobs_of_kubernetes),
)
"""Keys of a record, or parts of its apiVersion, by all of which a list is known."""
