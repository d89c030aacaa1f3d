"""One of the processes that measure at the same time; started by `farpipe.run.profile.profile`."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

import torch

from farpipe.run.launch import reporting_errors
from farpipe.run.profile import KINDS, REQUEST_NAME, STACK_NAMES, ProfileRequest, StackTimes
from farpipe.runtime.data.batches import Batch
from farpipe.runtime.model.decoder import StageSlice
from farpipe.runtime.optimizer import Optimizer
from farpipe.runtime.rendezvous import rendezvous_from_env
from farpipe.runtime.stage import TorchStage
from farpipe.runtime.work import choose_gpu, make_stage, numerics_of
from farpipe.strict import write_text
from farpipe.transport import TransportConfig, connect

NUM_WARM_UPS: Final = 3
MIN_REPEATS: Final = 5
_SLICES: Final = (
    StageSlice(0, 1, False, False),
    StageSlice(0, 3, False, False),
    StageSlice(0, 1, True, False),
    StageSlice(0, 1, False, True),
)


def main(folder: Path) -> None:
    """Measure at the same time as the other processes and leave the times in `folder`."""
    request = ProfileRequest.load(folder / REQUEST_NAME)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if request.device == "cuda":
        choose_gpu()
    stacks = {name: _Stack(request, part) for name, part in zip(STACK_NAMES, _SLICES, strict=True)}
    with connect(rank, world_size, TransportConfig(), rendezvous_from_env()) as transport:
        transport.exchange("stacks", b"", waiting_for="all processes to measure stacks of layers")
        times = _stack_times(list(stacks.values()), request.seconds)
        transport.exchange("optimizer", b"", waiting_for="all processes to measure the optimizer")
        optimizer_s = _optimizer_s_per_param(stacks["three_layers"].stage, request)
    found = StackTimes(**dict(zip(stacks, times, strict=True)), optimizer_s_per_param=optimizer_s)
    write_text(folder / f"rank-{rank}.json", found.model_dump_json())


class _Stack:
    """A small stage that is run over and over."""

    def __init__(self, request: ProfileRequest, part: StageSlice) -> None:
        training, self._has_head = request.training, part.has_head
        model = request.model.model_copy(update={"hugging_face": None})  # times don't depend on the weights' values
        numerics = numerics_of(training, recompute="none" if training.recompute == "auto" else training.recompute)
        self.stage = make_stage(model, training, part, numerics, request.device)
        self.stage.begin_step(_random_batch(request))
        boundary, device = self.stage.boundary, self.stage.device
        self._x = torch.randn(boundary.shape).to(device, boundary.dtype)  # copying it is not the stage's time
        self.stage.forward(0, self._x)

    def run(self, repeat: int) -> tuple[float, float, float]:
        """Seconds of F, I and W in the order of 1F1B's steady state: the next F comes before this I."""
        this, following = repeat % 2, 1 - repeat % 2
        forward_s = _seconds(self.stage, lambda: self.stage.forward(following, self._x))
        input_grad_s = _seconds(self.stage, lambda: self.stage.input_grad(this, None if self._has_head else self._x))
        return forward_s, input_grad_s, _seconds(self.stage, lambda: self.stage.weight_grad(this))


def _stack_times(stacks: list[_Stack], seconds: float) -> list[dict[str, float]]:
    """Median times of every stack; they take turns, so that a slow moment of the machine meets all of them."""
    samples: list[list[tuple[float, float, float]]] = [[] for _ in stacks]
    deadline = time.perf_counter() + seconds
    repeat = 0
    while repeat < NUM_WARM_UPS + MIN_REPEATS or time.perf_counter() < deadline:
        for stack, found in zip(stacks, samples, strict=True):
            found.append(stack.run(repeat))
        repeat += 1
    columns = [zip(*found[NUM_WARM_UPS:], strict=True) for found in samples]
    return [dict(zip(KINDS, map(median, column), strict=True)) for column in columns]


def _seconds(stage: TorchStage, call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    stage.finish()
    return time.perf_counter() - start


def _random_batch(request: ProfileRequest) -> Batch:
    shape = (2, request.training.microbatch_size or 1, request.training.sequence_length)
    tokens = torch.randint(request.model.vocab_size, shape)
    return Batch(tokens, tokens)


def _optimizer_s_per_param(stage: TorchStage, request: ProfileRequest) -> float:
    """Norm, clipping and update of a stage, per parameter."""
    parameters = list(stage.module.parameters())
    optimizer = Optimizer(parameters, request.training)
    grads = [torch.randn_like(parameter) for parameter in parameters]

    def step() -> None:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        optimizer.update(optimizer.sum_of_squares() ** 0.5)

    seconds = [_seconds(stage, step) for _ in range(NUM_WARM_UPS + MIN_REPEATS)][NUM_WARM_UPS:]
    return median(seconds) / sum(parameter.numel() for parameter in parameters)


if __name__ == "__main__":
    with reporting_errors():
        main(Path(sys.argv[1]))
