"""Products that are added to gradients: in place, and with the gradient's digits where a GPU can."""

import pytest
import torch

from farpipe.engine.stages import weight_grads
from farpipe.engine.stages.weight_grads import LARGE_ON_GPU, SMALL, WeightGradStore, add_product

WIDTH = 1024


def half_weight(grad):
    weight = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16))
    assert weight.numel() > SMALL
    weight.grad_dtype = torch.float32
    weight.grad = grad
    return weight


@pytest.fixture
def on_gpu(monkeypatch):
    """A GPU's product with more digits, played on the CPU; what it was given."""
    calls = []

    def addmm(grad, left, right, *, out_dtype, out):
        calls.append((grad, out))
        return out.copy_(grad + left.to(out_dtype) @ right.to(out_dtype))

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(weight_grads, "_adds_wider", lambda grad, factor: grad.dtype != factor.dtype)
    return calls


def test_a_gpu_adds_a_product_with_the_digits_of_the_gradient(on_gpu):
    torch.manual_seed(1)
    left, right = torch.randn(WIDTH, 8).bfloat16(), torch.randn(8, WIDTH).bfloat16()
    before = torch.randn(WIDTH, WIDTH)
    weight = half_weight(before.clone())
    grad = weight.grad
    add_product(weight, left, right)
    assert weight.grad is grad
    assert on_gpu[0][0] is on_gpu[0][1] is grad, "no second tensor"
    assert torch.allclose(grad, before + left.float() @ right.float(), atol=1e-4)


def test_a_cpu_adds_it_rounded_as_autograd_does():
    left, right = torch.randn(WIDTH, 8).bfloat16(), torch.randn(8, WIDTH).bfloat16()
    weight = half_weight(torch.ones(WIDTH, WIDTH))
    add_product(weight, left, right)
    assert torch.equal(weight.grad, 1 + (left @ right).float())


@pytest.mark.parametrize("is_divided", [False, True])
def test_only_cuda_tensors_of_one_process_are_added_wider(is_divided):
    class Grad:
        dtype, is_cuda = torch.float32, True

    grad = Grad()
    if is_divided:
        grad.placements = ()
    assert weight_grads._adds_wider(grad, torch.zeros(1, dtype=torch.bfloat16)) is not is_divided
    assert not weight_grads._adds_wider(grad, torch.zeros(1, dtype=torch.float64))
    assert not weight_grads._adds_wider(torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16))


def test_a_large_weight_with_a_wider_gradient_is_not_left_to_autograd_on_a_gpu():
    store = WeightGradStore()
    store.forward_begins(0, in_parts=False)
    side = 4096
    assert side * side >= LARGE_ON_GPU
    wide = torch.nn.Parameter(torch.empty(side, side, dtype=torch.bfloat16, device="meta"))
    assert store.leaves(wide)
    wide.grad_dtype = torch.float32
    assert not store.leaves(wide)
    small = torch.nn.Parameter(torch.empty(side, 16, dtype=torch.bfloat16, device="meta"))
    small.grad_dtype = torch.float32
    assert store.leaves(small)
