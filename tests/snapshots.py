"""Tensors that are ready to be written to a checkpoint."""

from farpipe.engine.checkpoint.snapshot import Pieces, Snapshot
from farpipe.engine.checkpoint.writing import write_file


def filled(tensors):
    """A snapshot of `tensors`."""
    snapshot = Snapshot(tensors, Pieces(pinned=False))
    snapshot.fill()
    return snapshot


def write_tensors(folder, rank, site, tensors):
    """`write_file` of them."""
    return write_file(folder, rank, site, filled(tensors))
