"""A loss that is not a number on one rank ends the training on all of them, and names the last good checkpoint."""

import math

import pytest
import torch

from chosen import chosen
from farpipe.core.errors import DivergedError
from farpipe.engine.executor.work import Trainer
from trainings import checkpoints, equal_states, losses, make_run, state, train

pytestmark = pytest.mark.slow  # starts processes


@pytest.mark.parametrize(
    ("num_replicas", "zero1", "rank"), chosen([(1, False, 1), (2, False, 2), (2, False, 3), (2, True, 3)], 0, 3)
)
def test_a_loss_that_is_not_a_number_ends_all_before_it_spoils_anything(
    num_replicas, zero1, rank, text_file, tmp_path, monkeypatch
):
    """Its gradients are numbers, so nothing else would tell. Of two replicas ranks 2 and 3 have the last stage."""
    options = {"num_replicas": num_replicas, "zero1": zero1, "checkpoint_every_steps": 2, "keep_checkpoints": 9}
    train(make_run(text_file, num_steps=2, **options), tmp_path / "good")
    begin_step = Trainer.begin_step

    def spoilt(learning, step):
        begin_step(learning, step)
        if step == 3 and learning._peers.rank == rank:
            learning.torch_stages[1]._losses.append(torch.tensor(math.nan))

    monkeypatch.setattr(Trainer, "begin_step", spoilt)
    run = make_run(text_file, num_steps=6, **options)
    words = rf"step 3: the loss or gradient on rank {rank} is not finite.*the last good checkpoint is .*step-2$"
    with pytest.raises(DivergedError, match=words):
        train(run, tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [2]
    assert equal_states(state(tmp_path / "run", run), state(tmp_path / "good", run))
    assert [step for step, *_ in losses(tmp_path / "run")] == [0, 1, 2]
