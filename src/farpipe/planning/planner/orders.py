"""The best order for a Problem among the named ones: each is checked, simulated and compared."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Self

from farpipe.core.arguments import expect_kind, expect_seconds
from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.schedule import check, peak_memory_bytes
from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.core.schedule.library import ORDERS, Order, expect_order, order
from farpipe.core.simulate import Timeline, simulate
from farpipe.core.step import Problem, Schedule, exceeds
from farpipe.core.step.player import makespan_s, period_s
from farpipe.planning.search import SEARCHES, FoundOrder, Progress, of_period, search

V_ORDERS: Final = ("zbv", "zbv-late", "v-half", "v-min", "wave")
"""The named orders of two stages per rank in a V."""
LIMITED_ORDERS: Final = ("zb-1p", "zb-2p", "wave")
"""The named orders that try fewer rules where nothing can be won."""
AUTO: Final = "auto"
"""Method that tries every named order and keeps the fastest."""
QUICK: Final = "quick"
"""Method that tries a few named orders, of which one is nearly always close to the best; not for users."""
QUICK_ORDERS: Final = ("1f1b", "zb-1p", "zb-2p")
"""Orders of one stage per rank: least memory; zero bubble in one and two times that."""
QUICK_V_ORDERS: Final = ("zbv-late", "v-half")
"""The same of two in a V."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one order: its schedule and the step time, or the reason why there is none."""

    method: str
    schedule: Schedule | None = None
    makespan_s: float = math.inf
    obstacle: InputError | InfeasibleError | None = None

    @classmethod
    def played(cls, method: str, problem: Problem, schedule: Schedule) -> Self:
        """The outcome of a schedule that keeps the rules of `check`."""
        return cls(method, schedule, makespan_s(problem, schedule))

    def timeline(self, problem: Problem) -> Timeline | None:
        """The simulated step; None where there is no schedule."""
        return None if self.schedule is None else simulate(problem, self.schedule, checked=True)


def expect_known(method: str | Order) -> None:
    """UsageError for a name that is neither an order's nor a search's; InputError for what is no function either."""
    if isinstance(method, str):
        expect_order(method, tuple(SEARCHES))
    elif not callable(method):
        expect_kind("method", method, (), "the name of a schedule, FILE.py:FUNCTION, or a function")


def try_order(method: str | Order, problem: Problem) -> Outcome:
    """Make, check and simulate one named order, or a function's; UsageError for an unknown name.

    An order that is not defined here, or does not fit, is an outcome too; a function that breaks is a UsersCodeError.
    """
    name = method if isinstance(method, str) else method.__name__
    try:
        schedule = order(method, problem)
        check(problem, schedule)
    except (InputError, InfeasibleError) as error:
        return Outcome(name, obstacle=error)
    return Outcome.played(name, problem, schedule)


def try_quickly(method: str | Order, problem: Problem, limit_s: float = math.inf) -> Outcome:
    """Make and simulate one order as `try_order` does, checking memory alone: the library keeps the other rules.

    Only an order that is faster than `limit_s` is of use: where none will be, it may be a worse one than else.
    """
    if not isinstance(method, str) or method not in ORDERS:
        return try_order(method, problem)
    try:
        schedule = order(method, problem, **({"limit_s": limit_s} if method in LIMITED_ORDERS else {}))
    except (InputError, InfeasibleError) as error:
        return Outcome(method, obstacle=error)
    if not _fits(problem, schedule):
        return Outcome(method, obstacle=InfeasibleError(f"schedule {method!r} does not fit memory"))
    return Outcome.played(method, problem, schedule)


def _fits(problem: Problem, schedule: Schedule) -> bool:
    """Rule 6 of `check`."""
    peaks = peak_memory_bytes(problem, schedule)
    return not any(exceeds(peak, spec.memory_bytes) for peak, spec in zip(peaks, problem.ranks, strict=True))


def try_orders(problem: Problem, methods: Iterable[str | Order] = tuple(ORDERS)) -> list[Outcome]:
    """The outcome of every method, the fastest first (see `ranked`), useless ones last."""
    return ranked(problem, [try_order(method, problem) for method in methods])


def ranked(problem: Problem, outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The fastest first: of equal makespans the shorter period, of equal ones the order that needs less memory.

    Without a barrier the period comes before the makespan. Times to nine digits, so that rounding does not decide
    between equals.
    """
    found = list(outcomes)
    counts = Counter(_digits(one.makespan_s) for one in found)

    def merit(one: Outcome) -> tuple[float, float, float]:
        if one.schedule is None:
            return math.inf, math.inf, math.inf
        time_s, memory_bytes = _digits(one.makespan_s), max(peak_memory_bytes(problem, one.schedule))
        if not problem.barrier:
            return _digits(period_s(problem, one.schedule)), time_s, memory_bytes
        return time_s, _digits(period_s(problem, one.schedule)) if counts[time_s] > 1 else 0.0, memory_bytes

    return sorted(found, key=merit)


def _digits(seconds: float) -> float:
    return float(f"{seconds:.9g}")


def find_order(
    problem: Problem,
    method: str | Order = AUTO,
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> FoundOrder:
    """The order of `method`, a named one, a function's or a search's, with its bound; errors as for `best_order`.

    `time_limit_s` and `seed` are the search's. InputError for arguments that are of another type or can't be.
    """
    expect_kind("order: problem", problem, Problem, "a Problem; that of a plan is plan.problem")
    expect_seconds("order: time_limit_s", time_limit_s)
    if not isinstance(seed, int) or seed < 0:
        expect_kind("order: seed", seed, (), "a whole number, 0 or more")
    if isinstance(method, str) and method in SEARCHES:
        always = method == "exact"
        options: dict[str, Any] = {"always_exact": always, "on_progress": on_progress}
        return search(problem, time_limit_s, seed, SEARCHES[method], **options)
    schedule, timeline = best_order(problem, method)
    bound_s = lower_bound_s(problem)
    gap = timeline.makespan_s / bound_s - 1 if bound_s else 0.0
    found = FoundOrder(schedule, timeline, bound_s, gap, proven=gap <= 1e-9, cut_by_clock=False, history=())
    return found if problem.barrier else of_period(problem, found)


def best_order(problem: Problem, method: str | Order = AUTO, limit_s: float = math.inf) -> tuple[Schedule, Timeline]:
    """The schedule of `method` with its timeline; ``auto`` is here the fastest named order, as planning asks often.

    `limit_s` as for `try_quickly`. ``quick`` is a few of them, not checked.

    Raises UsageError for an unknown method, InputError when the method is not defined for such a problem, and
    InfeasibleError when no order (or not the one asked for) fits memory.
    """
    if method == QUICK:
        outcomes = [try_quickly(name, problem, limit_s) for name in quick_orders(problem)]
        return _best_of(problem, outcomes)
    expect_known(method)
    if isinstance(method, str) and method in SEARCHES and method != AUTO:
        found = find_order(problem, method)
        return found.schedule, found.timeline
    outcomes = [try_quickly(name, problem, limit_s) for name in (ORDERS if method == AUTO else (method,))]
    schedule, timeline = _best_of(problem, outcomes)
    check(problem, schedule)
    return schedule, timeline


def quick_orders(problem: Problem) -> tuple[str, ...]:
    """The orders that ``quick`` tries; of several stages per rank, round robin, there is hardly a choice."""
    if problem.num_stages == problem.num_ranks:
        return QUICK_ORDERS
    if problem.num_stages == 2 * problem.num_ranks and problem.stages[-1].rank == problem.stages[0].rank:
        return QUICK_V_ORDERS
    return ("bfs",) if problem.num_microbatches % problem.num_ranks else ("interleaved",)


def _best_of(problem: Problem, outcomes: list[Outcome]) -> tuple[Schedule, Timeline]:
    best = ranked(problem, outcomes)[0]
    timeline = best.timeline(problem)
    if best.schedule is None or timeline is None:
        raise _most_telling(problem, outcomes)
    return best.schedule, timeline


def _most_telling(problem: Problem, outcomes: list[Outcome]) -> InputError | InfeasibleError:
    """Too little memory says more than an order that is not defined here; of those, 1F1B's, which needs least."""
    least = "1f1b" if problem.num_stages == problem.num_ranks else "interleaved"
    told = min(outcomes, key=lambda o: (not isinstance(o.obstacle, InfeasibleError), o.method != least))
    obstacle = (try_order(told.method, problem).obstacle if told.method in ORDERS else None) or told.obstacle
    assert obstacle is not None
    return obstacle
