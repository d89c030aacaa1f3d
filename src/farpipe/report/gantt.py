"""Gantt charts as SVG: one or several Timelines under each other on one time axis.

What is drawn is bounded: a step with more actions than can be distinguished is cut to a window of time, with the whole
step in a small strip below, and of very many ranks and links some are left out; the picture says so.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from farpipe.core.simulate import Timeline
from farpipe.core.step import site_of
from farpipe.core.units import format_seconds
from farpipe.planning import Plan, PlanDocument
from farpipe.report.axis import shorten
from farpipe.report.figure import Block, Figure, Markup, at, join, stack, tag
from farpipe.report.gantt_frame import GanttFrame, Panel, choose_frame, extent
from farpipe.report.gantt_rows import (
    BOX_PX,
    FALL_PX,
    action_boxes,
    legend,
    link_row,
    outer_row,
    shades,
    strips,
    wait_boxes,
)

__all__ = ["Panel", "draw_gantt", "draw_small_multiples", "svg_of"]

_HEAD_PX = 20.0
_SMALL_TYPE_PX = 8.0
_AXIS_PX = 24.0
_LINK_ROW_PX = BOX_PX + FALL_PX + 4


def draw_gantt(panels: Sequence[Panel], *, window: tuple[float, float] | None = None, key: str = "gantt") -> Figure:
    """The panels under each other: ranks as rows, links below them, on one time axis.

    `window` = (from, until) in seconds is the time to draw, by default the whole step, or as much of its beginning
    (of its middle, where the beginning is all warm-up) as can be distinguished.
    """
    return _draw(panels, choose_frame(panels, window, key))


def draw_small_multiples(panels: Sequence[Panel]) -> Figure:
    """Many timelines in one picture: low rows without links, titles at the left, on one time axis."""
    return _draw(panels, choose_frame(panels, None, "small", compact=True))


def _draw(panels: Sequence[Panel], frame: GanttFrame) -> Figure:
    draw_panel = _small_panel if frame.compact else _panel
    blocks = [legend(panels, frame), *(draw_panel(panel, frame) for panel in panels)]
    parts = [stack(blocks, 10), _axis(frame), *_left_out(frame)]
    if frame.is_cut:
        parts.append(strips(panels, frame))
    names = " and ".join(panel.title for panel in panels)
    title = f"Timeline of one step: {names}" if len(panels) <= 3 else f"Timelines of {len(panels)} schedules"
    steps = "; ".join(f"{panel.title} takes {format_seconds(panel.timeline.makespan_s)}" for panel in panels)
    description = f"Gantt chart, one row per rank, time to the right. {steps}."
    return Figure(frame.key, title, description, frame.width, stack(parts))


def _panel(panel: Panel, frame: GanttFrame) -> Block:
    rows = [_rank_row(panel, frame, rank) for rank in frame.ranks if rank < panel.timeline.num_ranks]
    ranks = stack(rows)
    links = stack([_link_row(panel, frame, name) for name in frame.links])
    outer = stack(
        [_outer_row(panel, frame, name) for name in dict.fromkeys(one.source for one in panel.timeline.outer)]
    )
    body = stack([ranks, *(rows for rows in (links, outer) if rows.height)], 6)
    content = [_grid(frame, body.height), body.content, _step_end(panel, frame, ranks.height)]
    return stack([_head(panel, frame), Block(join(content), body.height)])


def _head(panel: Panel, frame: GanttFrame) -> Block:
    parts = [tag("text", panel.title, class_="head", x=0, y=13)]
    if panel.text:
        parts.append(tag("text", panel.text, class_="muted", x=frame.scale.start, y=13))
    return Block(join(parts), _HEAD_PX)


def _small_panel(panel: Panel, frame: GanttFrame) -> Block:
    rows = stack([_rank_row(panel, frame, rank) for rank in frame.ranks if rank < panel.timeline.num_ranks])
    height = max(rows.height, 30.0)
    title = tag("text", tag("title", panel.title), shorten(panel.title, 19), class_="head", x=0, y=12)
    note = tag("text", tag("title", panel.text), shorten(panel.text, 26), class_="muted", x=0, y=26)
    top = (height - rows.height) / 2
    grid, end = _grid(frame, height), _step_end(panel, frame, rows.height)
    return Block(join([grid, title, note, at(0, top, rows.content, end)]), height)


def _rank_row(panel: Panel, frame: GanttFrame, rank: int) -> Block:
    timeline, scale, height = panel.timeline, frame.scale, frame.row_px
    own = timeline.actions[timeline.actions["rank"] == rank]
    waited = frame.visible(panel.waits[panel.waits["rank"] == rank])
    ground = tag("rect", class_="ground", x=scale.start, width=_step_px(panel, frame), height=height)
    boxes = action_boxes(timeline, frame.within(own, "end_s"), shades(own), scale, height, frame.font_px)
    marks = wait_boxes(timeline, waited, scale, height, frame.key)
    label = _small_rank_label if frame.compact else _rank_label
    content = [*label(panel, frame, rank), ground, *marks, *boxes]
    return Block(join(content), height + frame.gap_px)


def _rank_label(panel: Panel, frame: GanttFrame, rank: int) -> Iterator[Markup]:
    size = min(11.0, frame.row_px - 1)
    place = {"y": frame.row_px / 2 + size * 0.36, "font_size": size}
    yield tag("text", f"rank {rank}", class_="end", x=frame.scale.start - 6, **place)
    if panel.begins_site(rank):
        site = panel.sites[rank]
        yield tag("text", tag("title", site), shorten(site, 13), class_="muted", x=0, **place)
        if rank > 0:
            yield tag("path", class_="grid", d=f"M0 {-frame.gap_px / 2}H{frame.scale.start - 4:g}")


def _small_rank_label(panel: Panel, frame: GanttFrame, rank: int) -> Iterator[Markup]:
    """The name of a low row; where rows are lower than type, of every second, third, ... alone."""
    every = math.ceil(_SMALL_TYPE_PX / (frame.row_px + frame.gap_px))
    if frame.ranks.index(rank) % every == 0:
        name, y = panel.rank_name(rank), frame.row_px / 2 + _SMALL_TYPE_PX * 0.36
        shown = shorten(name.rpartition(" ")[0], 12 - len(str(rank)))
        label = f"{shown} {rank}"
        place = {"x": frame.scale.start - 5, "y": y, "font_size": _SMALL_TYPE_PX}
        yield tag("text", tag("title", name), label, class_="end muted", **place)


def _link_row(panel: Panel, frame: GanttFrame, name: str) -> Block:
    timeline = panel.timeline
    label = tag("text", tag("title", name), arrow(name), class_="end muted", x=frame.scale.start - 6, y=BOX_PX + 1)
    if name not in timeline.links:
        return Block(label, _LINK_ROW_PX)
    chosen = np.flatnonzero(timeline.messages["link"] == timeline.links.index(name))
    chosen = chosen[frame.shows(timeline.messages[chosen], "arrival_s")]
    chosen = chosen[np.argsort(timeline.messages[chosen], order="start_s")]
    base = tag("path", class_="grid", d=f"M{frame.scale.start:g} {BOX_PX:g}H{frame.scale.end:g}")
    return Block(join([label, base, *link_row(panel, chosen, frame.scale)]), _LINK_ROW_PX)


def _outer_row(panel: Panel, frame: GanttFrame, source: str) -> Block:
    text = tag("title", f"from {source}"), f"from {shorten(source, 16)}"
    label = tag("text", *text, class_="end muted", x=frame.scale.start - 6, y=BOX_PX + 1)
    base = tag("path", class_="grid", d=f"M{frame.scale.start:g} {BOX_PX:g}H{frame.scale.end:g}")
    return Block(join([label, base, *outer_row(panel.timeline, source, frame)]), BOX_PX + 4)


def arrow(name: str) -> str:
    """A link's name beside its row: ``zurich → lugano``."""
    source, mark, target = name.partition(">")
    if not mark:
        return shorten(name, 22)
    if site_of(source) == site_of(target):
        return shorten(f"{source} → {target.partition(':')[2] or target}", 22)
    return f"{shorten(source, 10)} → {shorten(target, 10)}"


def _grid(frame: GanttFrame, height: float) -> Markup:
    lines = [f"M{frame.scale(tick.value):.2f} -3V{height:g}" for tick in frame.ticks]
    return tag("path", class_="grid", d="".join(lines))


def _step_px(panel: Panel, frame: GanttFrame) -> float:
    """Width of the panel's step as drawn: what lies behind its end is no bubble."""
    return max(0.0, min(frame.scale.end, frame.scale(extent(panel.timeline)[1])) - frame.scale.start)


def _step_end(panel: Panel, frame: GanttFrame, height: float) -> Markup:
    """A line where the step ends, if that is drawn."""
    end = extent(panel.timeline)[1]
    if not frame.low <= end <= frame.high * (1 + 1e-9):
        return Markup("")
    x = frame.scale(end)
    title = tag("title", f"the step ends after {format_seconds(panel.timeline.makespan_s)}")
    return tag("path", title, class_="rule", d=f"M{x:.2f} -3V{height:g}")


def _axis(frame: GanttFrame) -> Block:
    line = tag("path", class_="grid", d=f"M{frame.scale.start:g} .5H{frame.scale.end:g}")
    labels = [tag("text", tick.label, class_="mid muted", x=frame.scale(tick.value), y=14) for tick in frame.ticks]
    return Block(join([line, *labels]), _AXIS_PX)


def _left_out(frame: GanttFrame) -> list[Block]:
    """The parts that the picture does not show, in words."""
    return [Block(tag("text", text, class_="muted", x=0, y=11), 17) for text in frame.left_out]


def svg_of(document: object) -> str | None:
    """Gantt chart of a timeline, or of the step that a plan predicts; None for anything else."""
    if isinstance(document, PlanDocument):
        return svg_of(document.plan)
    if isinstance(document, Plan):
        return draw_gantt([Panel(document.schedule.method, document.timeline, document.sites)]).svg()
    if isinstance(document, Timeline):
        return draw_gantt([Panel(document.source, document)]).svg()
    return None
