"""The figures of a run in its directory: a line per step in ``metrics.jsonl``, medians of them in ``summary.json``."""

import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from itertools import count, groupby
from mmap import ACCESS_READ, mmap
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Final, NamedTuple, Self

from farpipe.core.cpu_share import other_work
from farpipe.core.document import Document
from farpipe.core.errors import InputError, RunError
from farpipe.core.strict import parse_json, write_bytes
from farpipe.core.units import counted, format_bytes, format_seconds

RUN_NAME: Final = "run.json"
PLAN_NAME: Final = "plan.json"
METRICS_NAME: Final = "metrics.jsonl"
SUMMARY_NAME: Final = "summary.json"
TIMELINE_NAME: Final = "timeline.json"
STEP_PLAN_NAME: Final = "step-plan.json"
"""File with the plan of the timeline's step, in a training on chunks."""
NUM_SKIPPED_STEPS: Final = 3
"""Left out of medians: the first steps open connections, fill caches and let libraries choose their kernels."""
_MEDIANS: Final = (
    "makespan_s",
    "step_s",
    "tokens_per_s",
    "bubble",
    "exposed_inter_site_s",
    "exposed_inter_site_max_s",
    "exposed_intra_site_s",
    "exposed_intra_site_max_s",
)
_NULLABLE_MEDIANS: Final = ("model_flops_utilisation", "cpu_share")
_NUMBERS: Final = (*_MEDIANS, *_NULLABLE_MEDIANS, "loss", "evaluation_loss")
"""Figures that a line may lack, and that are numbers where it has them."""


class MetricsFile:
    """Writes ``metrics.jsonl``; every line is handed to the system at once, whole or not at all.

    Where an earlier attempt at the run has left lines, those of steps that will be done again are dropped. Where the
    run begins at step 0 all the same, they are kept in ``metrics-ATTEMPT.jsonl``. A file with damaged lines is kept in
    ``metrics-damaged-NUMBER.jsonl``.
    """

    def __init__(self, path: Path, first_step: int = 0, *, is_whole: bool = True) -> None:
        """`first_step`: the first that will be written. `is_whole`: the lines should begin at step 0.

        RunError when the file can't be made, InputError when it is no file of metrics.
        """
        self.path = path
        try:
            lines, problems = _repair(path)
            self.problems = problems + _missing(path, lines, first_step, is_whole=is_whole)
            """Damaged lines that were put aside, and lines that are missing."""
            self.attempt = lines[-1].attempt + 1 if lines else 0
            """Number of this attempt at the run, from 0."""
            if first_step == 0 and lines:
                path.replace(path.with_name(f"{path.stem}-{lines[-1].attempt}{path.suffix}"))
            self._size = max((line.end for line in lines if line.step < first_step), default=0)
            _cut(path, self._size)  # steps that will be done again, and what is no whole line
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._failure(error.strerror) from None

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line. RunError when the disk is full, or somebody has removed the file."""
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            if not self._is_there():
                raise self._failure("it or its directory was removed or renamed while the run went on")
            if os.write(self._descriptor, data) < len(data):
                os.ftruncate(self._descriptor, self._size)
                raise self._failure("only a part of a line could be written; is the disk full?")
        except OSError as error:
            raise self._failure(error.strerror) from None
        self._size += len(data)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def sync(self) -> None:
        """Wait until all lines are on the disk. RunError when that fails."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._failure(error.strerror) from None

    def close(self) -> None:
        """No more lines."""
        os.close(self._descriptor)

    def _failure(self, reason: str | None) -> RunError:
        return RunError(f"{self.path}: can't be written: {reason}")


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of ``metrics.jsonl``, read one by one; InputError when they are not lines of metrics.

    A last line without its end was being written when the machine went down, and is left out.
    """
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.endswith(b"\n"):
                yield _parse(text, f"{path}:{number}")


def last_line(path: Path) -> dict[str, Any] | None:
    """The last good line of ``metrics.jsonl``; None when there is none. However long the file is, it takes no time."""
    with _mapped(path) as data:
        return next((line for _, line in _backwards(data, path)), None)


def good_lines(data: bytes, path: Path) -> Iterator[dict[str, Any]]:
    """The lines in `data`, a part of the file `path`, but for damaged ones."""
    for text in data.splitlines():
        with suppress(InputError):
            yield _parse(text, str(path))


class _Line(NamedTuple):
    """A good line of metrics, and where it lies in the file."""

    start: int
    end: int
    step: int
    attempt: int


def _repair(path: Path) -> tuple[list[_Line], list[str]]:
    """The lines of a file, and its damage in words; a damaged file is put aside, and its good lines in its place.

    InputError when there are lines, but no good one.
    """
    lines, error = _scan(path)
    if error is None:
        return lines, []
    if not lines:
        raise error
    aside = _free_name(path)
    os.link(path, aside)
    with _mapped(path) as data:
        kept = b"".join(data[line.start : line.end] for line in lines)
    write_bytes(path, kept)
    return _scan(path)[0], [f"{error}; the file is kept as {aside.name}, its {len(lines)} good lines are used"]


def _scan(path: Path) -> tuple[list[_Line], InputError | None]:
    """The good ones of the whole lines of a file, if there is one, and what is wrong with the first bad one."""
    good, first_error, start = [], None, 0
    with path.open("rb") if path.exists() else nullcontext(()) as file:
        for text in file:
            end = start + len(text)
            try:
                if text.endswith(b"\n"):
                    line = _parse(text, f"{path}, byte {start}")
                    good.append(_Line(start, end, line["step"], line["attempt"]))
            except InputError as error:
                first_error = first_error or error
            start = end
    return good, first_error


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.stem}-damaged-{number}{path.suffix}") for number in count(1))
    return next(name for name in names if not name.exists())


def _cut(path: Path, end: int) -> None:
    """Rewrite the file up to `end`, if it is longer; a launcher that follows it starts over with a new file."""
    if path.exists() and end < path.stat().st_size:
        with path.open("rb") as file:
            write_bytes(path, file.read(end))


def _missing(path: Path, lines: Sequence[_Line], first_step: int, *, is_whole: bool) -> list[str]:
    """A sentence if steps before `first_step` have no line; lines begin at step 0 if the file `is_whole`."""
    steps = {line.step for line in lines}
    first = 0 if is_whole else min(steps, default=first_step)
    if missing := {*range(first, first_step)} - steps:
        return [f"{path}: has no lines of {len(missing)} earlier steps, the first of which is {min(missing)}"]
    return []


@contextmanager
def _mapped(path: Path) -> Iterator[mmap | bytes]:
    """The content of a file, of which only what is looked at is read; nothing if there is no file."""
    if not path.exists() or not path.stat().st_size:
        yield b""
        return
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        yield data


def _backwards(data: mmap | bytes, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(where it begins, line) of the whole lines that are good, the last one first."""
    end = data.rfind(b"\n")
    while end >= 0:
        start = data.rfind(b"\n", 0, end) + 1
        with suppress(InputError):
            yield start, _parse(data[start:end], f"{path}, byte {start}")
        end = start - 1


def _parse(text: bytes, source: str) -> dict[str, Any]:
    line = parse_json(text.decode(errors="replace"), source)
    if not isinstance(line, dict) or not _has_figures(line):
        raise InputError(f"{source}: not a line of metrics of this version of farpipe")
    return line


def _has_figures(line: Mapping[str, Any]) -> bool:
    counts = (line.get("step"), line.get("attempt"))
    return all(isinstance(number, int) and number >= 0 for number in counts) and all(
        isinstance(line.get(name), int | float | None) for name in _NUMBERS
    )


@dataclass(frozen=True)
class Summary(Document):
    """Results of a run; times are medians over the steps after `num_skipped_steps`."""

    FORMAT: ClassVar[str] = "farpipe/summary/1"
    INDENT: ClassVar[int | None] = 2

    num_steps: int
    num_skipped_steps: int
    first_loss: float | None
    last_loss: float | None
    makespan_s: float
    step_s: float
    tokens_per_s: float
    bubble: float
    exposed_inter_site_s: float
    exposed_inter_site_max_s: float
    exposed_intra_site_s: float
    exposed_intra_site_max_s: float
    num_attempts: int
    """Number of times that the run was started; more than one if it was restarted or resumed."""
    last_evaluation_loss: float | None
    timeline_step: int | None
    """The step of ``timeline.json``: the one whose makespan is nearest to the median; None where there is no timeline,
    because all steps had been done before the last attempt."""
    model_flops_utilisation: float | None = None
    """Median as well; None where the device's peak is not known."""
    cpu_share: float | None = None
    """Median as well: share of the actions' time for which the rank that had the CPU least had it; None on GPUs."""

    def to_body(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        names = {field.name for field in fields(cls)}
        if body.keys() != names:
            wrong = ", ".join(sorted(body.keys() ^ names))
            raise InputError(f"{source}: not a summary of this version of farpipe: keys {wrong}")
        return cls(**body)


def summarise(lines: Iterable[Mapping[str, Any]], timeline_step: int | None) -> Summary:
    """The summary of a run from the lines of its metrics, whatever attempts they come from; some may be missing.

    Lines may come from a file of any length: of each, only the figures that medians are made of are kept.
    """
    columns = _columns()
    first: Mapping[str, Any] | None = None
    last: Mapping[str, Any] = {}
    evaluation_loss, num_lines, num_attempts = None, 0, 0
    for _, group in groupby(lines, key=_attempt):
        of_attempt, num_attempts = _columns(), num_attempts + 1
        for line in group:
            first, last, num_lines = first or line, line, num_lines + 1
            evaluation_loss = evaluation_loss if line.get("evaluation_loss") is None else line["evaluation_loss"]
            for name, column in of_attempt.items():
                column.append(math.nan if line.get(name) is None else line[name])
        for name, column in columns.items():
            column.extend(of_attempt[name][num_skipped_steps(len(of_attempt[name])) :])
    if first is None:
        raise RunError("the metrics have no line to make a summary of; go on with more --steps")
    return Summary(
        num_steps=last["step"] + 1,
        num_skipped_steps=num_lines - len(columns["step_s"]),
        first_loss=first.get("loss"),
        last_loss=last.get("loss"),
        **{name: _median(column) for name, column in columns.items() if not all(map(math.isnan, column))},
        num_attempts=num_attempts,
        last_evaluation_loss=evaluation_loss,
        timeline_step=timeline_step,
    )


def _columns() -> "dict[str, array[float]]":
    """Empty columns of the figures that medians are made of."""
    return {name: array("d") for name in (*_MEDIANS, *_NULLABLE_MEDIANS)}


def _median(values: Iterable[float]) -> float:
    """Median over the steps that have the figure."""
    return float(median(value for value in values if not math.isnan(value)))


def _attempt(line: Mapping[str, Any]) -> int:
    return int(line.get("attempt", 0))


def settled_steps(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines that medians are made of: all but each attempt's first steps."""
    attempts = [[*group] for _, group in groupby(lines, key=_attempt)]
    return [line for attempt in attempts for line in attempt[num_skipped_steps(len(attempt)) :]]


def num_skipped_steps(num_steps: int) -> int:
    """Number of an attempt's first steps that medians leave out: three, but at most half of them."""
    return min(NUM_SKIPPED_STEPS, num_steps // 2)


def is_logged(step: int, num_steps: int, every: int) -> bool:
    """True if a line is due after `step`: after the first and the last one, and every `every` steps; 0: never."""
    return every > 0 and (step == 0 or (step + 1) % every == 0 or step + 1 == num_steps)


def log_line(line: Mapping[str, Any], num_steps: int) -> str:
    """A line of ``metrics.jsonl`` as words: loss, gradient norm, memory, tokens/s, MFU; unknown ones are left out."""
    parts = [f"step: {line['step'] + 1}/{num_steps}"]
    if line.get("loss") is not None:
        parts.append(f"loss: {line['loss']:.4f}")
    if line.get("grad_norm") is not None:
        parts.append(f"grad_norm: {line['grad_norm']:.4f}")
    if line.get("evaluation_loss") is not None:
        parts.append(f"evaluation_loss: {line['evaluation_loss']:.4f}")
    memory = line.get("cuda_peak_max_bytes") or line.get("rss_max_bytes")
    if memory:
        parts.append(f"memory: {format_bytes(memory)}")
    parts.append(f"step_s: {line['step_s']:.3f}")
    if line.get("tokens_per_s"):
        parts.append(f"tps: {line['tokens_per_s']:,.0f}")
    if line.get("model_flops_utilisation") is not None:
        parts.append(f"mfu: {100 * line['model_flops_utilisation']:.2f}%")
    if line.get("causal_utilisation") is not None:
        parts.append(f"causal_mfu: {100 * line['causal_utilisation']:.2f}%")
    if other_work(line.get("cpu_share")):
        parts.append(f"cpu: {100 * line['cpu_share']:.0f}%")
    if line.get("mirrored"):
        parts.append(mirrored_text(line["mirrored"]))
    return "  ".join(parts)


def mirrored_text(newest: Mapping[str, int]) -> str:
    """Newest checkpoint that sites hold in full, as ``mirrored: step 20 (lugano)``; `newest`: step by site."""
    steps = sorted(set(newest.values()), reverse=True)
    sites = {step: ", ".join(site for site, own in newest.items() if own == step) for step in steps}
    return "mirrored: " + "; ".join(f"step {step} ({names})" for step, names in sites.items())


def event_text(event: Mapping[str, Any]) -> str:
    """Describe a link's event (see LinkEvent.to_data, which leaves out what is zero) in words."""
    match event["kind"]:
        case "outage":
            return f"outage ({event.get('reason', '')})"
        case "reconnection":
            again = f"{event.get('resent_frames', 0)} frames ({format_bytes(event.get('resent_bytes', 0))}) sent again"
            connections = counted(event["num_connections"], "connection")
            return f"back after {format_seconds(event.get('duration_s', 0.0))}: {connections}, {again}"
        case _:
            return f"{event['num_packets']} of {event['of_packets']} packets sent again by TCP"


def event_sentence(event: Mapping[str, Any]) -> str:
    """An event of ``metrics.jsonl`` with the link and the processes that it concerns."""
    link = f"link {event['link']}, " if "link" in event else ""
    return f"{link}process {event['process']} to {event['peer']}: {event_text(event)}"
