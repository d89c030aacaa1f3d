"""The step of groups of devices as one picture: which device works on which documents, and when."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from farpipe.core.simulate.timeline import Timeline
from farpipe.core.step import KINDS
from farpipe.core.units import counted
from farpipe.planning.workload import Chunk
from farpipe.report.axis import TIME, Scale, duration
from farpipe.report.chunk_map import HUE_STEP, WIDTH_PX, top_axis
from farpipe.report.figure import Block, Figure, Markup, at, join, stack, tag

_GUTTER_PX: Final = 84.0
_MARGIN_PX: Final = 24.0
_MOST_PX: Final = 480.0
"""Height of all devices; of few a row has `_ROW_PX`."""
_ROW_PX: Final = 15.0
_LABELS: Final = 16
"""Largest number of devices that is written beside their row."""


@dataclass(frozen=True)
class GroupRun:
    """Chunks of one group: `degree` devices from `first_device` on, which begin `begin_s` after the step."""

    first_device: int
    degree: int
    begin_s: float
    chunks: Sequence[Chunk]
    predicted: Timeline


def draw_groups(runs: Sequence[GroupRun], num_devices: int, step_s: float) -> Figure:
    """The figure: a row for every device, boxes for forwards (pale) and backwards of chunks, a colour for every size of
    group."""
    scale = Scale(0.0, step_s, _GUTTER_PX, WIDTH_PX - _MARGIN_PX)
    row_px = min(_ROW_PX, _MOST_PX / num_devices)
    degrees = sorted({run.degree for run in runs}, reverse=True)
    hues = {degree: number * HUE_STEP % 360 for number, degree in enumerate(degrees)}
    boxes = [box for run in runs for box in _boxes(run, scale, row_px, hues[run.degree])]
    every = -(-num_devices // _LABELS)
    labels = [
        tag("text", f"device {device}", x=_GUTTER_PX - 8, y=(device + 1) * row_px - 2, text_anchor="end")
        for device in range(0, num_devices, every)
    ]
    counts = [(degree, sum(run.degree == degree for run in runs)) for degree in degrees]
    told = ", ".join(f"{counted(count, 'group')} of {counted(degree, 'device')}" for degree, count in counts)
    body = stack([_key(degrees, hues), top_axis(scale, TIME), Block(join([*labels, *boxes]), num_devices * row_px)], 4)
    return Figure("groups", "Devices", f"{told}, one after the other from the largest on.", WIDTH_PX, body)


def _boxes(run: GroupRun, scale: Scale, row_px: float, hue: float) -> Iterator[Markup]:
    for action in run.predicted.actions:
        parts, is_forward = run.chunks[int(action["microbatch"])].slices, KINDS[action["kind"]] == "F"
        begin_s, end_s = (run.begin_s + float(action[key]) for key in ("start_s", "end_s"))
        work = f"{'forward' if is_forward else 'backward'} of {counted(sum(part.length for part in parts), 'token')}"
        documents = ", ".join(str(part.sequence) for part in parts)
        hint = tag("title", f"{work}, {duration(end_s - begin_s)}: sequence{'s' * (len(parts) > 1)} {documents}")
        yield tag(
            "rect",
            hint,
            x=scale(begin_s),
            y=run.first_device * row_px + 0.5,
            width=max(0.5, scale(end_s) - scale(begin_s) - 0.5),
            height=run.degree * row_px - 1,
            fill=f"hsl({hue:.0f} 55% {82 if is_forward else 66}%)",
        )


def _key(degrees: Sequence[int], hues: dict[int, float]) -> Block:
    parts = []
    for number, degree in enumerate(degrees):
        box = tag("rect", x=0, y=0, width=12, height=12, fill=f"hsl({hues[degree]:.0f} 55% 66%)")
        parts.append(at(_GUTTER_PX + 110 * number, 0, box, tag("text", counted(degree, "device"), x=17, y=10)))
    return Block(join(parts), 18.0)
