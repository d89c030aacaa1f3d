"""Line charts of a report: memory of ranks, use of links, loss and step time over the steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.simulate.timeline import Timeline
from farpipe.core.step import KINDS, Problem, byte_tables, exceeds, held_over_time
from farpipe.core.units import format_bytes, format_percent, format_rate, format_seconds
from farpipe.report.axis import MEMORY, PLAIN, SHARE, TIME, Quantity, covered, shorten
from farpipe.report.gantt_frame import extent
from farpipe.report.views import RunView

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Values `y` [N] at `x` [N], N > 0; `look` is its line's in `lines`, a `step` holds each value until the next."""

    name: str
    x: Floats
    y: Floats
    look: str
    step: bool = False


@dataclass(frozen=True)
class LineChart:
    """One or more curves on common axes.

    `limit` is a line across, such as the memory of a rank; it is left out where it would flatten the curves. Ranges
    that are not given follow from the curves.
    """

    title: str
    curves: Sequence[Curve]
    x_axis: Quantity
    y_axis: Quantity
    x_label: str = ""
    text: str = ""
    limit: float | None = None
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    counts: bool = False

    @cached_property
    def x(self) -> tuple[float, float]:
        """Ends of the horizontal axis."""
        low, high = self.x_range or _range([curve.x for curve in self.curves])
        return low, high if high > low else low + 1.0

    @cached_property
    def y(self) -> tuple[float, float]:
        """Ends of the vertical axis, with a little room above and below the curves."""
        return self.y_range or _roomy(_range([curve.y for curve in self.curves]))

    @property
    def limit_is_drawn(self) -> bool:
        """True if the limit lies within the chart."""
        return self.limit is not None and self.y[0] <= self.limit <= self.y[1]

    @property
    def description(self) -> str:
        """The curves in a sentence, for people who hear the page."""
        return f"{self.title}. {'; '.join(_describe(curve, self.y_axis) for curve in self.curves)}."


def _range(values: Sequence[Floats]) -> tuple[float, float]:
    return min(float(v.min()) for v in values), max(float(v.max()) for v in values)


def _roomy(values: tuple[float, float]) -> tuple[float, float]:
    low, high = values
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _describe(curve: Curve, axis: Quantity) -> str:
    name, factor = axis.unit(float(np.abs(curve.y).max()))
    first, last, most = (f"{value / factor:.3g} {name}".strip() for value in (*curve.y[[0, -1]], curve.y.max()))
    return f"{curve.name}: from {first} to {last}, at most {most}"


MAX_CHARTS: Final = 16
"""Small charts in one group; of more ranks or links those are drawn that matter most."""
WINDOW: Final = 0.05
"""The use of a link is a moving mean over this part of the step, at NUM_PLACES places."""
NUM_PLACES: Final = 161
WORTH_DRAWING: Final = 0.05
"""A link inside a site gets a chart when it is used for at least this part of the step."""

_TOPS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Shares of time at the upper edge of a link's chart, below 1."""
_LIMIT_IN_SIGHT: Final = 2.5
"""A limit is drawn where it is at most this many times the highest peak."""
_MEMORY_COLUMNS: Final = ("memory of", "most")
_LINK_COLUMNS: Final = ("link", "use")
_MEMORY_NOTE: Final = (
    "Bytes that each rank holds: parameters and optimizer state, and the activations of microbatches in flight. "
    "Computed from the sizes in the plan and from when the actions ran, not read from a device."
)
_LINK_NOTE: Final = (
    f"Share of the time in which a link carries something, as a moving mean over {format_percent(WINDOW)} of the step; "
    "where it stays at 100 %, the link limits the step. Scales differ."
)


@dataclass(frozen=True)
class ChartGroup:
    """Small charts that belong together; `left_out` says what is missing."""

    charts: list[LineChart]
    columns: tuple[str, str]
    """What the titles and the texts of the charts are, for a table of them."""
    note: str = ""
    left_out: str = ""


def memory_over_time(problem: Problem, timeline: Timeline, rank: int) -> tuple[Floats, Floats]:
    """(times in seconds [N], bytes from then on [N]) of what `rank` holds, static bytes included; from the begin of the
    timeline to its end.

    Bytes are taken at the start of F and given back at the end of I, B or W (`farpipe.core.step.byte_tables`).
    """
    actions = timeline.actions[timeline.actions["rank"] == rank]
    slots = actions["stage"].astype(np.int64) * problem.num_microbatches + actions["microbatch"]
    taken, freed = (table[len(KINDS) * slots + actions["kind"]] for table in byte_tables(problem))
    times, held = held_over_time(taken, freed, actions["start_s"], actions["end_s"])
    begin_s, end_s = extent(timeline)
    changes = np.concatenate([[0.0], held, [held[-1] if held.size else 0.0]])
    return np.concatenate([[begin_s], times, [end_s]]), problem.ranks[rank].static_bytes + changes


def memory_charts(view: RunView) -> ChartGroup:
    """One chart per rank, those nearest to their limits if there are many; none where nothing has a size."""
    problem, spans = view.problem, _timelines(view)
    curves = {rank: [_memory_curve(problem, t, rank) for t in spans] for rank in range(problem.num_ranks)}
    peaks = {rank: max(float(curve.y.max()) for curve in found) for rank, found in curves.items()}
    highest = max(peaks.values())
    if highest == 0:
        return ChartGroup([], _MEMORY_COLUMNS)
    limits = {rank: problem.ranks[rank].memory_bytes for rank in curves}
    shown = [limit for limit in limits.values() if limit is not None and limit <= highest * _LIMIT_IN_SIGHT]
    top = max([highest, *shown]) * 1.06
    identical = _identical(curves, limits)
    order = sorted(identical, key=lambda ranks: peaks[ranks[0]] / (limits[ranks[0]] or highest), reverse=True)
    charts = [
        LineChart(
            _rank_title(view, ranks),
            curves[ranks[0]],
            TIME,
            MEMORY,
            text=_of_limit(peaks[ranks[0]], limits[ranks[0]]),
            limit=limits[ranks[0]],
            x_range=_step_range(spans),
            y_range=(0.0, top),
        )
        for ranks in sorted(order[:MAX_CHARTS])
    ]
    return ChartGroup(
        charts, _MEMORY_COLUMNS, _MEMORY_NOTE, _left_out(len(order), "different curves, those nearest to their limits")
    )


def _identical(curves: Mapping[int, Sequence[Curve]], limits: Mapping[int, float | None]) -> list[tuple[int, ...]]:
    """The ranks in groups whose curves and limits are the same."""
    groups: dict[object, list[int]] = {}
    for rank, found in curves.items():
        key = (limits[rank], *(part.tobytes() for curve in found for part in (curve.x, curve.y)))
        groups.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _left_out(total: int, what: str) -> str:
    return f"Drawn: {MAX_CHARTS} of {total} {what}." if total > MAX_CHARTS else ""


def _memory_curve(problem: Problem, timeline: Timeline, rank: int) -> Curve:
    times, held = memory_over_time(problem, timeline, rank)
    return Curve(timeline.source, times, held, timeline.source, step=True)


def _of_limit(peak: float, limit: float | None) -> str:
    text = f"peak {format_bytes(peak)}"
    if limit is None:
        return text
    over = f", {format_bytes(peak - limit)} too much" if exceeds(peak, limit) else ""
    return f"{text} of {format_bytes(limit)}{over}"


def _rank_title(view: RunView, ranks: Sequence[int]) -> str:
    """``rank 3, zurich``; ``ranks 0 to 3, zurich`` for several in a row, else ``ranks 0, 2``."""
    sites = ", ".join(dict.fromkeys(view.sites[rank] for rank in ranks if rank < len(view.sites)))
    in_a_row = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1
    numbers = f"{ranks[0]} to {ranks[-1]}" if in_a_row else ", ".join(map(str, ranks))
    return shorten(f"rank{'s' if len(ranks) > 1 else ''} {numbers}" + (f", {sites}" if sites else ""), 34)


def link_charts(view: RunView) -> ChartGroup:
    """One chart per link that matters: how much of the time it carries something; between sites first."""
    timelines = _timelines(view)
    use = {name: max(t.link_busy_ratio().get(name, 0.0) for t in timelines) for name in view.problem.links}
    used = sorted((name for name in use if use[name] > 0), key=lambda name: not view.problem.between_sites[name])
    names = [name for name in used if view.problem.between_sites[name] or use[name] >= WORTH_DRAWING][:MAX_CHARTS]
    span = _step_range(timelines)
    curves = {name: [_use_curve(timeline, name, *span) for timeline in timelines] for name in names}
    charts = [
        LineChart(
            name.replace(">", " → "),
            found,
            TIME,
            SHARE,
            text=_link_text(view, name),
            x_range=span,
            y_range=(0.0, _top(found)),
        )
        for name, found in curves.items()
    ]
    left = len(used) - len(names)
    busiest = max((use[name] for name in used if name not in names), default=0.0)
    left_out = (
        f"Not drawn: {left} more links, none of which is used for more than {format_percent(busiest)} of the step."
    )
    return ChartGroup(charts, _LINK_COLUMNS, _LINK_NOTE, left_out if left else "")


def _top(curves: Sequence[Curve]) -> float:
    """The least of some round shares that no curve exceeds, so that a link that is hardly used is no flat line."""
    highest = max(float(curve.y.max()) for curve in curves)
    return next((top for top in _TOPS if highest <= top), 1.0)


def _use_curve(timeline: Timeline, name: str, low: float, high: float) -> Curve:
    """The share of time in which the link carries something, as a moving mean over WINDOW of the step.

    Where replicas send one after the other, the others' messages follow each one's. It ends with its timeline.
    """
    is_here = timeline.messages["link"] == (timeline.links.index(name) if name in timeline.links else -2)
    messages, copies = timeline.messages[is_here], timeline.message_copies[is_here]
    start_s, end_s = messages["start_s"], messages["start_s"] + copies * (messages["end_s"] - messages["start_s"])
    half, (own_low, own_high) = WINDOW / 2 * (high - low), extent(timeline)
    low, high = max(low, own_low), min(high, own_high)  # outside its own step a timeline says nothing
    places = np.linspace(low, high, NUM_PLACES)
    edges = np.stack([np.maximum(places - half, low), np.minimum(places + half, high)])
    busy = covered(start_s, end_s, edges.T)[:, 0] / np.maximum(edges[1] - edges[0], 1e-12)
    return Curve(timeline.source, places, np.clip(busy, 0.0, 1.0), timeline.source)


def _link_text(view: RunView, name: str) -> str:
    link = view.problem.links[name]
    used = (view.measured or view.predicted).link_busy_ratio().get(name, 0.0)
    figures = f"{format_rate(link.bandwidth_bytes_per_s)}, {format_seconds(link.latency_s)}"
    return f"{format_percent(min(1.0, used))} used · {figures}"


def loss_chart(runs: Sequence[RunView]) -> LineChart | None:
    """The loss of every run over its steps; None when none has any."""
    curves = _metric_curves(runs, "loss")
    return _over_steps("Loss", curves, "nats per token") if curves else None


def step_time_chart(runs: Sequence[RunView]) -> LineChart | None:
    """Measured and predicted time of every step; None when nothing was measured."""
    curves = _metric_curves(runs, "step_s")
    if not curves:
        return None
    first, last = min(curve.x[0] for curve in curves), max(curve.x[-1] for curve in curves)
    for view in runs:
        if any(curve.name == view.name for curve in curves):
            expected = np.full(2, view.predicted.makespan_s + view.step_overhead_s)
            curves.append(Curve(f"{view.name} predicted", np.array([first, last]), expected, "predicted"))
    return _over_steps("Time of a step", curves, "", from_zero=True)


def _metric_curves(runs: Sequence[RunView], name: str) -> list[Curve]:
    """A metric of every run with at least two values; the first is drawn broad, to show below another."""
    found = [(view.name, metric(view.metrics, name), f"run{index % 4}") for index, view in enumerate(runs)]
    return [Curve(run, steps, values, look) for run, (steps, values), look in found if steps.size > 1]


def metric(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[Floats, Floats]:
    """(steps [N], values [N]) of a metric, without the lines in which it is missing or not a finite number."""
    rows = [(line.get("step", index), line.get(name)) for index, line in enumerate(metrics)]
    chosen = [(step, value) for step, value in rows if _is_number(step) and _is_number(value)]
    table = np.array(chosen, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def _over_steps(title: str, curves: list[Curve], text: str, from_zero: bool = False) -> LineChart:
    top = max(float(curve.y.max()) for curve in curves)
    y_range = (0.0, top * 1.08 or 1.0) if from_zero else None
    axis = TIME if from_zero else PLAIN
    return LineChart(title, curves, PLAIN, axis, x_label="step", text=text, y_range=y_range, counts=True)


def _timelines(view: RunView) -> list[Timeline]:
    return [timeline for timeline in (view.predicted, view.measured) if timeline is not None]


def _step_range(timelines: Sequence[Timeline]) -> tuple[float, float]:
    extents = [extent(timeline) for timeline in timelines]
    return min(0.0, *(low for low, _ in extents)), max(high for _, high in extents)
