"""Large steps improved window by window: all that begins in a stretch of time is freed, the rest keeps its order.

What begins before the window stays as it is and says when things are there; what begins after it keeps its order, and
says by when things are needed for the step to end at a target (`window_kernel.latest_starts`). Between the two
CP-SAT puts the actions so that the latest of all lateness is least, and of equals its sum over the ranks: so windows
that can't make the step shorter alone hand on what they gained. An answer counts only as what our own simulator makes
of it, and only if the step got no longer.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from farpipe.search.exact import memory_units, run_solver
from farpipe.search.step import CodedSchedule, Player, SearchStep, fits_memory
from farpipe.search.ticks import Ticks, choose_ticks, durations_s
from farpipe.step import BACKWARD, FORWARD
from farpipe.step.chains import NOBODY
from farpipe.step.lowering import Floats, Ints

MOST_ACTIONS: Final = 1_200
"""In one window: about what CP-SAT orders in a second."""
EFFORT: Final = 0.5
"""CP-SAT's deterministic time for one window."""
_SOON: Final = 0.02
"""The largest share by which the step is wanted to be shorter: an aim out of reach gives no direction."""

_F, _I, _W, _B = 0, 1, 2, 3


@dataclass(frozen=True)
class _Played:
    """The whole step as it is: times of every action (by its place in the orders) and message."""

    codes: Ints
    begin: Ints
    makespan_s: float
    start_s: Floats
    end_s: Floats
    message_start_s: Floats
    arrival_s: Floats
    place: Any
    due_s: Floats
    """By when every action has to begin for the step to end at `target_s`."""
    target_s: float


def improve_windows(
    step: SearchStep,
    best: tuple[float, CodedSchedule],
    *,
    num_windows: int,
    target_s: float,
    seed: int = 0,
    deadline_s: float = math.inf,
    report: Callable[[float, CodedSchedule], bool] = lambda makespan_s, orders: True,
) -> tuple[float, CodedSchedule]:
    """The best orders after `num_windows` windows, from `best` (makespan_s, orders), which must fit memory.

    Windows are as long as a microbatch takes through the pipeline, if that is not too much. The first ones go through
    the step from its end to its beginning, half overlapping, for the end is where a rank is most likely to run out of
    work; those after them lie anywhere. The same step, best, seed and number give the same answer, unless `report`,
    asked after every window, ends it, or `deadline_s` (of time.monotonic); it ends early at `target_s`.
    """
    player, random = Player(step), np.random.default_rng(seed)
    now = _play(player, best[1], _wanted_s(best[0], target_s))
    width_s = min(_forward_s(step), now.makespan_s * min(1.0, MOST_ACTIONS / step.num_actions))
    ticks = choose_ticks(durations_s(step.arrays), now.makespan_s)
    for index in range(num_windows):
        if now.makespan_s <= target_s * (1 + 1e-9):
            break
        from_s = now.makespan_s - width_s * (1.0 + 0.5 * index)
        if from_s < -0.5 * width_s:
            from_s = random.uniform(-0.5 * width_s, now.makespan_s - 0.5 * width_s)
        left_s = max(deadline_s - time.monotonic(), 0.01)
        orders = _order_window(step, now, ticks, (from_s, from_s + width_s), seed + index, left_s)
        if fits_memory(step, orders) and player.makespan_s(orders) <= now.makespan_s * (1 + 1e-12):
            now = _play(player, orders, _wanted_s(player.makespan_s(orders), target_s))
        if not report(now.makespan_s, (now.codes, now.begin)):
            break
    return now.makespan_s, (now.codes, now.begin)


def _forward_s(step: SearchStep) -> float:
    """Time that one microbatch takes forward through all stages, on average, and a fifth more."""
    arrays = step.arrays
    travel_s = arrays.messages.arrives_after_s[FORWARD]
    return 1.2 * float((arrays.duration_s[_F] + travel_s).sum(axis=0).mean())


def _wanted_s(makespan_s: float, target_s: float) -> float:
    return max(target_s, makespan_s * (1 - _SOON))


def _play(player: Player, orders: CodedSchedule, target_s: float) -> _Played:
    from farpipe.search import window_kernel  # here, for numba takes a third of a second to import

    kernel: Any = window_kernel
    (codes, begin), tables = orders, player.step.tables
    makespan_s, (start_s, message_start_s, arrival_s, _) = player.play(orders)
    place = kernel.places(codes, player.step.taken_bytes.size)
    end_s = start_s + player.step.arrays.duration_s.reshape(4, -1)[codes & 3, codes >> 2]
    due_s = kernel.latest_starts(codes, begin, tables, place, np.argsort(end_s, kind="stable")[::-1], target_s)
    times = (start_s, end_s, message_start_s, arrival_s)
    return _Played(codes, begin, makespan_s, *times, place, due_s, target_s)


@dataclass
class _Window:
    """The actions of one window as CP-SAT's variables, by their places in the orders; times in ticks."""

    step: SearchStep
    now: _Played
    ticks: Ticks
    model: Any
    low: Any
    """[R]: the place of the first free action of every rank."""
    high: Any
    """[R]: the place after its last."""
    start: dict[int, Any] = field(default_factory=dict)
    end: dict[int, Any] = field(default_factory=dict)
    late: list[Any] = field(default_factory=list)
    """By rank: how much later than it should the first thing after the window begins."""
    horizon: int = 0

    def down(self, seconds: float) -> int:
        return int(self.ticks.down(seconds))

    def at(self, stage: int, kind: int, microbatch: int) -> int:
        """The place of an action, -1 where there is none."""
        return int(self.now.place[4 * (stage * self.step.shape[1] + microbatch) + kind])


def _order_window(
    step: SearchStep, now: _Played, ticks: Ticks, stretch_s: tuple[float, float], seed: int, limit_s: float
) -> CodedSchedule:
    """The orders with the actions that begin in `stretch_s` put as CP-SAT likes them best."""
    from ortools.sat.python import cp_model  # here, for it takes most of a second to import

    ranks = [now.start_s[now.begin[r] : now.begin[r + 1]] for r in range(now.begin.size - 1)]
    low, high = (now.begin[:-1] + [np.searchsorted(row, edge_s) for row in ranks] for edge_s in stretch_s)
    window = _Window(step, now, ticks, cp_model.CpModel(), low, high)
    _add_actions(window)
    _add_messages(window)
    _add_sequences(window)
    for rank in np.flatnonzero(np.isfinite(step.headroom_bytes) & (high > low)):
        _add_memory(window, int(rank))
    most = window.model.new_int_var(0, window.horizon, "")
    window.model.add_max_equality(most, window.late)
    window.model.minimize(len(window.late) * most + sum(window.late))
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = EFFORT
    if math.isfinite(limit_s):
        solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers, solver.parameters.random_seed = 1, seed
    solver.parameters.cp_model_probing_level, solver.parameters.symmetry_level = 0, 0
    if run_solver(solver, window.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return now.codes, now.begin
    codes, found = now.codes.copy(), {at: solver.value(start) for at, start in window.start.items()}
    for first, end in zip(low.tolist(), high.tolist(), strict=True):
        places = sorted(
            range(first, end), key=lambda at: (found[at], now.end_s[at] > now.start_s[at], codes[at] & 3, at)
        )
        codes[first:end] = now.codes[places]
    return codes, now.begin


def _add_actions(window: _Window) -> None:
    """An interval per free action, after what its rank does before the window; a rank does one thing at a time."""
    now, model, ticks = window.now, window.model, window.ticks
    window.horizon = ticks.up(2 * now.makespan_s)
    sizes = ticks.down(now.end_s - now.start_s)
    for rank, (low, high) in enumerate(zip(window.low.tolist(), window.high.tolist(), strict=True)):
        ready_s = now.end_s[low - 1] if low > now.begin[rank] else 0.0
        due_s = now.due_s[high] if high < now.begin[rank + 1] else now.target_s
        window.late.append(model.new_int_var(0, window.horizon, ""))
        intervals = []
        for at in range(low, high):
            window.start[at] = model.new_int_var(window.down(ready_s), window.horizon, "")
            window.end[at] = window.start[at] + int(sizes[at])
            model.add_hint(window.start[at], window.down(now.start_s[at]))
            intervals.append(model.new_fixed_size_interval_var(window.start[at], int(sizes[at]), ""))
            model.add(window.late[rank] >= window.end[at] - window.down(due_s))
        model.add_no_overlap(intervals)


def _add_messages(window: _Window) -> None:
    """Messages to and from free actions: between them, from before the window, and to what comes after it."""
    from farpipe.search import window_kernel

    consumer: Any = window_kernel.consumer
    step, now, model = window.step, window.now, window.model
    arrays, shape = step.arrays, step.tables.shape
    free_s = _links_free_s(window)
    intervals: dict[int, list[Any]] = {}
    awaited: set[int] = set()
    for at in window.start:
        code = int(now.codes[at])
        other = int(consumer(code, now.place, shape))
        if other < 0:
            continue
        direction, (stage, microbatch) = (FORWARD if code & 3 == _F else BACKWARD), divmod(code >> 2, shape[1])
        link, arrival = int(arrays.messages.link[direction, stage, microbatch]), window.end[at]
        if link >= 0:
            size = window.down(arrays.messages.occupies_s[direction, stage, microbatch])
            sent = model.new_int_var(window.down(free_s[link]), window.horizon, "")
            model.add(sent >= window.end[at])
            intervals.setdefault(link, []).append(model.new_fixed_size_interval_var(sent, size, ""))
            arrival = sent + window.down(arrays.messages.arrives_after_s[direction, stage, microbatch])
        if other in window.start:
            awaited.add(other)
            model.add(window.start[other] >= arrival)
        else:
            rank = int(arrays.rank_of_stage[(int(now.codes[other]) >> 2) // shape[1]])
            model.add(window.late[rank] >= arrival - window.down(now.due_s[other]))
    for alike in intervals.values():
        model.add_no_overlap(alike)
    _add_arrivals(window, awaited)


def _links_free_s(window: _Window) -> Floats:
    """[L]: until when messages from before the window take each link."""
    now, arrays = window.now, window.step.arrays
    free_s = np.zeros(arrays.shared.size)
    before = np.concatenate([now.codes[a:b] for a, b in zip(now.begin[:-1], window.low, strict=True)])
    before = before[(before & 3) != _W]
    sent = np.where((before & 3) == _F, 0, window.step.activation_bytes.size) + (before >> 2)
    links = arrays.messages.link.ravel()[sent]
    real = links >= 0
    np.maximum.at(free_s, links[real], (now.message_start_s + arrays.messages.occupies_s.ravel())[sent[real]])
    return free_s


def _add_arrivals(window: _Window, awaited: set[int]) -> None:
    """Free actions whose message was sent before the window, and forwards that a gather holds up."""
    now, size = window.now, window.step.activation_bytes.size
    opens_s = window.step.problem.traffic.opening.stage_s
    for at, start in window.start.items():
        kind, slot = int(now.codes[at]) & 3, int(now.codes[at]) >> 2
        if kind != _W and at not in awaited:
            window.model.add(start >= window.down(now.arrival_s[(0 if kind == _F else size) + slot]))
        if kind == _F:
            window.model.add(start >= window.down(float(opens_s[slot // window.step.shape[1]])))


def _add_sequences(window: _Window) -> None:
    """F before I before W, slices in theirs; where microbatches are alike, they keep it in each stage and kind."""
    before = {_I: _F, _B: _F, _W: _I}
    chains = window.step.problem.chains
    last: dict[tuple[int, int], int] = {}
    for at in window.start:
        code = int(window.now.codes[at])
        kind, (stage, microbatch) = code & 3, divmod(code >> 2, window.step.shape[1])
        if kind != _F and (earlier := window.at(stage, before[kind], microbatch)) in window.start:
            window.model.add(window.start[at] >= window.end[earlier])
        slice_ = int((chains.previous if kind == _F else chains.next)[microbatch])
        if kind != _W and slice_ != NOBODY:
            for other in (_F,) if kind == _F else (_I, _B):
                if (earlier := window.at(stage, other, slice_)) in window.start:
                    window.model.add(window.start[at] >= window.end[earlier])
        if window.step.alike:
            if (stage, kind) in last:
                window.model.add(window.start[at] >= window.end[last[stage, kind]])
            last[stage, kind] = at


def _add_memory(window: _Window, rank: int) -> None:
    """Holdings as intervals, as in the exact search; what no free action takes or frees is always there."""
    step, now, model = window.step, window.now, window.model
    free = range(int(window.low[rank]), int(window.high[rank]))
    base = _level(step, now.codes[now.begin[rank] : free.start])
    intervals, demands = [], []
    for part, taken, given in _held_in(window, {int(now.codes[at]) >> 2 for at in free}):
        if taken not in window.start and given not in window.start:
            continue
        base -= part if taken not in window.start and taken < free.start else 0.0
        begin = window.start.get(taken, 0)
        size = model.new_int_var(0, 2 * window.horizon, "")
        end = window.end.get(given, 2 * window.horizon)
        intervals.append(model.new_interval_var(begin, size, end, ""))
        demands.append(part)
    if sum(demands) > step.headroom_bytes[rank] - base:
        capacity, units = memory_units(float(step.headroom_bytes[rank] - base), np.array(demands))
        model.add_cumulative(intervals, units, capacity)


def _held_in(window: _Window, slots: set[int]) -> Iterator[tuple[float, int, int]]:
    """(bytes, place of the action that takes them, of the one that frees them) of all that free actions may touch."""
    chains, num_microbatches = window.step.problem.chains, window.step.shape[1]
    cells = {divmod(slot, num_microbatches) for slot in slots}
    for stage, microbatch in tuple(cells):  # a chain's first backward takes the bytes of all its slices
        if chains.is_last[microbatch]:
            cells |= {(stage, int(j)) for j in np.flatnonzero(chains.first == chains.first[microbatch])}
    for stage, microbatch in sorted(cells):
        for holding in window.step.holdings:
            part = float(holding.size[stage, microbatch])
            taken = _either(window, stage, holding.taken_by, int(holding.taker[microbatch]))
            if part > 0:
                yield part, taken, _either(window, stage, holding.freed_by, microbatch)


def _either(window: _Window, stage: int, kind: int, microbatch: int) -> int:
    """The place of an action, or of the B that it is a part of."""
    joined = window.at(stage, _B, microbatch) if kind != _F else -1
    return joined if joined >= 0 else window.at(stage, kind, microbatch)


def _level(step: SearchStep, codes: Ints) -> float:
    """Bytes in use after these actions of one rank."""
    return float((step.taken_bytes[codes] - step.freed_bytes[codes]).sum()) if codes.size else 0.0
