"""Results that are not kept for the backward."""

import gc
import weakref

import torch

from farpipe.runtime.model.discarded import discarding


def test_a_result_is_made_again_once_for_all_that_use_it():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    made = []

    def work(values):
        made.append(values.exp())
        return made.pop() if torch.is_grad_enabled() else made[-1]

    with discarding(work, x) as y:
        loss = sum((y @ weight).square().sum() for weight in weights)
    del y
    found = torch.autograd.grad(loss, [x, *weights])
    assert len(made) == 1
    plain = sum((x.exp() @ weight).square().sum() for weight in weights)
    for one, other in zip(found, torch.autograd.grad(plain, [x, *weights]), strict=True):
        torch.testing.assert_close(one, other)


def test_a_norm_s_result_is_not_kept_by_the_maps_that_read_it():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    norm = torch.nn.LayerNorm(4, dtype=torch.float64)
    with discarding(norm, x) as y:
        gone, kept = weakref.ref(y), y @ weight
    del y
    gc.collect()
    assert gone() is None
    kept.sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(weight.grad, (norm(x).T @ torch.ones(3, 4, dtype=torch.float64)))
