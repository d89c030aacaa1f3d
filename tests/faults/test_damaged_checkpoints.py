"""Whatever is damaged in the newest checkpoint, no wrong number is read: the one before is taken where it matters."""

import random
import shutil

import pytest
import torch

from chosen import chosen
from farpipe.engine.agreement import agree
from farpipe.engine.checkpoint.resume import resume
from farpipe.engine.train import make_work
from in_process import run_ranks
from trainings import make_run, state, train

pytestmark = pytest.mark.slow  # starts processes

FILES = ("manifest.json", "rank-0.safetensors", "rank-1.safetensors")
DAMAGES = {
    "a bit is wrong": lambda data, place: data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :],
    "it is cut off": lambda data, place: data[:place],
    "64 bytes are zero": lambda data, place: data[:place] + bytes(len(data[place : place + 64])) + data[place + 64 :],
    "more stands behind it": lambda data, place: data + b"more",
}


@pytest.fixture(scope="module")
def broken_off(text_file, tmp_path_factory):
    """A run that was broken off after its checkpoint of step 4, and what its checkpoints have by step."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    train(make_run(text_file, num_steps=4, checkpoint_every_steps=2), run_dir)
    (run_dir / "summary.json").unlink()
    spec = make_run(text_file, num_steps=6, checkpoint_every_steps=2)
    return spec, run_dir, {step: state(run_dir, spec, step) for step in (2, 4)}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", chosen(FILES, 0, 1))
def test_a_run_goes_on_from_the_newest_good_state_whatever_is_damaged(name, damage, broken_off, tmp_path):
    spec, original, states = broken_off
    places = random.Random(f"{name} {damage}")
    for number, share in enumerate((0.1, 1.0, 1.0)):
        run_dir = tmp_path / str(number)
        shutil.copytree(original, run_dir)
        path = run_dir / "checkpoints" / "step-4" / name
        data = path.read_bytes()
        place = places.randrange(int(len(data) * share))  # one in the table at the beginning, two anywhere
        path.write_bytes(DAMAGES[damage](data, place))
        for start, values in run_ranks(2, lambda peers, run_dir=run_dir: begin(spec, peers, run_dir)):
            assert start.step in (2, 4)
            assert start.step == 2 or name != "manifest.json", place
            for key, read in values.items():
                assert torch.equal(read, states[start.step][key].flatten()), (key, place)


def begin(spec, peers, run_dir):
    """The step at which a rank goes on, and its state then."""
    work = make_work(spec, peers)
    start = resume(spec, work.state(), peers, run_dir, agree(spec, work, peers))
    return start, {piece.name: piece.values.clone() for piece in work.state()}
