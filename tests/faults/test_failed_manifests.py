"""A disk that has room for a checkpoint's files but not for its manifest: the checkpoint of the others stays good."""

import threading

import pytest

from farpipe.core.errors import RunError
from farpipe.engine.checkpoint.manifest import Manifest
from farpipe.engine.executor.work import Trainer
from farpipe.engine.train import train_rank
from in_process import run_ranks
from trainings import checkpoints, equal_states, losses, make_run, state, train
from waiting import wait_until

pytestmark = pytest.mark.slow  # starts processes


@pytest.mark.parametrize("sites", [("west", "east"), ("west", "west")], ids=["a disk at each site", "one disk"])
def test_a_manifest_that_one_rank_can_not_write_costs_no_checkpoint(sites, text_file, tmp_path, monkeypatch):
    """Only one is kept, and everything breaks off right afterwards."""
    run = make_run(text_file, num_steps=12, checkpoint_every_steps=4, keep_checkpoints=1)
    train(run, tmp_path / "whole")
    run_dirs = [tmp_path / site for site in sites]
    for run_dir in run_dirs:
        run_dir.mkdir(exist_ok=True)

    def work(peers):
        train_rank(run, peers, run_dirs[peers.rank])

    with monkeypatch.context() as patch:
        written = full_after_the_first_manifest(patch, step=8)
        with pytest.raises(RunError, match="the machine goes down"):
            run_ranks(2, work)
    assert checkpoints(written[0].parent.parent) == [8]
    run_ranks(2, work)
    assert losses(run_dirs[0]) == losses(tmp_path / "whole")
    if len(set(sites)) == 1:
        assert equal_states(state(run_dirs[0], run), state(tmp_path / "whole", run))


def full_after_the_first_manifest(patch, step):
    """One rank writes its manifest of `step`, the other one can't; then all ends. Where it was written."""
    save, begin_step, tried, written = Manifest.save, Trainer.begin_step, [], []
    one_at_a_time = threading.Lock()

    def save_one(manifest, folder):
        if manifest.step != step:
            save(manifest, folder)
            return
        with one_at_a_time:
            try:
                if written:
                    raise RunError(f"{folder}/manifest.json: can't be written: No space left on device")
                save(manifest, folder)
                written.append(folder)
            finally:
                tried.append(folder)

    def begin_or_end(learning, number):
        if number == step + 3:
            wait_until(lambda: len(tried) == 2, "both have tried")
        if len(tried) == 2:
            raise RunError("the machine goes down")
        begin_step(learning, number)

    patch.setattr(Manifest, "save", save_one)
    patch.setattr(Trainer, "begin_step", begin_or_end)
    return written
