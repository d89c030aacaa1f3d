"""Tables: text in rows and columns, and its layout for the width that a terminal has.

Nothing is ever cut within a word. Where a table is too wide, its texts are broken over lines; if that is not enough, a
table of few rows is turned, so that its columns become lines, and one of many rows leaves out some columns and says
which.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

MAX_TURNED: Final = 4
"""Rows of a table that may be turned: they become columns."""
_READABLE: Final = 20
"""A column of sentences is not made narrower than this many letters."""
_EDGES: Final = 2
_BETWEEN: Final = 3
"""Letters that the terminal's table takes besides its cells: at both edges, and between two columns."""


@dataclass(frozen=True)
class TableView:
    """A table as text; columns whose index is in `numbers` are aligned to the right, row `chosen` stands out.

    Where a terminal is too narrow for all columns, those of `expendable` are left out first, in that order.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()
    chosen: int | None = None
    note: str = ""
    expendable: tuple[int, ...] = ()
    bars: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(column, lengths from 0 to 1 of the bars that a page draws in its cells)."""


@dataclass(frozen=True)
class FittedTable:
    """A TableView that rich lays out for the width of its console; brackets in its text are shown as they are."""

    view: TableView

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> Iterator["RenderableType"]:
        from rich.text import Text

        view = fitted(self.view, options.max_width)
        if view.title:
            yield Text(view.title, "bold")
        yield _table(view, _widths(view, options.max_width))
        if view.note:
            yield Text(f"{view.note}\n")


def to_rich(view: TableView) -> FittedTable:
    """The table for a terminal of any width."""
    return FittedTable(view)


def bar_lengths(values: Sequence[float]) -> tuple[float, ...]:
    """Lengths of bars for `values`, the greatest as 1."""
    most = max(values, default=0.0)
    return tuple(value / most if most > 0 else 0.0 for value in values)


def as_text(view: TableView, width: int = 140) -> str:
    """The table as plain text, for `print` in Python."""
    from rich.console import Console

    text = StringIO()
    Console(file=text, width=width, highlight=False, color_system=None).print(to_rich(view))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).rstrip()


def fitted(view: TableView, width: int) -> TableView:
    """`view` itself where it fits in `width` letters, else turned, else without its last columns."""
    if _least_width(view) <= width:
        return view
    sideways = turned(view)
    if len(view.rows) <= MAX_TURNED and _least_width(sideways) <= width:
        return sideways
    kept = list(range(len(view.columns)))
    for index in (*view.expendable, *(i for i in reversed(kept) if i not in view.expendable)):
        if len(kept) == 2 or _least_width(_only(view, kept)) <= width:
            break
        kept.remove(index)
    left_out = ", ".join(name for index, name in enumerate(view.columns) if index not in kept)
    left = f"Not shown at this width: {left_out}."
    return replace(_only(view, kept), note=f"{left}\n{view.note}" if view.note else left)


def turned(view: TableView) -> TableView:
    """Rows as columns: the names of the rows become the head, the names of the columns the first column."""
    rows = tuple(zip(view.columns, *view.rows, strict=True))
    return TableView(view.title, rows[0], rows[1:], frozenset(range(1, len(rows[0]))), note=view.note)


def _only(view: TableView, kept: Sequence[int]) -> TableView:
    """`view` with the columns `kept` alone."""
    rows = tuple(tuple(row[index] for index in kept) for row in view.rows)
    numbers = frozenset(place for place, index in enumerate(kept) if index in view.numbers)
    return replace(view, columns=tuple(view.columns[index] for index in kept), rows=rows, numbers=numbers)


def _columns(view: TableView) -> Iterator[tuple[int, int]]:
    """(least width, width without a break) of every column."""
    for index, name in enumerate(view.columns):
        cells = [row[index] for row in view.rows]
        whole = max(_longest_line(text) for text in (name, *cells))
        words = max(len(word) for text in (name, *cells) for word in text.split() or [""])
        if index in view.numbers:
            words = max([words, *map(_longest_line, cells)])
        yield min(whole, max(words, 0 if index in view.numbers else _READABLE)), whole


def _longest_line(text: str) -> int:
    return max((len(line) for line in text.splitlines()), default=0)


def _least_width(view: TableView) -> int:
    return sum(least for least, _ in _columns(view)) + _frame(view)


def _frame(view: TableView) -> int:
    return _EDGES * 2 + _BETWEEN * (len(view.columns) - 1)


def _widths(view: TableView, width: int) -> list[int]:
    """The width of every column: what is left beyond the least is shared evenly by those that can use it."""
    sizes = list(_columns(view))
    widths = [least for least, _ in sizes]
    spare = width - _frame(view) - sum(widths)
    hungry = [index for index, (least, whole) in enumerate(sizes) if whole > least]
    while spare > 0 and hungry:
        for index in hungry[:spare]:
            widths[index] += 1
        spare -= len(hungry[:spare])
        hungry = [index for index in hungry if widths[index] < sizes[index][1]]
    return widths


def _table(view: TableView, widths: Sequence[int]) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for index, (name, width) in enumerate(zip(view.columns, widths, strict=True)):
        table.add_column(Text(name), justify="right" if index in view.numbers else "left", width=width)
    for index, row in enumerate(view.rows):
        table.add_row(*(Text(cell) for cell in row), style="bold" if index == view.chosen else None)
    return table


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of figures as CSV, under the names that they have as JSON: what is unknown is empty, a list one text, and
    maps are left out. The columns are those of the first row and then of later ones."""
    names = {name: None for row in rows for name, value in row.items() if not isinstance(value, Mapping)}
    text = StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: "; ".join(map(str, it)) if isinstance(it, list) else it for name, it in row.items()})
    return text.getvalue()
