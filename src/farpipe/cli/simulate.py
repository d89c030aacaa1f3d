"""``farpipe simulate PLAN``: the predicted timeline of a plan."""

from pathlib import Path
from typing import Annotated

import typer

from farpipe.cli.options import AsJson, Plot
from farpipe.cli.output import check_folder, check_picture, console, print_json


def simulate(
    plan: Annotated[Path, typer.Argument(help="A plan, or a problem together with --schedule.")],
    schedule: Annotated[
        Path | None, typer.Option(help="A schedule file to simulate instead of the plan's own.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    plot: Plot = None,
    html: Annotated[Path | None, typer.Option(help="Write the whole report as one HTML page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a plan: step time, bubble, exposed communication, memory, links."""
    from farpipe.cli.efficiency import of_a_device
    from farpipe.cli.shown import load_step, plan_report, step_table
    from farpipe.plan.step_samples import spread_of
    from farpipe.report import Panel, RunReport, RunView, draw_gantt, write_report, write_trace
    from farpipe.schedule import check
    from farpipe.simulate import data_with_slack
    from farpipe.simulate import simulate as play
    from farpipe.step import Schedule
    from farpipe.strict import write_text
    from farpipe.units import format_seconds

    check_picture(plot, kinds=(".svg",))
    check_folder(trace, plot, html, keeping=(plan, schedule))
    problem, own, source = load_step(plan)
    chosen = Schedule.load(schedule) if schedule is not None else own
    if chosen is None:
        raise typer.BadParameter("a problem has no schedule: give one with --schedule", param_hint="--schedule")
    check(problem, chosen)
    timeline = play(problem, chosen)
    overhead_s = source.prediction.overhead_s if source else 0.0
    use = of_a_device(source) if source else {}
    view = RunView(chosen.method, problem, timeline, None, (), overhead_s, source.sites if source else (), **use)
    if trace is not None:
        write_trace({"predicted": timeline}, trace, problem)
    if plot is not None:
        write_text(plot, draw_gantt([Panel("predicted", timeline, view.sites)]).svg())
    if html is not None:
        report = plan_report(source, [view]) if source else RunReport(str(plan), (view,))
        write_report(report, html)
    spread = spread_of(source, chosen) if source else None
    if as_json:
        print_json(data_with_slack(timeline) | (spread.to_figures() if spread else {}))
        return
    console().print(step_table([view]))
    counted = f"{problem.num_ranks} ranks, {len(timeline.actions):,} actions, {len(timeline.messages):,} messages"
    console().print(f"makespan {format_seconds(timeline.makespan_s)}: {counted}")
    if spread is not None:
        console().print(str(spread))
