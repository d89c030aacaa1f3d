"""Biases of routers that keep experts busy without a loss (arXiv 2408.15664): counted like gradients, updated by sign.

An expert that a step has chosen less often than the mean gets a larger bias, one chosen more often a smaller one. What
a bias is updated by is summed over microbatches, replicas and processes of a site on the road of every gradient: how
much more often than the mean an expert was chosen, in whole numbers (times the number of experts).
"""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from farpipe.core.errors import InputError, RunError
from farpipe.engine.stages.weight_grads import Deferred, WeightGradStore, add_grad

ROUTER_BIAS: Final = "e_score_correction_bias"
"""Name of the bias in models of transformers, which keep it as a buffer and never change it."""


def train_router_biases(model: nn.Module) -> None:
    """Make parameters of the routers' biases in `model`; InputError where it has none."""
    routers = [module for module in model.modules() if module._buffers.get(ROUTER_BIAS) is not None]
    if not routers:
        raise InputError(
            f"training.moe_router_bias_update_rate: routers of {type(model).__name__} have no {ROUTER_BIAS}; leave it "
            "out (a balancing loss is the model's own: output_router_logits in its config.json)"
        )
    for router in routers:
        bias = router._buffers.pop(ROUTER_BIAS)
        assert bias is not None
        router.register_parameter(ROUTER_BIAS, nn.Parameter(bias.to("meta")))


def is_trained_router(leaf: nn.Module) -> bool:
    """True for a router whose bias `train_router_biases` has made a parameter."""
    bias = leaf._parameters.get(ROUTER_BIAS)
    return bias is not None and bias.requires_grad


class RouterForward:
    """Forward of such a router that is patched: its backward leaves what the bias is updated by to the store."""

    def __init__(self, router: nn.Module, store: WeightGradStore) -> None:
        self._router, self._store = router, store

    def __call__(self, *inputs: Any) -> Any:
        output = type(self._router).forward(self._router, *inputs)
        parts = list(output) if isinstance(output, tuple) else [output]
        chosen = next((part for part in parts if not part.is_floating_point()), None)
        place = next((i for i, part in enumerate(parts) if chosen is not None and part.shape == chosen.shape), None)
        if chosen is None or place is None or not parts[place].is_floating_point():
            raise RunError(f"{type(self._router).__name__} does not say which experts it chose with which weights")
        call = _Choices(getattr(self._router, ROUTER_BIAS))
        parts[place] = _Counted.apply(parts[place], chosen, call, self._store)  # type: ignore[no-untyped-call]
        return tuple(parts)


class _Choices:
    """One call of a router with the bias that it had."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    @torch.no_grad()
    def accumulate(self, x: Tensor, gy: Tensor) -> None:
        """Add what choices `x` [tokens, k] are above the mean, times the number of experts."""
        dtype = self._bias.grad_dtype or self._bias.dtype
        counts = torch.zeros(len(self._bias), dtype=torch.int64, device=x.device)
        counts.index_add_(0, x.flatten(), torch.ones_like(x.flatten()))
        add_grad(self._bias, (len(counts) * counts - x.numel()).to(dtype))


class _Counted(torch.autograd.Function):
    """The weights of chosen experts as they are; backward counts the choices."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, chosen: Tensor, call: _Choices, store: WeightGradStore) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.call, ctx.store = call, store
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None, None]:
        (chosen,) = ctx.saved_tensors
        ctx.store.add(Deferred(ctx.call, chosen, gy))
        return gy, None, None, None


@torch.no_grad()
def update_by_sign(biases: list[nn.Parameter], rate: float) -> None:
    """Update by what was counted; `rate` is how far each moves in a step."""
    for bias in biases:
        if bias.grad is not None:
            bias.sub_(bias.grad.sign(), alpha=rate)
