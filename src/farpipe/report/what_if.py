"""The part of a page with dials: answers at other latencies, bandwidths and devices, redrawn in the browser."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.simulate import Timeline
from farpipe.core.step import KINDS
from farpipe.core.units import format_bytes, format_seconds
from farpipe.planning.explain.what_if import Answer, Dial
from farpipe.report.figure import Markup, scrolling, tag
from farpipe.report.gantt_frame import spaced

MAX_RANKS: Final = 16
NUM_UNITS: Final = 1500
"""Units of a step in which its boxes are written."""
MIN_UNITS: Final = 3
"""Shorter boxes are drawn as one with their neighbours of the same kind."""
MAX_NUMBERS: Final = 400_000
"""Numbers of all timelines of a page, beyond which further answers come without one."""
_NOTE: Final = (
    "The plan's own setting was searched; other answers are estimates by closed forms, of which the best are simulated "
    "in a few orders (~: not simulated). The timeline is that of the first row; the line is the end of the plan's step."
)
_SERVED_NOTE: Final = (
    "An estimate comes at once, the searched plan when the dials rest (~: not simulated). "
    "The timeline is that of the first row; the line marks the end of the job's own step."
)


def what_if_data(dials: Sequence[Dial], answers: Sequence[Answer] | None) -> dict[str, Any]:
    """Dials and the answers at all their settings; without `answers` the page asks its server for each."""
    cells: list[Any] | None = None if answers is None else []
    left = MAX_NUMBERS
    for answer in answers or ():
        cell = answer_data(answer)
        left -= sum(len(row) for _, row in cell["ranks"])
        assert cells is not None
        cells.append(cell if left >= 0 else cell | {"ranks": []})
    named = [{"name": dial.name, "texts": dial.texts, "at": dial.at} for dial in dials]
    return {"dials": named, "cells": cells}


def answer_data(answer: Answer) -> dict[str, Any]:
    """One answer: its uses as [name, degrees, seconds, step, peak memory] and its timeline by rank."""
    uses = [
        [
            use.name,
            use.degrees,
            float(f"{use.step_s:.6g}"),
            f"{'' if use.is_simulated else '~'}{format_seconds(use.step_s)}",
            format_bytes(use.memory_bytes),
        ]
        for use in answer.uses
    ]
    ranks = [] if answer.timeline is None else [*_ranks(answer.timeline, answer.sites)]
    return {"uses": uses, "ranks": ranks, "obstacle": answer.obstacle}


def _ranks(timeline: Timeline, sites: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """(name, boxes as start, end, kind, microbatch or -1) of every rank that is drawn."""
    unit_s = (timeline.makespan_s or 1.0) / NUM_UNITS
    for rank in spaced(timeline.num_ranks, MAX_RANKS):
        own = timeline.actions[timeline.actions["rank"] == rank]
        site = sites[rank] if rank < len(sites) else "rank"
        yield f"{site} {rank}", _boxes(own[np.argsort(own["start_s"])], unit_s)


def _boxes(actions: NDArray[np.void], unit_s: float) -> list[int]:
    found: list[list[int]] = []
    for action in actions:
        begin, end = round(float(action["start_s"]) / unit_s), round(float(action["end_s"]) / unit_s)
        kind, number = int(action["kind"]), int(action["microbatch"])
        last = found[-1] if found else None
        if last is not None and end - begin < MIN_UNITS and last[2] == kind and begin - last[1] < MIN_UNITS:
            last[1], last[3] = end, -1
        else:
            found.append([begin, end, kind, number])
    return [value for box in found for value in box]


def what_if_section(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Dials, the answer in a sentence, its uses of the sites and its timeline; a script fills them in."""
    dials = [_dial(number, dial) for number, dial in enumerate(data["dials"])]
    kinds = "".join(KINDS)
    text = json.dumps({**data, "kinds": kinds, "units": NUM_UNITS}, separators=(",", ":")).replace("<", "\\u003c")
    yield tag("script", Markup(text), type="application/json", id="what-if-data")
    yield tag("div", *dials, class_="dials")
    yield tag("p", "Dials need JavaScript.", id="what-if-answer", class_="answer", role="status")
    words = [tag("th", name, scope="col") for name in ("use of the sites", "layout")]
    head = tag("tr", *words, *(tag("th", name, scope="col", class_="number") for name in ("step", "peak memory")))
    table = tag("table", tag("thead", head), tag("tbody", id="what-if-uses"))
    yield scrolling(table, "Uses of the sites at this setting")
    names = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "backward"}
    title = f"Timeline at this setting: {', '.join(f'{kind} {name}' for kind, name in names.items())}"
    svg = tag("svg", id="what-if-timeline", class_="figure", role="img", aria_label=title)
    yield tag("figure", scrolling(svg, "Timeline at this setting"), class_="what-if")
    yield tag("p", _SERVED_NOTE if data["cells"] is None else _NOTE, class_="note")


def _dial(number: int, dial: Mapping[str, Any]) -> Markup:
    name, last = f"dial-{number}", len(dial["texts"]) - 1
    shown = tag("output", dial["texts"][dial["at"]], id=f"{name}-text", for_=name)
    slider = tag("input", type="range", id=name, min=0, max=last, step=1, value=dial["at"])
    return tag("div", tag("label", tag("span", dial["name"]), shown, for_=name), slider)
