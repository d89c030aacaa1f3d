"""Seconds of steps, memory and sizes from the training logs of other frameworks, read line by line."""

import json
import math
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

from farpipe.core.errors import InputError
from farpipe.core.spec import Job, Training
from farpipe.core.units import SECONDS
from farpipe.interop.log_sizes import TELLING, expect_same, sizes_in, sizes_of, sizes_of_plan
from farpipe.interop.log_tables import has_times, is_table, steps_of_table
from farpipe.interop.step_log import OF_BARS, OF_BLOCKS, OF_EPOCHS, OF_MEANS, RATES, StepLog
from farpipe.planning import Plan

_COLOUR: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NUMBER: Final = r"([-+]?[0-9][0-9,]*\.?[0-9]*(?:[eE][-+]?\d+)?)"
_STEPS: Final = (
    (
        "Megatron-LM",
        re.compile(
            rf"iteration[\s=]+(\d+)/\s*\d+.*?elapsed[ _]time[ _]per[ _]iteration[ _]\(?(\w+?)\)?[:=]\s*{_NUMBER}"
        ),
    ),
    ("NeMo", re.compile(rf"global_step[=:]\s*{_NUMBER}.*?train_step_timing in (\w+)[=:]\s*{_NUMBER}")),
    ("DeepSpeed", re.compile(rf"steps:\s*(\d+)\s+loss:.*?iter time \((\w+)\):\s*{_NUMBER}")),
)
"""Lines that tell the time of a step: framework, number of the step, unit and figure."""
_UNITS: Final = SECONDS | {"sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "msec": 1e-3, "milliseconds": 1e-3}
_RATE_LINES: Final = (
    ("torchtitan", re.compile(rf"\bstep:\s*(\d+)\s+loss:.*?\b[tw]ps:\s*{_NUMBER}")),
    ("DeepSpeed (rate)", re.compile(rf"(?:global_step=|\b\d+/)(\d+), (?:.*?Curr)?SamplesPerSec={_NUMBER}")),
)
"""torchtitan: tokens a second of a device (``wps`` until 2024); DeepSpeed: sequences a second of all devices."""
_BAR: Final = re.compile(rf"^(?:\[?[\w.-]*\d\]?:)?\s*\d+%\|[^|]*\|\s*(\d+)/(\d+) \[[^\]]*?,\s*{_NUMBER}(s/it|it/s)")
"""tqdm's bar without a description: the Trainer's of transformers."""
_EPOCH: Final = re.compile(rf"\bEpoch (\d+):\s+\d+%\S*\s.*?(\d+)/(\d+) \[[^\]]*?,\s*{_NUMBER}(s/it|it/s)")
"""Lightning's bar: batches of an epoch, and the mean time of those that are done."""
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
    "global_batch": (
        "batch",
        re.compile(r"(?:global[ _]|\btrain_)batch[ _]size(?:\s*\.{3,}|\"?:|=|\",.*\"value\":|)\s*(\d+)"),
    ),
    "sequence_length": (
        "seq",
        re.compile(r"(?:\bseq_length\s*\.{3,}|sequence length|max_sequence_length\",.*\"value\":)\s*(\d+)"),
    ),
    "num_layers": ("num_layers", re.compile(r"\bnum_layers\s*\.{3,}\s*(\d+)")),
    "hidden": ("hidden_size", re.compile(r"\bhidden_size\s*\.{3,}\s*(\d+)")),
}
"""Sizes by key of the job, each with a word of its lines: Megatron-LM's arguments and steps, DeepSpeed's, torchtitan's
first lines, MLPerf."""
_SAMPLES: Final = re.compile(r"consumed[ _]samples[:=]\s*(\d+)(?:\.0*)?(?![\d.e])")
"""Sequences since the start; rounded ones (``1.92e+3``) are of no use."""
_MESHES: Final = (
    re.compile(r"device mesh with [\[(][^\])]*[\])], [\[(]([\d, ]+)[\])]"),
    re.compile(r"device mesh with parallelism: (.*?cp=\d+, tp=\d+)"),
    re.compile(r"using world size: (\d+)"),
)
"""Degrees whose product is the number of devices: torchtitan's, of its first versions too, and Megatron-LM's."""
_TFLOPS: Final = re.compile(rf"(?:throughput per GPU \(TFLOP/s/GPU\)|tflops):\s*{_NUMBER}", re.IGNORECASE)
_NO_LOGS: Final = (".sh", ".slurm", ".sbatch", ".py", ".toml", ".yaml", ".yml", ".gz", ".sqlite", ".xml", ".zip")
"""Endings of files that are settings, traces or lists."""
_TELLING: Final = re.compile(
    "iteration|step|_size|batch size|num_layers|seq_length|sequence length|reserved|memory|MemAlloc|MLLOG|tflops"
    "|it/s|s/it|device mesh|world size|SamplesPerSec|" + TELLING
)
"""Words of which every line has one that any other pattern here finds."""
_PLAN_NAME: Final = "plan.json"
"""File of the plan that a run of farpipe has beside its metrics."""
MAX_LINE: Final = 100_000
"""Characters of a line that are read; the rest of a longer one is passed over."""


def read_log(path: Path, training: Training | None = None, num_devices: int | None = None) -> StepLog:
    """The steps of the log at `path`; InputError where there are none.

    Logs that tell only tokens or sequences a second need the sizes of a step: of `training` and `num_devices`, else
    those that the log has.
    """
    log = StepLog()
    for _ in _read(path, log):
        pass
    if not log.attempts:
        raise InputError(
            f"{path}: no step of a training was found; farpipe reads logs of Megatron-LM "
            "(elapsed time per iteration), torchtitan (tps), NeMo (train_step_timing), DeepSpeed (iter time), MLPerf "
            "(:::MLLOG), transformers' Trainer and Lightning (progress bars), DLLogger, a run's metrics.jsonl, "
            "TensorBoard's event files and CSV of Weights & Biases or Lightning"
        )
    log.count_batch(training.global_batch if training else None)
    _settle(log, training, num_devices, str(path))
    return log


def is_log(path: Path) -> bool:
    """True for a file that has a step of a training, and for a table of metrics with the time of steps."""
    if path.is_dir() or path.suffix in (".csv", *_NO_LOGS) or is_table(path):
        return is_table(path) and has_times(path)
    try:
        with path.open("rb") as file:
            if path.suffix == ".json" and file.read(64).lstrip()[:1] in (b"{", b"["):
                return False
    except OSError:
        return False
    log = StepLog()
    return any(log.attempts for _ in _read(path, log))


def _read(path: Path, log: StepLog) -> Iterator[None]:
    """Read one line after the other into `log`."""
    if is_table(path):
        for framework, step, seconds, batch in steps_of_table(path):
            log.facts |= {"global_batch": batch} if batch else {}
            log.add(framework, step, seconds)
            yield
        return
    try:
        with path.open("rb") as packed:
            if packed.read(2) == b"\x1f\x8b":
                raise InputError(f"{path}: not plain text; unpack it (gunzip)")
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            for line in _lines(file):
                try:
                    _read_line(line, log)
                except (ValueError, ArithmeticError):  # figures of thousands of digits
                    log.num_unreadable += 1
                yield
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}") from None


def _settle(log: StepLog, training: Training | None, num_devices: int | None, source: str) -> None:
    """Put seconds of steps in place of those of a token on a device or of a sequence."""
    if log.framework not in RATES:
        return
    sizes = {
        "global_batch": training.global_batch if training else log.facts.get("global_batch"),
        "sequence_length": training.sequence_length if training else log.facts.get("sequence_length"),
        "number of devices": num_devices or log.num_devices,
    }
    if log.framework != "torchtitan":
        sizes = {"global_batch": sizes["global_batch"]}
    if missing := [name for name, size in sizes.items() if size is None]:
        raise InputError(
            f"{source}: it has rates, and does not say the {' and the '.join(missing)} of a step: give the job (--job)"
        )
    batch, length, devices = (float(size or 1) for size in (*sizes.values(), 1, 1)[:3])
    for attempt in log.attempts:
        own = zip(attempt.seconds, attempt.batches, strict=True)
        attempt.seconds = array("d", (seconds * (size or batch) * length / devices for seconds, size in own))
        if log.framework == OF_BLOCKS:
            attempt.steps = array("q", (round(samples / batch) for samples in attempt.steps))


def _lines(file: TextIO) -> Iterator[str]:
    """Lines that may tell something, without colours; a carriage return ends one too, as progress bars use it."""
    inside = False
    while raw := file.readline(MAX_LINE):
        if not inside and _TELLING.search(raw):
            yield _COLOUR.sub("", raw)
        inside = raw[-1] not in "\r\n"


def _read_line(line: str, log: StepLog) -> None:
    _read_facts(line, log)
    if "max" in line or "Max" in line or "memory" in line:
        found = ((pattern.search(line), unit) for pattern, unit in _MEMORY)
        memory_bytes = next((_number(match[1]) * unit for match, unit in found if match), 0.0)
        log.memory_bytes = max(log.memory_bytes or 0.0, memory_bytes) or None
    if ("FLOP" in line or "flops" in line) and (match := _TFLOPS.search(line)):
        log.tflops_of_batch.setdefault(log.facts.get("global_batch", 0), array("d")).append(_number(match[1]))
    if _MLPERF in line:
        _read_mlperf(line, log)
    elif _DLLOGGER in line:
        _read_dllogger(line, log)
    elif line.startswith("{") and '"step_s"' in line:
        _read_metrics(line, log)
    elif not (_read_seconds(line, log) or _read_rate(line, log) or _read_bar(line, log) or _read_epoch(line, log)):
        log.num_unreadable += "elapsed time per iteration" in line or "train_step_timing" in line


def _read_facts(line: str, log: StepLog) -> None:
    log.facts |= sizes_in(line)
    for key, (word, pattern) in _FACTS.items():
        if word in line and (match := pattern.search(line)):  # the word is found ten times as fast
            log.facts[key] = int(match[1])
    if not ("mesh" in line or "world size" in line):
        return
    if match := next((found for pattern in _MESHES if (found := pattern.search(line))), None):
        log.num_devices = math.prod(map(int, re.findall(r"\d+", match[1])))


def read_log_of(path: Path, job: Job) -> StepLog:
    """The steps of the log of `job` at `path`; InputError where it tells of another training."""
    sizes = sizes_of(job)
    log = read_log(path, job.training, sizes["num_devices"])
    if log.framework == "farpipe" and (plan := path.with_name(_PLAN_NAME)).exists():
        log.facts |= sizes_of_plan(Plan.load(plan))
        if job.layout.data is None:  # the planner may leave devices out, as it did for this run
            sizes.pop("num_devices")
    expect_same(log.sizes, sizes, str(path))
    return log


def _read_seconds(line: str, log: StepLog) -> bool:
    for framework, pattern in _STEPS:
        if (match := pattern.search(line)) and match[2] in _UNITS:
            step = int(_number(match[1]))
            _read_samples(line, step, log)
            log.add(framework, step, _number(match[3]) * _UNITS[match[2]])
            return True
    return False


def _read_samples(line: str, step: int, log: StepLog) -> None:
    """The batch of a step whose line tells the samples so far, but no batch."""
    if _FACTS["global_batch"][1].search(line) or (match := _SAMPLES.search(line)) is None:
        return
    (before, consumed), log.samples = log.samples, (step, int(match[1]))
    if before and step > before and (batch := (int(match[1]) - consumed) // (step - before)) > 0:
        log.facts["global_batch"] = batch


def _read_rate(line: str, log: StepLog) -> bool:
    for framework, pattern in _RATE_LINES:
        if match := pattern.search(line):
            rate = _number(match[2])
            log.add(framework, int(match[1]), 1 / rate if rate else 0.0)
            return True
    return False


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _read_bar(line: str, log: StepLog) -> bool:
    """A progress bar with the most steps that the log has; bars of evaluations have fewer."""
    if (match := _BAR.search(line)) is None:
        return False
    step, total, rate = int(match[1]), int(match[2]), _number(match[3])
    if total > log.total and log.framework == OF_BARS:
        log.attempts = []
    log.total = max(total, log.total)
    if total == log.total and rate:
        log.add(OF_BARS, step, rate if match[4] == "s/it" else 1 / rate)
    return True


def _read_epoch(line: str, log: StepLog) -> bool:
    if (match := _EPOCH.search(line)) is None:
        return False
    epoch, batch, num_batches, rate = int(match[1]), int(match[2]), int(match[3]), _number(match[4])
    if rate:
        log.add(OF_EPOCHS, epoch * num_batches + batch, rate if match[5] == "s/it" else 1 / rate)
    return True


def _read_mlperf(line: str, log: StepLog) -> None:
    """A line of MLPerf's log: ``train_step_time`` of tracked_stats, by the step of its metadata, or the time between
    the start and the stop of a block of samples."""
    try:
        entry = json.loads(line.partition(_MLPERF)[2])
        key, value, metadata = entry["key"], entry["value"], entry.get("metadata", {})
        if key == "tracked_stats" and isinstance(value, dict) and "train_step_time" in value:
            if "step" in metadata:
                kind = OF_MEANS if "throughput" in value else "MLPerf"
                log.add(kind, int(metadata["step"]), float(value["train_step_time"]))
        elif key in ("block_start", "block_stop") and "samples_count" in metadata:
            place = float(metadata["samples_count"]), float(metadata.get("step", 0))
            _read_block(key, *place, float(entry["time_ms"]), log)
    except (ValueError, KeyError, TypeError):
        log.num_unreadable += 1


def _read_block(key: str, samples: float, step: float, at_ms: float, log: StepLog) -> None:
    """The mean time of a sample of a block, whose counts are those so far or (NVIDIA) its own at both ends."""
    if key == "block_start":
        log.block = (samples, step, at_ms)
    elif log.block is not None:
        before, first_step, begun_ms = log.block
        is_own = samples == before and step > first_step
        count = samples if is_own else samples - before
        done = count + (log.attempts[-1].steps[-1] if is_own and log.attempts else 0)
        if count > 0:
            log.add(OF_BLOCKS, round(done if is_own else samples), (at_ms - begun_ms) * 1e-3 / count)


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
