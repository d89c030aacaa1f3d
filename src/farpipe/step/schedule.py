"""Schedule: for every rank, the order of its actions. An order, no times, and no communication."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from farpipe.errors import InputError
from farpipe.step.action import Action
from farpipe.step.grid import draw_grid
from farpipe.step.problem import MAX_MICROBATCHES
from farpipe.strict import expect_format, nearest, parse_json, read_text, write_text

FORMAT: Final = "farpipe/schedule/1"
_KEYS: Final = ("method", "num_microbatches", "ranks")

RankOrder = tuple[Action, ...]


@dataclass(frozen=True, repr=False)
class Schedule:
    """Who does what in which order; `method` is the name of what made it."""

    num_microbatches: int
    ranks: tuple[RankOrder, ...]
    method: str = "given"

    @property
    def num_actions(self) -> int:
        """Actions on all ranks together."""
        return sum(len(order) for order in self.ranks)

    def to_data(self) -> dict[str, Any]:
        """The schedule as JSON data in the format ``farpipe/schedule/1``."""
        return {
            "format": FORMAT,
            "method": self.method,
            "num_microbatches": self.num_microbatches,
            "ranks": [[str(action) for action in order] for order in self.ranks],
        }

    def save(self, path: Path | str) -> None:
        """Write the schedule to `path`, whole or not at all."""
        write_text(path, json.dumps(self.to_data()) + "\n")

    @classmethod
    def from_data(cls, data: Any, source: str = "schedule") -> "Schedule":
        """Read JSON data; InputError names the rank and the place of whatever is wrong."""
        body = expect_format(data, FORMAT, source)
        for key in body:
            if key not in _KEYS:
                raise InputError(f"{source}: {key}: unknown key{nearest(key, _KEYS)}")
        for key in _KEYS:
            if key not in body:
                raise InputError(f"{source}: {key}: missing")
        method, count, ranks = (body[key] for key in _KEYS)
        if not isinstance(method, str):
            raise InputError(f"{source}: method: expected a name, found {method!r}")
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_MICROBATCHES:
            raise InputError(
                f"{source}: num_microbatches: expected a whole number from 1 to {MAX_MICROBATCHES}, found {count!r}"
            )
        if not isinstance(ranks, list) or not ranks:
            raise InputError(f"{source}: ranks: expected a list with one list of actions per rank")
        return cls(count, tuple(_parse_order(o, f"{source}: ranks[{i}]") for i, o in enumerate(ranks)), method)

    @classmethod
    def from_json(cls, text: str, source: str = "schedule") -> "Schedule":
        """Read ``farpipe/schedule/1`` from JSON text."""
        return cls.from_data(parse_json(text, source), source)

    @classmethod
    def load(cls, path: Path | str) -> "Schedule":
        """Read a schedule file."""
        return cls.from_json(read_text(path), str(path))

    @classmethod
    def from_text(cls, rows: Iterable[str], num_microbatches: int, method: str = "given") -> "Schedule":
        """Build from one line per rank of actions separated by blanks: ``"0F0 0F1 0B0 0B1"``."""
        return cls(num_microbatches, tuple(tuple(map(Action.parse, row.split())) for row in rows), method)

    def __repr__(self) -> str:
        head = f"Schedule {self.method!r}: {len(self.ranks)} ranks, {self.num_microbatches} microbatches"
        return f"{head}\n{draw_grid(self.ranks)}"

    __str__ = __repr__


def _parse_order(order: Any, source: str) -> RankOrder:
    if not isinstance(order, list):
        raise InputError(f"{source}: expected a list of actions, found {order!r}")
    actions = []
    for index, text in enumerate(order):
        try:
            actions.append(Action.parse(text))
        except InputError as error:
            raise InputError(f"{source}[{index}]: {error}") from None
    return tuple(actions)
