"""Checkpoints of stages that are divided over processes of a site, read under any other division."""

import random
import shutil

import pytest

from farpipe.core.errors import InputError
from site_checkpoints import DIVISIONS, whole_state
from site_processes import run_processes

pytestmark = pytest.mark.slow  # starts processes


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Folder with a checkpoint by each division, each from the one before, and what differed."""
    folder = tmp_path_factory.mktemp("checkpoints")
    (found,) = run_processes(4, [("checkpoints", str(folder), {})])
    return folder, found


def test_weights_and_moments_are_bit_equal_under_one_division_after_the_other(written):
    folder, found = written
    assert found == {label: [] for label in DIVISIONS}
    files = {label: len(list((folder / label).glob("rank-*.safetensors"))) for label in DIVISIONS}
    assert files["tensor 2 x FSDP 2"] == files["FSDP 4"] == files["four stages"] == 4
    assert files["one process"] == 1


@pytest.mark.parametrize("label", ["tensor 2 x FSDP 2", "FSDP 4"])
def test_damaged_boxes_are_refused_with_the_files_name(written, label, tmp_path):
    places = random.Random(label)
    for rank in range(4):
        folder = tmp_path / f"{rank}"
        shutil.copytree(written[0] / label, folder)
        path = folder / f"rank-{rank}.safetensors"
        data = bytearray(path.read_bytes())
        data[places.randrange(len(data) // 2, len(data))] ^= 4
        path.write_bytes(data)
        with pytest.raises(InputError, match=rf"{path.name}: damaged: .* is not what was written"):
            whole_state(folder)
