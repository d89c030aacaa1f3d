"""Pieces of checkpoints as boxes and as runs of flattened tensors: any division reads any other, to the last bit."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InputError
from farpipe.engine.checkpoint.boxes import boxes_of_run, common, within, without
from farpipe.engine.checkpoint.files import Checkpoint, Piece
from farpipe.engine.checkpoint.manifest import Manifest, Trained
from small_models import TIED
from snapshots import write_tensors

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_a_run_is_its_boxes_in_order(shape, data):
    flat = torch.arange(math.prod(shape))
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(flat))] * 2)))
    whole = tuple((0, size) for size in shape)
    parts = [flat.view(shape)[within(whole, box)].reshape(-1) for box in boxes_of_run(shape, start, end)]
    assert torch.equal(torch.cat([*parts, flat[:0]]), flat[start:end])
    assert len(parts) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.data())
def test_a_box_is_what_it_has_in_common_with_another_and_the_rest(shape, data):
    box, other = (tuple(tuple(sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))) for n in shape) for _ in range(2))
    if (both := common(box, other)) is None:
        return
    count, whole = torch.zeros(shape), tuple((0, size) for size in shape)
    for part in (both, *without(box, both)):
        count[within(whole, part)] += 1
    expected = torch.zeros(shape)
    expected[within(whole, box)] = 1
    assert torch.equal(count, expected)


def pieces(values, cut):
    """The tensor `values` [rows, columns] as a grid of boxes, or as runs, of lengths that `cut` gives."""
    kind, first, second = cut
    if kind == "runs":
        flat, bounds = values.view(-1), sorted({0, first, second, values.numel()})
        bounds = [bound for bound in bounds if bound <= values.numel()]
        return [
            Piece("weight/w", tuple(values.shape), start, flat[start:end].clone())
            for start, end in itertools.pairwise(bounds)
        ]
    found, row = [], 0
    for rows in values.split(first):
        column = 0
        for box in rows.split(second, dim=1):
            found.append(Piece("weight/w", tuple(values.shape), 0, box.clone(), offset=(row, column)))
            column += box.shape[1]
        row += len(rows)
    return found


cuts = st.tuples(st.sampled_from(["runs", "boxes"]), st.integers(1, 30), st.integers(1, 30))


def written(folder, found):
    """A checkpoint in which every piece is in a file of its own."""
    files = [write_tensors(folder, rank, "zurich", {piece.key: piece.stored}) for rank, piece in enumerate(found)]
    trained = Trained(model=TIED, sequence_length=8, global_batch=2, seed=0)
    manifest = Manifest(step=1, farpipe="0", trained=trained, batches_sha256="", files=tuple(files))
    return Checkpoint(folder, manifest)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 6), st.integers(2, 6), cuts, cuts)
def test_what_was_written_under_one_division_is_read_under_any_other(tmp_path_factory, rows, columns, cut, other):
    values = torch.randn(rows, columns)
    checkpoint = written(tmp_path_factory.mktemp("checkpoint"), pieces(values, cut))
    wanted = pieces(torch.full_like(values, torch.nan), other)
    checkpoint.fill(wanted)
    for piece, expected in zip(wanted, pieces(values, other), strict=True):
        assert torch.equal(piece.values, expected.values)


def test_a_box_that_is_missing_is_named(tmp_path):
    checkpoint = written(tmp_path, pieces(torch.randn(4, 4), ("boxes", 2, 2))[1:])
    with pytest.raises(InputError, match=r"has no weight/w of shape \[4, 4\]"):
        checkpoint.fill([Piece("weight/w", (4, 4), 0, torch.empty(16))])


def test_a_box_with_other_dimensions_than_its_tensor_is_damage(tmp_path):
    checkpoint = written(tmp_path, [Piece("weight/w", (4, 4), 0, torch.ones(2, 2), offset=(0, 0))])
    with pytest.raises(InputError, match=r"rank-0.safetensors: damaged: weight/w@0,0 is no piece of a tensor"):
        checkpoint.fill([Piece("weight/w", (2, 2, 2), 0, torch.empty(8))])
