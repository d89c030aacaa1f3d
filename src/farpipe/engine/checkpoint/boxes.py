"""Boxes of a tensor's elements, a range per dimension: what a process has of a tensor that is divided along several."""

from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[tuple[int, int], ...]
"""(start, end) of every dimension."""


def box_at(offset: Sequence[int], sizes: Sequence[int]) -> Box:
    """The box with this number of elements along every dimension, the first of them at `offset`."""
    return tuple((start, start + size) for start, size in zip(offset, sizes, strict=True))


def sizes_of(box: Box) -> tuple[int, ...]:
    """Number of elements along every dimension."""
    return tuple(end - start for start, end in box)


def common(one: Box, other: Box) -> Box | None:
    """The elements that are in both; None if there are none."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(start < end for start, end in found) else None


def without(box: Box, hole: Box) -> Iterator[Box]:
    """Yield disjoint boxes that together have the elements of `box` that are not in `hole`, which is inside it."""
    for axis, ((start, end), (first, last)) in enumerate(zip(box, hole, strict=True)):
        for part in ((start, first), (last, end)):
            if part[0] < part[1]:
                yield (*hole[:axis], part, *box[axis + 1 :])


def within(box: Box, inner: Box) -> tuple[slice, ...]:
    """The place of `inner` in a tensor that has the elements of `box`."""
    return tuple(slice(first - start, last - start) for (start, _), (first, last) in zip(box, inner, strict=True))


def boxes_of_run(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """The boxes, in order, of a run of the flattened tensor's elements: the end of a row, whole rows, a beginning."""
    if start >= end:
        return []
    if len(shape) < 2:
        return [((start, end),)] if shape else [()]
    row = prod(shape[1:])
    if start // row == (end - 1) // row and end - start < row:  # a part of one row
        return _in_row(shape, start // row, start % row, start % row + end - start)
    first, last = -(-start // row), end // row
    found = _in_row(shape, start // row, start % row, row) if start % row else []
    if first < last:
        found.append(((first, last), *((0, size) for size in shape[1:])))
    return found + (_in_row(shape, last, 0, end % row) if end % row else [])


def _in_row(shape: Sequence[int], row: int, start: int, end: int) -> list[Box]:
    return [((row, row + 1), *rest) for rest in boxes_of_run(shape[1:], start, end)]
