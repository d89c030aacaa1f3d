"""A bound from one rank with its memory, solved exactly: all other ranks and all links are as fast as one likes.

Where a rank has several stages, a microbatch takes its memory several times, and comes back after the least time that
the path through the other ranks takes. Each rank alone, with that, is a small problem: CP-SAT on the rank's own
actions, one after the other, within its memory, none before its head and each with its tail (`bounds.least_times_s`).
It allows more than any schedule can do (everything else only adds waiting, and durations are rounded down), so its
bound is a bound. In a V the rank where the pipeline turns is the one that tells most.
"""

from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import numpy as np

from farpipe.schedule.bounds import least_times_s
from farpipe.search.exact import memory_units, run_solver
from farpipe.search.step import CodedSchedule, Player, SearchStep
from farpipe.search.ticks import Ticks, choose_ticks
from farpipe.step.lowering import Floats

_F, _I, _W = 0, 1, 2


@dataclass
class _Alone:
    """One rank's variables in ticks: start by (kind, stage, microbatch)."""

    step: SearchStep
    stages: list[int]
    ticks: Ticks
    horizon: int
    model: Any
    times_s: tuple[Floats, ...]
    """As `bounds.least_times_s` gives them."""
    makespan: Any = None
    start: dict[tuple[int, int, int], Any] = field(default_factory=dict)

    @property
    def num_microbatches(self) -> int:
        return self.step.shape[1]

    def down(self, seconds: float) -> int:
        return int(self.ticks.down(seconds))

    def size(self, kind: int, stage: int) -> int:
        return self.down(self.times_s[0][kind, stage])

    def end(self, kind: int, stage: int, microbatch: int) -> Any:
        return self.start[kind, stage, microbatch] + self.size(kind, stage)


def rank_bound_s(
    step: SearchStep,
    rank: int,
    best: tuple[float, CodedSchedule],
    lower_bound_s: float,
    *,
    effort: float,
    limit_s: float,
    seed: int = 0,
) -> tuple[float, bool]:
    """(no schedule is faster than this, whether the clock `limit_s` cut it), for steps whose microbatches are alike.

    `best` (makespan_s, orders) are known: only what is faster than them is looked for, and where there is nothing they
    are the best there is. `effort` is CP-SAT's deterministic time.
    """
    from ortools.sat.python import cp_model  # here, for it takes most of a second to import

    assert step.alike
    times_s = least_times_s(step.problem)
    ticks = choose_ticks(np.concatenate([part.ravel() for part in times_s[:2]] + [step.arrays.opens_s]), best[0])
    stages = step.stages[step.stages_begin[rank] : step.stages_begin[rank + 1]].tolist()
    alone = _Alone(step, stages, ticks, max(ticks.up(best[0]) - 1, 0), cp_model.CpModel(), times_s)
    alone.makespan = alone.model.new_int_var(min(alone.down(lower_bound_s), alone.horizon), alone.horizon, "")
    _add_actions(alone)
    _add_paths(alone)
    if np.isfinite(step.headroom_bytes[rank]):
        _add_memory(alone, float(step.headroom_bytes[rank]))
    _hint(alone, best[1])
    alone.model.minimize(alone.makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time, solver.parameters.max_time_in_seconds = effort, max(limit_s, 0.01)
    solver.parameters.num_workers, solver.parameters.random_seed = 1, seed
    solver.parameters.cp_model_probing_level, solver.parameters.symmetry_level = 0, 0
    status = run_solver(solver, alone.model)
    if status == cp_model.INFEASIBLE:
        return min(best[0], (alone.horizon + 1) * ticks.seconds), False
    cut = status != cp_model.OPTIMAL and solver.response_proto.deterministic_time < 0.99 * effort
    return max(lower_bound_s, float(solver.best_objective_bound) * ticks.seconds), cut


def _add_actions(alone: _Alone) -> None:
    """One at a time, microbatches in their sequence, none before its head, and its tail before the end of the step."""
    _, _, head, tail = alone.times_s
    intervals = []
    for stage in alone.stages:
        for kind in (_F, _I, _W):
            for j in range(alone.num_microbatches):
                earliest = min(alone.down(head[kind, stage, j]), alone.horizon)
                start = alone.start[kind, stage, j] = alone.model.new_int_var(earliest, alone.horizon, "")
                intervals.append(alone.model.new_fixed_size_interval_var(start, alone.size(kind, stage), ""))
                alone.model.add(alone.makespan >= alone.end(kind, stage, j) + alone.down(tail[kind, stage, j]))
                if j:
                    alone.model.add(start >= alone.end(kind, stage, j - 1))
    alone.model.add_no_overlap(intervals)


def _add_paths(alone: _Alone) -> None:
    """From stage to stage of the rank a microbatch takes at least the durations and the travel in between."""
    durations, travel, _, _ = alone.times_s
    last = alone.stages[-1]
    turn_s = (durations[_F, last + 1 :] + travel[_F, last:-1]).sum()
    turn_s += (durations[_I, last + 1 :] + travel[_I, last + 1 :]).sum()
    for j in range(alone.num_microbatches):
        alone.model.add(alone.start[_I, last, j] >= alone.end(_F, last, j) + alone.down(turn_s))
        for one, other in pairwise(alone.stages):
            forth_s = durations[_F, one + 1 : other].sum() + travel[_F, one:other].sum()
            back_s = durations[_I, one + 1 : other].sum() + travel[_I, one + 1 : other + 1].sum()
            alone.model.add(alone.start[_F, other, j] >= alone.end(_F, one, j) + alone.down(forth_s))
            alone.model.add(alone.start[_I, one, j] >= alone.end(_I, other, j) + alone.down(back_s))
        for stage in alone.stages:
            alone.model.add(alone.start[_W, stage, j] >= alone.end(_I, stage, j))


def _add_memory(alone: _Alone, headroom_bytes: float) -> None:
    """An interval for every holding of every stage and microbatch."""
    intervals, demands = [], []
    for holding, stage in product(alone.step.holdings, alone.stages):
        for j, part in enumerate(holding.size[stage].tolist()):
            if part > 0:
                size = alone.model.new_int_var(0, alone.horizon, "")
                begin = alone.start[holding.taken_by, stage, int(holding.taker[j])]
                end = alone.end(holding.freed_by, stage, j)
                intervals.append(alone.model.new_interval_var(begin, size, end, ""))
                demands.append(part)
    if sum(demands) > headroom_bytes:
        capacity, units = memory_units(headroom_bytes, np.array(demands))
        alone.model.add_cumulative(intervals, units, capacity)


def _hint(alone: _Alone, orders: CodedSchedule) -> None:
    """The times of the best known orders."""
    codes, _ = orders
    for code, start_s in zip(codes.tolist(), Player(alone.step).start_s(orders).tolist(), strict=True):
        stage, microbatch = divmod(code >> 2, alone.num_microbatches)
        if (code & 3, stage, microbatch) in alone.start:
            alone.model.add_hint(alone.start[code & 3, stage, microbatch], alone.down(start_s))
