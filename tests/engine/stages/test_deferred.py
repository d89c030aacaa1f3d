"""Weight gradients of any module's layers, put off by the patch: equal to autograd's, whenever W comes."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from farpipe.engine.stages.deferred import defer
from farpipe.engine.stages.recomputed import Again
from farpipe.engine.stages.weight_grads import WeightGradStore


class Renamed(nn.Linear):
    """A subclass that keeps the forward."""


class WithAdapter(nn.Linear):
    """A low-rank adapter: its forward is its own."""

    def __init__(self, width):
        super().__init__(width, width)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x):
        return super().forward(x) + self.up(self.down(x))


def make_module():
    torch.manual_seed(0)
    layers = [nn.Embedding(9, 6, padding_idx=2), Renamed(6, 6), nn.LayerNorm(6), WithAdapter(6), nn.Linear(6, 4)]
    return nn.Sequential(*layers).double()


ROWS = torch.tensor([[0, 2, 5, 5], [8, 2, 1, 0]])


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def test_gradients_are_autograds_whether_they_wait_or_not():
    module, store = make_module(), WeightGradStore()
    plain = copy.deepcopy(module)
    assert defer(module, store) == 5, "embedding, three linear layers of the stack, two of the adapter, not itself"
    with store.deferring(0):
        module(ROWS).square().sum().backward()
    assert not {"0.weight", "1.weight", "1.bias", "4.weight"} & gradients(module).keys(), "they wait"
    assert {"2.weight", "3.weight"} <= gradients(module).keys(), "autograd's own come at once"
    module(ROWS).sum().backward()
    store.compute(0)
    plain(ROWS).square().sum().backward()
    plain(ROWS).sum().backward()
    torch.testing.assert_close(gradients(module), gradients(plain))
    assert not gradients(module)["0.weight"][2].any(), "the row of padding is not trained"


def test_the_store_holds_what_w_needs_and_an_input_that_two_layers_share_once():
    layers, store, x = nn.ModuleList(nn.Linear(5, 3) for _ in range(2)), WeightGradStore(), torch.randn(4, 5)
    defer(layers, store)
    with store.deferring(0):
        torch.autograd.backward([layer(x) for layer in layers], [torch.ones(4, 3) for _ in layers])
    assert store.num_bytes == x.nbytes + 2 * 4 * 3 * 4
    store.compute(0)
    assert store.num_bytes == 0


@pytest.mark.parametrize("width", [6, 800])
def test_backwards_at_once_leave_small_layers_to_autograd_and_add_the_same(width):
    """Microbatches in turn, one in parts and one at once, their forwards before their backwards."""
    torch.manual_seed(0)
    module, store, x = (
        nn.Sequential(nn.Linear(width, width), nn.Tanh()).double(),
        WeightGradStore(),
        torch.randn(3, width),
    )
    plain = copy.deepcopy(module)
    defer(module, store)
    outputs = []
    for microbatch in range(4):
        store.forward_begins(microbatch, in_parts=microbatch % 2 == 0)
        outputs.append(module((1 + microbatch) * x.double()))
        plain((1 + microbatch) * x.double()).sum().backward()
    assert ("Addmm" in str(outputs[1].grad_fn.next_functions)) == (width == 6)
    for microbatch, y in enumerate(outputs):
        store.backward_begins(microbatch)
        if microbatch % 2:
            y.sum().backward()
        else:
            with store.deferring(microbatch):
                y.sum().backward()
    for microbatch in (2, 0):
        store.compute(microbatch)
    torch.testing.assert_close(gradients(module), gradients(plain), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_small_layers_get_the_same_bits_in_parts_and_at_once(dtype, bias):
    torch.manual_seed(0)
    table, layers = nn.Embedding(31, 24, padding_idx=3), [nn.Linear(24, 40, bias=bias), nn.Tanh(), nn.Linear(40, 16)]
    parted = nn.Sequential(table, *layers).to(dtype)
    modules = parted, copy.deepcopy(parted)
    for in_parts, module in zip((True, False), modules, strict=True):
        store = WeightGradStore()
        defer(module, store)
        for parameter in module.parameters():
            parameter.grad_dtype = torch.float32
        for microbatch in range(4):
            store.forward_begins(microbatch, in_parts=in_parts)
            loss = module((ROWS + 5 * microbatch) % 31).float().square().sum()
            if in_parts:
                with store.deferring(microbatch):
                    loss.backward()
                store.compute(microbatch)
            else:
                loss.backward()
    for one, other in zip(*(module.parameters() for module in modules), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_the_gradient_goes_to_the_parameter_of_its_own_forward():
    layer, store, x = nn.Linear(3, 2), WeightGradStore(), torch.randn(4, 3)
    defer(layer, store)
    used = layer.weight
    with store.deferring(0):
        layer(x).sum().backward()
    layer.weight = nn.Parameter(torch.zeros(2, 3))  # as FSDP2 does when it frees the whole parameter
    store.compute(0)
    assert layer.weight.grad is None
    torch.testing.assert_close(used.grad, x.sum(0).expand(2, 3))


def test_recomputation_ends_before_the_last_product_of_a_block():
    """What no gradient needs is not computed again: a down projection, a twentieth of a Llama's step."""
    block, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(4, 3, requires_grad=True)
    defer(block, WeightGradStore())
    block.forward = Again(block)
    with FlopCounterMode(display=False) as recomputed:
        block(x).sum().backward()
    forward = 2 * 4 * (3 * 5 + 5 * 2)
    assert recomputed.get_total_flops() == 3 * forward + 2 * 4 * 3 * 5


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_get_no_gradient(frozen):
    layer, store, x = nn.Linear(3, 2), WeightGradStore(), torch.randn(4, 3, requires_grad=True)
    defer(layer, store)
    getattr(layer, frozen).requires_grad_(False)
    with store.deferring(0):
        layer(x).sum().backward()
    store.compute(0)
    assert getattr(layer, frozen).grad is None
    assert getattr(layer, "bias" if frozen == "weight" else "weight").grad is not None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(4, 3))


def test_a_weight_computed_from_others_is_left_to_autograd():
    layer, store, x = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), WeightGradStore(), torch.randn(4, 3)
    defer(layer, store)
    with store.deferring(0):
        layer(x).sum().backward()
    store.compute(0)
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_a_forward_that_somebody_has_put_around_a_layer_stays():
    layer = nn.Linear(3, 3)
    plain = layer.forward
    layer.forward = lambda x: 2 * plain(x)
    assert defer(layer, WeightGradStore()) == 0
    assert torch.equal(layer(torch.ones(3)), 2 * plain(torch.ones(3)))


def test_another_store_takes_the_place_of_the_first():
    layer, store = nn.Linear(3, 3), WeightGradStore()
    assert defer(layer, WeightGradStore()) == defer(layer, store) == 1
    with store.deferring(0):
        layer(torch.ones(2, 3)).sum().backward()
    assert layer.weight.grad is None
    store.compute(0)
    assert torch.equal(layer.weight.grad, torch.full((3, 3), 2.0))


def test_gradients_are_summed_in_the_dtype_that_parameters_ask_for():
    layer, store = nn.Linear(3, 2, dtype=torch.bfloat16), WeightGradStore()
    defer(layer, store)
    for parameter in layer.parameters():
        parameter.grad_dtype = torch.float32
    for microbatch in range(2):
        with store.deferring(microbatch):
            layer(torch.ones(4, 3, dtype=torch.bfloat16)).sum().backward()
    for microbatch in range(2):
        store.compute(microbatch)
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}
    assert layer.weight.grad.tolist() == [[8.0] * 3] * 2


def test_layers_have_their_own_forward_while_no_backward_comes_in_parts():
    module, store = make_module(), WeightGradStore()
    plain = copy.deepcopy(module)
    defer(module, store)
    modes = [False, False, True, False]
    patched = []
    for microbatch, in_parts in enumerate(modes):
        store.forward_begins(microbatch, in_parts=in_parts)
        patched.append("forward" in module[4].__dict__)
        y = module(ROWS).square().sum()
        store.backward_begins(microbatch)
        if in_parts:
            with store.deferring(microbatch):
                y.backward()
            store.compute(microbatch)
        else:
            y.backward()
        plain(ROWS).square().sum().backward()
    assert patched == modes
    torch.testing.assert_close(gradients(module), gradients(plain))


def test_a_forward_that_somebody_has_put_around_a_patched_layer_stays():
    module, store = make_module(), WeightGradStore()
    defer(module, store)
    module[4].forward = Again(module[4])
    store.forward_begins(0, in_parts=False)
    assert isinstance(module[4].forward, Again)
