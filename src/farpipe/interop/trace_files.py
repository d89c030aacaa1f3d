"""Traces of one process on one clock: torch.profiler's JSON (Kineto) and NVIDIA Nsight Systems' SQLite export."""

import gzip
import json
import re
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from farpipe.core.errors import InputError
from farpipe.core.strict import shaped

_STEP: Final = "ProfilerStep#"
_MARKS: Final = tuple(
    re.compile(mark)
    for mark in (
        *(rb'"traceEvents":\s*\[', rb'"schemaVersion":\s*\d', rb'"deviceProperties":\s*\[', rb'"distributedInfo":\s*{'),
        *(rb'"displayTimeUnit":\s*"', rb'"baseTimeNanoseconds":\s*\d', rb'"ph":\s*"', rb'"ts":\s*\d'),
    )
)
"""Keys at the beginning of a trace of torch.profiler, of which it has several."""
_LAUNCHES: Final = ("cuda_runtime", "cuda_driver")
_SQLITE: Final = b"SQLite format 3\0"
_PROCESS: Final = 1 << 24
"""Weight of the process in Nsight's numbers of threads; below it is the thread, 24 bits above it the machine."""
_SHAPES: Final = re.compile(r"sizes = (\[\[.*?\]\])")
_NSYS: Final = {
    "ranges": "SELECT start, end, COALESCE(text, (SELECT value FROM StringIds WHERE id = textId)), globalTid "
    "FROM NVTX_EVENTS WHERE end IS NOT NULL AND end > start",
    "kernels": "SELECT start, end, (SELECT value FROM StringIds WHERE id = shortName), globalPid, correlationId "
    "FROM CUPTI_ACTIVITY_KIND_KERNEL",
    "launches": "SELECT start, end, (SELECT value FROM StringIds WHERE id = nameId), globalTid, correlationId "
    "FROM CUPTI_ACTIVITY_KIND_RUNTIME",
    "epoch": "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME",
}
"""Queries of an export of Nsight Systems, whose times are in ns (docs.nvidia.com/nsight-systems, exporter's schema)."""


class Span(NamedTuple):
    """One event: its thread, its start and its end in seconds."""

    start_s: float
    end_s: float
    name: str
    thread: Any
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Trace:
    """Events of one rank, by kind, each in the order of their starts."""

    source: str
    operations: tuple[Span, ...]
    kernels: Mapping[Any, Span] = field(default_factory=dict)
    """Kernels of a GPU by the number that their launch has too."""
    launches: Mapping[Any, tuple[Span, ...]] = field(default_factory=dict)
    """Launches by thread."""
    notes: tuple[Span, ...] = ()
    """Annotations: steps of the profiler, of an optimizer, actions of a pipeline."""
    epoch_s: float = 0.0
    """Time of the clock at which the trace's own time is zero."""
    rank: int | None = None
    """Rank of torch.distributed; None where the trace does not name it."""

    @property
    def step_s(self) -> list[float]:
        """Seconds of the steps that the profiler was told of."""
        return [span.end_s - span.start_s for span in self.notes if span.name.startswith(_STEP)]


def is_trace(path: Path) -> bool:
    """True for a file whose beginning or name is that of a trace of torch.profiler or of Nsight Systems."""
    with path.open("rb") as file:
        head = file.read(4096)
    if path.name.endswith(".json.gz"):
        with suppress(OSError, EOFError, zlib.error), gzip.open(path) as file:
            head = file.read(4096)
    elif path.suffix != ".json":
        return head.startswith(_SQLITE)
    return sum(bool(mark.search(head)) for mark in _MARKS) > 1


def read_traces(path: Path) -> list[Trace]:
    """The traces in the file at `path`: one of torch.profiler's, one per process of Nsight Systems'.

    InputError for what is no whole trace of either.
    """
    try:
        with path.open("rb") as file:
            is_nsys = file.read(len(_SQLITE)) == _SQLITE
        with shaped(str(path), "a trace"):
            return _read_nsys(path) if is_nsys else [_read_kineto(path)]
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from None


def read_all(paths: Iterable[Path]) -> list[Trace]:
    """The traces of several files."""
    return [trace for path in paths for trace in read_traces(path)]


def of_one_rank(traces: Sequence[Trace]) -> bool:
    """True for one trace or none, and for several of one rank at different steps."""
    ranks = {trace.rank for trace in traces}
    return len(traces) < 2 or (len(ranks) == 1 and None not in ranks)


def _read_kineto(path: Path) -> Trace:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            data = json.load(file)
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: broken off, or no JSON: {error}; let the profiler finish its trace") from None
    events = data.get("traceEvents") if isinstance(data, Mapping) else None
    if not isinstance(events, list):
        raise InputError(f"{path}: no trace of torch.profiler (traceEvents is missing); export_chrome_trace writes one")
    spans = dict[str, list[Span]]()
    for event in events:
        if isinstance(event, Mapping) and event.get("ph") == "X":
            try:
                start_s, seconds = float(event["ts"]) * 1e-6, float(event["dur"]) * 1e-6
                span = Span(start_s, start_s + seconds, event["name"], event["tid"], event.get("args") or {})
            except (KeyError, TypeError, ValueError):
                raise InputError(f"{path}: an event without name, thread, start or duration: {event!r:.100}") from None
            spans.setdefault(str(event.get("cat")), []).append(span)
    if "cpu_op" not in spans:
        raise InputError(f"{path}: no operations; record ProfilerActivity.CPU beside the GPU's")
    kernels = {span.arguments.get("correlation"): span for span in spans.get("kernel", ())}
    launches = _by_thread(span for kind in _LAUNCHES for span in spans.get(kind, ()))
    notes = _sorted(spans.get("user_annotation", ()))
    epoch_s = float(data.get("baseTimeNanoseconds") or 0) * 1e-9
    rank = (data.get("distributedInfo") or {}).get("rank")
    return Trace(str(path), _sorted(spans["cpu_op"]), kernels, launches, notes, epoch_s, rank)


def _read_nsys(path: Path) -> list[Trace]:
    """One trace per process: NVTX ranges are its operations, such as those of torch's `emit_nvtx`."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            rows = {name: _rows(database, query) for name, query in _NSYS.items()}
    except sqlite3.Error as error:
        raise InputError(
            f"{path}: no export of Nsight Systems: {error}; nsys export --type sqlite writes one"
        ) from None
    if not rows["ranges"]:
        raise InputError(f"{path}: no NVTX ranges; profile with --trace=cuda,nvtx and torch's emit_nvtx")
    epoch_s = rows["epoch"][0][0] * 1e-9 if rows["epoch"] else 0.0
    processes = sorted({row[3] // _PROCESS for row in rows["ranges"]})
    return [_of_process(str(path), rows, process, epoch_s) for process in processes]


def _rows(database: sqlite3.Connection, query: str) -> list[tuple[Any, ...]]:
    """Rows of a query; none where the table is not there, for tables are made only when something fills them."""
    table = query.rpartition("FROM ")[2].split()[0]
    is_there = database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    return database.execute(query).fetchall() if is_there else []


def _of_process(source: str, rows: Mapping[str, list[tuple[Any, ...]]], process: int, epoch_s: float) -> Trace:
    def spans(kind: str) -> Iterator[Span]:
        for start, end, name, thread, *number in rows[kind]:
            if thread // _PROCESS == process:
                arguments = {"correlation": number[0]} if number else _shapes(name or "")
                yield Span(start * 1e-9, end * 1e-9, (name or "").partition(", ")[0], thread, arguments)

    kernels = {span.arguments["correlation"]: span for span in spans("kernels")}
    ranges = _sorted(spans("ranges"))
    return Trace(source, ranges, kernels, _by_thread(spans("launches")), ranges, epoch_s)


def _shapes(text: str) -> dict[str, Any]:
    """Shapes in the name of a range of `emit_nvtx`, as a trace of torch.profiler has them."""
    match = _SHAPES.search(text)
    return {"Input Dims": json.loads(match[1])} if match else {}


def _by_thread(launches: Iterable[Span]) -> dict[Any, tuple[Span, ...]]:
    found = dict[Any, list[Span]]()
    for span in launches:
        found.setdefault(span.thread, []).append(span)
    return {thread: _sorted(of_thread) for thread, of_thread in found.items()}


def _sorted(spans: Iterable[Span]) -> tuple[Span, ...]:
    return tuple(sorted(spans, key=lambda span: span[:2]))
