"""Measures what small stacks of layers take on this device, with microbatches or chunks; for ``farpipe profile``."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Final, NamedTuple

import torch
from torch import nn

from farpipe.core.cpu_share import LEAST_SHARE, Timed, timed, undisturbed
from farpipe.engine.data.batches import Batch
from farpipe.engine.executor.optimizer import Optimizer
from farpipe.engine.stages.chunk_stage import ChunkBatch, ChunkStage
from farpipe.engine.stages.decoder import compute_dtype
from farpipe.engine.stages.make_stage import choose_gpu, make_stage, numerics_of
from farpipe.engine.stages.profile_request import KINDS, STACK_NAMES, ChunkTimes, ProfileRequest
from farpipe.engine.stages.slices import StageSlice
from farpipe.engine.stages.stage import TorchStage
from farpipe.planning.workload import Chunk, Slice
from farpipe.planning.workload.chunk import load_of

NUM_SKIPPED: Final = 3
"""First repeats that count for nothing: they fill caches and let libraries choose their kernels."""
MIN_REPEATS: Final = 5
LONGER: Final = 3
"""Factor by which measuring may take longer, until other work has left enough samples alone."""
SLICES: Final = (
    StageSlice(0, 1, False, False),
    StageSlice(0, 3, False, False),
    StageSlice(0, 1, True, False),
    StageSlice(0, 1, False, True),
)
LEAST_REPEATS: Final = 3
NUM_LENGTHS: Final = 5
SHORTEST_SHARE: Final = 1 / 16
"""Shortest sequence, as a share of the longest one."""
NUM_PACKED: Final = 16
"""Sequences in a packed chunk that is measured."""
CUTS: Final = (0.0, 0.5, 0.75)
"""Fractions at which sequences are cut in two; 0: they stay whole."""
_RECOMPUTED, _SLICE, _RECOMPUTED_SLICE = "recomputed", "three_layers_of_a_slice", "recomputed_slice"

Samples = dict[tuple[int, int], list[Timed]]


class Stacks:
    """All stacks of a request, made and ready on the device."""

    def __init__(self, request: ProfileRequest) -> None:
        if request.device == "cuda":
            choose_gpu()
        self._request = request
        self._stacks = {name: _Stack(request, part) for name, part in zip(STACK_NAMES, SLICES, strict=True)}

    def times(self) -> tuple[dict[str, dict[str, float]], float]:
        """Median seconds by stack and kind, over `request.seconds`, and the share of the CPU that they had."""
        samples = _sample([*self._stacks.values()], self._request)
        kept = [undisturbed(row, MIN_REPEATS) for row in samples]
        times = iter(map(median_s, kept))
        return {name: {kind: next(times) for kind in KINDS} for name in self._stacks}, cpu_share(kept)

    def optimizer_s_per_param(self) -> float:
        """Median seconds of norm, clipping and update, per parameter."""
        return _optimizer_s_per_param(self._stacks["three_layers"].stage, self._request)


class _Stack:
    """A small stage that is run over and over."""

    def __init__(self, request: ProfileRequest, part: StageSlice) -> None:
        training, self._has_head, self._request = request.training, part.has_head, request
        recompute = "none" if training.recompute == "auto" else training.recompute
        numerics = numerics_of(training, compute_dtype(training.precision), recompute)
        self.stage = make_stage(request.model, training, part, numerics, request.device, only_times=True)
        self.stage.begin_step(_random_batch(request))
        message, device = self.stage.message, self.stage.device
        self._x = torch.randn(message.shape).to(device, message.dtype)  # copying it is not the stage's time
        self.stage.forward(0, self._x)

    def run(self, repeat: int) -> list[Timed]:
        """Seconds of F, I and W in the order of 1F1B's steady state: the next F comes before this I."""
        this, following = repeat % 2, 1 - repeat % 2
        stage, gy = self.stage, None if self._has_head else self._x
        calls = (
            lambda: stage.forward(following, self._x),
            lambda: stage.input_grad(this, gy),
            lambda: stage.weight_grad(this),
        )
        return [time_call(self._request, stage, call) for call in calls]


def _sample(stacks: list[_Stack], request: ProfileRequest) -> list[list[Timed]]:
    """Samples of every kind of every stack, taken in rotation, so that a slow moment of the machine meets all."""
    samples: list[list[Timed]] = [[] for _ in stacks for _ in KINDS]
    begin_s, repeat = time.perf_counter(), 0
    while repeat < NUM_SKIPPED + MIN_REPEATS or not is_over(begin_s, request, samples, MIN_REPEATS):
        found = [sample for stack in stacks for sample in stack.run(repeat)]
        for row, sample in zip(samples, found, strict=True):
            row += [sample] if repeat >= NUM_SKIPPED else []
        repeat += 1
    return samples


def is_over(begin_s: float, request: ProfileRequest, samples: Iterable[Sequence[Timed]], least: int) -> bool:
    """True after the requested time if other work left `least` samples of each row alone, else LONGER times later."""
    passed_s = time.perf_counter() - begin_s
    if passed_s < request.seconds:
        return False
    enough = (sum(sample.cpu_share >= LEAST_SHARE for sample in row) >= least for row in samples)
    return passed_s >= LONGER * request.seconds or all(enough)


def time_call(request: ProfileRequest, stage: TorchStage, call: Callable[[], object]) -> Timed:
    """The seconds until the device is done; those of the CPU only if it computes and each process has its own core."""

    def finish() -> None:
        call()
        stage.finish()

    found = timed(finish)
    return found if request.device == "cpu" and not request.share_cores else Timed(found.wall_s, found.wall_s)


def median_s(samples: Sequence[Timed]) -> float:
    """Median seconds by the clock."""
    return median(sample.wall_s for sample in samples)


def cpu_share(rows: Iterable[Sequence[Timed]]) -> float:
    """Share of the CPU that all samples together had."""
    samples = [sample for row in rows for sample in row]
    return Timed(sum(sample.wall_s for sample in samples), sum(sample.cpu_s for sample in samples)).cpu_share


def _random_batch(request: ProfileRequest) -> Batch:
    shape = (2, request.training.microbatch_size or 1, request.training.sequence_length)
    tokens = torch.randint(request.model.vocab_size, shape)
    return Batch(tokens, tokens)


def _optimizer_s_per_param(stage: TorchStage, request: ProfileRequest) -> float:
    """Norm, clipping and update of a stage, per parameter."""
    parameters = [nn.Parameter(parameter.float()) for parameter in stage.module.trained_parameters.values()]
    optimizer = Optimizer(parameters, request.training)
    grads = [torch.randn_like(parameter) for parameter in parameters]

    def step() -> None:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        optimizer.update(optimizer.sum_of_squares().total ** 0.5)

    samples = [time_call(request, stage, step) for _ in range(NUM_SKIPPED + 2 * MIN_REPEATS)][NUM_SKIPPED:]
    return median_s(undisturbed(samples, MIN_REPEATS)) / sum(parameter.numel() for parameter in parameters)


class TimedSequence(NamedTuple):
    """A sequence that is measured, in one slice or in two; or several short ones, packed."""

    length: int
    """Tokens of all chunks."""
    cut: int
    packed: tuple[int, ...] = ()
    """Lengths of packed sequences."""

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Chunks of one slice each, or the one of packed sequences."""
        if self.packed:
            return (Chunk(tuple(Slice(index, 0, size, size) for index, size in enumerate(self.packed))),)
        bounds = [(0, self.cut), (self.cut, self.length)] if self.cut else [(0, self.length)]
        return tuple(Chunk((Slice(0, start, end - start, self.length),)) for start, end in bounds)


def points(longest: int) -> list[TimedSequence]:
    """Sequences to measure, from the shortest to the longest in equal steps of their logarithm, then packed ones.

    Packed sequences are of unequal lengths, so that each takes a call of attention.
    """
    shares = [SHORTEST_SHARE ** (1 - index / (NUM_LENGTHS - 1)) for index in range(NUM_LENGTHS)]
    lengths = sorted({max(4, round(longest * share)) for share in shares})
    single = [TimedSequence(length, round(length * share)) for length in lengths for share in CUTS]
    return single + [TimedSequence(sum(sizes), 0, sizes) for length in lengths for sizes in [_unequal(length)] if sizes]


def _unequal(length: int) -> tuple[int, ...]:
    """NUM_PACKED unequal lengths, the longest first, of about `length` tokens together; none where that is too few."""
    least = length // NUM_PACKED - NUM_PACKED // 2
    return tuple(range(least + NUM_PACKED - 1, least - 1, -1)) if least > 0 else ()


class ChunkStacks:
    """All stacks of a request, made and ready on the device."""

    def __init__(self, request: ProfileRequest) -> None:
        if request.device == "cuda":
            choose_gpu()
        self._request, self._points = request, points(request.training.sequence_length)
        training = request.training.model_copy(update={"microbatch_size": 1})
        numerics = numerics_of(training, compute_dtype(training.precision))
        self._stages: dict[str, ChunkStage] = {}
        for name, part in zip(STACK_NAMES, SLICES, strict=True):
            stage = make_stage(request.model, training, part, numerics, request.device, on_chunks=True, only_times=True)
            assert isinstance(stage, ChunkStage)
            self._stages[name] = stage

    def times(self) -> ChunkTimes:
        """Median seconds of every slice in every stack, over `request.seconds`, and the bytes that are held."""
        forward: dict[str, Samples] = {name: defaultdict(list) for name in self._stages}
        backward: dict[str, Samples] = {name: defaultdict(list) for name in self._stages}
        begin_s, repeats = time.perf_counter(), 0
        rows = [*forward.values(), *backward.values()]
        while repeats < LEAST_REPEATS or not is_over(begin_s, self._request, _settled(rows), LEAST_REPEATS - 1):
            for number, point in enumerate(self._points):
                for name, stage in self._stages.items():  # in rotation, so that a slow moment meets all of them
                    self._run(stage, point, number, forward[name], backward[name])
            repeats += 1
        load = load_of([chunk for point in self._points for chunk in point.chunks])
        held = {name: self._held(stage, 0) for name, stage in self._stages.items()}
        three = self._stages["three_layers"]
        held |= {_RECOMPUTED: self._held(three, 3), _SLICE: self._held(three, 0, slices=2)}
        held |= {_RECOMPUTED_SLICE: self._held(three, 3, slices=2)}
        return ChunkTimes(
            tokens=tuple(load.tokens.tolist()),
            pairs=tuple(load.pairs.tolist()),
            split_pairs=tuple(load.split_pairs.tolist()),
            further_calls=tuple(load.further_calls.tolist()),
            forward_s={name: _medians(found) for name, found in forward.items()},
            backward_s={name: _medians(found) for name, found in backward.items()},
            held_bytes=held,
            cpu_share=cpu_share(undisturbed(row, LEAST_REPEATS - 1) for row in _settled(rows)),
        )

    def _run(self, stage: ChunkStage, point: TimedSequence, number: int, forward: Samples, backward: Samples) -> None:
        chunks = point.chunks
        self._begin(stage, chunks, 0)
        for index, chunk in enumerate(chunks):
            x = self._input(stage, chunk.num_tokens)
            forward[number, index].append(time_call(self._request, stage, partial(stage.forward, index, x)))
        for index in reversed(range(len(chunks))):
            gy = self._input(stage, chunks[index].num_tokens)
            backward[number, index].append(time_call(self._request, stage, partial(stage.backward, index, gy)))

    def _begin(self, stage: ChunkStage, chunks: tuple[Chunk, ...], layers: int) -> None:
        ids = tuple(torch.randint(self._request.model.vocab_size, (1, chunk.num_tokens)) for chunk in chunks)
        ids = tuple(one.to(stage.device) for one in ids)
        stage.begin_chunks(ChunkBatch(chunks, ids, ids), [layers] * len(chunks))

    def _held(self, stage: ChunkStage, layers: int, slices: int = 1) -> float:
        """Bytes per token between the forwards and backwards of one sequence, whole or in `slices` equal ones."""
        length = max(point.length for point in self._points if not point.packed)
        chunks = TimedSequence(length, 0 if slices == 1 else length // slices).chunks
        self._begin(stage, chunks, layers)
        for index, chunk in enumerate(chunks):
            stage.forward(index, self._input(stage, chunk.num_tokens))
        found = stage.held.now / length
        for index in reversed(range(len(chunks))):
            stage.backward(index, self._input(stage, chunks[index].num_tokens))
        return found

    def _input(self, stage: ChunkStage, num_tokens: int) -> torch.Tensor:
        shape = (1, num_tokens, self._request.model.hidden)
        return torch.randn(shape).to(stage.device, stage.boundary.dtype)


def _settled(found: Iterable[Samples]) -> list[list[Timed]]:
    """The samples of every slice, in the order of the points; the first repeat counts for nothing."""
    return [samples[place][1:] for samples in found for place in sorted(samples)]


def _medians(found: Samples) -> tuple[float, ...]:
    """Seconds of every slice."""
    return tuple(median_s(undisturbed(row, LEAST_REPEATS - 1)) for row in _settled([found]))
