"""A Problem as the searches read it: the simulator's flat tables, memory, and what makes a good order good."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from farpipe.core.schedule.bounds import first_starts_s
from farpipe.core.step import (
    Holding,
    Link,
    Problem,
    Schedule,
    Sync,
    Transfer,
    byte_tables,
    headroom_bytes,
    holdings,
    peaks,
)
from farpipe.core.step.arrays import Floats, Ints, StepArrays, Tables, step_arrays
from farpipe.core.step.codes import B, I, W, kind_of
from farpipe.core.step.player import CodedSchedule

AnyTransfer = TypeVar("AnyTransfer", bound=Transfer)

_MAX_TICKS: Final = 1_000_000
_CLOSE: Final = 1e-9


@dataclass(frozen=True)
class SearchStep:
    """One Problem, lowered once for many evaluations."""

    problem: Problem
    arrays: StepArrays
    headroom_bytes: Floats
    """[R]: what a rank has for activations; infinite where memory is unlimited."""
    taken_bytes: Floats
    freed_bytes: Floats
    """Bytes, by code, that an action takes when it starts and frees when it ends (`farpipe.core.step.byte_tables`)."""
    holdings: tuple[Holding, ...]
    """Spans of time, from one action to another, in which these bytes are held."""
    stages: Ints
    """[S]: the stages of rank 0, then those of rank 1, ..., each ascending."""
    stages_begin: Ints
    """[R + 1]: where each rank's stages begin in `stages`."""
    identical: bool
    """True if all microbatches are, so that they may be done in their own order without loss; chains are not."""

    @property
    def tables(self) -> Tables:
        """The arrays that compiled loops read."""
        return self.arrays.tables

    @property
    def num_actions(self) -> int:
        """Actions of a schedule whose backwards are split."""
        return 3 * self.problem.num_stages * self.problem.num_microbatches

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of stages and of microbatches."""
        return self.problem.num_stages, self.problem.num_microbatches

    @property
    def activation_bytes(self) -> Floats:
        """[S, M]: taken at the start of F."""
        return self.problem.table("activation_bytes")

    @property
    def work_s(self) -> Floats:
        """[R]: all computation of every rank."""
        stage_s = self.arrays.duration_s[[0, 3]].sum(axis=(0, 2))
        return np.asarray(np.bincount(self.arrays.rank_of_stage, stage_s, self.problem.num_ranks), np.float64)

    @property
    def mean_action_s(self) -> float:
        """The mean duration of F, I and W."""
        return float(self.arrays.duration_s[:3].mean())


def search_step(problem: Problem) -> SearchStep:
    """Lower `problem` for a search."""
    arrays = step_arrays(problem)
    taken_bytes, freed_bytes = byte_tables(problem)
    counts = [len(stages) for stages in problem.stages_of_rank]
    names = ("activation_bytes", "weight_stash_bytes", "chain_bytes")
    messages = arrays.messages
    rows = [*arrays.duration_s, *messages.link, *messages.occupies_s, *messages.arrives_after_s]
    rows += map(problem.table, names)
    return SearchStep(
        problem=problem,
        arrays=arrays,
        headroom_bytes=headroom_bytes(problem),
        taken_bytes=taken_bytes,
        freed_bytes=freed_bytes,
        holdings=holdings(problem),
        stages=np.array([stage for stages in problem.stages_of_rank for stage in stages], np.int32),
        stages_begin=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        identical=not problem.chains.any
        and all(bool((row == row[:, :1]).all()) for row in (*rows, *map(problem.table, names))),
    )


def by_period(problem: Problem) -> tuple[Problem, float]:
    """A step with a barrier whose makespan, less the seconds returned, is the time between steps without one.

    A rank need not end with the others: it has until it can begin again, which in a step's own beginning is later by as
    much as its first forward can start later than the first rank's. So that every rank may end as late as it begins,
    what its optimizer waits for comes later by what it begins earlier than the last. Links take no turns across steps:
    orders found so are to be held against `farpipe.core.step.player.period_s`.
    """
    starts_s = first_starts_s(problem)
    begins_s = [float(starts_s[list(mine)].min()) if mine else 0.0 for mine in problem.stages_of_rank]
    later_s = [max(begins_s) - begins_s[stage.rank] for stage in problem.stages]
    links, sync = dict(problem.links), list(problem.sync or (None,) * problem.num_stages)
    for stage, seconds in enumerate(later_s):
        own, name = sync[stage] or Sync(), f"stage {stage}>stage {stage}"
        if own.reduce is None:
            links[name] = Link(latency_s=0.0, bandwidth_bytes_per_s=1.0)
        reduce = _later(own.reduce or Transfer(link=name, bytes=0.0), seconds, links)
        sync[stage] = own.model_copy(update={"reduce": reduce})
    exchanges = tuple(_later(one, later_s[one.target_stage], links) for one in problem.exchanges)
    return problem.changed(sync=tuple(sync), exchanges=exchanges, links=links, barrier=True), max(begins_s)


def _later(transfer: AnyTransfer, seconds: float, links: Mapping[str, Link]) -> AnyTransfer:
    """A collective's transfer that arrives so much later."""
    assert isinstance(transfer.link, str)
    assert not isinstance(transfer.bytes, tuple)
    travel_s = links[transfer.link].travel_s(transfer.bytes)
    there_s = travel_s if transfer.arrives_after_s is None else transfer.arrives_after_s
    assert not isinstance(there_s, tuple)
    return transfer.model_copy(update={"arrives_after_s": there_s + seconds})


def fits_memory(step: SearchStep, orders: CodedSchedule) -> bool:
    """True if no rank ever holds more than its memory."""
    codes, begin = orders
    taken, given = step.taken_bytes[codes], step.freed_bytes[codes]
    return bool((peaks(taken, given, begin) <= step.headroom_bytes).all())


def to_schedule(orders: CodedSchedule, num_microbatches: int, method: str) -> Schedule:
    """The Schedule that `orders` encode."""
    return Schedule.from_codes(num_microbatches, *orders, method)


def split_backwards(orders: CodedSchedule) -> CodedSchedule:
    """Every B as I and W.

    Never slower: the gradient leaves at the end of I instead of B, and the same memory is free at the end of W.
    """
    codes, begin = orders
    joined = kind_of(codes) == B
    parts = np.repeat(codes, 1 + joined)
    place = np.cumsum(1 + joined) - 1  # of the last part of every action
    parts[place[joined]] += W - B
    parts[place[joined] - 1] += I - B
    return parts, np.concatenate(([0], np.cumsum(1 + joined)))[begin].astype(np.int32)


def to_orders(schedule: Schedule) -> CodedSchedule:
    """The codes of a Schedule."""
    return schedule.codes, schedule.begin


@dataclass(frozen=True)
class Ticks:
    """The length of a tick; `exact`: every duration is a whole number of them (to nine digits)."""

    seconds: float
    exact: bool

    def down(self, seconds: Floats | float) -> Ints:
        """Whole ticks that fit: never more than the time itself, so that what is computed with them is a bound."""
        ticks = np.asarray(seconds, np.float64) / self.seconds
        near = np.rint(ticks)
        return np.where(np.abs(ticks - near) <= _CLOSE * np.maximum(near, 1), near, np.floor(ticks)).astype(np.int64)

    def up(self, seconds: float) -> int:
        """Whole ticks in which the time fits."""
        return -int(self.down(-seconds))


def choose_ticks(durations_s: Floats, horizon_s: float) -> Ticks:
    """The longest tick that divides all durations, or a millionth of `horizon_s` where there is none so long."""
    tick = 0.0
    for value in np.unique(durations_s[durations_s > 0]):
        tick = _common(tick, float(value), horizon_s / _MAX_TICKS)
        if tick == 0.0:
            return Ticks(horizon_s / _MAX_TICKS, exact=False)
    tick = tick or 1.0
    counts = durations_s / tick
    exact = bool((np.abs(counts - np.rint(counts)) <= _CLOSE * np.maximum(counts, 1)).all())
    return Ticks(tick, exact=True) if exact else Ticks(horizon_s / _MAX_TICKS, exact=False)


def durations_s(arrays: StepArrays) -> Floats:
    """All durations of a step."""
    times = [(part.occupies_s, part.arrives_after_s) for part in (arrays.messages, arrays.collectives)]
    return np.concatenate([part.ravel() for part in (arrays.duration_s, *times[0], *times[1], arrays.opens_s)])


def _common(one: float, other: float, smallest: float) -> float:
    """The greatest common divisor (Euclid's algorithm, forgiving rounding), 0 if it is below `smallest`."""
    larger = max(one, other)
    while other > _CLOSE * larger:
        one, other = other, abs(one - round(one / other) * other)
    return one if one >= smallest else 0.0
