"""The figures of a run in its directory: a line per step in ``metrics.jsonl``, medians of them in ``summary.json``."""

import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from mmap import ACCESS_READ, mmap
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Final, Self

from farpipe.document import Document
from farpipe.errors import InputError, RunError
from farpipe.strict import parse_json, write_bytes

RUN_NAME: Final = "run.json"
METRICS_NAME: Final = "metrics.jsonl"
SUMMARY_NAME: Final = "summary.json"
TIMELINE_NAME: Final = "timeline.json"
STEP_PLAN_NAME: Final = "step-plan.json"
"""Of a training on chunks: the plan of the step that the timeline is of."""
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
_UTILISATION: Final = "model_flops_utilisation"


class MetricsFile:
    """Writes ``metrics.jsonl``; every line is handed to the system at once, whole or not at all.

    Where an earlier attempt at the run has left lines, those of steps that will be done again are dropped. Where the
    run begins at step 0 all the same, they are kept in ``metrics-ATTEMPT.jsonl``.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        """`first_step`: the first that will be written. RunError when the file can't be made."""
        self.path = path
        last = last_line(path)
        self.attempt = 0 if last is None else last["attempt"] + 1
        """Number of this attempt at the run, from 0."""
        try:
            if first_step == 0 and last is not None:
                path.replace(path.with_name(f"{path.stem}-{last['attempt']}{path.suffix}"))
            _drop_lines(path, first_step)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise self._failure(error.strerror) from None

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line. RunError when the disk is full, or somebody has removed the file."""
        data = _text(line).encode()
        try:
            if not os.fstat(self._descriptor).st_nlink:
                raise self._failure("it was removed while the run went on")
            if os.write(self._descriptor, data) < len(data):
                os.ftruncate(self._descriptor, self._size)
                raise self._failure("only a part of a line could be written; is the disk full?")
        except OSError as error:
            raise self._failure(error.strerror) from None
        self._size += len(data)

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


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of ``metrics.jsonl``, read one by one; InputError when they are not lines of metrics.

    A last line without its end was being written when the machine went down, and is left out.
    """
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.endswith(b"\n"):
                yield _parse(text, f"{path}:{number}")


def last_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of ``metrics.jsonl``; None when there is none. However long the file is, it takes no time."""
    with _mapped(path) as data:
        return next((line for _, line in _backwards(data, path)), None)


def _drop_lines(path: Path, first_step: int) -> None:
    """Drop what follows the last line of a step before `first_step`."""
    with _mapped(path) as data:
        end = data.rfind(b"\n") + 1
        for start, line in _backwards(data, path):
            if line["step"] < first_step:
                break
            end = start
        if end < len(data):
            with memoryview(data) as view, view[:end] as kept:
                write_bytes(path, kept)


@contextmanager
def _mapped(path: Path) -> Iterator[mmap | bytes]:
    """The content of a file, of which only what is looked at is read; nothing if there is no file."""
    if not path.exists() or not path.stat().st_size:
        yield b""
        return
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        yield data


def _backwards(data: mmap | bytes, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(where it begins, line) of the whole lines, the last one first."""
    end = data.rfind(b"\n")
    while end >= 0:
        start = data.rfind(b"\n", 0, end) + 1
        yield start, _parse(data[start:end], f"{path}, byte {start}")
        end = start - 1


def _parse(text: bytes, source: str) -> dict[str, Any]:
    line = parse_json(text.decode(errors="replace"), source)
    if not isinstance(line, dict) or not all(isinstance(line.get(key), int) for key in ("step", "attempt")):
        raise InputError(f"{source}: not a line of metrics of this version of farpipe")
    return line


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
    model_flops_utilisation: float | None
    """Median as well; None where the device's peak is not known."""
    last_evaluation_loss: float | None
    timeline_step: int
    """The step of ``timeline.json``: the one whose makespan is nearest to the median."""

    def to_body(self) -> dict[str, Any]:
        """See Document."""
        return asdict(self)

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        """See Document."""
        names = {field.name for field in fields(cls)}
        if body.keys() != names:
            wrong = ", ".join(sorted(body.keys() ^ names))
            raise InputError(f"{source}: not a summary of this version of farpipe: keys {wrong}")
        return cls(**body)


def summarise(lines: Iterable[Mapping[str, Any]], timeline_step: int) -> Summary:
    """The summary of a run from the lines of its metrics, whatever attempts they come from.

    Lines may come from a file of any length: of each, only the figures that medians are made of are kept.
    """
    columns = {name: array("d") for name in (*_MEDIANS, _UTILISATION)}
    first: Mapping[str, Any] | None = None
    last: Mapping[str, Any] = {}
    evaluation_loss, num_steps, num_attempts = None, 0, 0
    for _, group in groupby(lines, key=_attempt):
        of_attempt = {name: array("d") for name in columns}
        num_attempts += 1
        for line in group:
            first, last, num_steps = first or line, line, num_steps + 1
            evaluation_loss = evaluation_loss if line["evaluation_loss"] is None else line["evaluation_loss"]
            for name, column in of_attempt.items():
                column.append(math.nan if line[name] is None else line[name])
        for name, column in columns.items():
            column.extend(of_attempt[name][num_skipped_steps(len(of_attempt[name])) :])
    assert first is not None
    return Summary(
        num_steps=num_steps,
        num_skipped_steps=num_steps - len(columns[_UTILISATION]),
        first_loss=first["loss"],
        last_loss=last["loss"],
        **{name: _median(columns[name]) for name in _MEDIANS},
        num_attempts=num_attempts,
        model_flops_utilisation=None if all(map(math.isnan, columns[_UTILISATION])) else _median(columns[_UTILISATION]),
        last_evaluation_loss=evaluation_loss,
        timeline_step=timeline_step,
    )


def _median(values: Iterable[float]) -> float:
    """Of the steps that have the figure."""
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
