"""``farpipe fleet``: many jobs over many regions, simulated under one policy or several."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from farpipe.cli.options import AsJson, Plot, with_groups
from farpipe.cli.output import check_folder, check_picture, console, print_json, status
from farpipe.errors import InfeasibleError, UsageError
from farpipe.report.tables import FittedTable, TableView, to_rich
from farpipe.strict import nearest, write_text
from farpipe.units import format_percent

if TYPE_CHECKING:
    from farpipe.fleet.outcome import FleetOutcome
    from farpipe.fleet.scenario import Scenario
    from farpipe.fleet.waiting import Waits

fleet = typer.Typer(help="Decide and simulate many jobs over many regions.", no_args_is_help=True)

MAX_NAMED = 5
"""Jobs that were not taken or did not finish, named one by one."""

FleetFile = Annotated[Path, typer.Argument(metavar="FLEET.toml", help="Sites, links, prices and failures.")]
Jobs = Annotated[Path, typer.Option("--jobs", help="The trace: JOBS.csv.")]
Charts = Annotated[
    Path | None,
    typer.Option(help="Draw completion times, use, queue and money over time, links and a map to this PNG or SVG."),
]


@dataclass(frozen=True)
class FleetOptions:
    """Regions, a trace of jobs, the policy, and what is to be drawn and written."""

    path: FleetFile
    jobs: Jobs
    policy: Annotated[str, typer.Option(help="Policy that decides; `farpipe fleet policies` lists them.")] = "farpipe"
    events: Annotated[Path | None, typer.Option(help="Write a line of JSON for every change to this file.")] = None
    plot: Plot = None
    charts: Charts = None
    why: Annotated[str | None, typer.Option(metavar="JOB", help="Show why this job waits, and what would help.")] = None
    as_json: AsJson = False


@fleet.command()
@with_groups
def simulate(options: FleetOptions) -> None:
    """Simulate a trace of jobs over regions under one policy."""
    from farpipe.fleet.play import play
    from farpipe.fleet.scenario import load_scenario
    from farpipe.fleet.traces import read_jobs
    from farpipe.fleet.waiting import Waits

    _check_outputs(options.path, options.jobs, options.plot, options.charts, options.events)
    scenario, why = load_scenario(options.path), options.why
    trace = read_jobs(options.jobs, scenario.start)
    names = [job.name for job in trace]
    if why is not None and why not in names:
        raise UsageError(f"--why {why}: {options.jobs} has no such job{nearest(why, names)}")
    waits = Waits(why or "")
    with status(f"simulating {len(trace)} jobs under {options.policy}"):
        outcome = _logged(options.events, lambda log: play(scenario, trace, options.policy, log=log, after=waits))
    _print_series_ends(scenario, outcome.end_s)
    _draw([outcome], scenario, options.plot, options.charts)
    if options.as_json:
        reasons = [{"time_s": time_s, "why": reason or None} for time_s, reason in waits.found]
        print_json(outcome.to_data() | ({"why": reasons} if why else {}))
    else:
        _print_outcome(outcome, waits)
    _print_left([outcome])


@fleet.command()
def compare(
    path: FleetFile,
    jobs: Jobs,
    policies: Annotated[str, typer.Option(help="Names with commas between them; all: every one.")] = "all",
    plot: Plot = None,
    charts: Charts = None,
    as_json: AsJson = False,
) -> None:
    """Simulate the same trace under several policies, side by side."""
    from farpipe.fleet.play import play, quotes_of
    from farpipe.fleet.policies import POLICIES, policy_of
    from farpipe.fleet.scenario import load_scenario
    from farpipe.fleet.traces import read_jobs

    names = list(POLICIES) if policies == "all" else [name.strip() for name in policies.split(",")]
    for name in names:
        policy_of(name)
    _check_outputs(path, jobs, plot, charts)
    scenario = load_scenario(path)
    trace = read_jobs(jobs, scenario.start)
    quotes, outcomes = quotes_of(scenario), []
    for name in names:
        with status(f"simulating {len(trace)} jobs under {name}"):
            outcomes.append(play(scenario, trace, name, quotes=quotes))
    _print_series_ends(scenario, max(outcome.end_s for outcome in outcomes))
    _draw(outcomes, scenario, plot, charts)
    if as_json:
        print_json([{k: v for k, v in outcome.to_data().items() if k != "jobs"} for outcome in outcomes])
    else:
        console().print(_table(outcomes))
    _print_left(outcomes)


def _print_outcome(outcome: "FleetOutcome", waits: "Waits") -> None:
    console().print(_table([outcome]))
    if len(outcome.tenants()) > 1:
        console().print(_tenants_table(outcome))
    for time_s, reason in waits.found:
        typer.echo(f"{time_s:,.0f} s: {reason or 'it does not wait any more'}")
    if waits.name and not waits.found:
        typer.echo(f"{waits.name!r} never waits")


@fleet.command("policies")
def list_policies() -> None:
    """List the policies."""
    from farpipe.fleet.policies import POLICIES

    for name in POLICIES:
        typer.echo(name)


def _check_outputs(path: Path, jobs: Path, plot: Path | None, charts: Path | None, events: Path | None = None) -> None:
    check_picture(plot)
    check_picture(charts, "--charts")
    check_folder(plot, charts, events, keeping=(path, jobs))


def _draw(outcomes: "list[FleetOutcome]", scenario: "Scenario", plot: Path | None, charts: Path | None) -> None:
    if plot is not None:
        from farpipe.report.fleet import draw_fleet

        draw_fleet(outcomes, plot)
    if charts is not None:
        from farpipe.report.fleet import draw_charts

        draw_charts(outcomes, charts, scenario.locations)


def _print_series_ends(scenario: "Scenario", end_s: float) -> None:
    """Series of prices and carbon that end before the jobs."""
    for name, last_s in scenario.series_end_s.items():
        if end_s > last_s + 3600.0:
            hours = (end_s - last_s) / 3600.0
            typer.echo(f"{name}: its last figure stands for the {hours:,.0f} hours after it as well", err=True)


def _logged(path: Path | None, run: "Callable[[TextIO | None], FleetOutcome]") -> "FleetOutcome":
    """Outcome of `run`; its log is written whole or not at all."""
    log = io.StringIO() if path is not None else None
    outcome = run(log)
    if path is not None and log is not None:
        write_text(path, log.getvalue())
    return outcome


def _table(outcomes: "list[FleetOutcome]") -> "FittedTable":
    with_deadlines = any(record.job.deadline_s is not None for record in outcomes[0].records)
    head: tuple[str, ...] = ("policy", "finished", "mean JCT", "p95 JCT", "p99 wait", "max wait", "use", "energy")
    head += ("idle", "carbon", "electricity", "rent", "egress", *(["in time"] if with_deadlines else []))
    rows = [_row(outcome) + ((_in_time(outcome),) if with_deadlines else ()) for outcome in outcomes]
    title = f"{len(outcomes[0].records)} jobs on {sum(outcomes[0].num_devices.values())} devices"
    return to_rich(
        TableView(title, head, tuple(rows), frozenset(range(1, len(head))), expendable=(8, 9, 7, 1, 3, 5, 12))
    )


def _print_left(outcomes: "list[FleetOutcome]") -> None:
    """Jobs that can never run, with what would help; jobs that did not finish; and decisions that were not possible.

    InfeasibleError if none can ever run.
    """
    refused = [record.refused for record in outcomes[0].records if record.refused]
    _print_named("not taken", refused)
    if refused and len(refused) == len(outcomes[0].records):
        raise InfeasibleError(f"none of the {len(refused)} jobs can ever run in this fleet; see the reasons above")
    for outcome in outcomes:
        left = [f"job {record.job.name!r}: {record.unfinished}" for record in outcome.records if record.unfinished]
        _print_named("not finished", left)
        if outcome.num_refused:
            typer.echo(
                f"{outcome.num_refused} decisions of {outcome.policy} were not possible; --events names them", err=True
            )


def _print_named(what: str, reasons: list[str]) -> None:
    for why in reasons[:MAX_NAMED]:
        typer.echo(f"{what}: {why}", err=True)
    if (more := len(reasons) - MAX_NAMED) > 0:
        typer.echo(f"{what}: {more} more jobs; `farpipe fleet simulate --json` names each with its reason", err=True)


def _row(outcome: "FleetOutcome") -> tuple[str, ...]:
    data = outcome.to_data()
    hours = [_hours(data[key]) for key in ("mean_jct_s", "p95_jct_s", "p99_wait_s", "max_wait_s")]
    money = [_usd(sum(data["money"][kind].values())) for kind in ("electricity", "rent", "egress")]
    energy = [f"{sum(data['energy_kwh'][part].values()) / 1000:,.1f} MWh" for part in ("jobs", "idle")]
    carbon = f"{sum(data['carbon_g'].values()) / 1e6:,.1f} t"
    finished = f"{data['num_finished']} of {data['num_jobs']}"
    return (outcome.policy, finished, *hours, format_percent(data["utilization"], 0), *energy, carbon, *money)


def _in_time(outcome: "FleetOutcome") -> str:
    found = [record.is_in_time for record in outcome.records if record.is_in_time is not None]
    return f"{sum(found)} of {len(found)}"


def _tenants_table(outcome: "FleetOutcome") -> "FittedTable":
    head = ("tenant", "jobs", "mean JCT", "max wait", "device-hours", "money")
    rows = [
        (
            *(name or "-", str(one["num_jobs"]), _hours(one["mean_jct_s"]), _hours(one["max_wait_s"])),
            *(f"{one['device_hours']:,.0f}", _usd(one["total_usd"])),
        )
        for name, one in outcome.tenants().items()
    ]
    return to_rich(TableView("tenants", head, tuple(rows), frozenset(range(1, len(head)))))


def _usd(amount: float) -> str:
    """Whole dollars; energy may have a negative price."""
    return f"{'-' if round(amount) < 0 else ''}${abs(amount):,.0f}"


def _hours(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds / 3600:.2f} h"
