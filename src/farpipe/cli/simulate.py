"""``farpipe simulate PLAN``: the predicted timeline of a plan."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farpipe.cli.options import AsJson, Perfetto, Plot, with_groups
from farpipe.cli.output import check_folder, check_picture, console, print_json
from farpipe.core.strict import write_text
from farpipe.core.units import format_seconds

if TYPE_CHECKING:
    from farpipe.core.step import Problem, Schedule
    from farpipe.planning import Plan, PlanDocument
    from farpipe.planning.planner.plan import Spread
    from farpipe.report.views import RunView


@dataclass(frozen=True)
class SimulateOptions:
    """A plan or a problem with its schedule, and what is to be drawn of the step."""

    plan: Annotated[Path, typer.Argument(help="A plan, or a problem together with --schedule.")]
    schedule: Annotated[Path | None, typer.Option(help="A schedule file to simulate instead of the plan's own.")] = None
    perfetto: Perfetto = None
    plot: Plot = None
    html: Annotated[Path | None, typer.Option(help="Write the whole report as one HTML page.")] = None
    as_json: AsJson = False


@with_groups
def simulate(options: SimulateOptions) -> None:
    """Simulate a plan: step time, bubble, exposed communication, memory, links.

    Plays the plan's own order, or that of --schedule, which a bare problem needs.
    """
    from farpipe.cli.planned import load_explained
    from farpipe.core.schedule import check
    from farpipe.core.simulate import data_with_slack
    from farpipe.core.step import Schedule
    from farpipe.planning.planner.step_samples import spread_of

    check_picture(options.plot, kinds=(".svg",))
    check_folder(options.perfetto, options.plot, options.html, keeping=(options.plan, options.schedule))
    problem, own, document = load_explained(options.plan)
    plan = document.plan if document else None
    schedule = Schedule.load(options.schedule) if options.schedule is not None else own
    if schedule is None:
        raise typer.BadParameter("a problem has no schedule: give one with --schedule", param_hint="--schedule")
    check(problem, schedule)
    view = _view(problem, schedule, plan)
    _draw(view, document, options)
    spread = spread_of(plan, schedule) if plan else None
    if options.as_json:
        print_json(
            data_with_slack(view.predicted)
            | (spread.to_figures() if spread else {})
            | (plan.job.model.guess_data if plan else {})
        )
        return
    _show(view, spread)
    if plan is not None and plan.job.model.guess:
        console().print(plan.job.model.guess_note, markup=False)


def _draw(view: "RunView", document: "PlanDocument | None", options: SimulateOptions) -> None:
    """Write the trace, the picture and the page that are asked for."""
    from farpipe.report.gantt import Panel, draw_gantt
    from farpipe.report.page import write_report
    from farpipe.report.shown import plan_report
    from farpipe.report.trace import write_trace
    from farpipe.report.views import RunReport

    if options.perfetto is not None:
        write_trace({"predicted": view.predicted}, options.perfetto, view.problem)
    if options.plot is not None:
        write_text(options.plot, draw_gantt([Panel("predicted", view.predicted, view.sites)]).svg())
    if options.html is not None:
        report = plan_report(document, [view]) if document else RunReport(str(options.plan), (view,))
        write_report(report, options.html)


def _view(problem: "Problem", schedule: "Schedule", plan: "Plan | None") -> "RunView":
    from farpipe.core.simulate import simulate as play
    from farpipe.report.shown import planned_view
    from farpipe.report.views import RunView

    if plan is not None:
        return planned_view(plan.model_copy(update={"schedule": schedule}))
    return RunView(schedule.method, problem, play(problem, schedule, checked=True))


def _show(view: "RunView", spread: "Spread | None") -> None:
    from farpipe.report.shown import step_table

    played = view.predicted
    counted = f"{played.num_ranks} ranks, {len(played.actions):,} actions, {len(played.messages):,} messages"
    console().print(step_table([view]))
    console().print(f"makespan {format_seconds(played.makespan_s)}: {counted}")
    if spread is not None:
        console().print(str(spread))
