"""One picture of a step over light paths: the pipeline above, its busiest fibres below, one time axis."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import UsageError
from farpipe.optical.paths import PathTable
from farpipe.optical.transfers import Step, lit_problem
from farpipe.report.page import write_report
from farpipe.report.pyplot import load_pyplot, plain_ticks, save_figure
from farpipe.report.tables import TableView
from farpipe.report.views import Picture, RunReport, RunView

_COLOURS: Final = {0: "#4c78a8", 1: "#f2a65a", 2: "#e3d2a4", 3: "#e07b39"}
_FORWARD, _BACKWARD, _BACKGROUND, _LATE = "#2a9d5c", "#8e44ad", "#d9d9d9", "#d62728"
MAX_FIBRES: Final = 4
WINDOW_S: Final = (0.0, 1.5)
"""Part of a step that is drawn, seconds after its begin."""
_NOTE: Final = (
    "Above the pipeline with its messages, below the fibres that these hold most, on one time axis: a box is a light "
    "path, its slots by its time; grey: background traffic. A red line is a message that waited for spectrum."
)


@dataclass(frozen=True)
class LightText:
    """Words of a page: its title, the setting, one paragraph a line, and the figures of all backgrounds."""

    title: str
    setting: str
    figures: TableView


def draw_light(
    path: Path | str,
    step: Step,
    table: PathTable,
    log: NDArray[np.float64],
    num_slots: int,
    window_s: tuple[float, float] = WINDOW_S,
) -> None:
    """Draw a step, from `window_s[0]` to `window_s[1]` at most, to an SVG or PNG file.

    UsageError where the step is over before the window begins.

    Below the pipeline are the fibres that its messages hold most: every light path is a box of slots and seconds, the
    background's grey. Messages that had to wait for spectrum are marked in red from when they were ready.
    """
    if Path(path).suffix not in (".svg", ".png"):
        raise UsageError(f"{path}: pictures are written as .svg or .png")
    with _figure(step, table, log, num_slots, window_s) as figure:
        save_figure(figure, path, dpi=110)


def write_light_page(
    path: Path | str,
    step: Step,
    table: PathTable,
    log: NDArray[np.float64],
    num_slots: int,
    window_s: tuple[float, float] = WINDOW_S,
    *,
    about: LightText,
) -> None:
    """Write a report page about a step over light paths: its picture, its timeline, and what its links did."""
    with _figure(step, table, log, num_slots, window_s) as figure, io.BytesIO() as text:
        plain_ticks(figure)
        figure.savefig(text, format="svg", metadata={"Date": None})
        picture = Picture("Light paths", text.getvalue().decode(), _NOTE)
    view = RunView(f"order {step.training.schedule.method}", lit_problem(step), step.timeline())
    first, *rest = about.setting.splitlines()
    page = RunReport(
        about.title,
        (view,),
        verdict=(f"{first[:1].upper()}{first[1:]}.",),
        pictures=(picture,),
        plan_text="\n".join(rest),
        plan_tables=(about.figures,),
    )
    write_report(page, path)


def light_rows(step: Step, table: PathTable, log: NDArray[np.float64]) -> Iterator[str]:
    """Lines of a CSV of the light paths that are there during a step: their owner, nodes, slots and times."""
    yield "owner,nodes,first_slot,slots,from_s,until_s"
    for owner, candidate, first, slots, from_s, until_s in log:
        if from_s < step.end_s and until_s > step.begin_s:
            nodes = "-".join(table.paths[int(candidate)][0])
            name = f"message {owner:.0f}" if owner >= 0 else f"request {-1 - owner:.0f}"
            yield f"{name},{nodes},{first:.0f},{slots:.0f},{from_s:.9g},{until_s:.9g}"


@contextmanager
def _figure(
    step: Step, table: PathTable, log: NDArray[np.float64], num_slots: int, window_s: tuple[float, float]
) -> Iterator[Any]:
    pyplot, from_s, until_s = load_pyplot(), window_s[0], min(window_s[1], step.makespan_s)
    if from_s >= until_s:
        raise UsageError(f"--window: the step takes {step.makespan_s:.3g} s, so nothing of it is after {from_s:g} s")
    rows = log[(log[:, 4] < step.begin_s + until_s) & (log[:, 5] > step.begin_s + from_s)]
    fibres = _busiest(rows, table)
    heights = [3.2] + [1.5] * len(fibres)
    figure, axes = pyplot.subplots(
        len(heights),
        1,
        sharex=True,
        squeeze=False,
        figsize=(12, 1.0 + sum(heights)),
        gridspec_kw={"height_ratios": heights},
    )
    pipeline, *below = axes[:, 0]
    _draw_pipeline(pipeline, step, from_s, until_s)
    names = table.network.fibre_names()
    for axis, fibre in zip(below, fibres, strict=True):
        _draw_fibre(axis, step, rows, table, fibre)
        axis.set(ylim=(0, num_slots), ylabel=f"{names[fibre]}\nslot")
    part = f", {from_s:.3g} to {until_s:.3g} of {step.makespan_s:.3g}" if until_s - from_s < step.makespan_s else ""
    axes[-1, 0].set_xlabel(f"seconds since the step began{part}")
    figure.tight_layout()
    try:
        yield figure
    finally:
        pyplot.close(figure)


def _fibres_of(table: PathTable, candidate: float) -> NDArray[np.int32]:
    return table.fibres[table.begin[int(candidate)] : table.begin[int(candidate) + 1]]


def _busiest(rows: NDArray[np.float64], table: PathTable) -> list[int]:
    """The fibres on which messages hold most slots times seconds."""
    held: dict[int, float] = {}
    for owner, candidate, _, slots, begin_s, end_s in rows:
        for fibre in _fibres_of(table, candidate) if owner >= 0 else ():
            held[int(fibre)] = held.get(int(fibre), 0.0) + slots * (end_s - begin_s)
    return sorted(sorted(held, key=lambda fibre: -held[fibre])[:MAX_FIBRES])


def _draw_pipeline(axis: Any, step: Step, from_s: float, until_s: float) -> None:
    timeline, nodes, waited_for_spectrum = step.timeline(), step.training.nodes, step.waited
    actions, messages = timeline.actions, timeline.messages
    for row in actions[(actions["start_s"] < until_s) & (actions["end_s"] > from_s)]:
        _draw_action(axis, row, until_s - from_s)
    for message in messages[(messages["ready_s"] < until_s) & (messages["arrival_s"] > from_s)]:
        waited = waited_for_spectrum[message["kind"], message["stage"], message["microbatch"]]
        colour = _LATE if waited else (_FORWARD if message["kind"] == 0 else _BACKWARD)
        times, ranks = (message["ready_s"], message["arrival_s"]), (message["source"], message["target"])
        axis.plot(times, ranks, color=colour, lw=1.6 if waited else 0.8)
    labels = [f"{rank} at {node}" for rank, node in enumerate(nodes)]
    axis.set(xlim=(from_s, until_s), yticks=range(len(nodes)), yticklabels=labels)
    axis.invert_yaxis()
    axis.set_ylabel("rank at node")
    above = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "frameon": False}
    axis.legend(handles=_legend(), ncols=8, fontsize=8, columnspacing=1.1, handlelength=1.2, **above)


def _draw_action(axis: Any, row: Any, window_s: float) -> None:
    width = row["end_s"] - row["start_s"]
    axis.barh(row["rank"], width, left=row["start_s"], color=_COLOURS[int(row["kind"])], edgecolor="white", lw=0.4)
    if width > window_s / 60:
        centre, look = row["start_s"] + width / 2, {"ha": "center", "va": "center", "fontsize": 7, "clip_on": True}
        axis.text(centre, row["rank"], str(row["microbatch"]), **look)


def _legend() -> list[Any]:
    from matplotlib.patches import Patch

    named = (("forward", _COLOURS[0]), ("backward", _COLOURS[3]), ("inputs' gradient", _COLOURS[1]))
    split = (("weights' gradient", _COLOURS[2]), ("message forward", _FORWARD))
    more = (("message backward", _BACKWARD), ("waited for spectrum", _LATE), ("background", _BACKGROUND))
    return [Patch(color=colour, label=name) for name, colour in (*named, *split, *more)]


def _draw_fibre(axis: Any, step: Step, rows: NDArray[np.float64], table: PathTable, fibre: int) -> None:
    half = step.training.num_messages // 2
    for owner, candidate, first, slots, begin_s, end_s in rows:
        if fibre in _fibres_of(table, candidate):
            colour = _BACKGROUND if owner < 0 else (_FORWARD if owner < half else _BACKWARD)
            box = (begin_s - step.begin_s, min(end_s, step.end_s + 1) - begin_s)
            axis.broken_barh([box], (first, slots), facecolors=colour, edgecolor="white", lw=0.3)
