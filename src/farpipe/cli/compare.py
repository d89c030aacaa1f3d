"""``farpipe compare JOB|PROBLEM``: every schedule side by side."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farpipe.cli.options import AsJson, Csv, JobKeys, Plot, with_groups
from farpipe.cli.output import check_folder, check_picture, console, print_json, search_status
from farpipe.core.errors import InfeasibleError, UsageError
from farpipe.core.strict import write_text
from farpipe.core.units import format_seconds
from farpipe.report.tables import csv_text, to_rich

if TYPE_CHECKING:
    from farpipe.planning import Plan, PlanDocument
    from farpipe.planning.search import Progress
    from farpipe.report.comparison import Comparison


@dataclass(frozen=True)
class CompareOptions:
    """A step, and the schedules and searches that are compared on it."""

    step: Annotated[Path, typer.Argument(help="A job (.toml), a plan, or a problem.")]
    given: JobKeys = None
    method: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this schedule or search, or 'all'; may be repeated. Default: all."),
    ] = None
    time_limit: Annotated[
        float | None,
        typer.Option(min=0, help="Search too (greedy, auto, or those of --method), each for this many seconds."),
    ] = None
    plot: Plot = None
    csv: Csv = None
    as_json: AsJson = False


@with_groups
def compare(options: CompareOptions) -> None:
    """Every schedule of one step side by side: time, gap to the bound, bubble, waits, memory, links.

    Given a job, it plans first and compares the orders of that plan. Orders that can't be used are listed with the
    reason. The gap is makespan / lower bound - 1; waits are exposed communication, the mean over ranks.
    """
    from farpipe.cli.planned import load_explained
    from farpipe.report.comparison import compare_orders

    check_picture(options.plot, kinds=(".svg",))
    check_folder(options.plot, options.csv, keeping=(options.step,))
    named = _named(options.method, options.time_limit) if options.method else None
    problem, own, document = load_explained(options.step, options.given)
    plan = document.plan if document else None
    overhead_s, sites = (plan.prediction.overhead_s, plan.sites) if plan else (0.0, ())
    found = compare_orders(
        problem, named, options.time_limit, own=own, overhead_s=overhead_s, sites=sites, searching=_searching
    )
    if options.plot is not None and found.is_usable:
        write_text(options.plot, found.figure().svg())
    if options.csv is not None:
        write_text(options.csv, csv_text(found.to_data()))
    if options.as_json:
        figures = {"lower_bound_s": found.lower_bound_s, "overhead_s": overhead_s, "schedules": found.to_data()}
        print_json(figures | _guess(plan))
    if not found.is_usable:
        raise InfeasibleError(f"no schedule can be used here\n{found.obstacles}")
    if not options.as_json:
        _show(found, document)


def _searching(name: str) -> "AbstractContextManager[Callable[[Progress], None]]":
    return search_status(f"searching ({name})")


def _guess(plan: "Plan | None") -> dict[str, Any]:
    return plan.job.model.guess_data if plan is not None else {}


def _show(found: "Comparison", document: "PlanDocument | None") -> None:
    from farpipe.report.plan_tables import trust_note

    out, bound_s = console(), format_seconds(found.lower_bound_s or 0.0)
    out.print(to_rich(found.table))
    out.print(f"lower bound of every schedule: {bound_s}; gap: (makespan - bound) / bound")
    if document is not None and document.plan.prediction.overhead_s:
        out.print(f"optimizer and clipping: {format_seconds(document.plan.prediction.overhead_s)} per step, included")
    if document is not None and document.explanation.is_rough:
        out.print(trust_note(document))


def _named(names: "Sequence[str]", search_s: float | None) -> list[str]:
    """`names` without repetitions; UsageError for one that nobody knows, or for seconds that no search would use."""
    from farpipe.planning.planner.orders import expect_known
    from farpipe.planning.search import SEARCHES
    from farpipe.report.comparison import ALL

    for name in names:
        if name != ALL:
            expect_known(name)
    if search_s and not {ALL, *SEARCHES} & set(names):
        raise UsageError(f"--time-limit needs a search: add --method with one of {', '.join(SEARCHES)}")
    return list(dict.fromkeys(names))
