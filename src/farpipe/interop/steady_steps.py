"""Steady steps of a training's log, told from its warm-up, its outliers and its restarts."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InputError
from farpipe.core.units import counted
from farpipe.interop.step_log import StepLog

FEW_STEPS: Final = 3
"""Steps after the warm-up of which fewer are judged with a note."""
_OF_OTHERS: Final = "other batch"
"""Kind of a step of another global batch than the one that counts, as while the batch ramps up."""
_FAR: Final = 1.5
"""A step this many times as long as the median is an outlier: a checkpoint, an evaluation, a stall."""


@dataclass(frozen=True)
class Measured:
    """Seconds of the steps of a run once they are steady."""

    step_s: float
    """Median."""
    num_steps: int
    spread: float
    """Half of the middle 80 % of the steps, relative to the median."""
    notes: tuple[str, ...]


def measured(log: StepLog, source: str) -> Measured:
    """The step of a run once it is steady: without warm-up, outliers and the first steps after a restart.

    InputError where no step is left.
    """
    kinds = np.concatenate(kinds_of_steps(log))
    kept = np.concatenate([np.array(attempt.seconds) for attempt in log.attempts])[kinds == "steady"]
    num_warm_up, num_outliers = int((kinds == "warm-up").sum()), int((kinds == "outlier").sum())
    if not len(kept):
        raise InputError(f"{source}: {counted(num_warm_up, 'step')} of warm-up and none after it: too few to judge by")
    notes = list[str]()
    if len(log.attempts) > 1:
        notes.append(f"{len(log.attempts) - 1} restarts: step numbers fall back")
    if num_others := int((kinds == _OF_OTHERS).sum()):
        sizes = sorted({batch for attempt in log.attempts for batch in attempt.batches} - {log.batch})
        notes.append(
            f"the steps of global batch {log.batch} count; {num_others} of other batches "
            f"({', '.join(str(size or 'unknown') for size in sizes[:8])}{', ...' if len(sizes) > 8 else ''}) left out"
        )
    notes.append(f"{counted(num_warm_up, 'step')} of warm-up and {counted(num_outliers, 'outlier')} left out")
    if len(kept) < FEW_STEPS:
        notes.append(f"only {len(kept)} steady steps: too few for more than a first look")
    if log.num_unreadable:
        notes.append(f"{log.num_unreadable} lines of steps could not be read")
    low, middle, high = np.quantile(kept, (0.1, 0.5, 0.9)).tolist()
    return Measured(middle, len(kept), (high - low) / 2 / middle, tuple(notes))


def kinds_of_steps(log: StepLog) -> list[NDArray[np.str_]]:
    """Every step's kind (warm-up, steady, outlier or other batch), for each attempt."""
    seconds = [np.array(attempt.seconds) for attempt in log.attempts]
    own = [np.array(attempt.batches) == log.batch for attempt in log.attempts]
    warm = [
        _num_warm_up(one[mask], bool(mask[0]) and attempt.steps[0] <= 1)
        for one, mask, attempt in zip(seconds, own, log.attempts, strict=True)
    ]
    rest = np.concatenate([one[mask][count:] for one, mask, count in zip(seconds, own, warm, strict=True)])
    median = float(np.median(rest)) if len(rest) else 0.0
    found = []
    for one, mask, count in zip(seconds, own, warm, strict=True):
        kinds = np.where((one >= median / _FAR) & (one <= median * _FAR), "steady", "outlier").astype("<U16")
        kinds[np.flatnonzero(mask)[:count]] = "warm-up"
        kinds[~mask] = _OF_OTHERS
        found.append(kinds)
    return found


def log_data(log: StepLog, found: Measured) -> dict[str, Any]:
    """The log as ``farpipe import --json`` prints it."""
    return {
        "format": "farpipe/steps/1",
        "framework": log.framework,
        "step_s": found.step_s,
        "num_steps": found.num_steps,
        "spread": found.spread,
        "sizes": log.sizes,
        "memory_bytes": log.memory_bytes,
        "tflops": float(np.median(log.tflops)) if log.tflops else None,
        "notes": list(found.notes),
        "steps": [dict(zip(("attempt", "step", "step_s", "kind"), row, strict=True)) for row in rows_of(log)],
    }


def rows_of(log: StepLog) -> list[tuple[int, int, float, str]]:
    """Attempt from 0 on, number, seconds and kind of every step."""
    return [
        (place, step, round(seconds, 9), str(kind))
        for place, (attempt, kinds) in enumerate(zip(log.attempts, kinds_of_steps(log), strict=True))
        for step, seconds, kind in zip(attempt.steps, attempt.seconds, kinds, strict=True)
    ]


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
