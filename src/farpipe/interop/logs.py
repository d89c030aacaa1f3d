"""Seconds of steps, memory and throughput from the training logs of other frameworks, read line by line."""

import bisect
import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

import numpy as np
from numpy.typing import NDArray

from farpipe.errors import InputError
from farpipe.interop.log_tables import is_table, steps_of_table
from farpipe.spec import Job, Training

_COLOUR: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NUMBER: Final = r"([-+]?[0-9][0-9,]*\.?[0-9]*(?:[eE][-+]?\d+)?)"
_STEPS: Final = (
    (
        "Megatron-LM",
        re.compile(rf"iteration[\s=]+(\d+)/\s*\d+.*?elapsed[ _]time[ _]per[ _]iteration[ _]\(?ms\)?[:=]\s*{_NUMBER}"),
        1e-3,
    ),
    ("NeMo", re.compile(rf"global_step[=:]\s*{_NUMBER}.*?train_step_timing in s[=:]\s*{_NUMBER}"), 1.0),
    ("DeepSpeed", re.compile(rf"steps:\s*(\d+)\s+loss:.*?iter time \(s\):\s*{_NUMBER}"), 1.0),
)
"""Lines that tell the seconds of a step: framework, number of the step and its time, seconds of the time's unit."""
_TOKEN_RATE: Final = re.compile(rf"\bstep:\s*(\d+)\s+loss:.*?\btps:\s*{_NUMBER}")
"""torchtitan: tokens a second of a device."""
_SEQUENCE_RATE: Final = re.compile(rf"global_step=(\d+),.*?CurrSamplesPerSec={_NUMBER}")
"""DeepSpeed: sequences a second of all devices."""
_BAR: Final = re.compile(rf"^(?:\[?[\w.-]*\d\]?:)?\s*\d+%\|[^|]*\|\s*(\d+)/(\d+) \[[^\]]*?,\s*{_NUMBER}(s/it|it/s)")
"""tqdm's bar without a description: the Trainer's of transformers."""
_OF_BARS: Final = "a progress bar (smoothed over some steps)"
_OF_BLOCKS: Final = "MLPerf (blocks)"
_RATES: Final = ("torchtitan", "DeepSpeed (rate)")
"""Logs of which only rates tell a step."""
_COARSE: Final = (*_RATES, _OF_BLOCKS, _OF_BARS)
"""Kinds of lines that count where no line tells the seconds of a step; a later one where no earlier one does."""
_STEP_KEYS: Final = ("train_step_timing in s", "train_step_time")
_DLLOGGER: Final = "DLLL {"
_MLPERF: Final = ":::MLLOG"
_MEMORY: Final = (
    (re.compile(rf"max allocated:\s*{_NUMBER}"), 1e6 * 1.048576),
    (re.compile(rf"max reserved:\s*{_NUMBER}"), 1e6 * 1.048576),
    (re.compile(rf"mem-max-reserved-gigabytes:\s*{_NUMBER}"), 1e9),
    (re.compile(rf"\bmemory:\s*{_NUMBER}\s*GiB"), 2.0**30),
    (re.compile(rf"MaxMemAllocated=\s*{_NUMBER}\s*GB"), 2.0**30),
)
"""Largest memory of a device by the allocator, with the bytes of its unit (Megatron-LM prints MiB as MB)."""
_FACTS: Final = {
    "global_batch": re.compile(r"(?:global[ _]|\btrain_)batch[ _]size(?:\s*\.{3,}|\"?:|\",.*\"value\":|)\s*(\d+)"),
    "sequence_length": re.compile(
        r"(?:\bseq_length\s*\.{3,}|sequence length|max_sequence_length\",.*\"value\":)\s*(\d+)"
    ),
    "num_layers": re.compile(r"\bnum_layers\s*\.{3,}\s*(\d+)"),
    "hidden": re.compile(r"\bhidden_size\s*\.{3,}\s*(\d+)"),
}
"""Sizes by key of the job: Megatron-LM's arguments and steps, DeepSpeed's, torchtitan's first lines, MLPerf."""
_TFLOPS: Final = re.compile(rf"(?:throughput per GPU \(TFLOP/s/GPU\)|tflops):\s*{_NUMBER}", re.IGNORECASE)
_TELLING: Final = re.compile(
    "iteration|step|_size|batch size|num_layers|seq_length|sequence length|reserved|memory|MemAlloc|MLLOG|tflops"
    "|it/s|s/it"
)
"""Words of which every line has one that any other pattern here finds."""
MAX_LINE: Final = 100_000
"""Characters of a line that are read; the rest of a longer one is passed over."""
FEW_STEPS: Final = 3
"""Steps after the warm-up of which fewer are judged with a note."""
_LAG: Final = 1
"""Steps by which the lines of one rank may be behind those of another in a log of several ranks."""
_FAR: Final = 1.5
"""A step this many times as long as the median is an outlier: a checkpoint, an evaluation, a stall."""


class Attempt:
    """Seconds of steps in the order of their numbers, from one start of a training: 16 bytes a step."""

    def __init__(self) -> None:
        self.steps, self.seconds = array("q"), array("d")

    def __len__(self) -> int:
        return len(self.steps)

    def goes_on(self, step: int) -> bool:
        """True unless `step` falls back further than the lines of another rank."""
        return not self.steps or step >= self.steps[-1] - _LAG

    def add(self, step: int, seconds: float) -> None:
        """Take in a step, unless it is there already, by another rank."""
        place = bisect.bisect_left(self.steps, step, max(0, len(self.steps) - _LAG - 1))
        if place == len(self.steps) or self.steps[place] != step:
            self.steps.insert(place, step)
            self.seconds.insert(place, seconds)


@dataclass
class StepLog:
    """Steps that a log tells of, for each attempt that a restart began."""

    framework: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    memory_bytes: float | None = None
    """Largest memory of any device that is told."""
    tflops: "array[float]" = field(default_factory=lambda: array("d"))
    """Rate per device by the framework's own count, 10^12 FLOP/s."""
    facts: dict[str, int] = field(default_factory=dict)
    """Sizes of the training that the log tells of, by key of the job; the last that it has."""
    num_unreadable: int = 0
    """Lines that begin like a step's and break off."""
    total: int = 0
    """Number at the end of a progress bar: that of the training is the largest."""
    block: tuple[float, float] | None = None
    """Samples and milliseconds at the start of a block of MLPerf's log."""

    def add(self, framework: str, step: int, seconds: float) -> None:
        """Take in a step: one that falls back begins an attempt, one that is there already is another rank's."""
        if self.framework and _rank(framework) > _rank(self.framework):
            return  # Megatron-DeepSpeed has both kinds of lines: seconds go before rates
        if self.framework and _rank(framework) < _rank(self.framework):
            self.attempts = []
        self.framework = framework
        if seconds <= 0:
            return
        if framework == _OF_BARS and self.attempts and step in self.attempts[-1].steps:
            return  # processes write their bars one after the other where output is buffered
        if not self.attempts or not self.attempts[-1].goes_on(step):
            self.attempts.append(Attempt())
        self.attempts[-1].add(step, seconds)


def _rank(framework: str) -> int:
    """Place among the kinds of lines, those that tell seconds first."""
    return _COARSE.index(framework) + 1 if framework in _COARSE else 0


@dataclass(frozen=True)
class Measured:
    """Seconds of the steps of a run once they are steady."""

    step_s: float
    """Median."""
    num_steps: int
    spread: float
    """Half of the middle 80 % of the steps, relative to the median."""
    notes: tuple[str, ...]


def read_log(path: Path, training: Training, num_devices: int) -> StepLog:
    """The steps of the log at `path`; InputError where there are none.

    `training` and `num_devices` give seconds to logs that tell only tokens or sequences a second.
    """
    log = StepLog()
    if is_table(path):
        for framework, step, seconds in steps_of_table(path, training.tokens_per_step / num_devices):
            log.add(framework, step, seconds)
        return log
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            for line in _lines(file):
                _read_line(line, log, training, num_devices)
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}") from None
    if not log.attempts:
        raise InputError(
            f"{path}: no step of a training was found; farpipe reads logs of Megatron-LM "
            "(elapsed time per iteration), torchtitan (tps), NeMo (train_step_timing), DeepSpeed (iter time), MLPerf "
            "(:::MLLOG), transformers' Trainer (progress bars), DLLogger, a run's metrics.jsonl, TensorBoard's event "
            "files and CSV of Weights & Biases or Lightning"
        )
    return log


def _lines(file: TextIO) -> Iterator[str]:
    """Lines that may tell something, without colours; a carriage return ends one too, as progress bars use it."""
    inside = False
    while raw := file.readline(MAX_LINE):
        if not inside and _TELLING.search(raw):
            yield _COLOUR.sub("", raw)
        inside = raw[-1] not in "\r\n"


def _read_line(line: str, log: StepLog, training: Training, num_devices: int) -> None:
    _read_facts(line, log)
    found = ((pattern.search(line), unit) for pattern, unit in _MEMORY)
    memory_bytes = next((_number(match[1]) * unit for match, unit in found if match), 0.0)
    if memory_bytes:
        log.memory_bytes = max(log.memory_bytes or 0.0, memory_bytes)
    if match := _TFLOPS.search(line):
        log.tflops.append(_number(match[1]))
    if _MLPERF in line:
        _read_mlperf(line, log, training.global_batch)
    elif _DLLOGGER in line:
        _read_dllogger(line, log)
    elif line.startswith("{") and '"step_s"' in line:
        _read_metrics(line, log)
    elif not (_read_seconds(line, log) or _read_rate(line, log, training, num_devices) or _read_bar(line, log)):
        log.num_unreadable += "elapsed time per iteration" in line or "train_step_timing" in line


def _read_facts(line: str, log: StepLog) -> None:
    for key, pattern in _FACTS.items():
        if match := pattern.search(line):
            log.facts[key] = int(match[1])


def expect_same_training(log: StepLog, job: Job, source: str) -> None:
    """InputError where the log tells of other sizes than the job has."""
    for key, found in log.facts.items():
        known = getattr(job.training if key in ("global_batch", "sequence_length") else job.model, key)
        if found != known:
            raise InputError(f"{source}: its {key} is {found}, the job's {known}: the log is of another training")


def _read_seconds(line: str, log: StepLog) -> bool:
    for framework, pattern, unit in _STEPS:
        if match := pattern.search(line):
            log.add(framework, int(_number(match[1])), _number(match[2]) * unit)
            return True
    return False


def _read_rate(line: str, log: StepLog, training: Training, num_devices: int) -> bool:
    work = dict(zip(_RATES, (training.tokens_per_step / num_devices, float(training.global_batch)), strict=True))
    for framework, pattern in zip(_RATES, (_TOKEN_RATE, _SEQUENCE_RATE), strict=True):
        if match := pattern.search(line):
            rate = _number(match[2])
            log.add(framework, int(match[1]), work[framework] / rate if rate else 0.0)
            return True
    return False


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _read_bar(line: str, log: StepLog) -> bool:
    """A progress bar with the most steps that the log has; bars of evaluations have fewer."""
    if (match := _BAR.search(line)) is None:
        return False
    step, total, rate = int(match[1]), int(match[2]), _number(match[3])
    if total > log.total and log.framework == _OF_BARS:
        log.attempts = []
    log.total = max(total, log.total)
    if total == log.total and rate:
        log.add(_OF_BARS, step, rate if match[4] == "s/it" else 1 / rate)
    return True


def _read_mlperf(line: str, log: StepLog, global_batch: int) -> None:
    """A line of MLPerf's log: ``train_step_time`` of tracked_stats, by the step of its metadata, or the time between
    the start and the stop of a block of samples."""
    try:
        entry = json.loads(line.partition(_MLPERF)[2])
        key, value, metadata = entry["key"], entry["value"], entry.get("metadata", {})
        if key == "tracked_stats" and isinstance(value, dict) and "train_step_time" in value:
            log.add("MLPerf", int(metadata["step"]), float(value["train_step_time"]))
        elif key in ("block_start", "block_stop") and "samples_count" in metadata:
            _read_block(key, float(metadata["samples_count"]), float(entry["time_ms"]), log, global_batch)
    except (ValueError, KeyError, TypeError):
        log.num_unreadable += 1


def _read_block(key: str, samples: float, at_ms: float, log: StepLog, global_batch: int) -> None:
    """The mean step of a block: its samples are those of a batch times its steps."""
    if key == "block_start":
        log.block = (samples, at_ms)
    elif log.block is not None and samples > log.block[0]:
        num_steps = (samples - log.block[0]) / global_batch
        log.add(_OF_BLOCKS, round(samples / global_batch), (at_ms - log.block[1]) * 1e-3 / num_steps)


def _read_dllogger(line: str, log: StepLog) -> None:
    """A line of NVIDIA's DLLogger, as NeMo writes it: JSON behind a mark."""
    try:
        entry = json.loads(line[line.index(_DLLOGGER) + len(_DLLOGGER) - 1 :])
        data = entry.get("data", {})
        seconds = next((data[key] for key in _STEP_KEYS if key in data), None)
        if seconds is not None:
            log.add("NeMo", int(data.get("global_step", entry["step"])), float(seconds))
    except (ValueError, KeyError, TypeError, AttributeError):
        log.num_unreadable += "step_tim" in line


def _read_metrics(line: str, log: StepLog) -> None:
    """A line of a farpipe run's metrics.jsonl."""
    try:
        entry = json.loads(line)
        log.add("farpipe", int(entry["step"]), float(entry["step_s"]))
    except (ValueError, KeyError, TypeError):
        log.num_unreadable += 1


def measured(log: StepLog, source: str) -> Measured:
    """The step of a run once it is steady: without warm-up, outliers and the first steps after a restart.

    InputError where no step is left.
    """
    steady, notes = array("d"), list[str]()
    num_warm_up = 0
    for attempt in log.attempts:
        warm = _num_warm_up(np.array(attempt.seconds), begins=attempt.steps[0] <= 1)
        num_warm_up += warm
        steady += attempt.seconds[warm:]
    seconds = np.array(steady)
    median = float(np.median(seconds)) if len(seconds) else 0.0
    kept = seconds[(seconds >= median / _FAR) & (seconds <= median * _FAR)]
    if not len(kept):
        raise InputError(f"{source}: {num_warm_up} steps of warm-up and none after it: too few to judge by")
    if len(log.attempts) > 1:
        notes.append(f"{len(log.attempts) - 1} restarts: step numbers fall back")
    notes.append(f"{num_warm_up} steps of warm-up and {len(steady) - len(kept)} outliers left out")
    if len(kept) < FEW_STEPS:
        notes.append(f"only {len(kept)} steady steps: too few for more than a first look")
    if log.num_unreadable:
        notes.append(f"{log.num_unreadable} lines of steps could not be read")
    low, middle, high = np.quantile(kept, (0.1, 0.5, 0.9)).tolist()
    return Measured(middle, len(kept), (high - low) / 2 / middle, tuple(notes))


def _num_warm_up(seconds: NDArray[np.float64], begins: bool) -> int:
    """Steps at the beginning that are longer than nearly all of the second half, at most half; at least one where the
    training begins."""
    half = len(seconds) // 2
    if not half:
        return int(begins)
    usual = float(np.median(seconds[half:])) * 1.05
    count = int(begins)
    while count < half and seconds[count] > usual:
        count += 1
    return count
