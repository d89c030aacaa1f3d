"""Which sites computed each step of an elastic run: a band of steps for every site, and what happened in between."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any, Final

from farpipe.core.units import counted, format_bytes, format_seconds
from farpipe.engine.outer.record import EVENTS, site_event_text
from farpipe.report.axis import PLAIN, Scale
from farpipe.report.chunk_map import WIDTH_PX, top_axis
from farpipe.report.figure import Block, Figure, Markup, join, stack, tag
from farpipe.report.tables import TableView

MAX_EVENTS: Final = 40
"""Events in the table, the newest."""
_GUTTER_PX: Final = 96.0
_MARGIN_PX: Final = 24.0
_ROW_PX: Final = 13.0
_TOGETHER: Final = "#5b8c5a"
_FEWER: Final = "#d9a441"
_MESSAGES: Final = "outer_messages"
_WORLDS: Final = "sites"
"""Field of a line with the sites in the world that computed the step."""


def draw_membership(metrics: Sequence[Mapping[str, Any]], key: str) -> Figure | None:
    """The figure: a row for every site, a box for the steps in which it took part; None for runs that are not elastic.

    Steps that fewer sites than there are computed have another colour.
    """
    lines = [line for line in metrics if line.get(_WORLDS)]
    if not lines:
        return None
    sites = sorted({site for line in lines for site in line[_WORLDS]})
    first, end = lines[0]["step"], lines[-1]["step"] + 1
    scale = Scale(float(first), float(end), _GUTTER_PX, WIDTH_PX - _MARGIN_PX)
    rows = [Block(join(_row(site, lines, len(sites), scale)), _ROW_PX + 3) for site in sites]
    num_alone = sum(len(line[_WORLDS]) < len(sites) for line in lines)
    text = f"Sites that computed each step together: {counted(len(lines), 'step')}, {num_alone} of them by fewer sites."
    return Figure(key, "Membership", text, WIDTH_PX, stack([top_axis(scale, PLAIN, "step", whole=True), *rows]))


def _row(site: str, lines: Sequence[Mapping[str, Any]], num_sites: int, scale: Scale) -> Iterator[Markup]:
    yield tag("text", site, x=_GUTTER_PX - 8, y=_ROW_PX - 2, text_anchor="end")
    for members, group in groupby(lines, key=lambda line: tuple(line[_WORLDS])):
        steps = [line["step"] for line in group]
        if site in members:
            left, right = scale(steps[0]), scale(steps[-1] + 1)
            hint = f"steps {steps[0]} to {steps[-1]}: {' and '.join(members)}"
            fill = _TOGETHER if len(members) == num_sites else _FEWER
            yield tag("rect", tag("title", hint), x=left, y=0, width=max(1.0, right - left), height=_ROW_PX, fill=fill)


def site_event_view(metrics: Sequence[Mapping[str, Any]]) -> TableView | None:
    """What sites have done beside computing, the newest events; None where there are none."""
    found = [(line["step"], event) for line in metrics for event in line.get(EVENTS, ())]
    if not found:
        return None
    rows = tuple((str(step), event["site"], site_event_text(event)) for step, event in found[-MAX_EVENTS:])
    note = f"The newest {MAX_EVENTS} of {len(found)} events." if len(found) > MAX_EVENTS else ""
    return TableView("Sites that left and returned", ("step", "site", "event"), rows, frozenset({0}), note=note)


def outer_message_view(metrics: Sequence[Mapping[str, Any]]) -> TableView | None:
    """Messages from other sites and their slack, as rank 0 of each step's recorder saw them; None where none came."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for message in (message for line in metrics for message in line.get(_MESSAGES, ())):
        found.setdefault((message["what"], " and ".join(message["from"])), []).append(message)
    if not found:
        return None
    rows = tuple(
        (
            what,
            sites,
            str(len(every)),
            format_bytes(median(one["bytes"] for one in every)),
            _signed(median(one["slack_s"] for one in every)),
            _signed(min(one["slack_s"] for one in every)),
        )
        for (what, sites), every in sorted(found.items())
    )
    note = "Slack: from a message's arrival until it was needed; below 0 training waited so long for it."
    columns = ("message", "from", "number", "bytes", "slack", "least slack")
    return TableView("Messages between sites", columns, rows, frozenset({2, 3, 4, 5}), note=note)


def _signed(seconds: float) -> str:
    return f"-{format_seconds(-seconds)}" if seconds < 0 else format_seconds(seconds)
