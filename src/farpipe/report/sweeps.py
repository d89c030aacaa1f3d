"""Sweeps: a table and a map of the winners over a job's inputs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from farpipe.core.units import format_count, format_seconds
from farpipe.planning.explain.job_grid import Axis, Result
from farpipe.planning.planner.plan import Strategy
from farpipe.report.plan_tables import bottleneck
from farpipe.report.pyplot import load_pyplot, save_figure
from farpipe.report.tables import TableView

COLOURS: Final = {
    "one site": "#c7ccd6",
    "pipeline": "#5b8fd9",
    "replicas": "#5fb38a",
    "local steps": "#e8b04b",
    "nothing fits": "#ffffff",
}
"""Colours of the cells, by the kind of the winning strategy."""
LEGEND_INCHES: Final = 0.55
NARROW_HATCH: Final = "//"
"""Hatching of cells whose winner sends narrower messages."""


def sweep_table(axes: Sequence[Axis], results: Sequence[Result]) -> TableView:
    """One row for every point."""
    rows = [(*map(str, result.values), *_cells(result)) for result in results]
    columns = (*(axis.key for axis in axes), "wins", "step", "tokens/s", "x one site", "bottleneck")
    first = len(axes)
    numbers = frozenset({first + 1, first + 2, first + 3})
    return TableView("Best strategy", columns, tuple(rows), numbers, expendable=(first + 2, first + 4))


def sweep_rows(axes: Sequence[Axis], results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row for every strategy at every point, with the point's inputs and its winner; where nothing fits one with the
    reason."""
    rows = list[dict[str, Any]]()
    for number, result in enumerate(results, 1):
        data = result.to_data()
        inputs = {axis.key: str(value) for axis, value in zip(axes, result.values, strict=True)}
        point = {"point": number, **inputs, "winner": data["winner"], "obstacle": data["obstacle"]}
        rows += [point | strategy for strategy in data["strategies"]] or [point]
    return rows


def _cells(result: Result) -> tuple[str, ...]:
    best, gain = result.winner, result.gain
    if best is None:
        return "-", "-", "-", "-", result.obstacle
    words = f"{best.kind}: {best.where}{f', {best.training}' if best.training else ''}"
    times = "-" if gain is None else f"{gain:.2f}"
    return words, format_seconds(best.step_s), format_count(best.tokens_per_s), times, bottleneck(best.limited_by)


def draw_map(path: Path, axes: Sequence[Axis], results: Sequence[Result]) -> None:
    """Colour every point by the strategy that wins: the first axis upwards, the second to the right, a panel for every
    combination of further axes. In each cell: how many times as fast as the best site alone.

    InputError without matplotlib.
    """
    pyplot = load_pyplot()
    height, width = len(axes[0].values), len(axes[1].values) if len(axes) > 1 else 1
    panels = _panels(axes, results)
    size = (1.2 + len(panels) * max(2.4, 0.72 * width + 0.6), 1.9 + max(1.0, 0.45 * height))
    figure, places = pyplot.subplots(1, len(panels), squeeze=False, figsize=size, sharey=True)
    for place, (title, cells) in zip(places[0], panels, strict=True):
        _draw_panel(place, title, cells, axes)
    places[0][0].set_ylabel(axes[0].key)
    _draw_legend(figure, results)
    figure.tight_layout(rect=(0, LEGEND_INCHES / size[1], 1, 1))
    save_figure(figure, path, dpi=110)
    pyplot.close(figure)


def _panels(axes: Sequence[Axis], results: Sequence[Result]) -> list[tuple[str, dict[tuple[int, int], Result]]]:
    """Title and cells, by row and column, of every panel."""
    found: dict[str, dict[tuple[int, int], Result]] = {}
    for result in results:
        title = ", ".join(f"{axis.key} = {value}" for axis, value in zip(axes[2:], result.values[2:], strict=True))
        row = axes[0].values.index(result.values[0])
        column = axes[1].values.index(result.values[1]) if len(axes) > 1 else 0
        found.setdefault(title, {})[row, column] = result
    return list(found.items())


def _draw_panel(place: Any, title: str, cells: dict[tuple[int, int], Result], axes: Sequence[Axis]) -> None:
    from matplotlib.patches import Rectangle

    for (row, column), result in cells.items():
        best, gain = result.winner, result.gain
        colour = COLOURS[best.kind if best is not None else "nothing fits"]
        hatch = NARROW_HATCH if _is_narrow(best) else None
        place.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white", hatch=hatch))
        text = "" if best is None else "only" if gain is None else f"{gain:.2f}"
        place.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8)
    columns = axes[1].values if len(axes) > 1 else ("",)
    place.set(xlim=(0, len(columns)), ylim=(0, len(axes[0].values)), title=title)
    place.set_xticks([i + 0.5 for i in range(len(columns))], [str(value) for value in columns], fontsize=8, rotation=30)
    place.set_yticks([i + 0.5 for i in range(len(axes[0].values))], [str(v) for v in axes[0].values], fontsize=8)
    place.set_xlabel(axes[1].key if len(axes) > 1 else "")
    place.title.set_fontsize(9)


def _is_narrow(one: Strategy | None) -> bool:
    return one is not None and one.kind == "pipeline" and not one.same_training


def _draw_legend(figure: Any, results: Sequence[Result]) -> None:
    from matplotlib.patches import Patch

    winners = [result.winner for result in results]
    kinds = {"nothing fits" if one is None else one.kind for one in winners}
    keys = [Patch(facecolor=colour, edgecolor="#888", label=kind) for kind, colour in COLOURS.items() if kind in kinds]
    if any(map(_is_narrow, winners)):
        keys.append(Patch(facecolor="white", edgecolor="#888", hatch=NARROW_HATCH, label="8-bit messages"))
    note = "number: times as fast as the best site alone"
    figure.legend(
        handles=keys, loc="lower center", ncols=len(keys), fontsize=8, title=note, title_fontsize=8, frameon=False
    )
