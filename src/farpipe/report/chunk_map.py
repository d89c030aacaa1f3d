"""The chunk map of a step: which tokens of which sequence are in which chunk; and what every stage took and held."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.simulate.timeline import Timeline
from farpipe.core.units import counted, format_bytes, format_change
from farpipe.planning.workload import Chunk, Slice
from farpipe.report.axis import PLAIN, Quantity, Scale, duration, ticks
from farpipe.report.figure import Block, Figure, Markup, at, join, stack, tag
from farpipe.report.tables import TableView
from farpipe.report.views import RunView

MAX_ROWS: Final = 40
"""Sequences that have a row of their own, the longest; the others follow in lines, one after the other."""
MAX_LINES: Final = 12
"""Lines of shorter sequences at most."""
WIDTH_PX: Final = 1080.0
_GUTTER_PX: Final = 96.0
_MARGIN_PX: Final = 24.0
_ROW_PX: Final = 11.0
_PITCH_PX: Final = 13.0
_LETTER_PX: Final = 5.2
_MARK: Final = "#1b1f27"
HUE_STEP: Final = 137.508
"""Degrees between the hues of neighbours, so that neighbours differ."""


def draw_chunk_map(
    chunks: Sequence[Chunk], key: str, recomputed: NDArray[np.int64] | None = None, *, keeps_attention: bool = False
) -> Figure:
    """The figure: a row for every long sequence, its slices coloured by chunk; short ones packed into lines.

    `recomputed` layers of every stage and chunk are marks at the lower edge, the wider the more.
    """
    layers = np.zeros(len(chunks), np.int64) if recomputed is None else recomputed.sum(axis=0)
    placed = sorted(
        ((part, index) for index, chunk in enumerate(chunks) for part in chunk.slices),
        key=lambda pair: (-pair[0].sequence_length, pair[0].sequence, pair[0].start),
    )
    lengths = {part.sequence: part.sequence_length for part, _ in placed}
    longest = max(lengths.values())
    own_rows = list(lengths)[:MAX_ROWS]
    scale = Scale(0.0, float(longest), _GUTTER_PX, WIDTH_PX - _MARGIN_PX)
    rows = [
        _row(f"sequence {name}", [(p, index, p.start) for p, index in placed if p.sequence == name], scale, layers)
        for name in own_rows
    ]
    shorter = [(part, index) for part, index in placed if part.sequence not in set(own_rows)]
    lines, num_left_out = _lines(shorter, longest)
    rows += [
        _row("short ones" if first else "", line, scale, layers)
        for first, line in zip([True, *[False] * len(lines)], lines, strict=False)
    ]
    text = _description(len(lengths), len(chunks), num_left_out, int(layers.max()), keeps_attention)
    body = stack([top_axis(scale, PLAIN, "token", whole=True), *(Block(row, _PITCH_PX) for row in rows)])
    return Figure(key, "Chunk map", text, WIDTH_PX, body)


def _description(
    num_sequences: int, num_chunks: int, num_left_out: int, most_layers: int, keeps_attention: bool
) -> str:
    note = f" {num_left_out} of the shortest are left out." if num_left_out else ""
    text = (
        f"{counted(num_sequences, 'sequence')} in {counted(num_chunks, 'chunk')}. Every box is a slice, its colour and "
        f"number the chunk; a row is a sequence, the last rows have short ones side by side.{note}"
    )
    if most_layers:
        what = "layers that all stages recompute of its chunk" + ", but for their attention" * keeps_attention
        text += f" The line below a box: {what}, {most_layers} where it is full."
    return text


def _row(name: str, slices: Sequence[tuple[Slice, int, int]], scale: Scale, layers: NDArray[np.int64]) -> Markup:
    label = tag("text", name, x=_GUTTER_PX - 8, y=_ROW_PX - 2, text_anchor="end") if name else Markup("")
    return join([label, *(_box(part, index, begin, scale, layers) for part, index, begin in slices)])


def _box(part: Slice, index: int, begin: int, scale: Scale, layers: NDArray[np.int64]) -> Markup:
    left, right = scale(begin), scale(begin + part.length)
    width = max(1.0, right - left - 0.5)
    hint = f"chunk {index}: sequence {part.sequence}, tokens {part.start} to {part.end} of {part.sequence_length}"
    hint += f", {layers[index]} layers recomputed" if layers[index] else ""
    drawn = tag("rect", tag("title", hint), x=left, y=0, width=width, height=_ROW_PX, fill=colour_of(index))
    if layers[index]:
        marked = width * layers[index] / layers.max()
        drawn = join([drawn, tag("rect", x=left, y=_ROW_PX - 2, width=marked, height=2, fill=_MARK)])
    name = str(index)
    if width < len(name) * _LETTER_PX + 4:
        return drawn
    return join([drawn, tag("text", name, x=left + width / 2, y=_ROW_PX - 2, text_anchor="middle", class_="on-chunk")])


def colour_of(chunk: int) -> str:
    """Colour of a chunk's boxes."""
    return f"hsl({chunk * HUE_STEP % 360:.0f} {50 + 15 * (chunk % 2)}% {66 + 8 * (chunk // 2 % 2)}%)"


def _lines(shorter: Sequence[tuple[Slice, int]], longest: int) -> tuple[list[list[tuple[Slice, int, int]]], int]:
    """(slices one after the other, in the order of their chunks, with where each is drawn; how many have no place)"""
    lines: list[list[tuple[Slice, int, int]]] = []
    begin, gap = longest, max(1, longest // 400)
    for number, (part, index) in enumerate(sorted(shorter, key=lambda pair: (pair[1], -pair[0].length))):
        if begin + part.length > longest:
            if len(lines) == MAX_LINES:
                return lines, len(shorter) - number
            lines.append([])
            begin = 0
        lines[-1].append((part, index, begin))
        begin += part.length + gap
    return lines, 0


def top_axis(scale: Scale, quantity: Quantity, name: str = "", *, whole: bool = False) -> Block:
    """An axis above rows: its ticks, and `name` in the gutter; `whole` as of `ticks`."""
    marks = [
        at(
            scale(tick.value),
            0,
            tag("text", tick.label, x=0, y=10, text_anchor="middle"),
            tag("path", d="M0 13V17", class_="axis"),
        )
        for tick in ticks(scale.low, scale.high, quantity, 10, whole=whole)
    ]
    label = [tag("text", name, x=scale.start - 8, y=10, text_anchor="end")] if name else []
    return Block(join([*label, *marks]), 20.0)


def stage_table(view: RunView) -> TableView:
    """Time of every stage in the step and the most that its rank held, predicted and measured."""
    predicted, measured = (_busy(timeline) for timeline in (view.predicted, view.measured))
    columns = [
        ("stage", [str(stage) for stage in range(view.problem.num_stages)]),
        ("predicted F", [duration(row[0]) for row in predicted]),
        ("predicted B", [duration(row[1]) for row in predicted]),
        ("measured F", [duration(row[0]) for row in measured]),
        ("measured B", [duration(row[1]) for row in measured]),
        ("error", [format_change(sum(p) / sum(m) - 1) for p, m in zip(predicted, measured, strict=False)]),
        *_memory(view),
    ]
    filled = [(name, cells) for name, cells in columns if len(cells) == view.problem.num_stages]
    rows = tuple(zip(*(cells for _, cells in filled), strict=True))
    names = tuple(name for name, _ in filled)
    note = "Time in forwards and backwards of the step that is drawn."
    if measured:
        note += " Error: (predicted - measured) / measured."
    if len(filled) > 6:
        note += " Held: activations, keys and values and their gradients, without weights and working memory."
    return TableView("Time and memory of the stages", names, rows, frozenset(range(1, len(names))), note=note)


def _busy(timeline: Timeline | None) -> list[tuple[float, float]]:
    """Seconds of (F, all else) of every stage; nothing without a timeline."""
    if timeline is None:
        return []
    actions = timeline.actions
    seconds = actions["end_s"] - actions["start_s"]
    count = int(actions["stage"].max()) + 1
    is_forward = actions["kind"] == 0
    forward = np.bincount(actions["stage"][is_forward], seconds[is_forward], count)
    other = np.bincount(actions["stage"][~is_forward], seconds[~is_forward], count)
    return list(zip(forward.tolist(), other.tolist(), strict=True))


def _memory(view: RunView) -> list[tuple[str, list[str]]]:
    """Columns for one stage per rank, where what was held is known."""
    held = [("predicted held", view.predicted_held_bytes), ("measured held", view.measured_held_bytes)]
    return [(name, [format_bytes(size) for size in sizes]) for name, sizes in held]
