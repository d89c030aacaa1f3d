"""``farpipe schedule PROBLEM.json``: order one step."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from farpipe.cli.options import AsJson, Output, Seed, refuse, typed
from farpipe.cli.output import check_folder, console, expect_replaceable, keep_earlier, print_json, search_status


def schedule(
    context: typer.Context,
    problem: Annotated[Path, typer.Argument(help="A problem, or a plan or a job (.toml), whose problem is taken.")],
    method: Annotated[
        str, typer.Option(help="A named schedule, or a search: greedy, local, exact, or auto (all three).")
    ] = "auto",
    time_limit: Annotated[float, typer.Option(min=0, help="Seconds that a search may take.")] = 10.0,
    seed: Seed = 0,
    output: Output = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="With --json: every event too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Schedule one step: which rank does what in which order, its makespan and the gap to the lower bound."""
    from farpipe.cli.shown import load_step
    from farpipe.plan.orders import find_order
    from farpipe.schedule import peak_memory_bytes
    from farpipe.simulate import data_with_slack
    from farpipe.units import format_bytes, format_percent, format_seconds

    begin = time.perf_counter()
    _refuse_what_is_not_used(context, method, as_json=as_json)
    check_folder(output)
    if output is not None:
        expect_replaceable(output, "schedule")
    step, _, _ = load_step(problem)
    with search_status(f"searching ({method})") as tell:
        best = find_order(step, method, time_limit_s=time_limit, seed=seed, on_progress=tell)
    found, played, bound = best.schedule, best.timeline, best.lower_bound_s
    if best.interrupted:
        typer.echo("interrupted: this is the best schedule found so far", err=True)
    elif best.cut_by_clock:
        typer.echo("the search stopped at the time limit; another run may find another schedule", err=True)
    facts: dict[str, Any] = {
        "schedule": found.to_data(),
        "makespan_s": played.makespan_s,
        "lower_bound_s": bound,
        "gap": best.gap,
        "bubble_ratio": played.bubble_ratio,
        "peak_memory_bytes": peak_memory_bytes(step, found),
        "elapsed_s": time.perf_counter() - begin,
    }
    told = ""
    if output is not None:
        told = f"schedule written to {output}{keep_earlier(output, 'schedule')}"
        found.save(output)
    if as_json:
        print_json(facts | ({"timeline": data_with_slack(played)} if timeline else {}))
        return
    out = console()
    out.print(found)
    out.print(
        f"makespan {format_seconds(played.makespan_s)}, {_nearness(best.gap, bound)}, "
        f"bubble {format_percent(played.bubble_ratio)}, peak memory {format_bytes(max(facts['peak_memory_bytes']))}"
    )
    if told:
        out.print(told)


def _nearness(gap: float, bound_s: float) -> str:
    """Distance of a schedule from the lower bound, in words; a gap of rounding errors is none."""
    from farpipe.units import format_percent, format_seconds

    if gap < 1e-9:
        return "optimal (proven: equals the lower bound)"
    return f"{format_percent(gap)} above the lower bound of {format_seconds(bound_s)}"


def _refuse_what_is_not_used(context: typer.Context, method: str, *, as_json: bool) -> None:
    """UsageError for an unknown method, and for options of a search beside a method that is none."""
    from farpipe.plan.orders import expect_known
    from farpipe.search import SEARCHES

    expect_known(method)
    if not SEARCHES.get(method):
        of_searches = typed(context, time_limit="--time-limit", seed="--seed")
        refuse(of_searches, f"is for a search, and --method {method} is none: take one of {', '.join(SEARCHES)}")
    if not as_json:
        refuse(typed(context, timeline="--timeline"), "is a part of what --json prints: give both")
