"""A schedule drawn as a grid of text, with an arrow where something is wrong."""

from collections.abc import Sequence

from farpipe.step.action import Action

MAX_ROWS = 16
MAX_COLUMNS = 14


def draw_grid(ranks: Sequence[Sequence[Action]], mark: tuple[int, int] | None = None) -> str:
    """One line per rank, one column per position; `mark` = (rank, position) gets an arrow below it.

    Only a window of MAX_COLUMNS columns and MAX_ROWS rows around the mark is drawn; ``..`` says that there is more.
    """
    rank, position = mark or (0, 0)
    rows = _window(rank, len(ranks), MAX_ROWS)
    longest = max((len(order) for order in ranks), default=0)
    columns = _window(position, max(longest, position + 1), MAX_COLUMNS)
    cells = {r: [str(a) for a in ranks[r][columns.start : columns.stop]] for r in rows}
    size = max((len(cell) for row in cells.values() for cell in row), default=3)
    lines = [".."] if rows.start > 0 else []
    for r in rows:
        before = ".. " if columns.start > 0 else ""
        after = " .." if len(ranks[r]) > columns.stop else ""
        head = f"rank {r}: {before}"
        lines.append(head + " ".join(cell.ljust(size) for cell in cells[r]).rstrip() + after)
        if mark is not None and r == rank:
            lines.append(" " * (len(head) + (position - columns.start) * (size + 1)) + "^" * size)
    return "\n".join([*lines, ".."] if rows.stop < len(ranks) else lines)


def _window(centre: int, total: int, width: int) -> range:
    start = max(0, min(centre - width // 2, total - width))
    return range(start, min(total, start + width))
