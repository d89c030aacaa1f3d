"""AdamW over the parameters of all ranks, with the gradient clipped by the norm of the whole of it."""

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch
from torch import nn

from farpipe.core.errors import DivergedError
from farpipe.core.spec import Training
from farpipe.engine.executor.peers import Peers
from farpipe.engine.stages.router_bias import update_by_sign

CLIP_EPSILON: Final = 1e-6
"""Added to the norm when clipping, as `torch.nn.utils.clip_grad_norm_` does."""
_NORM_ELEMENTS: Final = 1 << 24
"""Elements of a gradient whose norm is taken at once: torch makes a float64 copy of them."""
_SHARE: Final = struct.Struct("<dd")


class Squares(NamedTuple):
    """A sum of squares as two numbers, the second being what the first is off: the sum of all ranks' is then the same,
    however the parameters are divided over the ranks, and so is the run."""

    total: float = 0.0
    rest: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> "Squares":
        """The sum of `values`; not finite where one isn't."""
        if not all(map(math.isfinite, values)):
            return cls(math.nan)
        total = math.fsum(values)
        return cls(total, math.fsum([*values, -total]))


class Optimizer:
    """AdamW on this rank's parameters. Weight decay is for matrices only, not for gains, shifts and biases."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        training: Training,
        *,
        copies: Sequence[nn.Parameter] = (),
        router_biases: Sequence[nn.Parameter] = (),
    ) -> None:
        """Of `parameters`: `copies`, those that another rank or stage owns, and that don't count in the norm;
        `router_biases`, whose gradients are counts (see `router_bias`).
        """
        self.parameters = list(dict.fromkeys(parameters))
        self._biases, self._bias_rate = list(router_biases), training.moe_router_bias_update_rate
        others = {id(other) for other in (*copies, *router_biases)}
        self._counted = [parameter for parameter in self.parameters if id(parameter) not in others]
        self.clip_norm = training.clip_norm
        self._adamw = _adamw(self.parameters, training, {id(bias) for bias in router_biases})
        self._kept: list[torch.Tensor] = []
        self._kept_grads: list[torch.Tensor | None] = []

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the updates from now on."""
        for group in [] if self._adamw is None else self._adamw.param_groups[:2]:
            group["lr"] = rate

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """AdamW's two running means for one of its parameters, as live tensors; zero before the first update."""
        assert self._adamw is not None
        state = self._adamw.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return {name: state[name] for name in ("exp_avg", "exp_avg_sq")}

    def restore(self, num_steps: int) -> None:
        """Number of updates that have been done; the moments were written to already."""
        for state in [] if self._adamw is None else self._adamw.state.values():
            state["step"].fill_(num_steps)

    @torch.no_grad()
    def keep(self, *, copies_grads: bool) -> None:
        """Keep what the next update changes, for `take_back`; `copies_grads`: the next step writes into gradients."""
        live = self._live()
        if not self._kept:
            self._kept = [torch.empty_like(tensor) for tensor in live]
        for kept, tensor in zip(self._kept, live, strict=True):
            kept.copy_(tensor)
        grads = [parameter.grad for parameter in self.parameters]
        self._kept_grads = [grad.clone() if copies_grads and grad is not None else grad for grad in grads]

    @torch.no_grad()
    def take_back(self) -> None:
        """Undo the update that came after `keep`; the gradients are those with which it was made."""
        for kept, tensor in zip(self._kept, self._live(), strict=True):
            tensor.copy_(kept)
        for parameter, grad in zip(self.parameters, self._kept_grads, strict=True):
            parameter.grad = grad
        self._kept_grads = []

    def is_clipped(self, grad_norm: float) -> bool:
        """True if a gradient of this norm is clipped."""
        return self.clip_norm is not None and grad_norm + CLIP_EPSILON > self.clip_norm

    def _live(self) -> list[torch.Tensor]:
        """Parameters, AdamW's means and its count of updates."""
        means = [tensor for parameter in self.parameters for tensor in self.moments(parameter).values()]
        counts = [] if self._adamw is None else [self._adamw.state[one]["step"] for one in self.parameters]
        return [*(parameter.data for parameter in self.parameters), *means, *counts]

    def sum_of_squares(self) -> Squares:
        """Sum of squares of the gradients that this rank owns, of each in float64."""
        norms = [_norm(parameter) for parameter in self._counted if parameter.grad is not None]
        return Squares.of(torch.stack(norms).square().tolist() if norms else [])

    @torch.no_grad()
    def update(self, grad_norm: float) -> None:
        """Clip by the norm of the whole gradient, update the parameters, drop the gradients."""
        if self.clip_norm is not None and self.is_clipped(grad_norm):
            grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            torch._foreach_mul_(grads, self.clip_norm / (grad_norm + CLIP_EPSILON))
        update_by_sign(self._biases, self._bias_rate)
        if self._adamw is not None:
            self._adamw.step()
            self._adamw.zero_grad(set_to_none=True)


def _adamw(parameters: list[nn.Parameter], training: Training, still: set[int]) -> torch.optim.AdamW | None:
    """AdamW that does not move those of `parameters` whose ids are in `still`.

    None for a rank without parameters, which torch's optimizer does not accept.
    """
    if not parameters:
        return None
    moved = [parameter for parameter in parameters if id(parameter) not in still]
    groups = [
        {"params": [p for p in moved if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in moved if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for p in parameters if id(p) in still], "weight_decay": 0.0, "lr": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas, fused=True)


def _norm(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    pieces = torch.split(parameter.grad.flatten(), _NORM_ELEMENTS)
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    whole: torch.Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return whole


def global_norm(own: Squares, peers: Peers, step: int) -> float:
    """The norm of the whole gradient from every rank's share; all ranks get the same bits.

    DivergedError when it is not finite: the training has broken down, and going on would only spoil the weights.
    """
    name, waiting_for = f"norm {step}", f"the gradient norm of step {step}"
    answers = peers.exchange(name, _SHARE.pack(*own), waiting_for=waiting_for)
    shares = [Squares(*_SHARE.unpack(answer)) for answer in answers]
    total = math.fsum(number for share in shares for number in share)
    if not math.isfinite(total):
        broken = [rank for rank, share in enumerate(shares) if not math.isfinite(share.total)]
        raise DivergedError(
            f"step {step}: the loss or gradient on rank {', '.join(map(str, broken)) or 'all'} is not finite: "
            "the training has diverged; lower training.learning_rate or clip_norm"
        )
    return math.sqrt(total)


def learning_rate(training: Training, step: int, num_steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of a run of `num_steps` steps.

    Warm-up rises in equal parts, so that the first step learns something and step ``warmup_steps`` has the full rate.
    The cosine is that of SGDR (Loshchilov and Hutter, arXiv 1608.03983) without restarts.
    """
    peak, floor, warmup = training.learning_rate, training.final_learning_rate, training.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if training.decay == "none":
        return peak
    end = training.decay_steps or num_steps
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
