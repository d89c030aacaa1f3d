"""The figures of a run in its directory: a line per step in ``metrics.jsonl``, medians of them in ``summary.json``."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Final, Self

from farpipe.errors import InputError, RunError
from farpipe.strict import expect_format, parse_json, read_text, write_text

RUN_NAME: Final = "run.json"
METRICS_NAME: Final = "metrics.jsonl"
SUMMARY_NAME: Final = "summary.json"
TIMELINE_NAME: Final = "timeline.json"
SUMMARY_FORMAT: Final = "farpipe/summary/1"
NUM_WARM_UP_STEPS: Final = 3
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


class MetricsFile:
    """Writes ``metrics.jsonl``; every line is handed to the system at once, whole or not at all."""

    def __init__(self, path: Path) -> None:
        """RunError when the file exists or can't be made."""
        self.path, self._size = path, 0
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._failure(error.strerror) from None

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line. RunError when the disk is full."""
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        try:
            if os.write(self._descriptor, data) < len(data):
                os.ftruncate(self._descriptor, self._size)
                raise self._failure("only a part of a line could be written; is the disk full?")
        except OSError as error:
            raise self._failure(error.strerror) from None
        self._size += len(data)

    def close(self) -> None:
        """No more lines."""
        os.close(self._descriptor)

    def _failure(self, reason: str | None) -> RunError:
        return RunError(f"{self.path}: can't be written: {reason}")


@dataclass(frozen=True)
class Summary:
    """What came out of a run; times are medians over the steps after `num_warm_up_steps`."""

    num_steps: int
    num_warm_up_steps: int
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
    timeline_step: int
    """The step of ``timeline.json``: the one whose makespan is nearest to the median."""

    def save(self, path: Path | str) -> None:
        """Write ``farpipe/summary/1`` to `path`, whole or not at all."""
        write_text(path, json.dumps({"format": SUMMARY_FORMAT, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read ``farpipe/summary/1``; InputError when it is something else."""
        body = expect_format(parse_json(read_text(path), str(path)), SUMMARY_FORMAT, str(path))
        names = {field.name for field in fields(cls)}
        if body.keys() != names:
            wrong = ", ".join(sorted(body.keys() ^ names))
            raise InputError(f"{path}: not a summary of this version of farpipe: keys {wrong}")
        return cls(**body)


def summarise(lines: Sequence[Mapping[str, Any]], timeline_step: int) -> Summary:
    """The summary of a run from the lines of its metrics."""
    skipped = num_warm_up_steps(len(lines))
    medians = {name: float(median(line[name] for line in lines[skipped:])) for name in _MEDIANS}
    return Summary(len(lines), skipped, lines[0]["loss"], lines[-1]["loss"], **medians, timeline_step=timeline_step)


def num_warm_up_steps(num_steps: int) -> int:
    """How many of a run's first steps medians leave out: three, but at most half of them."""
    return min(NUM_WARM_UP_STEPS, num_steps // 2)
