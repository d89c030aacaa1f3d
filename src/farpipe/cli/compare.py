"""``farpipe compare JOB|PROBLEM``: every schedule side by side."""

from pathlib import Path
from typing import Annotated

import typer

from farpipe.cli.output import console, print_json


def compare(
    step: Annotated[Path, typer.Argument(help="A job (.toml), a plan, or a problem.")],
    method: Annotated[
        list[str] | None, typer.Option(help="Only these orders; may be given several times. Default: all.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write all Gantt charts as one SVG picture.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Every schedule of one step side by side: time, gap to the bound, bubble, waits, memory."""
    from farpipe.cli.shown import comparison_row, load_step
    from farpipe.plan.orders import try_orders
    from farpipe.report import Panel, comparison_table, draw_small_multiples
    from farpipe.schedule.bounds import lower_bound_s
    from farpipe.schedule.library import ORDERS
    from farpipe.strict import write_text

    problem, _, plan = load_step(step)
    outcomes = try_orders(problem, method or tuple(ORDERS))
    bound_s = lower_bound_s(problem)
    if plot is not None:
        sites = plan.sites if plan else ()
        panels = [Panel(o.method, o.timeline, sites) for o in outcomes if o.timeline is not None]
        write_text(plot, draw_small_multiples(panels).svg())
    rows = [comparison_row(problem, outcome) for outcome in outcomes]
    if as_json:
        fields = ("method", "step_s", "bubble_ratio", "exposed_inter_site_s", "exposed_intra_site_s")
        table = [{name: getattr(row, name) for name in (*fields, "peak_memory_bytes", "obstacle")} for row in rows]
        print_json({"lower_bound_s": bound_s, "schedules": table})
        return
    console().print(comparison_table(rows))
    typer.echo(f"no schedule can be faster than {bound_s:.6g} s")
