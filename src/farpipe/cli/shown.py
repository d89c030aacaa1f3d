"""Lines, tables and pages about plans and runs that several commands show."""

from typing import Any

from rich.console import Console
from rich.text import Text

from farpipe.cli.efficiency import cost_line, of_a_device, use_line
from farpipe.cost import JobCosts, PartTimes, Profile
from farpipe.plan import Plan
from farpipe.plan.changes import WORTH_LISTING
from farpipe.plan.derivation import costs_of
from farpipe.plan.engine import plan_obstacle
from farpipe.processes.cpu_share import other_work
from farpipe.report import RunReport, RunView, step_row, step_time_view
from farpipe.report.plan_tables import derivation_tables, plan_tables
from farpipe.report.summary import link_event_view
from farpipe.report.tables import FittedTable, TableView, to_rich
from farpipe.simulate import simulate
from farpipe.units import format_about, format_change, format_count, format_percent, format_seconds


def verdict_lines(plan: Plan, num_tokens: float | None = None) -> tuple[str, str]:
    """The use of the sites and how much faster it is; the time and money it takes, and what limits it."""
    use = plan.verdict or f"Use {plan.where}."
    limit = f"; limited by {plan.limited_by}" if plan.limited_by else ""
    return f"{plan.job.model.name}: {use[0].lower()}{use[1:]}", f"{cost_line(plan, num_tokens)}{limit}."


def cheapest_gain(plan: Plan) -> str:
    """The first of the changes, in one line."""
    if not plan.changes:
        return f"No change that was tried gains {format_percent(WORTH_LISTING, 0)}."
    first = plan.changes[0]
    return f"Cheapest gain: {format_change(first.gain)} tokens/s for {first.costs}: {first.what}."


def show_plan(plan: Plan, out: Console) -> None:
    """The plan, its stages and links, the runners-up and why they lost."""
    spread = [str(plan.prediction.spread)] if plan.prediction.spread is not None else []
    out.print(Text(_headline(plan), "bold"), *spread, use_line(plan), "", sep="\n")
    for view in filter(lambda view: view.rows, plan_tables(plan)):
        out.print(to_rich(view))
    for line in (*plan.advice, *engine_lines(plan)):
        out.print(f"* {line}")


def show_derivation(plan: Plan, costs: JobCosts, out: Console) -> None:
    """Print the derivation of the predicted step."""
    for view in derivation_tables(plan, costs):
        out.print(to_rich(view))


def engine_lines(plan: Plan) -> tuple[str, ...]:
    """One line on why the engine can't run a plan and what to change in the job; none where it can."""
    obstacle, change = plan_obstacle(plan)
    line = f"farpipe's engine can't run this plan yet ({obstacle}); with {change} in the job it can."
    return (line,) if obstacle else ()


def _headline(plan: Plan) -> str:
    expected = plan.prediction
    return (
        f"{plan.job.model.name}{_sites(plan)}: step {format_about(expected.step_s, is_rough=plan.is_rough)}, "
        f"{format_count(expected.tokens_per_s)} tokens/s, bubble {format_percent(expected.bubble_ratio)}\n"
        f"{plan.candidate.degrees}, schedule {plan.schedule.method}"
    )


def _sites(plan: Plan) -> str:
    """``, pipeline over zurich > lugano``, ``, replicas at zurich + lugano`` or `` at zurich``."""
    if plan.layout.replica_sites:
        return f", replicas at {plan.where}"
    return f"{', pipeline over' if len(set(plan.sites)) > 1 else ' at'} {plan.where}"


def step_table(views: list[RunView]) -> FittedTable:
    """Predicted and measured step time of runs."""
    return to_rich(step_time_view([step_row(view) for view in views]))


def link_event_tables(views: list[RunView]) -> list[FittedTable]:
    """Outages, reconnections and retransmission bursts, a table for every run that had any."""
    named = [(view, view.name if len(views) > 1 else "") for view in views]
    return [to_rich(table) for view, name in named if (table := link_event_view(view.metrics, name)) is not None]


def _derivation_of(plan: Plan) -> tuple[TableView, ...]:
    """Tables of the derivation of the step; none where a profile that the plan does not hold gave its times."""
    costs = costs_of(plan)
    return () if costs is None else derivation_tables(plan, costs)


def planned_view(plan: Plan, **measured: Any) -> RunView:
    """The plan's step as predicted, for a page; `measured` are fields of what was measured of it."""
    return RunView(
        name=plan.schedule.method,
        problem=plan.problem,
        predicted=simulate(plan.problem, plan.schedule, checked=True),
        step_overhead_s=plan.prediction.overhead_s,
        sites=plan.sites,
        **of_a_device(plan),
        **measured,
    )


def plan_report(
    plan: Plan, runs: list[RunView], notices: tuple[str, ...] = (), costs: JobCosts | None = None
) -> RunReport:
    """The page about a plan and its runs; `notices` stand at its top, `costs` are those that it was made with."""
    why = _derivation_of(plan) if costs is None else derivation_tables(plan, costs)
    return RunReport(
        title=f"{plan.job.model.name} over {plan.where}",
        runs=tuple(runs),
        summary=_headline(plan).splitlines()[1],
        plan_tables=(*(view for view in plan_tables(plan) if view.rows), *why),
        plan_text="\n".join((*verdict_lines(plan), *plan.advice, *engine_lines(plan))),
        notices=notices,
    )


def profile_table(profile: Profile) -> FittedTable:
    """Table of measured times of one microbatch."""

    def row(name: str, part: PartTimes) -> tuple[str, ...]:
        return name, *(format_seconds(s) for s in (part.forward_s, part.input_grad_s, part.weight_grad_s))

    rows = tuple(row(name, getattr(profile, name)) for name in ("embedding", "layer", "head"))
    title = f"{profile.device}, {profile.precision}, microbatch {profile.microbatch_size} x {profile.sequence_length}"
    return to_rich(
        TableView(title, ("part", "F", "I", "W"), rows, frozenset({1, 2, 3}), note=other_work(profile.cpu_share))
    )
