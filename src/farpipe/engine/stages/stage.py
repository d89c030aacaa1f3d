"""Execution of one stage's actions: on PyTorch, or asleep for a rehearsal of the pipeline without the model."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from farpipe.core.errors import RunError
from farpipe.core.step import Problem
from farpipe.engine.data.batches import IGNORED, Batch
from farpipe.engine.stages.balancing import Balance
from farpipe.engine.stages.deferred import defer
from farpipe.engine.stages.dropout import Masks
from farpipe.engine.stages.slices import SliceModule
from farpipe.engine.stages.weight_grads import WeightGradStore


class PipelineStage(Protocol):
    """One stage of the pipeline. The first stage gets no `x` and gives no `gx`, the last gives no `y` and gets no `gy`.

    A backward is either `backward` or `input_grad` and later `weight_grad`, chosen per microbatch.
    """

    def forward(self, microbatch: int, x: Tensor | None, *, in_parts: bool = True) -> Tensor | None:
        """Input activation -> output activation; not `in_parts`: its backward will be `backward`."""

    def input_grad(self, microbatch: int, gy: Tensor | None) -> Tensor | None:
        """Gradient of the output -> gradient of the input; the weights' gradients are put off."""

    def weight_grad(self, microbatch: int) -> None:
        """Add the gradients of the weights that `input_grad` has put off."""

    def backward(self, microbatch: int, gy: Tensor | None) -> Tensor | None:
        """`input_grad` and `weight_grad` at once."""


@dataclass(frozen=True)
class Boundary:
    """The shape and dtype of the activations between stages, and of their gradients."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def expect(self, tensor: Tensor | None, what: str) -> Tensor:
        """`tensor` itself if it fits; RunError says what came instead."""
        if tensor is None or tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            found = "nothing" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
            raise RunError(
                f"the {what} should be {self}, but {found} came; "
                "do all ranks run the same plan with the same version of farpipe?"
            )
        return tensor


class WholeSequences:
    """What processes share of sequences, where one process has the stage: nothing, it computes all tokens."""

    num_processes = 1
    options: Mapping[str, Any] = MappingProxyType({})
    """What the module is called with beside its input."""

    def share(self, batch: Batch) -> Batch:
        """This process's part of a batch."""
        return batch

    def summed(self, balance: Balance) -> Balance:
        """The sum over all processes that share sequences."""
        return balance


class _Losses(list[Tensor]):
    """Losses of the microbatches of a step; a GPU is asked for their sum once, for the answer waits for all it does."""

    _known: tuple[int, float] = 0, 0.0
    """A number of losses, and their sum."""

    def clear(self) -> None:
        super().clear()
        self._known = 0, 0.0

    @property
    def total(self) -> float:
        if self._known[0] != len(self):
            self._known = len(self), float(torch.stack(list(self)).sum())
        return self._known[1]


class TorchStage:
    """A PipelineStage: a module with what its microbatches in flight have saved.

    Its weight gradients wait for W (`defer`). On a GPU an action returns when the GPU knows what to do; `finish` waits
    until it has done it.
    """

    def __init__(
        self,
        module: SliceModule,
        boundary: Boundary,
        device: torch.device | str = "cpu",
        sequences: WholeSequences | None = None,
    ) -> None:
        """`sequences`: the processes that share every one, and this one's part of them."""
        self._sequences = sequences or WholeSequences()
        self.store, self.boundary, self.device = WeightGradStore(), boundary, torch.device(device)
        defer(module, self.store)
        self.module = module.to(self.device)
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._batch: Batch | None = None
        self._losses = _Losses()
        self.masks: Masks | None = None
        """Masks of its dropout layers; None without any."""

    @property
    def message(self) -> Boundary:
        """What it takes from and gives to its neighbours."""
        return self.boundary

    def begin_step(self, batch: Batch | None) -> None:
        """Take the step's tokens (needed by the first and the last stage)."""
        self._batch = None if batch is None else _on_device(self._sequences.share(batch), self.device)
        self._saved.clear()
        self._losses.clear()

    @property
    def loss(self) -> float:
        """Mean loss per target token over the microbatches done in this step; on the last stage only."""
        return self._losses.total

    def forward(self, microbatch: int, x: Tensor | None, *, in_parts: bool = True) -> Tensor | None:
        """Output activation of a microbatch; on the last stage the loss is computed and nothing is returned."""
        self.store.forward_begins(microbatch, in_parts=in_parts)
        if self.masks is not None:
            self.masks.begin(microbatch)
        x = self._input(microbatch, x)
        y = self._compute(microbatch, x)
        if self.module.part.has_head:
            y = self._loss(microbatch, y)
            self._losses.append(y.detach())
        self._saved[microbatch] = (x, y)
        return None if self.module.part.has_head else y.detach()

    def input_grad(self, microbatch: int, gy: Tensor | None) -> Tensor | None:
        with self.store.deferring(microbatch):
            return self.backward(microbatch, gy)

    def weight_grad(self, microbatch: int) -> None:
        self.store.compute(microbatch)

    def backward(self, microbatch: int, gy: Tensor | None) -> Tensor | None:
        self.store.backward_begins(microbatch)
        if self.masks is not None:
            self.masks.begin(microbatch)
        x, y = self._saved.pop(microbatch)
        if not self.module.part.has_head:
            gy = self._boundary(microbatch).expect(gy, "gradient").to(self.device)
        self._differentiate(microbatch, y, gy)
        return x.grad

    def _differentiate(self, microbatch: int, y: Tensor, gy: Tensor | None) -> None:
        torch.autograd.backward(y, gy)

    def evaluate(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """`forward` that keeps nothing, for there is no backward."""
        with torch.no_grad():
            y = self.forward(microbatch, x, in_parts=False)
        del self._saved[microbatch]
        return y

    def finish(self) -> None:
        """Wait until all that was begun is done."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _input(self, microbatch: int, x: Tensor | None) -> Tensor:
        if self.module.part.has_embedding:
            return self._tokens(microbatch)
        return self._boundary(microbatch).expect(x, "activation").to(self.device).detach().requires_grad_()

    def _compute(self, microbatch: int, x: Tensor) -> Tensor:
        """Return the module's output for a microbatch's input."""
        y: Tensor = self.module(x, **self._sequences.options)
        return y

    def _boundary(self, microbatch: int) -> Boundary:
        """Shape and dtype of a microbatch's activations."""
        return self.boundary

    def _tokens(self, microbatch: int) -> Tensor:
        return self._step_batch.tokens[microbatch]

    def _targets(self, microbatch: int) -> tuple[Tensor, int]:
        """A microbatch's targets, and how many count in the whole step."""
        return self._step_batch.targets[microbatch], self._step_batch.num_target_tokens

    def _loss(self, microbatch: int, logits: Tensor) -> Tensor:
        """This microbatch's share of the step's loss: summed over its tokens, divided by all of the step's."""
        targets, num_counted = self._targets(microbatch)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        total = functional.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total / num_counted

    @property
    def _step_batch(self) -> Batch:
        assert self._batch is not None, "begin_step with a batch comes before the first and the last stage's actions"
        return self._batch


def _on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch copied at once: a copy in every action, and counting there, would wait for the action before."""
    if device.type == "cpu":
        return batch
    return Batch(batch.tokens.to(device), batch.targets.to(device), batch.num_target_tokens)


class SleepStage:
    """A PipelineStage for rehearsals: it takes as long as its Problem says, passes as many bytes, computes nothing."""

    def __init__(self, problem: Problem, stage: int) -> None:
        spec = problem.stages[stage]
        self._forward_s, self._input_grad_s, self._weight_grad_s = (
            problem.row(figure).tolist() for figure in (spec.forward_s, spec.input_grad_s, spec.weight_grad_s)
        )
        self._outputs = _payloads(problem, stage, "forward") if stage + 1 < problem.num_stages else None
        self._gradients = _payloads(problem, stage - 1, "backward") if stage > 0 else None

    def forward(self, microbatch: int, x: Tensor | None, *, in_parts: bool = True) -> Tensor | None:
        _sleep(self._forward_s[microbatch])
        return None if self._outputs is None else self._outputs[microbatch]

    def input_grad(self, microbatch: int, gy: Tensor | None) -> Tensor | None:
        _sleep(self._input_grad_s[microbatch])
        return None if self._gradients is None else self._gradients[microbatch]

    def weight_grad(self, microbatch: int) -> None:
        _sleep(self._weight_grad_s[microbatch])

    def backward(self, microbatch: int, gy: Tensor | None) -> Tensor | None:
        _sleep(self._input_grad_s[microbatch] + self._weight_grad_s[microbatch])
        return None if self._gradients is None else self._gradients[microbatch]


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


def _payloads(problem: Problem, hop: int, direction: str) -> list[Tensor]:
    """One tensor per microbatch with the bytes of its message; equal sizes share one tensor, nobody writes to it."""
    spec = problem.hops[hop]
    transfer = None if spec is None else spec.forward if direction == "forward" else spec.backward
    sizes = [0] * problem.num_microbatches if transfer is None else problem.row(transfer.bytes).round().astype(int)
    tensors = {size: torch.zeros(size, dtype=torch.uint8) for size in {int(size) for size in sizes}}
    return [tensors[int(size)] for size in sizes]
