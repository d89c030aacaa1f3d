"""The figures of runs, schedules and plans as tables: one place that says what is shown and how it is written."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any, Final

from farpipe.core.cpu_share import other_work
from farpipe.core.units import format_bytes, format_change, format_count, format_flops, format_hours, format_percent
from farpipe.engine.figures.metrics import NUM_SKIPPED_STEPS, event_text, settled_steps
from farpipe.report.axis import duration
from farpipe.report.charts import metric
from farpipe.report.tables import TableView
from farpipe.report.views import RunView

MISSING = "–"
ALIKE_RATIO: Final = 1.1
"""Ratio of measured to planned times of actions up to which the plan's times hold."""


@dataclass(frozen=True)
class StepRow:
    """A run in figures; None: not measured. Exposed time is the mean over the ranks."""

    name: str
    predicted_s: float
    measured_s: float | None
    bubble_ratio: float
    exposed_inter_site_s: float
    exposed_intra_site_s: float
    tokens_per_s: float | None
    first_loss: float | None
    last_loss: float | None
    device_flops: float = 0.0
    """The model's FLOPs in one step per device; 0: not known."""
    device_peak: float = 0.0
    """FLOP/s that a device could do; 0: not known."""
    causal_share: float = 1.0
    """Share of `device_flops` that is left where attention counts only what its causal mask keeps."""
    device_hours: float | None = None
    """Hours of one device that all steps of the run took together."""
    num_recorded: tuple[int, int] | None = None
    """(steps of which actions and messages were recorded, all steps), where these differ."""
    cpu_share: float | None = None
    """Share of the actions' time for which the rank that had the CPU least had it."""
    trust: str = ""
    """Sentences on how far the prediction can be trusted."""
    compute_ratio: float | None = None
    """Measured time of all actions divided by the predicted one."""
    is_steady: bool = False
    """True where the measured step is of those that were found to be steady, and not of all but the first."""

    @property
    def device_flops_per_s(self) -> float | None:
        """FLOP/s that a device achieves."""
        return self.device_flops / (self.measured_s or self.predicted_s) if self.device_flops else None

    @property
    def model_flops_utilisation(self) -> float | None:
        """MFU: FLOP/s achieved of the peak, attention counted in full."""
        achieved = self.device_flops_per_s
        return achieved / self.device_peak if achieved and self.device_peak else None

    @property
    def causal_utilisation(self) -> float | None:
        """MFU with attention counted as its causal mask leaves it."""
        full = self.model_flops_utilisation
        return None if full is None else full * self.causal_share

    @property
    def error(self) -> float | None:
        """Error of the prediction: (predicted - measured) / measured."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else None


def step_row(view: RunView) -> StepRow:
    """The figures of a run.

    Measured ones are medians over the steps after the skipped ones; without metrics they are those of the one measured
    timeline, and without that the predicted ones. Where every step was predicted for itself, so is the prediction.
    """
    timeline = view.measured or view.predicted
    inter, intra = timeline.exposed_s.mean(axis=0)
    measured = view.measured_s or typical(view, "step_s")
    if measured is None and view.measured is not None:
        measured = view.measured.makespan_s + view.step_overhead_s
    _, losses = metric(view.metrics, "loss")
    return StepRow(
        view.name,
        _or(typical(view, "predicted_makespan_s"), view.predicted.makespan_s) + view.step_overhead_s,
        measured,
        _or(typical(view, "bubble"), timeline.bubble_ratio),
        _or(typical(view, "exposed_inter_site_s"), float(inter)),
        _or(typical(view, "exposed_intra_site_s"), float(intra)),
        typical(view, "tokens_per_s"),
        float(losses[0]) if losses.size else None,
        float(losses[-1]) if losses.size else None,
        view.device_flops,
        view.device_peak,
        view.causal_share,
        _device_hours(view),
        _num_recorded(view),
        typical(view, "cpu_share"),
        view.trust if view.measured is not None else "",
        compute_ratio(view),
        view.measured_s is not None,
    )


def compute_ratio(view: RunView) -> float | None:
    """Measured time of all actions divided by the predicted one; None where nothing was measured."""
    expected_s = float(view.predicted.busy_s.sum())
    return float(view.measured.busy_s.sum()) / expected_s if view.measured is not None and expected_s else None


def _num_recorded(view: RunView) -> tuple[int, int] | None:
    left_out = sum(line.get("is_recorded") is False for line in view.metrics)
    return (len(view.metrics) - left_out, len(view.metrics)) if left_out else None


def _device_hours(view: RunView) -> float | None:
    """Device-hours of the steps in the metrics; None where nothing was computed."""
    _, seconds = metric(view.metrics, "step_s")
    return float(seconds.sum()) * view.num_devices / 3600 if seconds.size and view.num_devices else None


def typical(view: RunView, name: str) -> float | None:
    """The median of a metric over the steps after the skipped ones, as in ``summary.json``."""
    _, values = metric(settled_steps(view.metrics), name)
    return float(median(values)) if values.size else None


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def step_time_view(rows: Sequence[StepRow]) -> TableView:
    """The step-time table; columns that no row can fill are left out."""
    columns = [
        ("run", [row.name for row in rows]),
        ("predicted step", [duration(row.predicted_s) for row in rows]),
        ("measured step", [_or_missing(row.measured_s, duration) for row in rows]),
        ("prediction error", [_or_missing(row.error, format_change) for row in rows]),
        ("bubble", [format_percent(row.bubble_ratio) for row in rows]),
        ("exposed between sites", [_wait(row.exposed_inter_site_s, row) for row in rows]),
        ("exposed inside sites", [_wait(row.exposed_intra_site_s, row) for row in rows]),
        ("tokens/s", [_or_missing(row.tokens_per_s, format_count) for row in rows]),
        ("FLOP/s per device", [_or_missing(row.device_flops_per_s, format_flops) for row in rows]),
        ("MFU, full", [_or_missing(row.model_flops_utilisation, format_percent) for row in rows]),
        ("MFU, causal", [_or_missing(row.causal_utilisation, format_percent) for row in rows]),
        ("device-hours", [_or_missing(row.device_hours, format_hours) for row in rows]),
        ("loss", [_fall(row.first_loss, row.last_loss) for row in rows]),
    ]
    filled = [(name, cells) for name, cells in columns if any(cell != MISSING for cell in cells)]
    cells = tuple(zip(*(cells for _, cells in filled), strict=True))
    names = tuple(name for name, _ in filled)
    return TableView("Step time", names, cells, frozenset(range(1, len(names))), note=_step_note(rows))


def _step_note(rows: Sequence[StepRow]) -> str:
    note = "Exposed: communication that a rank waited for, per step, mean over the ranks."
    if any(row.measured_s is not None for row in rows):
        if any(not row.is_steady for row in rows):
            note += f" Measured: medians over the steps without the first {NUM_SKIPPED_STEPS} (at most half of them)."
        note += " Error: (predicted - measured) / measured."
    if any(row.model_flops_utilisation is not None for row in rows):
        note += " MFU: with attention in full, as torchtitan counts it, and with its causal half."
    for row in rows:
        if row.num_recorded is not None:
            some, all_steps = row.num_recorded
            note += f" Bubble and exposed times of {row.name}: of the {some} of {all_steps} steps that were recorded."
        note += "".join(f"\n{row.name}: {doubt}" for doubt in (*filter(None, [row.trust]), *doubts(row)))
    return note


def doubts(row: StepRow) -> Iterator[str]:
    """Sentences on why a measured step says little about its prediction; none for a run on a quiet machine."""
    doubt, ratio = other_work(row.cpu_share), row.compute_ratio or 1.0
    if doubt:
        yield doubt
    if not 1 / ALIKE_RATIO <= ratio <= ALIKE_RATIO:
        hint = "" if doubt else "; measure with `farpipe profile`, or plan with --learned-from this run"
        yield f"Actions took {ratio:.2f} times as long as planned, so the plan's times do not hold here{hint}."


@dataclass(frozen=True)
class ComparisonRow:
    """One schedule among others on the same Problem; `obstacle` says why there is no timeline."""

    method: str
    step_s: float | None = None
    """Seconds from one step's start to the next one's: the makespan and what is outside the pipeline."""
    gap: float | None = None
    """Makespan / lower bound - 1."""
    bubble_ratio: float | None = None
    exposed_inter_site_s: float | None = None
    exposed_intra_site_s: float | None = None
    peak_memory_bytes: float | None = None
    """Peak of the fullest rank."""
    busiest_link_ratio: float | None = None
    """Share of the makespan in which the busiest link carries something."""
    obstacle: str = ""


def comparison_view(rows: Sequence[ComparisonRow], what: str = "schedule") -> TableView:
    """Every schedule (or timeline) that can be used, with how much longer it takes than the best; below them why the
    others can't. Columns that no row fills are left out."""
    best = min((row.step_s for row in rows if row.step_s is not None), default=None)
    figures: tuple[tuple[str, Callable[[ComparisonRow], str]], ...] = (
        ("step", lambda row: _or_missing(row.step_s, duration)),
        ("above best", lambda row: _slower(row.step_s, best)),
        ("gap", lambda row: _or_missing(row.gap, format_percent)),
        ("bubble", lambda row: _or_missing(row.bubble_ratio, format_percent)),
        ("exposed between sites", lambda row: _or_missing(row.exposed_inter_site_s, duration)),
        ("peak memory", lambda row: _or_missing(row.peak_memory_bytes, format_bytes)),
        ("busiest link", lambda row: _or_missing(row.busiest_link_ratio, format_percent)),
        ("exposed inside sites", lambda row: _or_missing(row.exposed_intra_site_s, duration)),
    )
    used = [row for row in rows if not row.obstacle]
    filled = [(name, write) for name, write in figures if any(write(row) != MISSING for row in used)]
    names = (what, *(name for name, _ in filled))
    cells = tuple((row.method, *(write(row) for _, write in filled)) for row in used)
    chosen = _first(best is not None and row.step_s == best for row in used)
    return TableView(
        f"{what.capitalize()}s side by side", names, cells, frozenset(range(1, len(names))), chosen, obstacles(rows)
    )


def obstacles(rows: Sequence[ComparisonRow]) -> str:
    """Reasons for which some can't be used, a line for each."""
    methods: dict[str, list[str]] = {}
    for row in (row for row in rows if row.obstacle):
        reason = row.obstacle.removeprefix(f"schedule {row.method!r} ")
        methods.setdefault(reason, []).append(row.method)
    return "\n".join(f"{', '.join(names)}: {_of(len(names), reason)}" for reason, names in methods.items())


def _of(number: int, reason: str) -> str:
    """A reason that begins with its verb, in singular or plural."""
    return reason.replace("needs ", "need ", 1) if number > 1 and reason.startswith("needs ") else reason


def _first(flags: Iterable[bool]) -> int | None:
    return next((index for index, flag in enumerate(flags) if flag), None)


def _slower(seconds: float | None, best: float | None) -> str:
    if seconds is None or not best:
        return MISSING
    return "best" if seconds == best else format_change(seconds / best - 1)


def _or_missing(value: float | None, write: Callable[[float], str]) -> str:
    return MISSING if value is None else write(value)


def _wait(seconds: float, row: StepRow) -> str:
    """An exposed time with its share of the step."""
    whole = row.measured_s or row.predicted_s
    return f"{duration(seconds)} ({format_percent(seconds / whole)})" if seconds and whole else "0"


def _fall(first: float | None, last: float | None) -> str:
    return MISSING if first is None or last is None else f"{first:.3f} → {last:.3f}"


MAX_EVENTS: Final = 40
_EVENT_COLUMNS: Final = ("step", "time (UTC)", "link", "processes", "event")


def link_event_view(metrics: Sequence[Mapping[str, Any]], run: str = "") -> TableView | None:
    """The events in the lines of metrics.jsonl, the newest MAX_EVENTS of them; None when there are none.

    `run` names the run in the title where there are several.
    """
    rows = [_event_row(line["step"], event) for line in metrics for event in line.get("link_events", ())]
    if not rows:
        return None
    left_out = len(rows) - MAX_EVENTS
    note = f"The newest {MAX_EVENTS} of {len(rows)} events; metrics.jsonl has all." if left_out > 0 else ""
    return TableView(
        f"Link events{run and ' of '}{run}",
        _EVENT_COLUMNS,
        tuple(rows[-MAX_EVENTS:]),
        frozenset({0}),
        note=note,
        expendable=(1,),
    )


def _event_row(step: int, event: Mapping[str, Any]) -> tuple[str, ...]:
    time = datetime.fromtimestamp(event["unix_s"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    return str(step), time, event.get("link", "-"), f"{event['process']} to {event['peer']}", event_text(event)
