"""The histogram of a corpus' lengths: how many sequences, and how many of the tokens, are how long."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.report.axis import Scale
from farpipe.report.figure import Block, Figure
from farpipe.report.markup import Markup, join, tag

Floats = NDArray[np.float64]

_WIDTH: Final = 720.0
_HEIGHT: Final = 200.0
_LEFT: Final = 44.0
_TOP: Final = 40.0


def draw_lengths(edges: Floats, sequences: Floats, tokens: Floats, title: str) -> Figure:
    """Two bars for every range of lengths: share of the sequences, and of the tokens; arrays of `summary.histogram`."""
    across = Scale(float(np.log2(edges[0])), float(np.log2(edges[-1])), _LEFT, _WIDTH)
    top = max(float(sequences.max()), float(tokens.max()), 1e-9)
    up = Scale(0.0, top, _TOP + _HEIGHT, _TOP)
    bars = [
        part
        for index in range(sequences.size)
        for part in _bars(across, up, edges[index : index + 2], (float(sequences[index]), float(tokens[index])))
    ]
    body = join([_legend(title), _shares(up, top), *bars, _powers(across, edges)])
    text = "Share of the sequences and of the tokens by the length of the sequence, which doubles from mark to mark."
    return Figure("lengths", title, text, _WIDTH + 8, Block(body, _TOP + _HEIGHT + 36))


def _bars(across: Scale, up: Scale, edges: Floats, shares: tuple[float, float]) -> list[Markup]:
    low, high = (across(float(np.log2(edge))) for edge in edges)
    width = (high - low - 2) / 2
    return [
        tag("rect", x=low + 1 + i * width, y=up(share), width=max(width, 0.5), height=up(0.0) - up(share),
            style=f"fill:var(--run{i})")
        for i, share in enumerate(shares)
        if share > 0
    ]  # fmt: skip


def _legend(title: str) -> Markup:
    marks = [
        join([
            tag("rect", x=_LEFT + 130.0 * i, y=20.0, width=10.0, height=10.0, style=f"fill:var(--run{i})"),
            tag("text", label, x=_LEFT + 130.0 * i + 15, y=29.0),
        ])
        for i, label in enumerate(("of sequences", "of tokens"))
    ]  # fmt: skip
    return join([tag("text", title, x=_LEFT, y=12.0, class_="head"), *marks])


def _shares(up: Scale, top: float) -> Markup:
    marks = [top * i / 4 for i in range(5)]
    return join(
        part
        for value in marks
        for part in (
            tag("line", x1=_LEFT, x2=_WIDTH, y1=up(value), y2=up(value), style="stroke:var(--line)"),
            tag("text", f"{value:.0%}", x=_LEFT - 6, y=up(value) + 4, class_="end muted"),
        )
    )


def _powers(across: Scale, edges: Floats) -> Markup:
    powers = range(int(np.log2(edges[0])), int(np.log2(edges[-1])) + 1)
    labels = [
        tag("text", _tokens(1 << p), x=across(float(p)), y=_TOP + _HEIGHT + 16, class_="mid muted") for p in powers
    ]
    middle = (_LEFT + _WIDTH) / 2
    return join([*labels, tag("text", "tokens of a sequence", x=middle, y=_TOP + _HEIGHT + 32, class_="mid")])


def _tokens(count: int) -> str:
    """``512``, ``4K``, ``1M``."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count >= size:
            return f"{count // size}{unit}"
    return str(count)
