"""Schedule: for every rank, the order of its actions. An order, no times, and no communication."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, ClassVar, Final, Self, overload

import numpy as np
from numpy.typing import NDArray

from farpipe.core.document import Document
from farpipe.core.errors import InputError
from farpipe.core.step.action import KINDS, Action, draw_grid
from farpipe.core.step.codes import cell_of, encode, kind_of
from farpipe.core.step.problem import MAX_MICROBATCHES
from farpipe.core.strict import nearest

_KEYS: Final = ("method", "num_microbatches", "ranks")
_PLACE: Final = {kind: place for place, kind in enumerate(KINDS)}

RankOrder = Sequence[Action]
Codes = NDArray[np.int32]
Integers = NDArray[np.signedinteger[Any]]


class CodedOrder(Sequence[Action]):
    """The order of one rank: codes, of which Actions are made when they are asked for."""

    __slots__ = ("codes", "stride")

    def __init__(self, codes: Codes, stride: int) -> None:
        self.codes = codes
        self.stride = stride

    def __len__(self) -> int:
        return int(self.codes.size)

    def __iter__(self) -> Iterator[Action]:
        stages, microbatches = cell_of(self.codes, self.stride)
        kinds = map(KINDS.__getitem__, kind_of(self.codes).tolist())
        return map(Action._make, zip(stages.tolist(), kinds, microbatches.tolist(), strict=True))

    @overload
    def __getitem__(self, place: int) -> Action: ...

    @overload
    def __getitem__(self, place: slice) -> "CodedOrder": ...

    def __getitem__(self, place: int | slice) -> "Action | CodedOrder":
        if isinstance(place, slice):
            return CodedOrder(self.codes[place], self.stride)
        code = int(self.codes[place])
        stage, microbatch = cell_of(code, self.stride)
        return Action(stage, KINDS[kind_of(code)], microbatch)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CodedOrder):
            return NotImplemented
        return self.stride == other.stride and np.array_equal(self.codes, other.codes)

    def __hash__(self) -> int:
        return hash((self.stride, *self.codes.tolist()))

    def __repr__(self) -> str:
        return " ".join(map(str, self))


class Schedule(Document):
    """The order in which every rank does its actions; `method` is the name of what made it.

    Inside it is two arrays, not to be written to. Codes of actions are as in `step.codes`; `stride` is
    `num_microbatches`, or more where an action names a microbatch that is not of the step, which `check` refuses.
    `ranks` shows them as Actions.
    """

    FORMAT: ClassVar[str] = "farpipe/schedule/1"

    num_microbatches: int
    codes: Codes
    """The actions of all ranks, one rank after the other: [num_actions]."""
    begin: Codes
    """Index in `codes` at which each rank's actions begin: [number of ranks + 1]."""
    method: str
    stride: int

    def __init__(self, num_microbatches: int, ranks: Iterable[Iterable[Action]], method: str = "given") -> None:
        orders = [tuple(order) for order in ranks]
        self.num_microbatches, self.method = num_microbatches, method
        stages, kinds, microbatches = _columns(orders)
        self.stride = max(num_microbatches, 1 + int(microbatches.max(initial=0)))
        codes = encode(kinds, stages * self.stride + microbatches)
        self.codes = codes if codes.max(initial=0) > np.iinfo(np.int32).max else codes.astype(np.int32)
        self.begin = np.cumsum([0, *map(len, orders)], dtype=np.int32)

    @classmethod
    def from_codes(cls, num_microbatches: int, codes: Integers, begin: Integers, method: str) -> Self:
        """The schedule of these arrays, whose stride is `num_microbatches`."""
        schedule = cls.__new__(cls)
        schedule.num_microbatches, schedule.stride, schedule.method = num_microbatches, num_microbatches, method
        schedule.codes, schedule.begin = codes.astype(np.int32, copy=False), begin.astype(np.int32, copy=False)
        return schedule

    def renamed(self, method: str) -> Self:
        """The same order under another name."""
        schedule = self.from_codes(self.num_microbatches, self.codes, self.begin, method)
        schedule.codes, schedule.stride = self.codes, self.stride
        return schedule

    @cached_property
    def ranks(self) -> tuple[CodedOrder, ...]:
        """Actions of every rank in their order."""
        return tuple(CodedOrder(self.codes[start:end], self.stride) for start, end in pairwise(self.begin.tolist()))

    @property
    def num_ranks(self) -> int:
        """Number of ranks that have an order."""
        return int(self.begin.size - 1)

    @property
    def num_actions(self) -> int:
        """Actions on all ranks together."""
        return int(self.codes.size)

    def to_body(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "num_microbatches": self.num_microbatches,
            "ranks": [[str(action) for action in order] for order in self.ranks],
        }

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
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
        return cls(count, (_parse_order(order, f"{source}: ranks[{i}]") for i, order in enumerate(ranks)), method)

    @classmethod
    def from_text(cls, rows: Iterable[str], num_microbatches: int, method: str = "given") -> Self:
        """Build from one line per rank of actions separated by blanks: ``"0F0 0F1 0B0 0B1"``."""
        return cls(num_microbatches, (map(Action.parse, row.split()) for row in rows), method)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        mine, others = (self.num_microbatches, self.method), (other.num_microbatches, other.method)
        return mine == others and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash((self.num_microbatches, self.method, self.ranks))

    def __repr__(self) -> str:
        head = f"Schedule {self.method!r}: {self.num_ranks} ranks, {self.num_microbatches} microbatches"
        return f"{head}\n{draw_grid(self.ranks)}"

    __str__ = __repr__


def _columns(orders: Sequence[Sequence[Action]]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(stages, places of kinds, microbatches) of all actions, one rank after the other."""
    stages, kinds, microbatches = zip(*chain.from_iterable(orders), strict=True) if any(orders) else ((), (), ())
    places = [_PLACE[kind] for kind in kinds]
    return np.array(stages, np.int64), np.array(places, np.int64), np.array(microbatches, np.int64)


def _parse_order(order: Any, source: str) -> list[Action]:
    if not isinstance(order, list):
        raise InputError(f"{source}: expected a list of actions, found {order!r}")
    actions = []
    for index, text in enumerate(order):
        try:
            actions.append(Action.parse(text))
        except InputError as error:
            raise InputError(f"{source}[{index}]: {error}") from None
    return actions
