"""The loss on text that is held out from training: the pipeline runs forward only, in the order of the run."""

import math
from collections.abc import Mapping
from typing import Final, Protocol

import torch
from torch import Tensor

from farpipe.runtime.executor import Executor
from farpipe.runtime.peers import Messenger
from farpipe.runtime.stage import PipelineStage, TorchStage
from farpipe.step import Schedule

FIRST_TAG: Final = 1 << 48
"""Messages of evaluations are told from those of training by their step, which begins here."""


def forward_only(schedule: Schedule) -> Schedule:
    """The same order without any backward.

    An order that can be played stays so: what is left needs less than before, in the same order.
    """
    ranks = ([action for action in order if action.kind == "F"] for order in schedule.ranks)
    return Schedule(schedule.num_microbatches, ranks, f"{schedule.method}, forward only")


class Evaluable(Protocol):
    """Interface of the training that an evaluation needs."""

    @property
    def torch_stages(self) -> Mapping[int, TorchStage]:
        """This rank's stages by number."""

    def complete_weights(self, step: int) -> None:
        """Make all of this rank's weights those after `step`."""

    def begin_evaluation(self, index: int) -> int:
        """Give the stages batch number `index` of the held-out text, the same one at every call.

        The number of tokens that count in it, those of all replicas; 0 on a rank that needs no text.
        """

    @property
    def loss(self) -> float:
        """Of what the stages have done since; NaN on a rank without the last stage."""


class Evaluation:
    """One rank's part in evaluating."""

    def __init__(self, schedule: Schedule, work: Evaluable, peers: Messenger, num_batches: int) -> None:
        self._work, self._num_batches = work, num_batches
        stages: dict[int, PipelineStage] = {number: _ForwardOnly(stage) for number, stage in work.torch_stages.items()}
        self._executor = Executor(forward_only(schedule), stages, peers)

    def run(self, step: int) -> float:
        """The mean loss per token over all batches; NaN on a rank without the last stage."""
        self._work.complete_weights(step)
        losses, num_tokens = [], 0
        for index in range(self._num_batches):
            num_here = self._work.begin_evaluation(index)
            self._executor.run(FIRST_TAG + step * self._num_batches + index)
            losses.append(self._work.loss * num_here)
            num_tokens += num_here
        return math.fsum(losses) / num_tokens if num_tokens else math.nan


class _ForwardOnly:
    """A stage that keeps nothing for a backward."""

    def __init__(self, stage: TorchStage) -> None:
        self._stage = stage

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """See PipelineStage."""
        with torch.no_grad():
            y = self._stage.forward(microbatch, x)
        self._stage.forget(microbatch)
        return y

    def backward(self, microbatch: int, gy: Tensor | None) -> Tensor | None:
        """See PipelineStage."""
        raise AssertionError("an evaluation has no backward")

    input_grad = backward

    def weight_grad(self, microbatch: int) -> None:
        """See PipelineStage."""
        self.backward(microbatch, None)
