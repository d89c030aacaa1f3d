"""Measures what small stacks of a model's layers take on this device, and the optimizer; for ``farpipe profile``."""

import time
from collections.abc import Callable
from statistics import median
from typing import Final

import torch

from farpipe.runtime.data.batches import Batch
from farpipe.runtime.make_stage import choose_gpu, make_stage, numerics_of
from farpipe.runtime.model.decoder import StageSlice
from farpipe.runtime.optimizer import Optimizer
from farpipe.runtime.profile_request import KINDS, STACK_NAMES, ProfileRequest
from farpipe.runtime.stage import TorchStage

NUM_SKIPPED: Final = 3
"""First repeats that count for nothing: they fill caches and let libraries choose their kernels."""
MIN_REPEATS: Final = 5
SLICES: Final = (
    StageSlice(0, 1, False, False),
    StageSlice(0, 3, False, False),
    StageSlice(0, 1, True, False),
    StageSlice(0, 1, False, True),
)


class Stacks:
    """All stacks of a request, made and ready on the device."""

    def __init__(self, request: ProfileRequest) -> None:
        if request.device == "cuda":
            choose_gpu()
        self._request = request
        self._stacks = {name: _Stack(request, part) for name, part in zip(STACK_NAMES, SLICES, strict=True)}

    def times(self) -> dict[str, dict[str, float]]:
        """Median seconds by stack and kind, over `request.seconds`."""
        times = _stack_times([*self._stacks.values()], self._request.seconds)
        return dict(zip(self._stacks, times, strict=True))

    def optimizer_s_per_param(self) -> float:
        """Median seconds of norm, clipping and update, per parameter."""
        return _optimizer_s_per_param(self._stacks["three_layers"].stage, self._request)


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
    """Median times of every stack, timed in rotation, so that a slow moment of the machine meets all of them."""
    samples: list[list[tuple[float, float, float]]] = [[] for _ in stacks]
    deadline = time.perf_counter() + seconds
    repeat = 0
    while repeat < NUM_SKIPPED + MIN_REPEATS or time.perf_counter() < deadline:
        for stack, found in zip(stacks, samples, strict=True):
            found.append(stack.run(repeat))
        repeat += 1
    columns = [zip(*found[NUM_SKIPPED:], strict=True) for found in samples]
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

    seconds = [_seconds(stage, step) for _ in range(NUM_SKIPPED + MIN_REPEATS)][NUM_SKIPPED:]
    return median(seconds) / sum(parameter.numel() for parameter in parameters)
