"""Measures what chunks take and hold in small stacks of layers on this device, for ``farpipe profile --sequences``."""

import time
from collections import defaultdict
from statistics import median
from typing import Final, NamedTuple

import torch

from farpipe.runtime.chunk_stage import ChunkBatch, ChunkStage
from farpipe.runtime.make_stage import choose_gpu, make_stage, numerics_of
from farpipe.runtime.profile_request import STACK_NAMES, ChunkTimes, ProfileRequest
from farpipe.runtime.stack_times import SLICES
from farpipe.sequences import Chunk, Slice
from farpipe.sequences.chunk import load_of

LEAST_REPEATS: Final = 3
NUM_LENGTHS: Final = 5
SHORTEST_SHARE: Final = 1 / 16
"""Of the longest sequence."""
CUTS: Final = (0.0, 0.5, 0.75)
"""Fractions at which sequences are cut in two; 0: they stay whole."""
_RECOMPUTED, _SLICE, _RECOMPUTED_SLICE = "recomputed", "three_layers_of_a_slice", "recomputed_slice"

Seconds = dict[tuple[int, int], list[float]]


class Point(NamedTuple):
    """A sequence that is measured, in one slice or in two."""

    length: int
    cut: int

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Its slices, one a chunk."""
        bounds = [(0, self.cut), (self.cut, self.length)] if self.cut else [(0, self.length)]
        return tuple(Chunk((Slice(0, start, end - start, self.length),)) for start, end in bounds)


def points(longest: int) -> list[Point]:
    """From the shortest lengths to the longest, in equal steps of their logarithm."""
    shares = [SHORTEST_SHARE ** (1 - index / (NUM_LENGTHS - 1)) for index in range(NUM_LENGTHS)]
    lengths = sorted({max(4, round(longest * share)) for share in shares})
    return [Point(length, round(length * share)) for length in lengths for share in CUTS]


class ChunkStacks:
    """All stacks of a request, made and ready on the device."""

    def __init__(self, request: ProfileRequest) -> None:
        if request.device == "cuda":
            choose_gpu()
        self._request, self._points = request, points(request.training.sequence_length)
        training = request.training.model_copy(update={"microbatch_size": 1})
        model = request.model.model_copy(update={"hugging_face": None})
        numerics = numerics_of(training, recompute="none")
        self._stages: dict[str, ChunkStage] = {}
        for name, part in zip(STACK_NAMES, SLICES, strict=True):
            stage = make_stage(model, training, part, numerics, request.device, ChunkStage)
            assert isinstance(stage, ChunkStage)
            self._stages[name] = stage

    def times(self) -> ChunkTimes:
        """Median seconds of every slice in every stack, over `request.seconds`, and the bytes that are held."""
        forward: dict[str, Seconds] = {name: defaultdict(list) for name in self._stages}
        backward: dict[str, Seconds] = {name: defaultdict(list) for name in self._stages}
        deadline_s, repeats = time.perf_counter() + self._request.seconds, 0
        while repeats < LEAST_REPEATS or time.perf_counter() < deadline_s:
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
            forward_s={name: _medians(found) for name, found in forward.items()},
            backward_s={name: _medians(found) for name, found in backward.items()},
            held_bytes=held,
        )

    def _run(self, stage: ChunkStage, point: Point, number: int, forward: Seconds, backward: Seconds) -> None:
        chunks = point.chunks
        self._begin(stage, chunks, 0)
        for index, chunk in enumerate(chunks):
            x = self._input(stage, chunk.num_tokens)
            start = time.perf_counter()
            stage.forward(index, x)
            stage.finish()
            forward[number, index].append(time.perf_counter() - start)
        for index in reversed(range(len(chunks))):
            gy = self._input(stage, chunks[index].num_tokens)
            start = time.perf_counter()
            stage.backward(index, gy)
            stage.finish()
            backward[number, index].append(time.perf_counter() - start)

    def _begin(self, stage: ChunkStage, chunks: tuple[Chunk, ...], layers: int) -> None:
        ids = tuple(torch.randint(self._request.model.vocab_size, (1, chunk.num_tokens)) for chunk in chunks)
        ids = tuple(one.to(stage.device) for one in ids)
        stage.begin_chunks(ChunkBatch(chunks, ids, ids), [layers] * len(chunks))

    def _held(self, stage: ChunkStage, layers: int, slices: int = 1) -> float:
        """Bytes per token between the forwards and backwards of one sequence, whole or in `slices` equal ones."""
        length = max(point.length for point in self._points)
        chunks = Point(length, 0 if slices == 1 else length // slices).chunks
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


def _medians(found: Seconds) -> tuple[float, ...]:
    """Of every slice, in the order of the points; the first repeat counts for nothing."""
    return tuple(median(found[place][1:]) for place in sorted(found))
