"""The loss on text that is held out from training: the pipeline runs forward only, in the order of the run."""

import math
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from farpipe.core.errors import InputError
from farpipe.core.step import Schedule
from farpipe.engine.executor.executor import Executor
from farpipe.engine.executor.peers import Messenger, Peers
from farpipe.engine.executor.step_plans import StepPlans
from farpipe.engine.executor.work import Trainer, Work
from farpipe.engine.replicas.replicas import PipelinePeers
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.stages.chunk_work import ChunkTrainer
from farpipe.engine.stages.stage import PipelineStage, TorchStage

FIRST_TAG: Final = 1 << 48
"""First step number in the tags of evaluations, by which their messages differ from those of training."""


def forward_only(schedule: Schedule) -> Schedule:
    """The order of `schedule` without any backward.

    An order that can be played stays so: what is left needs less than before, in the same order.
    """
    ranks = ([action for action in order if action.kind == "F"] for order in schedule.ranks)
    return Schedule(schedule.num_microbatches, ranks, f"{schedule.method}, forward only")


class Evaluation:
    """One rank's part in evaluating."""

    def __init__(self, schedules: Sequence[Schedule], work: Trainer, peers: Messenger) -> None:
        """`schedules`: the order of every batch."""
        self._work = work
        stages: dict[int, PipelineStage] = {number: _ForwardOnly(stage) for number, stage in work.torch_stages.items()}
        made = {id(schedule): Executor(forward_only(schedule), stages, peers) for schedule in schedules}
        self._executors = [made[id(schedule)] for schedule in schedules]

    def run(self, step: int) -> float:
        """The mean loss per token over all batches; NaN on a rank without the last stage."""
        self._work.complete_weights(step)
        losses, num_tokens = [], 0
        for index, executor in enumerate(self._executors):
            num_here = self._work.begin_evaluation(index)
            executor.run(FIRST_TAG + step * len(self._executors) + index)
            losses.append(self._work.loss * num_here)
            num_tokens += num_here
        return math.fsum(losses) / num_tokens if num_tokens else math.nan


def evaluation_of(run: RunSpec, work: Work, peers: Peers, plans: StepPlans | None) -> Evaluation | None:
    """This rank's part in the evaluations that a training asks for; InputError where no text is held out for them."""
    if run.plan.training is None or not run.plan.training.evaluate_every_steps or not isinstance(work, Trainer):
        return None
    if not run.plan.data.held_out:
        raise InputError("training.evaluate_every_steps: no text is held out for it; set data.held_out, as 0.01")
    num_batches = run.plan.training.evaluation_batches
    schedules = [run.plan.schedule] * num_batches
    if plans is not None:
        assert isinstance(work, ChunkTrainer)
        work.evaluation_plans = plans.of_evaluation(work.held_out_lengths, num_batches)
        schedules = [plan.schedule for plan in work.evaluation_plans]
    return Evaluation(schedules, work, PipelinePeers(peers, run.places))


class _ForwardOnly:
    """A PipelineStage that keeps nothing for a backward."""

    def __init__(self, stage: TorchStage) -> None:
        self._stage = stage

    def forward(self, microbatch: int, x: Tensor | None, *, in_parts: bool = True) -> Tensor | None:
        return self._stage.evaluate(microbatch, x)

    def backward(self, microbatch: int, gy: Tensor | None) -> Tensor | None:
        raise AssertionError("an evaluation has no backward")

    input_grad = backward

    def weight_grad(self, microbatch: int) -> None:
        self.backward(microbatch, None)
