"""The exact search: a constraint model of the step, solved by OR-Tools' CP-SAT.

Every action and every message is an interval; ranks and links do one thing at a time; memory is a cumulative. Actions
may wait for nothing, links that several ranks feed may serve in any order, and durations are rounded down to whole
ticks, so the model allows everything that a schedule can do: its bound is a bound. An answer counts only as what our
own simulator makes of its order.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from itertools import combinations, pairwise, product
from typing import Any, Final

import numpy as np

from farpipe.core.step import BACKWARD, FORWARD, num_fitting
from farpipe.core.step.arrays import Ints
from farpipe.core.step.chains import NOBODY
from farpipe.core.step.codes import B, F, I, W, cell_of, encode, kind_of, next_stage
from farpipe.core.step.player import CodedSchedule, Player
from farpipe.planning.search.step import SearchStep, Ticks, choose_ticks, durations_s, fits_memory

_MEMORY_UNITS: Final = 1_000_000
_MAX_PAIRS: Final = 2_000


@dataclass(frozen=True)
class ExactResult:
    """Result of the solver: `orders` is None when it found nothing better than what it was given."""

    orders: CodedSchedule | None
    makespan_s: float
    lower_bound_s: float
    proven: bool
    """True if the solver closed its search."""
    cut_by_clock: bool


@dataclass(frozen=True)
class _Sent:
    """A message on its link, in ticks; `queue`: messages of one direction and stage."""

    queue: tuple[int, int]
    ready: Any
    start: Any
    size: int


@dataclass
class _Model:
    """The variables: `start` by code of action, as ticks."""

    model: Any
    step: SearchStep
    ticks: Ticks
    split: bool
    horizon: int
    start: dict[int, Any] = field(default_factory=dict)
    size: dict[int, int] = field(default_factory=dict)
    link_intervals: dict[int, list[Any]] = field(default_factory=dict)
    sent: dict[int, list[_Sent]] = field(default_factory=dict)
    """Messages by link."""
    arrival: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    makespan: Any = None

    def code(self, stage: int, kind: int, microbatch: int) -> int:
        return encode(kind, stage * self.step.problem.num_microbatches + microbatch)

    def begin(self, stage: int, kind: int, microbatch: int) -> Any:
        return self.start[self.code(stage, kind, microbatch)]

    def end(self, stage: int, kind: int, microbatch: int) -> Any:
        code = self.code(stage, kind, microbatch)
        return self.start[code] + self.size[code]

    @property
    def back(self) -> int:
        """The kind that makes the gradient of the input."""
        return I if self.split else B

    @property
    def last(self) -> int:
        """The kind that ends with a microbatch."""
        return W if self.split else B

    @property
    def kinds(self) -> tuple[int, ...]:
        return (F, I, W) if self.split else (F, B)


def solve(
    step: SearchStep,
    best: tuple[float, CodedSchedule],
    lower_bound_s: float,
    *,
    time_limit_s: float,
    effort: float = 1e9,
    seed: int = 0,
    split: bool = True,
    in_order: bool | None = None,
    on_better: Callable[[float, CodedSchedule], None] = lambda makespan_s, orders: None,
) -> ExactResult:
    """Look for orders better than `best` (makespan_s, orders), or prove that there are none.

    `in_order`: microbatches of one stage and kind in their sequence. None: where they are equal, for then nothing is
    lost; if asked for elsewhere, no bound follows. `effort` is CP-SAT's deterministic time, the same on every machine.
    """
    cp_model = _in_thread(import_module, "ortools.sat.python.cp_model")  # here, for it takes most of a second
    ticks = choose_ticks(durations_s(step.arrays), best[0])
    ordered = step.identical if in_order is None else in_order
    built = _build(cp_model.CpModel(), step, ticks, best[0], lower_bound_s, split, ordered)
    _hint(built, step, best[1])
    watcher = _watcher(cp_model, built, best[0], on_better)
    solver = _solver(cp_model, time_limit_s, effort, seed)
    status = run_solver(solver, built.model, watcher)
    closed = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    sound = ordered == step.identical or not ordered
    bound_s = lower_bound_s
    if sound:
        in_ticks = built.horizon + 1 if status == cp_model.INFEASIBLE else solver.best_objective_bound
        bound_s = min(watcher.makespan_s, max(lower_bound_s, float(in_ticks) * ticks.seconds))
    cut = not closed and solver.response_proto.deterministic_time < 0.99 * effort
    return ExactResult(watcher.orders, watcher.makespan_s, bound_s, closed and sound, cut)


def _solver(cp_model: Any, time_limit_s: float, effort: float, seed: int) -> Any:
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
    solver.parameters.max_deterministic_time = effort
    solver.parameters.num_workers = 1  # what a second would add is not the same in every run, and proved no sooner
    solver.parameters.random_seed = seed
    solver.parameters.cp_model_probing_level, solver.parameters.symmetry_level = 0, 0
    return solver


def run_solver(solver: Any, model: Any, watcher: Any = None) -> Any:
    """Solve in a thread, so that Ctrl-C gets through: it stops the solver, and what `watcher` has seen stands."""
    solver.parameters.catch_sigint_signal = False
    return _in_thread(solver.solve, model, watcher, stop=solver.stop_search)


def _in_thread(function: Callable[..., Any], *arguments: Any, stop: Callable[[], None] = lambda: None) -> Any:
    """Call a function of C++ that Ctrl-C, in its midst, would leave broken: it is heard, after `stop`, when it ends."""
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(function, *arguments)
        try:
            return result.result()
        except KeyboardInterrupt:
            stop()
            raise


def _build(
    model: Any, step: SearchStep, ticks: Ticks, best_s: float, lower_bound_s: float, split: bool, in_order: bool
) -> _Model:
    horizon = max(ticks.up(best_s) - 1, 0)  # only what is faster is of interest: infeasible means proven
    built = _Model(model, step, ticks, split, horizon)
    _add_actions(built)
    _add_messages(built)
    _add_first_come(built, in_order)
    _add_precedence(built, in_order)
    _add_memory(built, in_order)
    _add_opening(built)
    floor = min(int(ticks.down(lower_bound_s)), built.horizon)
    built.makespan = model.new_int_var(floor, built.horizon, "makespan")
    _add_ends(built)
    for intervals in built.link_intervals.values():
        model.add_no_overlap(intervals)
    model.minimize(built.makespan)
    return built


def _cells(step: SearchStep) -> Iterator[tuple[int, int]]:
    num_stages, num_microbatches = step.shape
    return ((stage, j) for stage in range(num_stages) for j in range(num_microbatches))


def _add_actions(built: _Model) -> None:
    """An interval per action; a rank does one thing at a time."""
    step, model = built.step, built.model
    sizes, opens = built.ticks.down(step.arrays.duration_s), built.ticks.down(step.problem.traffic.opening.stage_s)
    of_rank: list[list[Any]] = [[] for _ in range(step.arrays.num_ranks)]
    for stage, j in _cells(step):
        for kind in built.kinds:
            code, size = built.code(stage, kind, j), int(sizes[kind, stage, j])
            built.start[code] = model.new_int_var(min(int(opens[stage]), built.horizon), built.horizon, "")
            built.size[code] = size
            interval = model.new_fixed_size_interval_var(built.start[code], size, "")
            of_rank[step.arrays.rank_of_stage[stage]].append(interval)
    for intervals in of_rank:
        model.add_no_overlap(intervals)


def _add_messages(built: _Model) -> None:
    """`arrival` of every message at its consumer; those on a link are intervals there."""
    step, model = built.step, built.model
    messages, num_stages = step.arrays.messages, step.shape[0]
    sizes, times = built.ticks.down(messages.occupies_s), built.ticks.down(messages.arrives_after_s)
    for direction, kind in ((FORWARD, F), (BACKWARD, built.back)):
        for stage, j in _cells(step):
            target = next_stage(stage, direction)
            if not 0 <= target < num_stages:
                continue
            ready, link = built.end(stage, kind, j), int(messages.link[direction, stage, j])
            arrival = ready
            if link >= 0:
                size, there = int(sizes[direction, stage, j]), int(times[direction, stage, j])
                arrival = ready + there
                if size:
                    sent = model.new_int_var(0, built.horizon, "")
                    model.add(sent >= ready)
                    interval = model.new_fixed_size_interval_var(sent, size, "")
                    built.link_intervals.setdefault(link, []).append(interval)
                    built.sent.setdefault(link, []).append(_Sent((direction, stage), ready, sent, size))
                    arrival = sent + there
            built.arrival[direction, target, j] = arrival


def _add_first_come(built: _Model, in_order: bool) -> None:
    """A link that one rank feeds serves in the order in which that rank made the messages.

    Left out where it would take too many pairs, and on links of several ranks: the model then allows more than is so.
    """
    for link, messages in built.sent.items():
        if built.step.arrays.shared[link]:
            continue
        if in_order:
            for one, other in pairwise(sorted(messages, key=lambda message: message.queue)):
                if one.queue == other.queue:
                    built.model.add(one.start + one.size <= other.start)
        pairs = [
            (one, other) for one, other in combinations(messages, 2) if not (in_order and one.queue == other.queue)
        ]
        for one, other in pairs if len(pairs) <= _MAX_PAIRS else ():
            first = built.model.new_bool_var("")
            for before, after, literal in ((one, other, first), (other, one, first.negated())):
                built.model.add(before.ready <= after.ready).only_enforce_if(literal)
                built.model.add(before.start + before.size <= after.start).only_enforce_if(literal)


def _add_precedence(built: _Model, in_order: bool) -> None:
    """F before I before W, nothing before its message, slices of a sequence in theirs, and microbatches in order."""
    model, num_microbatches = built.model, built.step.shape[1]
    chains = built.step.problem.chains
    for stage, j in _cells(built.step):
        model.add(built.begin(stage, built.back, j) >= built.end(stage, F, j))
        if built.split:
            model.add(built.begin(stage, W, j) >= built.end(stage, I, j))
        for direction, kind in ((FORWARD, F), (BACKWARD, built.back)):
            if (direction, stage, j) in built.arrival:
                model.add(built.begin(stage, kind, j) >= built.arrival[direction, stage, j])
        if (before := int(chains.previous[j])) != NOBODY:
            model.add(built.begin(stage, F, j) >= built.end(stage, F, before))
            model.add(built.begin(stage, built.back, before) >= built.end(stage, built.back, j))
        if in_order and j + 1 < num_microbatches:
            model.add(built.begin(stage, F, j + 1) >= built.end(stage, F, j))
            one, other = map(int, chains.backwards[j : j + 2])
            for kind in built.kinds[1:]:
                model.add(built.begin(stage, kind, other) >= built.end(stage, kind, one))


def _add_memory(built: _Model, in_order: bool) -> None:
    step = built.step
    for rank in range(step.arrays.num_ranks):
        stages = step.stages[step.stages_begin[rank] : step.stages_begin[rank + 1]]
        if sum(float(holding.size[stages].sum()) for holding in step.holdings) > step.headroom_bytes[rank]:
            _add_rank_memory(built, rank, stages)
            if in_order:
                _add_windows(built, rank, stages, step.activation_bytes[stages])


def _add_rank_memory(built: _Model, rank: int, stages: Ints) -> None:
    """An interval for every holding of every stage and microbatch."""
    does = {F: F, I: built.back, W: built.last}
    intervals, demands = [], []
    for holding, stage in product(built.step.holdings, stages.tolist()):
        for j, part in enumerate(holding.size[stage].tolist()):
            if part > 0:
                size = built.model.new_int_var(0, built.horizon, "")
                begin = built.begin(stage, does[holding.taken_by], int(holding.taker[j]))
                end = built.end(stage, does[holding.freed_by], j)
                intervals.append(built.model.new_interval_var(begin, size, end, ""))
                demands.append(part)
    capacity, units = memory_units(float(built.step.headroom_bytes[rank]), np.array(demands))
    built.model.add_cumulative(intervals, units, capacity)


def memory_units(headroom: float, demands: Any) -> tuple[int, list[int]]:
    """(capacity, demands) as whole numbers; exact where all demands are equal, else rounded in favour of fitting."""
    if (demands == demands[0]).all():
        return num_fitting(headroom, float(demands[0])), [1] * len(demands)
    unit = headroom / _MEMORY_UNITS
    return _MEMORY_UNITS, np.floor(demands / unit * (1 + 1e-12)).astype(int).tolist()


def _add_windows(built: _Model, rank: int, stages: Ints, held: Any) -> None:
    """Memory of K microbatches between F and I: F of j waits for the end of I of j - K (of W if all is stash)."""
    for place, stage in enumerate(stages.tolist()):
        if not held[place].min() > 0:
            continue
        window = min(num_fitting(float(built.step.headroom_bytes[rank]), float(held[place].min())), held.shape[1])
        all_stash = (built.step.problem.table("weight_stash_bytes")[stage] >= held[place]).all()
        kind = built.last if all_stash else built.back
        backwards = built.step.problem.chains.backwards
        for j in range(window, held.shape[1]):
            built.model.add(built.begin(stage, F, j) >= built.end(stage, kind, int(backwards[j - window])))


def _add_opening(built: _Model) -> None:
    """Links that gathers take when the step begins."""
    link_s = built.step.problem.traffic.opening.link_s
    for link in np.flatnonzero(link_s > 0).tolist():
        taken = built.model.new_fixed_size_interval_var(0, int(built.ticks.down(float(link_s[link]))), "")
        built.link_intervals.setdefault(link, []).append(taken)


def _collective(built: _Model, at: int, ready: list[Any]) -> Any:
    """A collective on its link, once all is `ready`; returns its arrival."""
    collectives = built.step.arrays.collectives
    size, there = (
        int(built.ticks.down(float(seconds[at]))) for seconds in (collectives.occupies_s, collectives.arrives_after_s)
    )
    sent = built.model.new_int_var(0, built.horizon, "")
    for earlier in ready:
        built.model.add(sent >= earlier)
    interval = built.model.new_fixed_size_interval_var(sent, size, "")
    built.link_intervals.setdefault(int(collectives.link[at]), []).append(interval)
    return sent + there


def _add_ends(built: _Model) -> None:
    """The step ends no earlier than anything."""
    num_stages, num_microbatches = built.step.shape
    for stage in range(num_stages):
        ends = [built.end(stage, built.last, j) for j in range(num_microbatches)]
        after = built.step.arrays.collectives.begin[stage : stage + 2]
        for end in [*ends, *(_collective(built, at, ends) for at in range(*after))]:
            built.model.add(built.makespan >= end)


def _hint(built: _Model, step: SearchStep, orders: CodedSchedule) -> None:
    """Start times of the best known orders."""
    for code, start_s in zip(orders[0].tolist(), Player(step.arrays).start_s(orders).tolist(), strict=True):
        if code in built.start:
            built.model.add_hint(built.start[code], int(built.ticks.down(start_s)))


def _watcher(cp_model: Any, built: _Model, best_s: float, on_better: Callable[[float, CodedSchedule], None]) -> Any:
    """Keeps the best order among the solver's answers, by our simulator's time."""
    player = Player(built.step.arrays)

    class Watcher(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
        orders: CodedSchedule | None = None
        makespan_s = best_s

        def on_solution_callback(self) -> None:
            orders = _orders_of({code: self.value(start) for code, start in built.start.items()}, built)
            makespan_s = player.makespan_s(orders)
            if makespan_s < self.makespan_s * (1 - 1e-12) and fits_memory(built.step, orders):
                self.orders, self.makespan_s = orders, makespan_s
                on_better(makespan_s, orders)

    return Watcher()


def _orders_of(start: dict[int, int], built: _Model) -> CodedSchedule:
    """The order of start times on every rank; of equal ones what takes no time comes first.

    Of these the forwards come first, by stage and slice, then the backwards in the opposite order.
    """
    num_microbatches = built.step.shape[1]
    backwards = np.argsort(built.step.problem.chains.backwards).tolist()

    def in_turn(code: int) -> tuple[Any, ...]:
        kind, (stage, j) = kind_of(code), cell_of(code, num_microbatches)
        turn = (-stage, backwards[j]) if kind == built.back else (stage, j)
        return (start[code], built.size[code] > 0, kind, *turn)

    of_rank: list[list[int]] = [[] for _ in range(built.step.arrays.num_ranks)]
    for code in start:
        of_rank[built.step.arrays.rank_of_stage[cell_of(code, num_microbatches)[0]]].append(code)
    for codes in of_rank:
        codes.sort(key=in_turn)
    begin = np.concatenate(([0], np.cumsum([len(codes) for codes in of_rank]))).astype(np.int32)
    return np.array([code for codes in of_rank for code in codes], np.int32), begin
