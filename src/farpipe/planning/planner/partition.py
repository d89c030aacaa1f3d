"""Partition of the layers into stages, each with its recomputation: exact, by dynamic programming."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Any, Final, NamedTuple

import numpy as np

from farpipe.core.errors import InfeasibleError
from farpipe.core.schedule.bounds import rank_bounds_s
from farpipe.core.spec import Job, Model, Recompute, Site, Training, possible_operations
from farpipe.core.spec.recompute import spelled
from farpipe.core.step import Problem
from farpipe.planning.cost import JobCosts, StageCost
from farpipe.planning.planner.candidates import Candidate
from farpipe.planning.planner.in_flight import minimum_in_flight

MAX_KNOWN: Final = 4096
"""Largest number of divisions that are remembered: three in four of a plan's, of its strategies' and of its changes'
have the same stages as one before."""

WORTH_MOVING: Final = 0.01
"""Relative gain by a lower bound for which a layer of the last stage is put into the first one."""


class StageOption(NamedTuple):
    """One recompute mode of a stage: what it takes and holds, by its number of layers."""

    layer_s: float
    """Forward and backward of one layer for one microbatch."""
    extra_s: float = 0.0
    """The same of what the stage does besides layers: embedding, head."""
    most_layers: int | None = None
    """The largest number that its memory holds; None: any number."""
    recompute: Recompute = "none"

    def most_of(self, num_layers: int) -> int:
        """Largest number of `num_layers` layers that fit."""
        return num_layers if self.most_layers is None else min(num_layers, self.most_layers)


@dataclass(frozen=True)
class StageMode:
    """One stage with one mode of recomputing; all that it costs is linear in its number of layers."""

    recompute: Recompute
    none: StageCost
    """Costs without layers: embedding, head, fixed overhead."""
    one: StageCost
    """Costs with one layer."""

    @cached_property
    def layer_s(self) -> float:
        """Seconds that a layer adds to forward and backward of one microbatch."""
        return self.one.seconds - self.none.seconds

    @cached_property
    def extra_s(self) -> float:
        """Seconds of what the stage does besides layers."""
        return self.none.seconds

    def layer_bytes(self, in_flight: int) -> float:
        """Bytes that a layer adds with `in_flight` microbatches."""
        return self.one.held_bytes(in_flight) - self.none.held_bytes(in_flight)


def open_modes(costs: JobCosts, sites: Sequence[Site]) -> tuple[Recompute, ...]:
    """The modes of recomputing that the job leaves open; under flash attention there are no scores to select.

    Where a device was measured, only those that its profile tells of.
    """
    wanted = "none" if costs.training.cpu_offloading_num_layers else costs.training.recompute
    if wanted != "auto":
        return (wanted,)
    profiles = [costs.profiles[name] for name in {site.device.name for site in sites} if name in costs.profiles]
    useful = every_mode(costs.model, costs.training)
    return tuple(mode for mode in useful if all(profile.tells_of(mode) for profile in profiles)) or ("none",)


def coarse_modes(costs: JobCosts, sites: Sequence[Site]) -> tuple[Recompute, ...]:
    """Modes of `open_modes` that are tried first: no sets of operations but attention's core."""
    modes = open_modes(costs, sites)
    return tuple(mode for mode in modes if mode in ("none", "selective", "full")) or modes


def every_mode(model: Model, training: Training) -> tuple[Recompute, ...]:
    """``none``, every set of operations that frees something, ``full``."""
    useful = [o for o in possible_operations(model) if o != "core_attn" or not training.flash_attention]
    sets = (spelled(some) for count in range(len(useful) + 1) for some in combinations(useful, count))
    return (*dict.fromkeys(sets), "full")


class StageModes:
    """The stages of one candidate, taken apart; identical ones (site, first, last) once."""

    def __init__(self, costs: JobCosts, candidate: Candidate) -> None:
        self.candidate = candidate
        self.open = open_modes(costs, candidate.sites)
        """The modes of recomputing that the job leaves open, the lightest first."""
        self.coarse = coarse_modes(costs, candidate.sites)
        self._costs, self._last = costs, candidate.layout.num_stages - 1
        self._known: dict[tuple[str, bool, bool, Recompute], StageMode] = {}
        self._all: dict[Recompute, list[StageMode]] = {}

    def of(self, index: int, recompute: Recompute) -> StageMode:
        """Stage `index` if it recomputes so."""
        site = self.candidate.sites[self.candidate.ranks[index]]
        key = (site.name, index == 0, index == self._last, recompute)
        if key not in self._known:
            layout = self.candidate.layout
            parts = self._costs.apart(layout, site, recompute, embedding=key[1], head=key[2])
            self._known[key] = StageMode(recompute, *parts)
        return self._known[key]

    def all(self, recompute: Recompute) -> list[StageMode]:
        """Every stage if it recomputes so."""
        if recompute not in self._all:
            self._all[recompute] = [self.of(index, recompute) for index in range(self._last + 1)]
        return self._all[recompute]


def stage_options(
    stages: StageModes, in_flight: Sequence[int], modes: Sequence[Recompute], pinned: Sequence[int] | None = None
) -> list[list[StageOption]]:
    """The `modes` of every stage, each with as many layers as fit with `in_flight[stage]` microbatches under way.

    Stages of one rank share its memory so that all could hold equally many layers, or in proportion to `pinned`, in the
    first of the modes; so whichever modes they take, together they fit. With one mode what is left over holds one layer
    more of as many stages as it is enough for, the last ones first, which need least.
    """
    candidate, alone = stages.candidate, stages.candidate.layout.virtual == 1
    parts = [stages.all(mode) for mode in modes]
    sizes = [_layer_bytes(mine, in_flight) for mine in parts]
    shares = _shares(candidate, sizes[0], pinned or [1] * len(parts[0]))
    options: list[list[StageOption]] = [[] for _ in candidate.ranks]
    free = [] if alone else _free_bytes(candidate, parts[-1], in_flight)
    for mine, of_layers in zip(parts, sizes, strict=True):
        free = _free_bytes(candidate, mine, in_flight) if alone else free
        most = _most_layers(candidate, of_layers, shares, free)
        if len(modes) == 1 and pinned is None and not alone:
            _use_rest(candidate, of_layers, free, most)
        for of_stage, part, number in zip(options, mine, most, strict=True):
            of_stage.append(StageOption(part.layer_s, part.extra_s, number, part.recompute))
    return options


def _layer_bytes(parts: Sequence[StageMode], in_flight: Sequence[int]) -> list[float]:
    """Bytes of a layer of every stage with so many microbatches in flight."""
    return [part.layer_bytes(number) for part, number in zip(parts, in_flight, strict=True)]


def _use_rest(candidate: Candidate, sizes: Sequence[float], free: Sequence[float], most: list[int]) -> None:
    """Add a layer to the stages of every rank, the last one first, as long as its memory is enough."""
    rest = list(free)
    for rank, size, number in zip(candidate.ranks, sizes, most, strict=True):
        rest[rank] -= size * number
    for index in reversed(range(len(most))):
        rank = candidate.ranks[index]
        if sizes[index] <= rest[rank]:
            rest[rank] -= sizes[index]
            most[index] += 1


def _shares(candidate: Candidate, of_layers: Sequence[float], layers: Sequence[int]) -> list[float]:
    """The part of its rank's memory that every stage takes which has so many `layers` of so many bytes each."""
    sizes = [count * size for size, count in zip(of_layers, layers, strict=True)]
    of_rank = [0.0] * candidate.layout.pipeline
    for rank, size in zip(candidate.ranks, sizes, strict=True):
        of_rank[rank] += size
    return [size / (of_rank[rank] or 1.0) for rank, size in zip(candidate.ranks, sizes, strict=True)]


def _free_bytes(candidate: Candidate, parts: Sequence[StageMode], in_flight: Sequence[int]) -> list[float]:
    """Bytes that each rank has for layers; of all modes, recomputing most has the largest working memory."""
    free = [site.plannable_bytes - part.one.working_bytes for site, part in zip(candidate.sites, parts, strict=False)]
    for part, rank, number in zip(parts, candidate.ranks, in_flight, strict=True):
        free[rank] -= part.none.held_bytes(number)
    return free


def _most_layers(
    candidate: Candidate, sizes: Sequence[float], shares: Sequence[float], free: Sequence[float]
) -> list[int]:
    """Layers of so many bytes that fit into every stage's share of what its rank has."""
    each = zip(sizes, shares, candidate.ranks, strict=True)
    return [math.floor(share * free[rank] / size * (1 + 1e-9)) for size, share, rank in each]


def missing_bytes(costs: JobCosts, candidate: Candidate, in_flight: Sequence[int]) -> float:
    """Memory that all ranks together lack for the layers, recomputing most; bytes of one tensor-parallel device each.

    Zero where every stage holds a layer and all of them together all layers.
    """
    stages = StageModes(costs, candidate)
    parts = stages.all(stages.open[-1])
    sizes, free = _layer_bytes(parts, in_flight), _free_bytes(candidate, parts, in_flight)
    most = _most_layers(candidate, sizes, _shares(candidate, sizes, [1] * len(parts)), free)
    if sum(most) >= costs.model.num_layers and min(most) >= 1:
        return 0.0
    return max(1.0, costs.model.num_layers * sum(sizes) / len(sizes) - sum(free))


class Division(NamedTuple):
    """Layers and recomputation of every stage."""

    layers: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    slowest_s: float
    """Seconds of the slowest stage."""


def divide_layers(
    num_layers: int, stages: Sequence[Sequence[StageOption]], pinned: Sequence[int] | None = None
) -> Division:
    """The division that makes the slowest stage as fast as possible, each stage with a layer at least.

    `stages` has the options of every stage; for its number of layers it takes the fastest that holds them.
    `pinned` fixes the number of layers of every stage. Among divisions with the same slowest stage one with the
    smallest sum of squared stage times is taken. Exact, in O(stages x layers^2). Raises InfeasibleError when the stages
    can't hold all layers.
    """
    if pinned is None and len(stages) > num_layers:
        raise InfeasibleError(f"{num_layers} layers are too few for {len(stages)} stages of at least 1")
    most = [max(option.most_of(num_layers) for option in options) for options in stages]
    wanted = [1] * len(stages) if pinned is None else pinned
    if sum(most) < num_layers or any(n < w for n, w in zip(most, wanted, strict=True)):
        raise InfeasibleError(_out_of_memory(num_layers, most, wanted))
    return _divided(num_layers, tuple(map(tuple, stages)), None if pinned is None else tuple(pinned))


@lru_cache(MAX_KNOWN)
def _divided(num_layers: int, stages: tuple[tuple[StageOption, ...], ...], pinned: tuple[int, ...] | None) -> Division:
    """The division of layers that fit."""
    from farpipe.planning.planner import partition_kernel  # here, for numba takes a third of a second to import

    compiled: Any = partition_kernel.divide
    most_options = max(map(len, stages))
    nothing = StageOption(0.0, most_layers=-1)
    padded = [[*options, *[nothing] * (most_options - len(options))] for options in stages]
    figures = np.array([[(o.extra_s, o.layer_s, o.most_of(num_layers)) for o in options] for options in padded])
    layers, chosen, slowest_s = compiled(figures, np.array(pinned or (), np.int64), num_layers)
    recompute = tuple(options[index].recompute for options, index in zip(stages, chosen.tolist(), strict=True))
    return Division(tuple(layers.tolist()), recompute, slowest_s)


def sooner_ended(stages: StageModes, division: Division, problem: Problem) -> Iterator[Division]:
    """The division with a layer of the last stage in the first one, where ranks end sooner; `problem` is its step.

    A division by the slowest stage does not know that stages begin late, which counts with few microbatches or far
    links.
    """
    at, last = stages.candidate.layout, len(division.layers) - 1
    if at.virtual > 1 or last == 0 or division.layers[-1] == 1:
        return
    ends_s = [max(bounds) for bounds in problem.kept(rank_bounds_s)]
    more_s, less_s = (stages.of(s, division.recompute[s]).layer_s * at.num_microbatches for s in (0, last))
    if max(ends_s[0] + more_s, *ends_s[1:-1], ends_s[-1] - less_s) < max(ends_s) * (1 - WORTH_MOVING):
        layers = (division.layers[0] + 1, *division.layers[1:-1], division.layers[-1] - 1)
        yield division._replace(layers=layers)


def _out_of_memory(num_layers: int, most: Sequence[int], wanted: Sequence[int]) -> str:
    short = [index for index, (n, w) in enumerate(zip(most, wanted, strict=True)) if n < w]
    if not short:
        all_stages = f"its {len(most)} stages together hold" if len(most) > 1 else "its only stage holds"
        return f"out of memory: {all_stages} {sum(most)} of {num_layers} layers"
    first = short[0]
    holds = f"{most[first]} of its {wanted[first]} layers" if most[first] > 0 else "not a single layer"
    others = f", nor do {len(short) - 1} others what they should" if len(short) > 1 else ""
    return f"out of memory: stage {first} of {len(most)} holds {holds}{others}"


def peak_bytes(job: Job, candidate: Candidate, costs: JobCosts) -> tuple[float, float]:
    """Bytes that the fullest rank holds under 1F1B and that it may hold, each of one device.

    InfeasibleError when the layers do not fit.
    """
    stages, flights = StageModes(costs, candidate), minimum_in_flight(candidate)
    modes = stages.open if candidate.layout.virtual == 1 else stages.open[-1:]
    options = stage_options(stages, flights, modes, job.layout.layers)
    division = divide_layers(job.model.num_layers, options, job.layout.layers)
    held, working = [0.0] * candidate.layout.pipeline, [0.0] * candidate.layout.pipeline
    for index, rank in enumerate(candidate.ranks):
        part = stages.of(index, division.recompute[index])
        held[rank] += part.none.held_bytes(flights[index]) + division.layers[index] * part.layer_bytes(flights[index])
        working[rank] = max(working[rank], part.one.working_bytes)
    used = [(h + w, site.plannable_bytes) for h, w, site in zip(held, working, candidate.sites, strict=True)]
    return max(used, key=lambda pair: pair[0] / pair[1])
