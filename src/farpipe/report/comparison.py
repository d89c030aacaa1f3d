"""Schedules of one step, or timelines of several, side by side: ``farpipe.compare``."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any, Final

from farpipe.core.arguments import expect_kind, expect_list, expect_seconds
from farpipe.core.errors import InfeasibleError, InputError, UsageError
from farpipe.core.schedule import peak_memory_bytes
from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.core.schedule.library import ADDED, Order
from farpipe.core.simulate import Timeline
from farpipe.core.step import Problem, Schedule
from farpipe.core.units import format_percent, format_seconds
from farpipe.planning import Plan
from farpipe.planning.planner.orders import Outcome, expect_known, find_order, try_orders
from farpipe.planning.search import SEARCHES, Progress
from farpipe.report.figure import Figure
from farpipe.report.gantt import Panel, draw_gantt, draw_small_multiples
from farpipe.report.summary import ComparisonRow, comparison_view, obstacles
from farpipe.report.tables import TableView, as_text

SEARCHED: Final = ("greedy", "auto")
"""Searches that are added to the named schedules where seconds are given and no method is."""
DEFAULT_SEARCH_S: Final = 10.0
ALL: Final = "all"
"""Stands for every named schedule among methods."""

Searching = Callable[[str], AbstractContextManager[Callable[[Progress], None]]]
"""Context in which a search of that name runs, with what it reports its progress to."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """Schedules or timelines side by side, the fastest schedule first; `print` shows the table."""

    rows: tuple[ComparisonRow, ...]
    timelines: tuple[Timeline | None, ...]
    """Timeline of every row; None where a schedule can't be used, as its row says."""
    made_by: tuple[str | None, ...] = ()
    """Method of every row's schedule, which of a search is the stage that found it."""
    lower_bound_s: float | None = None
    """Seconds that no schedule of the step can be below; None for timelines."""
    sites: tuple[str, ...] = ()

    @property
    def is_usable(self) -> bool:
        """True if at least one schedule can be used."""
        return any(self.timelines)

    @property
    def obstacles(self) -> str:
        """Why some schedules can't be used, a line for each reason."""
        return obstacles(self.rows)

    @property
    def table(self) -> TableView:
        """The table, without what no row has."""
        return comparison_view(self.rows, "schedule" if self.lower_bound_s is not None else "timeline")

    def to_data(self) -> list[dict[str, Any]]:
        """The rows for machines, with the makespan and the use of every link."""
        return [
            asdict(row)
            | {
                "makespan_s": timeline.makespan_s if timeline else None,
                "link_busy_ratio": timeline.link_busy_ratio() if timeline else {},
                "made_by": made_by,
            }
            for row, timeline, made_by in zip(self.rows, self.timelines, self.made_by, strict=True)
        ]

    def figure(self) -> Figure:
        """Gantt chart of every timeline, on one axis of time."""
        panels = [
            Panel(
                row.method,
                timeline,
                self.sites,
                f"{format_seconds(timeline.makespan_s)}, {format_percent(timeline.bubble_ratio)} bubble",
            )
            for row, timeline in zip(self.rows, self.timelines, strict=True)
            if timeline is not None
        ]
        return draw_small_multiples(panels) if self.lower_bound_s is not None else draw_gantt(panels)

    def __repr__(self) -> str:
        bound = self.lower_bound_s
        last = (
            ""
            if bound is None
            else f"\nlower bound of every schedule: {format_seconds(bound)}; gap: (makespan - bound) / bound"
        )
        return as_text(self.table) + last

    def _repr_html_(self) -> str:
        picture = self.figure().svg() if self.is_usable else ""
        return f"{picture}<pre>{escape(repr(self))}</pre>"


def compare(
    step: Problem | Plan | Timeline,
    *others: Timeline,
    methods: Sequence[str | Order] | None = None,
    search_s: float | None = None,
    names: Sequence[str] = (),
) -> Comparison:
    """Compare schedules of one step, or timelines with each other.

    Of a Problem or a Plan: every named schedule, or those of `methods` (names, ``FILE.py:FUNCTION``, functions, and
    ``all`` for every named one); the searches too where `search_s` gives seconds for each of them, or `methods` names
    them. A schedule that can't be used has its reason in the table. Of several Timelines, such as ``plan.timeline`` and
    ``run.timeline``: their figures with `names`, by default predicted and measured.

    Raises UsageError for an unknown method, or where timelines and schedules are mixed, InputError for arguments of
    another type.
    """
    expect_kind("compare: step", step, (Problem, Plan, Timeline), "a Problem, a Plan or a Timeline")
    for name, given in (("methods", methods), ("names", names)):
        expect_kind(f"compare: {name}", given or [], (list, tuple), f"a list such as {name}=['1f1b', 'zb-h1']")
    if isinstance(step, Timeline):
        if methods is not None or search_s is not None:
            raise UsageError("methods and search_s are for the schedules of a Problem or a Plan, not for timelines")
        expect_list("compare: others", others, Timeline, "a Timeline, such as plan.timeline or run.timeline")
        expect_list("compare: names", names, str, "a text")
        return _side_by_side((step, *others), names)
    if others or names:
        raise UsageError("a Problem or a Plan is compared alone; give timelines to compare several steps")
    if search_s is not None:
        expect_seconds("compare: search_s", search_s)
    if isinstance(step, Problem):
        return compare_orders(step, methods, search_s)
    overhead_s, sites = step.prediction.overhead_s, step.sites
    return compare_orders(step.problem, methods, search_s, own=step.schedule, overhead_s=overhead_s, sites=sites)


def compare_orders(
    problem: Problem,
    methods: Sequence[str | Order] | None = None,
    search_s: float | None = None,
    *,
    own: Schedule | None = None,
    overhead_s: float = 0.0,
    sites: tuple[str, ...] = (),
    searching: Searching = lambda name: nullcontext(lambda progress: None),
) -> Comparison:
    """The schedules of `problem`; without `methods` a plan's `own` is among them, which a search may have found."""
    asked = methods or (ALL,)
    every = _all_methods(problem, search_s) if ALL in asked else []
    tried = [*dict.fromkeys(one for method in asked for one in (every if method == ALL else (method,)))]
    for method in tried:
        expect_known(method)
    seconds = DEFAULT_SEARCH_S if search_s is None else search_s
    outcomes, bound_s = _outcomes(problem, tried, seconds, searching)
    if own is not None and ALL in asked and own.method not in tried:
        outcomes.append(Outcome.played(own.method, problem, own))
    outcomes.sort(key=_makespan_s)
    timelines = [outcome.timeline(problem) for outcome in outcomes]
    rows = [_row(problem, *one, bound_s, overhead_s) for one in zip(outcomes, timelines, strict=True)]
    made_by = [outcome.schedule.method if outcome.schedule else None for outcome in outcomes]
    return Comparison(tuple(rows), tuple(timelines), tuple(made_by), bound_s, sites)


def _side_by_side(timelines: Sequence[Timeline], names: Sequence[str]) -> Comparison:
    if names and len(names) != len(timelines):
        raise UsageError(f"{len(names)} names for {len(timelines)} timelines")
    named = names or _by_source(timelines)
    rows = [_figures(name, timeline) for name, timeline in zip(named, timelines, strict=True)]
    return Comparison(tuple(rows), tuple(timelines), tuple(named))


def _by_source(timelines: Sequence[Timeline]) -> list[str]:
    """Predicted and measured; numbered where there are several of a kind."""
    kinds = [timeline.source for timeline in timelines]
    return [
        kind if kinds.count(kind) == 1 else f"{kind} {kinds[: place + 1].count(kind)}"
        for place, kind in enumerate(kinds)
    ]


def _all_methods(problem: Problem, search_s: float | None) -> list[str]:
    """Every named schedule but `interleaved` with one stage per rank, which is 1F1B; the searches when asked for."""
    named = [name for name in ADDED.known if name != "interleaved" or problem.num_stages > problem.num_ranks]
    return [*named, *(SEARCHED if search_s else ())]


def _outcomes(
    problem: Problem, methods: Sequence[str | Order], search_s: float, searching: Searching
) -> tuple[list[Outcome], float]:
    """Outcome of every method, and the highest lower bound that anything proved."""
    searches = [name for name in methods if isinstance(name, str) and name in SEARCHES]
    outcomes = try_orders(problem, [method for method in methods if method not in searches])
    bound_s = lower_bound_s(problem)
    for name in searches:
        try:
            with searching(name) as report:
                found = find_order(problem, name, time_limit_s=search_s, on_progress=report)
        except (InputError, InfeasibleError) as error:
            outcomes.append(Outcome(name, obstacle=error))
            continue
        outcomes.append(Outcome(name, found.schedule, found.timeline.makespan_s))
        bound_s = max(bound_s, found.lower_bound_s)
    return outcomes, bound_s


def _makespan_s(outcome: Outcome) -> float:
    """Makespan to nine digits, so that rounding does not decide between equals."""
    return float(f"{outcome.makespan_s:.9g}")


def _row(
    problem: Problem, outcome: Outcome, timeline: Timeline | None, bound_s: float, overhead_s: float
) -> ComparisonRow:
    if timeline is None or outcome.schedule is None:
        return ComparisonRow(outcome.method, obstacle=str(outcome.obstacle).splitlines()[0])
    gap = max(timeline.makespan_s / bound_s - 1, 0.0) if bound_s else 0.0
    peak_bytes = max(peak_memory_bytes(problem, outcome.schedule))
    return replace(_figures(outcome.method, timeline, overhead_s), gap=gap, peak_memory_bytes=peak_bytes)


def _figures(name: str, timeline: Timeline, overhead_s: float = 0.0) -> ComparisonRow:
    inter_site_s, intra_site_s = map(float, timeline.exposed_s.mean(axis=0))
    return ComparisonRow(
        name,
        timeline.makespan_s + overhead_s,
        bubble_ratio=timeline.bubble_ratio,
        exposed_inter_site_s=inter_site_s,
        exposed_intra_site_s=intra_site_s,
        busiest_link_ratio=max(timeline.link_busy_ratio().values(), default=0.0),
    )
