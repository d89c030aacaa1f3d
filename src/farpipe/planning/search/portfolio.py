"""The best order for a step: named orders, greedy, local search, exact, each handing on its best, at any time limit."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from farpipe.core.errors import InfeasibleError, InputError, UsageError
from farpipe.core.schedule import check
from farpipe.core.schedule.bounds import lower_bound_s, period_bound_s
from farpipe.core.schedule.check import expect_enough_memory
from farpipe.core.schedule.library import ORDERS, order
from farpipe.core.simulate import Timeline, simulate
from farpipe.core.step import Problem, Schedule
from farpipe.core.step.codes import B, F, kind_of
from farpipe.core.step.player import CodedSchedule, Player, period_s
from farpipe.core.strict import nearest
from farpipe.planning.search.greedy import greedy_orders, one_by_one
from farpipe.planning.search.local import improve
from farpipe.planning.search.periodic import extended, find_periods, short_microbatches, shortened
from farpipe.planning.search.step import (
    SearchStep,
    by_period,
    fits_memory,
    search_step,
    split_backwards,
    to_orders,
    to_schedule,
)

METHODS: Final = ("named", "greedy", "local", "exact")
"""The stages of the search, in the order in which they hand on their best."""

SEARCHES: Final[dict[str, tuple[str, ...]]] = {
    "greedy": ("greedy",),
    "local": ("named", "greedy", "local"),
    "exact": METHODS,
    "auto": METHODS,
}
"""Searches of each method that users may name; ``auto`` leaves the exact search out where steps are large."""

_CLOSE: Final = 1e-9
_PLAYED_ACTIONS_PER_S: Final = 8e7
"""Sets how many evaluations a second of time limit is worth: about what two slow or busy cores do."""
_MAX_PLAYS_PER_ACTION: Final = 2000
"""More don't help steps that are so small."""
_MAX_ACTIONS_IN_A_ROUND: Final = 2e7
"""About half a second of local search, after which it looks at the clock."""
_FINISH_S_PER_ACTION: Final = 8e-6
"""Time for making, checking and playing the schedule when the search is over."""
_GRACE_S: Final = 1.0
"""Seconds by which the named orders may overrun the time limit, so that of small steps none is left out."""
_LOCAL_SHARE, _LOCAL_SHARE_OF_SMALL, _EFFORT_SHARE = 0.7, 0.2, 0.2
"""Shares of the time limit, by the size of the step, not by the other methods: one more must never make it worse."""
_SHORT_SHARE: Final = 0.6
"""Share of the time limit for the short step whose steady state a long one repeats."""
_MAX_REPEATED: Final = 6
"""Orders of the short step whose steady states are tried."""
_MAX_EXACT_ACTIONS: Final = 1500
"""Larger steps are left to the local search, which does better there, unless `always_exact`."""


@dataclass(frozen=True)
class Progress:
    """Progress of a search; `makespan_s` is infinite as long as there is no order."""

    method: str
    elapsed_s: float
    makespan_s: float
    lower_bound_s: float


@dataclass(frozen=True)
class FoundOrder:
    """The best order and how good it is."""

    schedule: Schedule
    """`method` is the name of what made it, such as ``auto (local)``."""
    timeline: Timeline
    lower_bound_s: float
    gap: float
    """makespan, or period, / lower bound - 1."""
    proven: bool
    """True if no order can be faster."""
    cut_by_clock: bool
    """True if the search ended for the time limit (or Ctrl-C): another run may then find another order."""
    history: tuple[Progress, ...]
    """Every time that the best order or the bound got better."""
    interrupted: bool = False
    """True if Ctrl-C ended the search."""
    period_s: float | None = None
    """Seconds from one step to the next without a barrier, of which the bound and the gap then are."""


@dataclass
class _Best:
    """The best order and bound so far, and the time that is left."""

    step: SearchStep
    deadline_s: float
    began_s: float
    bound_s: float
    on_progress: Callable[[Progress], None]
    makespan_s: float = math.inf
    orders: CodedSchedule | None = None
    made_by: str = ""
    seeds: list[tuple[float, CodedSchedule]] = field(default_factory=list)
    history: list[Progress] = field(default_factory=list)
    cut_by_clock: bool = False
    interrupted: bool = False
    exact_follows: bool = False

    @property
    def small(self) -> bool:
        """True if the exact search is likely to be of use."""
        return self.step.num_actions <= _MAX_EXACT_ACTIONS

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def go_on(self, grace_s: float = 0.0) -> bool:
        """True if there is time left; the first answer has all the time it needs."""
        if self.orders is not None and self.left_s <= -grace_s:
            self.cut_by_clock = True
        return not self.cut_by_clock

    @property
    def proven(self) -> bool:
        return bool(self.makespan_s <= self.bound_s * (1 + _CLOSE))

    def offer(self, method: str, makespan_s: float, orders: CodedSchedule) -> None:
        """Keep `orders` if they are better than what there is."""
        if makespan_s < self.makespan_s * (1 - 1e-12):
            self.makespan_s, self.orders, self.made_by = makespan_s, orders, method
            self._report(method)

    def raise_bound(self, method: str, bound_s: float) -> None:
        """A better lower bound; never above what was found, which rounding could make of it."""
        if bound_s > self.bound_s:
            self.bound_s = min(bound_s, self.makespan_s)
            self._report(method)

    def news(self, method: str) -> Progress:
        """Progress of the search, now that it is at `method`."""
        return Progress(method, time.monotonic() - self.began_s, self.makespan_s, self.bound_s)

    def _report(self, method: str) -> None:
        news = self.news(method)
        self.history.append(news)
        self.on_progress(news)


def search(
    problem: Problem,
    time_limit_s: float = 10.0,
    seed: int = 0,
    methods: Iterable[str] = METHODS,
    *,
    split: bool = True,
    always_exact: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> FoundOrder:
    """The best order for `problem` that can be found in about `time_limit_s` seconds.

    Ends early when it is proven that none is faster; on KeyboardInterrupt with the best so far. `split`: backwards may
    be done as I and W; else only as B. `always_exact`: the exact search however large the step. The same arguments give
    the same schedule unless `cut_by_clock`. Without a barrier it is the period that is to be short. Raises
    InfeasibleError when one microbatch alone does not fit some rank, UsageError for unknown methods.
    """
    chosen = _known(methods)
    if not problem.barrier:
        other, later_s = by_period(problem)

        def tell(news: Progress) -> None:
            bound_s, makespan_s = news.lower_bound_s - later_s, news.makespan_s - later_s
            on_progress(replace(news, makespan_s=makespan_s, lower_bound_s=bound_s))

        options: dict[str, Any] = {"split": split, "always_exact": always_exact, "on_progress": tell}
        found = search(other, time_limit_s, seed, chosen, **options)
        return of_period(problem, replace(found, timeline=simulate(problem, found.schedule), history=()))
    expect_enough_memory(problem)
    began_s = time.monotonic()
    step = search_step(problem)
    deadline_s = began_s + time_limit_s - _FINISH_S_PER_ACTION * step.num_actions
    best = _Best(step, deadline_s, began_s, lower_bound_s(problem), on_progress)
    best.exact_follows = "exact" in chosen and (always_exact or best.small)
    try:
        if count := short_microbatches(step) if set(chosen) - {"named"} else None:
            _repeat(best, count, chosen, time_limit_s, seed, split)
        _run(best, chosen, time_limit_s, seed, split)
    except KeyboardInterrupt:
        if best.orders is None:
            raise
        best.cut_by_clock = best.interrupted = True
    return _found(best)


def of_period(problem: Problem, found: FoundOrder) -> FoundOrder:
    """`found`, an order for `problem`, which has no barrier, with its bound, gap and proof of the period."""
    bound_s, between_s = period_bound_s(problem), period_s(problem, found.schedule)
    gap = between_s / bound_s - 1 if bound_s else 0.0
    return replace(found, lower_bound_s=bound_s, gap=gap, proven=gap <= _CLOSE, period_s=between_s)


def _run(best: _Best, chosen: Sequence[str], time_limit_s: float, seed: int, split: bool) -> None:
    """The chosen stages, one after the other, each beginning with what those before it found."""
    for method in METHODS:
        if method not in chosen or best.proven or (method == "exact" and not best.exact_follows):
            continue
        if not best.go_on():
            break
        best.on_progress(best.news(method))
        _STAGES[method](best, time_limit_s, seed, split)


def _repeat(best: _Best, count: int, chosen: Sequence[str], time_limit_s: float, seed: int, split: bool) -> None:
    """Search with `count` microbatches, and repeat the steady state of what is found as often as the step asks for."""
    step = search_step(shortened(best.step.problem, count))
    limit_s = _SHORT_SHARE * time_limit_s
    short = _Best(step, time.monotonic() + limit_s, best.began_s, lower_bound_s(step.problem), lambda news: None)
    _run(short, [method for method in chosen if method != "exact"], limit_s, seed, split)
    best.cut_by_clock |= short.cut_by_clock
    found = [(short.makespan_s, short.orders), *short.seeds] if short.orders is not None else short.seeds
    player, short_player = Player(best.step.arrays), Player(step.arrays)
    for makespan_s, orders in sorted(found, key=lambda pair: pair[0])[:_MAX_REPEATED]:
        whole = _split(step, makespan_s, orders)[1] if split else orders
        for period in find_periods(step, whole, short_player.start_s(whole)):
            repeated = extended(step, whole, period, best.step.problem.num_microbatches)
            if fits_memory(best.step, repeated):
                _offer_seed(best, f"{short.made_by}, repeated", player, repeated)
    best.seeds = sorted(best.seeds, key=lambda pair: pair[0])[:2]


def _known(methods: Iterable[str]) -> tuple[str, ...]:
    chosen = tuple(methods)
    for name in chosen:
        if name not in METHODS:
            raise UsageError(f"there is no search {name!r}{nearest(name, METHODS)}; known: {', '.join(METHODS)}")
    return chosen


def _found(best: _Best) -> FoundOrder:
    if best.orders is None:
        _one_by_one(best)
    assert best.orders is not None
    problem = best.step.problem
    schedule = to_schedule(best.orders, problem.num_microbatches, best.made_by)
    check(problem, schedule)
    timeline = simulate(problem, schedule, checked=True)
    bound_s = float(min(best.bound_s, timeline.makespan_s))
    gap = timeline.makespan_s / bound_s - 1 if bound_s else 0.0
    return FoundOrder(
        schedule, timeline, bound_s, gap, best.proven, best.cut_by_clock, tuple(best.history), best.interrupted
    )


def _one_by_one(best: _Best) -> None:
    problem = best.step.problem
    schedule = one_by_one(problem)
    check(problem, schedule)
    orders = to_orders(schedule)
    best.offer("one by one", Player(best.step.arrays).makespan_s(orders), orders)


def _named(best: _Best, time_limit_s: float, seed: int, split: bool) -> None:
    player = Player(best.step.arrays)
    for name in ORDERS:
        if not best.go_on(_GRACE_S):
            return
        try:
            orders = to_orders(order(name, best.step.problem))
        except (InputError, InfeasibleError):
            continue
        joined = (kind_of(orders[0]) == F) | (kind_of(orders[0]) == B)
        variants = {name: orders, f"{name} split": split_backwards(orders)} if split else {name: orders}
        for label, variant in variants.items():
            if (split or joined.all()) and fits_memory(best.step, variant):
                _offer_seed(best, label, player, variant)


def _offer_seed(best: _Best, name: str, player: Player, orders: CodedSchedule) -> None:
    makespan_s = player.makespan_s(orders)
    best.offer(name, makespan_s, orders)
    best.seeds.append((makespan_s, orders))


def _greedy(best: _Best, time_limit_s: float, seed: int, split: bool) -> None:
    found = greedy_orders(best.step, split=split, go_on=lambda: best.left_s > 0)
    best.cut_by_clock |= best.left_s <= 0
    for makespan_s, orders in found[:1]:
        best.offer("greedy", makespan_s, orders)
    best.seeds.extend(found[:2])


def _local(best: _Best, time_limit_s: float, seed: int, split: bool) -> None:
    share = _LOCAL_SHARE_OF_SMALL if best.small else _LOCAL_SHARE
    num_actions = best.step.num_actions
    plays = min(share * time_limit_s * _PLAYED_ACTIONS_PER_S / num_actions, _MAX_PLAYS_PER_ACTION * num_actions)

    def report(makespan_s: float, orders: CodedSchedule) -> bool:
        best.offer("local", makespan_s, orders)
        return best.go_on()

    rounds = min(max(8, int(plays * num_actions / _MAX_ACTIONS_IN_A_ROUND)), 64)
    seeds = _seeds(best, split)
    improve(
        best.step, seeds, num_evaluations=int(plays), num_rounds=rounds, seed=seed, target_s=best.bound_s, report=report
    )


def _seeds(best: _Best, split: bool) -> Sequence[tuple[float, CodedSchedule]]:
    """Starts of the local search: the best so far, all backwards in the form that is asked for."""
    if best.orders is None:
        _one_by_one(best)
    assert best.orders is not None
    seeds = best.seeds or [(best.makespan_s, best.orders)]
    return sorted((_split(best.step, *pair) for pair in seeds) if split else seeds, key=lambda pair: pair[0])


def _split(step: SearchStep, makespan_s: float, orders: CodedSchedule) -> tuple[float, CodedSchedule]:
    """(makespan_s, orders) with every backward as I and W, unless what W needs is more than the activations."""
    parts = split_backwards(orders)
    return (Player(step.arrays).makespan_s(parts), parts) if fits_memory(step, parts) else (makespan_s, orders)


def _exact(best: _Best, time_limit_s: float, seed: int, split: bool) -> None:
    from farpipe.planning.search.exact import solve  # here, as few searches come to it

    result = solve(
        best.step,
        _hint(best, split),
        best.bound_s,
        time_limit_s=best.left_s,
        effort=_EFFORT_SHARE * time_limit_s,
        seed=seed,
        split=split,
        on_better=lambda seconds, better: best.offer("exact", seconds, better),
    )
    best.cut_by_clock |= result.cut_by_clock
    best.raise_bound("exact", result.lower_bound_s)


def _hint(best: _Best, split: bool) -> tuple[float, CodedSchedule]:
    """The best so far in the form that the exact search works on."""
    if best.orders is None or not split:
        return _seeds(best, split)[0]
    return _split(best.step, best.makespan_s, best.orders)


_STAGES: Final = {"named": _named, "greedy": _greedy, "local": _local, "exact": _exact}
