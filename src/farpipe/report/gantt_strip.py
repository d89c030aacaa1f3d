"""The whole step in a low strip per timeline: the share of all ranks that compute, by kind of action."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.report.axis import TIME, Scale, ticks
from farpipe.report.figure import Block, stack
from farpipe.report.gantt_frame import GanttFrame, Panel
from farpipe.report.intervals import covered
from farpipe.report.markup import Markup, join, number, tag
from farpipe.simulate.timeline import Timeline
from farpipe.step import KINDS

NUM_BINS: Final = 240
_STRIP_PX: Final = 34.0


def strips(panels: Sequence[Panel], frame: GanttFrame) -> Block:
    """One strip per panel on an axis over the whole step, the drawn window framed."""
    scale = Scale(*frame.whole, frame.scale.start, frame.scale.end)
    blocks = [_strip(panel, frame, scale) for panel in panels]
    marks = ticks(*frame.whole, TIME, 10)
    labels = [tag("text", tick.label, class_="mid muted", x=scale(tick.value), y=13) for tick in marks]
    return stack([_head(), stack(blocks, 5), Block(join(labels), 18)], 2)


def _head() -> Block:
    return Block(tag("text", "Whole step: share of the ranks that compute", class_="muted", x=0, y=16), 22)


def _strip(panel: Panel, frame: GanttFrame, scale: Scale) -> Block:
    ground = tag("rect", class_="ground", x=scale.start, width=scale.end - scale.start, height=_STRIP_PX)
    label = tag("text", panel.title, class_="end", x=scale.start - 6, y=_STRIP_PX / 2 + 4)
    left, right = scale(frame.low), scale(frame.high)
    window = tag("rect", class_="frame", x=left, y=-1, width=max(2.0, right - left), height=_STRIP_PX + 2)
    return Block(join([label, ground, *_areas(panel.timeline, frame.whole, scale), window]), _STRIP_PX)


def _areas(timeline: Timeline, whole: tuple[float, float], scale: Scale) -> Iterator[Markup]:
    """One area per kind of action, stacked."""
    edges = np.linspace(*whole, NUM_BINS + 1)
    below = np.zeros(NUM_BINS)
    for index, kind in enumerate(KINDS):
        actions = timeline.actions[timeline.actions["kind"] == index]
        if len(actions):
            busy = covered(actions["start_s"], actions["end_s"], edges)
            above = below + busy / (timeline.num_ranks * (edges[1] - edges[0]))
            yield tag("path", class_=f"{kind}0", d=_between(below, above, scale.map(edges)))
            below = above


def _between(below: NDArray[np.float64], above: NDArray[np.float64], x: NDArray[np.float64]) -> str:
    """The outline of what lies between two step functions."""
    forth = [f"{number(at)} {number(_STRIP_PX * (1 - share))}" for at, share in _corners(x, above)]
    back = [f"{number(at)} {number(_STRIP_PX * (1 - share))}" for at, share in reversed([*_corners(x, below)])]
    return f"M{'L'.join(forth)}L{'L'.join(back)}Z"


def _corners(x: NDArray[np.float64], shares: NDArray[np.float64]) -> Iterator[tuple[float, float]]:
    for left, right, share in zip(x[:-1], x[1:], shares, strict=True):
        yield float(left), float(share)
        yield float(right), float(share)
