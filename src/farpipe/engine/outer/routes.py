"""Who sends which boxes of which parameters to whom, where sites have divided the same model in ways of their own."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from farpipe.core.errors import InputError
from farpipe.engine.checkpoint.boxes import Box, common, sizes_of, without


class Held(NamedTuple):
    """A box of a parameter that a process has."""

    name: str
    box: Box


Holdings = Sequence[Held]
"""What one process has, in the order of the whole model."""


class Part(NamedTuple):
    """A box of what a process has or owns."""

    number: int
    """Number of the whole among the process's own."""
    box: Box


class Route(NamedTuple):
    """What goes to or comes from one process, in the order in which it lies in the message."""

    process: int
    parts: tuple[Part, ...]


def owned(site: Sequence[Holdings]) -> list[list[Held]]:
    """What each process of a site owns: of all that have an element, the first.

    So each element crosses between two sites once, however many replicas a site has.
    """
    taken: dict[str, list[Box]] = {}
    found = []
    for holdings in site:
        mine = [Held(name, box) for name, whole in holdings for box in _rest(whole, taken.get(name, ()))]
        for name, box in mine:
            taken.setdefault(name, []).append(box)
        found.append(mine)
    return found


def _rest(whole: Box, holes: Sequence[Box]) -> list[Box]:
    """Boxes with the elements of `whole` that are in none of `holes`."""
    boxes = [whole]
    for hole in holes:
        boxes = [part for box in boxes for part in _less(box, hole)]
    return boxes


def _less(box: Box, hole: Box) -> Iterator[Box]:
    both = common(box, hole)
    return iter([box]) if both is None else without(box, both)


def routes(mine: Holdings, others: Mapping[int, Holdings], names: Collection[str], *, out: bool) -> list[Route]:
    """Routes to (`out`) or from `others`, by their numbers, of the parameters in `names`: all that is in both.

    Both ends find the same parts in the same order, that of the sender.
    """
    found = []
    for process, theirs in others.items():
        pairs = _shared(mine, theirs, names) if out else ((j, i, box) for i, j, box in _shared(theirs, mine, names))
        parts = tuple(Part(own, box) for own, _, box in pairs)
        found += [Route(process, parts)] if parts else []
    return found


def _shared(source: Holdings, target: Holdings, names: Collection[str]) -> Iterator[tuple[int, int, Box]]:
    """(number in `source`, number in `target`, the elements of both)."""
    at: dict[str, list[int]] = {}
    for number, held in enumerate(target):
        at.setdefault(held.name, []).append(number)
    for number, (name, box) in enumerate(source):
        for other in at.get(name, ()) if name in names else ():
            if (both := common(box, target[other].box)) is not None:
                yield number, other, both


def expect_one_model(sites: Mapping[str, Sequence[Holdings]]) -> None:
    """InputError unless all sites have the same elements of the same parameters."""
    sizes = {site: _sizes(owned(holdings)) for site, holdings in sites.items()}
    (first, expected), *others = sizes.items()
    for site, found in others:
        if found != expected:
            odd = sorted({name for name, _ in found.items() ^ expected.items()})
            raise InputError(f"{first} and {site} do not train one model: they differ in {', '.join(odd[:3])}")


def _sizes(processes: Sequence[Holdings]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, box in (held for holdings in processes for held in holdings):
        found[name] = found.get(name, 0) + prod(sizes_of(box))
    return found
