"""A stage of a model whose experts are balanced by a loss: its messages also carry how the experts were used."""

from functools import cached_property

import torch
from torch import Tensor

from farpipe.engine.data.batches import Batch
from farpipe.engine.stages.balancing import Balance, Balancing
from farpipe.engine.stages.slices import SliceModule
from farpipe.engine.stages.stage import Boundary, TorchStage, WholeSequences


class BalancedStage(TorchStage):
    """A TorchStage that adds the balancing loss: the mean over the step's microbatches of what each would have alone.

    Held-out losses are without it.
    """

    def __init__(
        self,
        module: SliceModule,
        boundary: Boundary,
        device: torch.device | str = "cpu",
        sequences: WholeSequences | None = None,
        *,
        share: float,
    ) -> None:
        """`share`: of a microbatch in the sequences of a step, over all replicas."""
        super().__init__(module, boundary, device, sequences)
        assert module.balancing is not None
        self._balancing: Balancing = module.balancing
        self._share = share
        self._probabilities: dict[int, Tensor | None] = {}
        self._totals: dict[int, Balance] = {}

    @cached_property
    def message(self) -> Boundary:
        num_elements = self.boundary.num_elements + self._balancing.num_elements(self.boundary.dtype)
        return Boundary((num_elements,), self.boundary.dtype)

    def begin_step(self, batch: Batch | None) -> None:
        super().begin_step(batch)
        self._probabilities.clear()
        self._totals.clear()

    def forward(self, microbatch: int, x: Tensor | None, *, in_parts: bool = True) -> Tensor | None:
        before = None
        if not self.module.part.has_embedding:
            x, before = self._unpacked(x, "activation")
        self._balancing.begin()
        y = super().forward(microbatch, x, in_parts=in_parts)
        routing = self._balancing.end(self.device)
        total = self._sequences.summed(routing.own)
        total = total if before is None else before + total
        self._probabilities[microbatch] = routing.probabilities
        if y is not None:
            return self._balancing.packed(y, total)
        self._totals[microbatch] = total
        if torch.is_grad_enabled():
            scale = self._balancing.coefficient * self._share / self._sequences.num_processes
            self._losses.append((scale * total.value()).to(self._losses[-1].dtype))
        return None

    def backward(self, microbatch: int, gy: Tensor | None) -> Tensor | None:
        if self.module.part.has_head:
            total = self._totals[microbatch]
        else:
            gy, total = self._unpacked(gy, "gradient")
            self._totals[microbatch] = total
        gx = super().backward(microbatch, gy)
        del self._totals[microbatch]
        return None if gx is None else self._balancing.packed(gx, total)

    def evaluate(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        y = super().evaluate(microbatch, x)
        del self._probabilities[microbatch]
        self._totals.pop(microbatch, None)
        return y

    def _differentiate(self, microbatch: int, y: Tensor, gy: Tensor | None) -> None:
        probabilities = self._probabilities.pop(microbatch)
        if probabilities is None:
            super()._differentiate(microbatch, y, gy)
            return
        by_probabilities = self._balancing.grad(self._totals[microbatch], self._share)
        torch.autograd.backward([y, probabilities], [gy, by_probabilities])

    def _unpacked(self, message: Tensor | None, what: str) -> tuple[Tensor, Balance]:
        numbers = self.message.expect(message, what).to(self.device)
        return self._balancing.unpacked(numbers, self.boundary.shape)


def torch_stage(
    module: SliceModule,
    boundary: Boundary,
    device: torch.device | str = "cpu",
    sequences: WholeSequences | None = None,
    *,
    share: float,
) -> TorchStage:
    """The stage of `module`, balanced where its model is; `share` as of BalancedStage."""
    if module.balancing is None:
        return TorchStage(module, boundary, device, sequences)
    return BalancedStage(module, boundary, device, sequences, share=share)
