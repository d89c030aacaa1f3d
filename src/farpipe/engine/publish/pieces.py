"""Whole tensors out of the pieces of all processes, by boxes as checkpoints have them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from farpipe.core.errors import InputError
from farpipe.engine.checkpoint.boxes import Box, box_at, boxes_of_run, common, within, without
from farpipe.engine.publish.version import TORCH_TYPES, PartForm, PieceForm, Version, as_weights


def boxes_of(piece: PieceForm) -> list[Box]:
    """The boxes of the whole tensor that a piece has, in the order of its elements."""
    if len(piece.offset) == 1:
        return boxes_of_run(piece.shape, piece.offset[0], piece.offset[0] + piece.num_elements)
    return [box_at(piece.offset, piece.sizes)]


def expect_whole(forms: Sequence[PartForm], where: str) -> None:
    """InputError unless the pieces of all processes cover every tensor, inside its shape."""
    if len({form.weight_type for form in forms}) > 1:
        raise InputError(f"{where}: its processes publish weights of different types")
    by_name: dict[str, list[PieceForm]] = defaultdict(list)
    for form in forms:
        for piece in form.pieces:
            by_name[piece.name].append(piece)
    if not by_name:
        raise InputError(f"{where}: publishes no weights")
    for name, pieces in by_name.items():
        shape = pieces[0].shape
        if any(piece.shape != shape or not _fits(piece) for piece in pieces):
            raise InputError(f"{where}: the pieces of {name} do not fit together")
        left: list[Box] = [tuple((0, size) for size in shape)]
        for box in (box for piece in pieces for box in boxes_of(piece)):
            left = [rest for one in left for rest in _less(one, box)]
        if left and 0 not in shape:
            raise InputError(f"{where}: no process publishes {left[0]} of {name}, whose shape is {list(shape)}")


def _fits(piece: PieceForm) -> bool:
    """True if a piece lies inside its tensor."""
    if len(piece.offset) == 1 == len(piece.sizes):
        return piece.offset[0] + piece.sizes[0] <= prod(piece.shape)
    sizes = zip(piece.offset, piece.sizes, piece.shape, strict=True)
    return len(piece.offset) == len(piece.sizes) == len(piece.shape) and all(a + n <= whole for a, n, whole in sizes)


def _less(box: Box, hole: Box) -> list[Box]:
    inner = common(box, hole)
    return [box] if inner is None else [*without(box, inner)]


def assembled(parts: Iterable[tuple[PartForm, Version]]) -> dict[str, Tensor]:
    """All tensors by name; one that a single process has is a view of its version."""
    found: dict[str, Tensor] = {}
    for form, version in parts:
        flat, start = as_weights(version.values, form.weight_type), 0
        for piece in form.pieces:
            values = flat[start : start + piece.num_elements]
            start += piece.num_elements
            if piece.num_elements == prod(piece.shape):
                found[piece.name] = values.view(piece.shape)
                continue
            whole = found.setdefault(piece.name, torch.empty(piece.shape, dtype=TORCH_TYPES[form.weight_type]))
            _fill(whole, piece, values)
    return found


def _fill(whole: Tensor, piece: PieceForm, values: Tensor) -> None:
    box_of_all: Box = tuple((0, size) for size in piece.shape)
    for box in boxes_of(piece):
        sizes = [end - start for start, end in box]
        whole[within(box_of_all, box)] = values[: prod(sizes)].view(sizes)
        values = values[prod(sizes) :]
