"""``farpipe schedule PROBLEM.json``: order one step."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farpipe.cli.options import AsJson, JobKeys, Output, refuse, typed, with_groups
from farpipe.cli.output import check_folder, console, expect_replaceable, keep_earlier, print_json, search_status
from farpipe.core.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from farpipe.core.step import Problem
    from farpipe.planning.search import FoundOrder


@dataclass(frozen=True)
class ScheduleOptions:
    """A problem, and how it is to be scheduled."""

    problem: Annotated[Path, typer.Argument(help="A problem, or a plan or a job (.toml), whose problem is taken.")]
    given: JobKeys = None
    method: Annotated[
        str, typer.Option(help="A named schedule, or a search: greedy, local, exact, or auto (all three).")
    ] = "auto"
    time_limit: Annotated[float, typer.Option(min=0, help="Seconds that a search may take.")] = 10.0
    output: Output = None
    timeline: Annotated[bool, typer.Option("--timeline", help="With --json: add every event.")] = False
    as_json: AsJson = False


@with_groups
def schedule(context: typer.Context, options: ScheduleOptions) -> None:
    """Schedule one step: which rank does what in which order, its makespan and the gap to the lower bound.

    `auto` tries the named orders, then greedy, a local search and the exact solver, each from the best so far, and
    stops when the best is proven or the time is up. Ctrl-C ends a search with the best order so far.
    """
    from farpipe.cli.planned import load_step
    from farpipe.core.simulate import data_with_slack
    from farpipe.planning.planner.orders import find_order

    begin, method, output = time.perf_counter(), options.method, options.output
    _refuse_what_is_not_used(context, method, as_json=options.as_json)
    if output is not None:
        expect_replaceable(output, "schedule")
    check_folder(output)
    problem, _, _ = load_step(options.problem, options.given)
    with search_status(f"searching ({method})") as report:
        best = find_order(problem, method, time_limit_s=options.time_limit, on_progress=report)
    if best.interrupted:
        typer.echo("interrupted: this is the best schedule found so far", err=True)
    elif best.cut_by_clock:
        typer.echo("the search stopped at the time limit; another run may find another schedule", err=True)
    facts = _facts(problem, best, time.perf_counter() - begin)
    earlier = "" if output is None else keep_earlier(output, "schedule")
    if output is not None:
        best.schedule.save(output)
    if options.as_json:
        print_json(facts | ({"timeline": data_with_slack(best.timeline)} if options.timeline else {}))
        return
    _show(best, facts)
    if output is not None:
        console().print(f"schedule written to {output}{earlier}")


def _facts(problem: "Problem", best: "FoundOrder", elapsed_s: float) -> dict[str, Any]:
    """Figures that ``--json`` prints."""
    from farpipe.core.schedule import peak_memory_bytes

    return {
        "schedule": best.schedule.to_data(),
        "makespan_s": best.timeline.makespan_s,
        "lower_bound_s": best.lower_bound_s,
        "gap": best.gap,
        **({} if best.period_s is None else {"period_s": best.period_s}),
        "bubble_ratio": best.timeline.bubble_ratio,
        "peak_memory_bytes": peak_memory_bytes(problem, best.schedule),
        "elapsed_s": elapsed_s,
    }


def _show(best: "FoundOrder", facts: dict[str, Any]) -> None:
    console().print(best.schedule)
    makespan, nearness = format_seconds(best.timeline.makespan_s), _nearness(best.gap, best.lower_bound_s)
    if best.period_s is None:
        time = f"makespan {makespan}, {nearness}"
    else:
        time = f"{format_seconds(best.period_s)} from step to step, {nearness}; makespan {makespan}"
    console().print(
        f"{time}, bubble "
        f"{format_percent(best.timeline.bubble_ratio)}, peak memory {format_bytes(max(facts['peak_memory_bytes']))}"
    )


def _nearness(gap: float, bound_s: float) -> str:
    """Distance of a schedule from the lower bound, in words; a gap of rounding errors is none."""
    if gap < 1e-9:
        return "optimal (proven: equals the lower bound)"
    return f"{format_percent(gap)} above the lower bound of {format_seconds(bound_s)}"


def _refuse_what_is_not_used(context: typer.Context, method: str, *, as_json: bool) -> None:
    """UsageError for an unknown method, and for options of a search beside a method that is none."""
    from farpipe.planning.planner.orders import expect_known
    from farpipe.planning.search import SEARCHES

    expect_known(method)
    if not SEARCHES.get(method):
        refuse(
            typed(context, time_limit="--time-limit"),
            f"is for a search, and --method {method} is not one: use one of {', '.join(SEARCHES)}",
        )
    if not as_json:
        refuse(typed(context, timeline="--timeline"), "needs --json")
