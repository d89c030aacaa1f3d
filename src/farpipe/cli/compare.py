"""``farpipe compare JOB|PROBLEM``: every schedule side by side."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farpipe.cli.options import AsJson, Plot, with_groups
from farpipe.cli.output import check_folder, check_picture, console, print_json, search_status
from farpipe.core.errors import InfeasibleError, InputError, UsageError
from farpipe.core.strict import write_text
from farpipe.core.units import format_percent, format_seconds
from farpipe.report.tables import to_rich

if TYPE_CHECKING:
    from farpipe.core.simulate import Timeline
    from farpipe.core.step import Problem, Schedule
    from farpipe.planning import Plan, PlanDocument
    from farpipe.planning.planner.orders import Outcome
    from farpipe.report.summary import ComparisonRow

    Played = list[tuple[Outcome, Timeline | None]]

SEARCHED = ("greedy", "auto")
"""Methods that `--search-s` adds when none is named."""
DEFAULT_SEARCH_S = 10.0


@dataclass(frozen=True)
class CompareOptions:
    """A step, and the schedules and searches that are compared on it."""

    step: Annotated[Path, typer.Argument(help="A job (.toml), a plan, or a problem.")]
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<str>", help="Only these schedules or searches; may be given several times. Default: all."
        ),
    ] = None
    search_s: Annotated[
        float | None,
        typer.Option(min=0, help="Search too (greedy, auto, or those of --method), each for so many seconds."),
    ] = None
    plot: Plot = None
    as_json: AsJson = False


@with_groups
def compare(options: CompareOptions) -> None:
    """Every schedule of one step side by side: time, gap to the bound, bubble, waits, memory, links.

    Given a job, it plans first and compares the orders of that plan. Orders that can't be used are listed with the
    reason. The gap is makespan / lower bound - 1; waits are exposed communication, the mean over ranks.
    """
    from farpipe.cli.planned import load_explained
    from farpipe.report.summary import obstacles

    check_picture(options.plot, kinds=(".svg",))
    check_folder(options.plot, keeping=(options.step,))
    named = _named(options.method, options.search_s) if options.method else None
    problem, own, document = load_explained(options.step)
    plan = document.plan if document else None
    names = named or _all_methods(problem, options.search_s)
    outcomes, bound_s = _outcomes(problem, names, DEFAULT_SEARCH_S if options.search_s is None else options.search_s)
    if own is not None and not named and own.method not in names:
        outcomes = _with_own(problem, own, outcomes)
    overhead_s = plan.prediction.overhead_s if plan else 0.0
    timelines = [outcome.timeline(problem) for outcome in outcomes]
    played = list(zip(outcomes, timelines, strict=True))
    rows = [_row(problem, *one, bound_s, overhead_s) for one in played]
    usable = any(timelines)
    if options.plot is not None and usable:
        _draw(options.plot, played, plan.sites if plan else ())
    if options.as_json:
        print_json(
            {"lower_bound_s": bound_s, "overhead_s": overhead_s, "schedules": _data(rows, played)} | _guess(plan)
        )
    if not usable:
        raise InfeasibleError(f"no schedule can be used here\n{obstacles(rows)}")
    if not options.as_json:
        _show(rows, bound_s, document)


def _guess(plan: "Plan | None") -> dict[str, Any]:
    return plan.job.model.guess_data if plan is not None else {}


def _show(rows: "Sequence[ComparisonRow]", bound_s: float, document: "PlanDocument | None") -> None:
    from farpipe.report.plan_tables import trust_note
    from farpipe.report.summary import comparison_view

    out = console()
    out.print(to_rich(comparison_view(rows)))
    out.print(f"lower bound of every schedule: {format_seconds(bound_s)}; gap: (makespan - bound) / bound")
    if document is not None and document.plan.prediction.overhead_s:
        out.print(f"optimizer and clipping: {format_seconds(document.plan.prediction.overhead_s)} per step, included")
    if document is not None and document.explanation.is_rough:
        out.print(trust_note(document))


def _named(names: "Sequence[str]", search_s: float | None) -> list[str]:
    """`names` without repetitions; UsageError for one that nobody knows, or for seconds that no search would use."""
    from farpipe.planning.planner.orders import expect_known
    from farpipe.planning.search import SEARCHES

    for name in names:
        expect_known(name)
    if search_s and not set(names) & set(SEARCHES):
        raise UsageError(f"--search-s is for a search, and no --method is one: add one of {', '.join(SEARCHES)}")
    return list(dict.fromkeys(names))


def _all_methods(problem: "Problem", search_s: float | None) -> list[str]:
    """Every named schedule but `interleaved` with one stage per rank, which is 1F1B; the searches when asked for."""
    from farpipe.core.schedule.library import ORDERS

    named = [name for name in ORDERS if name != "interleaved" or problem.num_stages > problem.num_ranks]
    return [*named, *(SEARCHED if search_s else ())]


def _outcomes(problem: "Problem", names: "Sequence[str]", search_s: float) -> "tuple[list[Outcome], float]":
    """Outcome of every method, the fastest first, and the highest lower bound that anything proved."""
    from farpipe.core.schedule.bounds import lower_bound_s
    from farpipe.planning.planner.orders import Outcome, find_order, try_orders
    from farpipe.planning.search import SEARCHES

    outcomes = try_orders(problem, [name for name in names if name not in SEARCHES])
    bound_s = lower_bound_s(problem)
    for name in (name for name in names if name in SEARCHES):
        try:
            with search_status(f"searching ({name})") as report:
                found = find_order(problem, name, time_limit_s=search_s, on_progress=report)
        except (InputError, InfeasibleError) as error:
            outcomes.append(Outcome(name, obstacle=error))
            continue
        outcomes.append(Outcome(name, found.schedule, found.timeline.makespan_s))
        bound_s = max(bound_s, found.lower_bound_s)
    return sorted(outcomes, key=_makespan_s), bound_s


def _with_own(problem: "Problem", own: "Schedule", outcomes: "list[Outcome]") -> "list[Outcome]":
    """The plan's own schedule, which a search has found, among the others."""
    from farpipe.planning.planner.orders import Outcome

    return sorted([*outcomes, Outcome.played(own.method, problem, own)], key=_makespan_s)


def _makespan_s(outcome: "Outcome") -> float:
    """Makespan to nine digits, so that rounding does not decide between equals."""
    return float(f"{outcome.makespan_s:.9g}")


def _row(
    problem: "Problem", outcome: "Outcome", timeline: "Timeline | None", bound_s: float, overhead_s: float
) -> "ComparisonRow":
    from farpipe.core.schedule import peak_memory_bytes
    from farpipe.report.summary import ComparisonRow

    if timeline is None or outcome.schedule is None:
        return ComparisonRow(outcome.method, obstacle=str(outcome.obstacle).splitlines()[0])
    inter_site_s, intra_site_s = timeline.exposed_s.mean(axis=0)
    return ComparisonRow(
        outcome.method,
        timeline.makespan_s + overhead_s,
        max(timeline.makespan_s / bound_s - 1, 0.0) if bound_s else 0.0,
        timeline.bubble_ratio,
        float(inter_site_s),
        float(intra_site_s),
        max(peak_memory_bytes(problem, outcome.schedule)),
        max(timeline.link_busy_ratio().values(), default=0.0),
    )


def _data(rows: "Sequence[ComparisonRow]", played: "Played") -> list[dict[str, Any]]:
    """The rows for machines, with the makespan and the use of every link."""
    return [
        asdict(row)
        | {
            "makespan_s": timeline.makespan_s if timeline else None,
            "link_busy_ratio": timeline.link_busy_ratio() if timeline else {},
            "made_by": outcome.schedule.method if outcome.schedule else None,
        }
        for row, (outcome, timeline) in zip(rows, played, strict=True)
    ]


def _draw(path: Path, played: "Played", sites: tuple[str, ...]) -> None:
    """One small Gantt chart per order that can be used, the fastest on top."""
    from farpipe.report.gantt import Panel, draw_small_multiples

    panels = [
        Panel(
            outcome.method,
            timeline,
            sites,
            f"{format_seconds(timeline.makespan_s)}, {format_percent(timeline.bubble_ratio)} bubble",
        )
        for outcome, timeline in played
        if timeline is not None
    ]
    write_text(path, draw_small_multiples(panels).svg())
