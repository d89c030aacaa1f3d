import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from farpipe.core.errors import RunError
from farpipe.core.spec import Training
from farpipe.engine.executor import optimizer
from farpipe.engine.executor.optimizer import Optimizer, Squares, global_norm, learning_rate
from in_process import run_ranks


def training(**options):
    return Training(sequence_length=1, global_batch=1, **options)


def parameter(*values):
    made = nn.Parameter(torch.zeros(len(values), 1))
    made.grad = torch.tensor(values, dtype=torch.float32).view(-1, 1)
    return made


def test_the_norm_is_that_of_the_gradient_on_all_ranks():
    shares = [[parameter(3.0)], [parameter(4.0), parameter(0.0)], []]

    def work(peers):
        return global_norm(Optimizer(shares[peers.rank], training()).sum_of_squares(), peers, 0)

    assert run_ranks(3, work) == [5.0] * 3


def test_the_norm_is_the_same_to_the_last_bit_however_ranks_share_the_parameters():
    generator = torch.Generator().manual_seed(3)
    sizes = [parameter(*(10.0 ** torch.randint(-4, 5, (7,), generator=generator)).tolist()) for _ in range(40)]
    norms = set()
    for cuts in ((), (20,), (3, 31), (1, 2, 3), (39,)):
        shares = [sizes[low:high] for low, high in pairwise((0, *cuts, 40))]

        def work(peers, shares=shares):
            return global_norm(Optimizer(shares[peers.rank], training()).sum_of_squares(), peers, 0)

        norms.update(run_ranks(len(shares), work))
    assert len(norms) == 1


def test_a_copy_of_a_tied_matrix_does_not_count_but_is_clipped():
    owned, copy = parameter(3.0), parameter(4.0)
    optimizer = Optimizer([owned, copy], training(clip_norm=1.0), copies=[copy])
    assert optimizer.sum_of_squares() == (9.0, 0.0)


def test_squares_are_summed_in_double_precision():
    large = parameter(*[1e4] * 1000, *[1e-3] * 1000)
    expected = 1000 * 1e8 + 1000 * float(torch.tensor(1e-3).double() ** 2)
    assert Optimizer([large], training()).sum_of_squares().total == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("clip_norm", "norm"), [(1.0, 5.0), (1.0, 0.5), (None, 5.0)])
def test_the_update_is_adamws_with_torchs_clipping(clip_norm, norm):
    ours, theirs = ([nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))] for _ in range(2))
    for p in (*ours, *theirs):
        p.grad = torch.full_like(p, norm / math.sqrt(6))
    options = training(clip_norm=clip_norm, learning_rate=0.1, betas=(0.8, 0.9), weight_decay=0.2)
    groups = [{"params": theirs[:1], "weight_decay": 0.2}, {"params": theirs[1:], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9))
    optimizer = Optimizer(ours, options)
    for factor in (1.0, -0.7):
        for p in (*ours, *theirs):
            p.grad = torch.full_like(p, factor * norm / math.sqrt(6))
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(theirs, clip_norm)
        adamw.step()
        optimizer.update(math.sqrt(optimizer.sum_of_squares().total))
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected)
        assert found.grad is None


def test_a_gradient_that_is_not_finite_names_its_rank():
    def work(peers):
        return global_norm(Squares(float("nan") if peers.rank == 1 else 1.0), peers, 3)

    with pytest.raises(RunError, match="step 3: the loss or gradient on rank 1 is not finite"):
        run_ranks(2, work)


def test_the_learning_rate_warms_up_stays_and_falls():
    constant = training(learning_rate=1.0)
    assert {learning_rate(constant, step, 100) for step in range(100)} == {1.0}
    warm = constant.model_copy(update={"warmup_steps": 3})
    assert [learning_rate(warm, step, 9) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    cosine = warm.model_copy(update={"decay": "cosine", "final_learning_rate": 0.2})
    rates = [learning_rate(cosine, step, 103) for step in range(104)]
    assert rates[3] == 1.0
    assert rates[53] == pytest.approx(0.6), "half way"
    assert rates[103] == pytest.approx(0.2)
    assert all(a > b for a, b in pairwise(rates[3:]))
    assert learning_rate(cosine.model_copy(update={"decay_steps": 13}), 50, 103) == pytest.approx(0.2)


def test_the_norm_of_a_long_gradient_is_taken_piece_by_piece(monkeypatch):
    long = nn.Parameter(torch.zeros(301, 7))
    long.grad = torch.randn(301, 7)
    whole = Optimizer([long], training()).sum_of_squares().total
    monkeypatch.setattr(optimizer, "_NORM_ELEMENTS", 100)
    assert Optimizer([long], training()).sum_of_squares().total == pytest.approx(whole, rel=1e-14)
