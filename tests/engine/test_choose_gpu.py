"""The GPU that a rank takes."""

import pytest
import torch

from farpipe.core.errors import InputError
from farpipe.engine.stages.make_stage import choose_gpu


@pytest.mark.parametrize(
    ("local_rank", "num_gpus", "shown", "taken"), [(3, 8, None, 3), (3, 1, "5", 0), (1, 2, "4,5", 1), (0, 1, None, 0)]
)
def test_a_rank_takes_its_own_gpu_or_the_one_that_its_task_is_shown(monkeypatch, local_rank, num_gpus, shown, taken):
    chosen = prepared(monkeypatch, local_rank, num_gpus, shown)
    choose_gpu()
    assert chosen == [taken]


@pytest.mark.parametrize(("num_gpus", "shown"), [(1, None), (2, "0,1"), (0, "")])
def test_more_ranks_than_gpus_are_refused(monkeypatch, num_gpus, shown):
    prepared(monkeypatch, 2, num_gpus, shown)
    with pytest.raises(InputError, match=f"there are {num_gpus} GPUs for local rank 2"):
        choose_gpu()


def prepared(monkeypatch, local_rank, num_gpus, shown):
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen
