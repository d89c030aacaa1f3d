import pytest
import torch

from farpipe.engine.stages.deferred import WeightGradStore
from farpipe.engine.stages.weight_grads import Embedding, Linear


@pytest.fixture
def store():
    return WeightGradStore()


def make_linear(store, dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    linear = Linear(5, 3, store, bias=bias, dtype=dtype)
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    return linear


def run_backward(linear, x, gy):
    """Backward of a linear layer; the gradient of its input."""
    x = x.detach().requires_grad_()
    linear(x).backward(gy)
    return x.grad


def plain_gradients(linear, pairs):
    """Gradients of the same weights by autograd."""
    plain = Linear(5, 3, None, bias=True, dtype=torch.float64)
    plain.load_state_dict(linear.state_dict())
    inputs = [run_backward(plain, x, gy) for x, gy in pairs]
    return inputs, plain.weight.grad, plain.bias.grad


def make_pairs(count):
    generator = torch.Generator().manual_seed(1)
    make = lambda width: torch.randn(2, 4, width, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(make(5), make(3)) for _ in range(count)]


def test_without_deferring_the_gradients_are_autograds(store):
    linear, pairs = make_linear(store), make_pairs(2)
    inputs = [run_backward(linear, x, gy) for x, gy in pairs]
    expected_inputs, weight, bias = plain_gradients(linear, pairs)
    for found, expected in zip(inputs, expected_inputs, strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(linear.weight.grad, weight)
    torch.testing.assert_close(linear.bias.grad, bias)


def test_deferred_gradients_come_in_any_order_and_mixed_with_others(store):
    linear, pairs = make_linear(store), make_pairs(3)
    with store.deferring(0):
        run_backward(linear, *pairs[0])
    assert linear.weight.grad is None, "deferred"
    run_backward(linear, *pairs[1])
    with store.deferring(2):
        run_backward(linear, *pairs[2])
    store.compute(2)
    store.compute(0)
    _, weight, bias = plain_gradients(linear, pairs)
    torch.testing.assert_close(linear.weight.grad, weight)
    torch.testing.assert_close(linear.bias.grad, bias)


def test_the_store_holds_input_and_output_gradient_until_w(store):
    linear, [(x, gy)] = make_linear(store), make_pairs(1)
    with store.deferring(0):
        run_backward(linear, x, gy)
    assert store.num_bytes == x.nbytes + gy.nbytes
    store.compute(0)
    assert store.num_bytes == 0


def test_an_input_that_two_layers_share_is_held_once(store):
    first, second, [(x, gy)] = make_linear(store), make_linear(store), make_pairs(1)
    x = x.requires_grad_()
    with store.deferring(0):
        torch.autograd.backward([first(x), second(x)], [gy, gy.clone()])
    assert store.num_bytes == x.nbytes + 2 * gy.nbytes


def test_float32_weights_take_gradients_of_bf16_computation(store):
    linear = make_linear(store, torch.float32)
    x, gy = torch.randn(7, 5, dtype=torch.bfloat16), torch.randn(7, 3, dtype=torch.bfloat16)
    for _ in range(2):
        gx = run_backward(linear, x, gy)
    assert gx.dtype == torch.bfloat16
    assert linear.weight.grad.dtype == torch.float32
    torch.testing.assert_close(linear.weight.grad, 2 * gy.float().T @ x.float(), rtol=0.02, atol=0.05)


def test_a_changed_weight_is_cast_anew(store):
    linear, x = make_linear(store, torch.float32, bias=False), torch.ones(1, 5, dtype=torch.bfloat16)
    before = linear(x)
    with torch.no_grad():
        linear.weight.mul_(2)
    linear.forget_cast()
    torch.testing.assert_close(linear(x), before * 2)


def test_the_embeddings_gradient_is_autograds():
    rows = torch.tensor([[0, 2, 2], [5, 0, 2]])
    tables = [Embedding(6, 4, store, dtype=torch.float64) for store in (WeightGradStore(), None)]
    torch.nn.init.normal_(tables[0].weight)
    tables[1].load_state_dict(tables[0].state_dict())
    gy = torch.randn(2, 3, 4, dtype=torch.float64)
    for table in tables:
        for _ in range(2):
            table(rows).backward(gy)
    torch.testing.assert_close(tables[0].weight.grad, tables[1].weight.grad)
