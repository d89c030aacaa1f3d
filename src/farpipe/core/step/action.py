"""The one thing that a rank does at a time: an Action, written ``{stage}{F|I|W|B}{microbatch}``, and grids of them."""

import re
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, cast

from farpipe.core.errors import InputError

Kind = Literal["F", "I", "W", "B"]
"""F forward, I gradient of the input, W gradient of the weights, B both at once.

The letters are torch.distributed.pipelining's; R (recompute ahead of the backward) is kept free for later.
"""

KINDS: Final[tuple[Kind, ...]] = ("F", "I", "W", "B")

_ACTION = re.compile(r"(0|[1-9][0-9]{0,8})([FIWB])(0|[1-9][0-9]{0,8})")


class Action(NamedTuple):
    """One computation of one stage for one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read the text form; InputError for anything else."""
        match = _ACTION.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InputError(f"expected an action such as '0F0' or '3W12', found {text!r}")
        stage, kind, microbatch = match.groups()
        return cls(int(stage), cast(Kind, kind), int(microbatch))


def awaited(action: Action, num_stages: int) -> tuple[int, Literal["F", "backward"], int] | None:
    """Work of another stage that an action waits for, as (stage, "F" or "backward", microbatch); None: nothing."""
    stage, kind, microbatch = action
    if kind == "F":
        return (stage - 1, "F", microbatch) if stage > 0 else None
    if kind in "IB":
        return (stage + 1, "backward", microbatch) if stage + 1 < num_stages else None
    return None


def handed_to(action: Action, num_stages: int) -> int | None:
    """The stage whose action needs what this one makes (see `awaited`); None: only its own stage."""
    stage = action.stage + 1 if action.kind == "F" else action.stage - 1
    return stage if action.kind != "W" and 0 <= stage < num_stages else None


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
