"""The loss that balances experts, over all layers of a microbatch as the whole model has it.

transformers counts how many tokens of a microbatch each expert gets in all layers together, which no stage knows alone.
So a stage adds its counts to those that come with its input, behind the activation, and passes them on; the last stage
has them all, and they come back behind the gradients. The probabilities that the loss differentiates stay where they
are. Such a message is one tensor without shape: the numbers of the activation, then those of a `Balance`.
"""

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from farpipe.core.errors import RunError

_DTYPE: Final = torch.float64
"""Dtype of what goes behind an activation: counts stay exact."""


class Balance(NamedTuple):
    """Use of the experts by one microbatch, summed over layers; float64."""

    counts: Tensor
    """Choices of each expert [experts]."""
    probabilities: Tensor
    """Sum of the router's probabilities [experts]."""
    num_rows: Tensor
    """Tokens, each as often as there are layers with experts; a tensor without dimensions."""

    def __add__(self, other: object) -> "Balance":
        assert isinstance(other, Balance)
        return Balance(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def value(self) -> Tensor:
        """transformers' ``load_balancing_loss_func`` of all that was summed; zero where nothing was."""
        rows = self.num_rows.clamp(min=1.0)
        return len(self.counts) * (self.counts / rows * (self.probabilities / rows)).sum()


class Routing(NamedTuple):
    """A stage's own part of a microbatch's Balance, with the sum whose gradient is this stage's."""

    own: Balance
    probabilities: Tensor | None
    """Sum [experts] in float32, as transformers has it, with its graph; None where nothing before it is trained."""


class Balancing:
    """The routers of a stage, and what their layers' balancing loss counts."""

    def __init__(self, routers: dict[nn.Module, int], num_experts: int, per_token: int, coefficient: float) -> None:
        """`routers`: those of this stage, with the place of the logits in their output."""
        self.num_experts, self._per_token, self.coefficient = num_experts, per_token, coefficient
        self._logits: list[Tensor] | None = None
        for router, place in routers.items():
            router.register_forward_hook(_Listener(self, place))

    def hear(self, logits: Tensor) -> None:
        """Take a layer's logits [tokens, experts]; those of a layer that is computed again are known already."""
        if self._logits is not None:
            self._logits.append(logits)

    def begin(self) -> None:
        """What is computed next is a microbatch's forward."""
        self._logits = []

    def end(self, device: torch.device) -> Routing:
        """What the forward since `begin` has counted."""
        heard, self._logits = self._logits or [], None
        counts = torch.zeros(self.num_experts, dtype=_DTYPE, device=device)
        total, num_rows = None, 0
        for logits in heard:
            weights = logits.softmax(-1)
            chosen = weights.topk(self._per_token, dim=-1).indices.flatten()
            counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=_DTYPE))
            summed = weights.float().sum(0)
            total, num_rows = summed if total is None else total + summed, num_rows + len(weights)
        known = torch.zeros_like(counts) if total is None else total.detach().to(_DTYPE)
        has_grad = total is not None and total.requires_grad
        return Routing(Balance(counts, known, counts.new_tensor(num_rows)), total if has_grad else None)

    def grad(self, whole: Balance, share: float) -> Tensor:
        """Gradient of `share` x coefficient x loss by the probabilities, in the operations of transformers' float32."""
        rows = float(whole.num_rows)
        scale = torch.tensor(self.coefficient * share, dtype=torch.float32, device=whole.counts.device)
        return scale * self.num_experts * (whole.counts.float() / rows) / rows

    def packed(self, numbers: Tensor, balance: Balance) -> Tensor:
        """One tensor [n] of an activation or gradient with `balance` behind it."""
        tail = torch.cat([balance.counts, balance.probabilities, balance.num_rows[None]])
        return torch.cat([numbers.detach().flatten(), tail.view(torch.uint8).view(numbers.dtype)])

    def num_elements(self, dtype: torch.dtype) -> int:
        """Elements of `dtype` that are behind an activation."""
        return (2 * self.num_experts + 1) * _DTYPE.itemsize // dtype.itemsize

    def unpacked(self, message: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Balance]:
        """The activation or gradient of this shape in a message, and what is behind it."""
        own = self.num_elements(message.dtype)
        tail = message[len(message) - own :].clone().view(torch.uint8).view(_DTYPE)
        counts, probabilities, num_rows = torch.split(tail, [self.num_experts, self.num_experts, 1])
        return message[: len(message) - own].view(shape), Balance(counts, probabilities, num_rows[0])


class _Listener:
    """Hook on a router that passes on its logits."""

    def __init__(self, balancing: Balancing, place: int) -> None:
        self._balancing, self._place = balancing, place

    def __call__(self, router: nn.Module, inputs: Any, output: Any) -> None:
        logits = output[self._place] if isinstance(output, tuple) else output
        if not isinstance(logits, Tensor):
            raise RunError(f"{type(router).__name__}: no logits at place {self._place} of its output")
        self._balancing.hear(logits.flatten(0, -2))
