"""Seconds of steps from tables of metrics: TensorBoard's event files, CSV of Weights & Biases and of Lightning."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from farpipe.core.errors import InputError

_EVENTS: Final = "events.out.tfevents"
_SECONDS: Final = {
    "iteration-time": "Megatron-LM",
    "iteration_time": "GPT-NeoX",
    "train_step_timing in s": "NeMo",
    "time_metrics/end_to_end(s)": "torchtitan (seconds)",
    "step_s": "farpipe",
}
"""Endings of names of metrics that are seconds of a step, and who writes them."""
_RATES: Final = {"throughput(tps)": "torchtitan"}
"""Endings of names of metrics that are tokens a second of a device."""
_STEPS: Final = ("Step", "step", "global_step", "_step", "trainer/global_step")
"""Columns with the number of a step."""

_BATCHES: Final = ("batch-size", "batch_size")
"""Endings of names of metrics that are the global batch."""

Row = tuple[str, int, float, int]


def is_table(path: Path) -> bool:
    """True for a CSV, an event file, or a folder that has event files."""
    return path.suffix == ".csv" or _EVENTS in path.name or (path.is_dir() and any(path.glob(f"{_EVENTS}*")))


def has_times(path: Path) -> bool:
    """True for event files, and for a CSV that tells the time of steps."""
    if path.suffix != ".csv":
        return True
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            names = next(csv.reader(file), [])
    except (OSError, csv.Error):
        return False
    known = (*_SECONDS, *_RATES)
    return any(_bare(name).endswith(known) for name in names) and any(name in _STEPS for name in names)


def steps_of_table(path: Path) -> list[Row]:
    """Framework, number, seconds and global batch (0: not known) of every step; seconds of a token on a device where
    it has only rates.

    InputError where no column or tag is known, and where there are several runs.
    """
    rows = [*(_csv_steps(path) if path.suffix == ".csv" else _event_steps(path))]
    if not rows:
        raise InputError(f"{path}: no row has both the number of a step and its time")
    return rows


def _csv_steps(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            rows = csv.DictReader(file)
            names = [name for name in rows.fieldnames or () if name]
            name, framework, is_rate = _metric(names, str(path))
            counter = next((column for column in _STEPS if column in names), None)
            if counter is None:
                raise InputError(f"{path}: no column has the number of the step; expected one of {', '.join(_STEPS)}")
            batch = _batch_metric(names)
            for row in rows:
                if row[name] and row[counter]:
                    size = int(float(row[batch] or 0)) if batch else 0
                    yield framework, int(float(row[counter])), _seconds(float(row[name]), is_rate), size
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}") from None
    except (csv.Error, ValueError, ArithmeticError, TypeError) as error:
        raise InputError(f"{path}: {error}") from None


def _seconds(value: float, is_rate: bool) -> float:
    return value if not is_rate else 1 / value if value else 0.0


def _event_steps(path: Path) -> Iterator[Row]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
            EventAccumulator,
        )
    except ImportError:
        raise InputError(f"{path}: event files are read with tensorboard: pip install 'farpipe[metrics]'") from None
    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    name, framework, is_rate = _metric(events.Tags()["scalars"], str(path))
    batch = _batch_metric(events.Tags()["scalars"])
    sizes = {event.step: int(event.value) for event in events.Scalars(batch)} if batch else {}
    for event in events.Scalars(name):
        yield framework, event.step, _seconds(event.value, is_rate), sizes.get(event.step, 0)


def _batch_metric(names: Sequence[str]) -> str | None:
    found = [name for name in names if _bare(name).endswith(_BATCHES) and "micro" not in name]
    return found[0] if len(found) == 1 else None


def _metric(names: Sequence[str], source: str) -> tuple[str, str, bool]:
    """The metric that tells the time of a step, who writes it, and whether it is a rate."""
    for endings in (_SECONDS, _RATES):
        found = {name: ending for name in names for ending in endings if _bare(name).endswith(ending)}
        if len(found) > 1:
            raise InputError(f"{source}: {len(found)} runs ({', '.join(found)}); export one of them")
        for name, ending in found.items():
            return name, endings[ending], endings is _RATES
    known = ", ".join([*_SECONDS, *_RATES])
    raise InputError(f"{source}: no metric tells the time of a step ({known}); found {', '.join(names)[:200]}")


def _bare(name: str) -> str:
    """The name of a metric; none for the extremes that Weights & Biases exports beside it."""
    return "" if name.endswith(("__MIN", "__MAX")) else name
