"""A rank's state on its way to the disk: in memory with a bound, page-locked where a GPU copies to it."""

import threading

import pytest
import torch

from farpipe.core.errors import RunError
from farpipe.engine.checkpoint import snapshot as module
from farpipe.engine.checkpoint.files import digest
from farpipe.engine.checkpoint.snapshot import Pieces, Snapshot
from farpipe.engine.checkpoint.writing import write_file
from late_gpu import INDEX, LIMIT_S, LateGpu
from snapshots import write_tensors
from waiting import wait_until

TENSORS = {
    "weight/a": torch.randn(5, 7),
    "weight/half": torch.randn(3).bfloat16(),
    "weight/none": torch.zeros(0),
    "weight/one": torch.tensor(2.5),
    "exp_avg/b": torch.randn(11, dtype=torch.float64),
}


@pytest.mark.parametrize("piece_bytes", [8, 24, 1 << 20])
def test_files_are_safetensors_with_a_digest_of_every_tensor(tmp_path, monkeypatch, piece_bytes):
    from safetensors import safe_open

    monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    write_tensors(tmp_path, 0, "here", TENSORS)
    with safe_open(tmp_path / "rank-0.safetensors", "pt") as file:
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        digests = file.metadata()
    assert set(found) == set(TENSORS)
    for key, tensor in TENSORS.items():
        assert torch.equal(found[key], tensor)
        assert found[key].dtype == tensor.dtype
        assert digests[key] == digest(tensor)


def test_what_changes_after_the_snapshot_is_not_in_the_file(tmp_path):
    live = torch.ones(100)
    snapshot = Snapshot({"weight/a": live}, Pieces(pinned=False))
    snapshot.fill()
    live.zero_()
    assert [bool((values == 1).all()) for _, values in snapshot.slices()] == [True]


def test_of_a_state_that_is_larger_than_the_bound_the_rest_waits_for_the_disk(monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 80)
    made, pieces, live = [], Pieces(pinned=False), torch.arange(200.0)
    host_tensor = module.host_tensor
    monkeypatch.setattr(module, "host_tensor", lambda *args, **kw: made.append(1) or host_tensor(*args, **kw))
    snapshot = Snapshot({"weight/a": live}, pieces, limit_bytes=240)
    filling = threading.Thread(target=snapshot.fill, daemon=True)
    filling.start()
    wait_until(lambda: len(made) == 3, "three pieces")
    filling.join(0.1)
    assert filling.is_alive(), "240 bytes are full"
    found = torch.cat([values.clone() for _, values in snapshot.slices()])
    filling.join(LIMIT_S)
    assert torch.equal(found, live)
    assert pieces._num_lent == 0


def test_nobody_waits_for_a_file_that_can_t_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 80)
    pieces = Pieces(pinned=False)
    snapshot = Snapshot({"weight/a": torch.arange(200.0)}, pieces, limit_bytes=0)
    filling = threading.Thread(target=snapshot.fill, daemon=True)
    filling.start()
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="can't be written: Not a directory"):
        write_file(tmp_path / "file" / "folder", 0, "here", snapshot)
    snapshot.end()
    filling.join(LIMIT_S)
    assert not filling.is_alive()
    assert pieces._num_lent == 0, "there is room for the next one"


def test_numbers_that_are_not_finite_leave_no_file(tmp_path):
    with pytest.raises(RunError, match="weight/a has numbers that are not finite"):
        write_tensors(tmp_path, 0, "here", {"weight/a": torch.tensor([1.0, torch.inf])})
    assert not [*tmp_path.iterdir()]


def test_a_gpu_copies_to_page_locked_pieces_that_are_used_again():
    """The computing thread does not wait for the copies; whoever writes does, and on the right GPU."""
    with LateGpu() as gpu:
        gpu.computing.eager = False
        pieces, seen = Pieces(pinned=True, cuda=gpu), []
        for step in range(2):
            flat = torch.full((8,), float(step))
            snapshot = Snapshot({"weight/a": OnGpu.of(flat[:6])}, pieces)
            snapshot.fill()
            assert gpu.computing.waiting, "not copied yet"
            gpu.set_device(0)  # as in a new thread
            for _, values in snapshot.slices():
                assert gpu.device_of_thread() == INDEX
                assert values.tolist() == [float(step)] * 6
                seen.append(values.data_ptr())
            gpu.set_device(INDEX)
        assert seen[0] == seen[1]


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @classmethod
    def of(cls, tensor):
        return tensor.as_subclass(cls)

    @property
    def is_cuda(self):
        return True
