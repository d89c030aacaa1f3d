"""Traces of one process on one clock: torch.profiler's JSON (Kineto)."""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
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
    """True for a file whose beginning or name is that of a trace of torch.profiler."""
    with path.open("rb") as file:
        head = file.read(4096)
    if path.name.endswith(".json.gz"):
        with suppress(OSError, EOFError, zlib.error), gzip.open(path) as file:
            head = file.read(4096)
    elif path.suffix != ".json":
        return False
    return sum(bool(mark.search(head)) for mark in _MARKS) > 1


def read_trace(path: Path) -> Trace:
    """The trace in the file at `path`; InputError for what is no whole trace of torch.profiler."""
    try:
        with shaped(str(path), "a trace"):
            return _read_kineto(path)
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from None


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


def _by_thread(launches: Iterable[Span]) -> dict[Any, tuple[Span, ...]]:
    found = dict[Any, list[Span]]()
    for span in launches:
        found.setdefault(span.thread, []).append(span)
    return {thread: _sorted(of_thread) for thread, of_thread in found.items()}


def _sorted(spans: Iterable[Span]) -> tuple[Span, ...]:
    return tuple(sorted(spans, key=lambda span: span[:2]))
