"""``farpipe fleet``: many jobs over many regions, simulated under one policy or several."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farpipe.cli.fleet_sweep import sweep
from farpipe.cli.output import check_folder, check_picture, console, print_json, status

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from farpipe.fleet.outcome import Outcome
    from farpipe.fleet.scenario import Scenario
    from farpipe.report import FittedTable

fleet = typer.Typer(help="Decide and simulate many jobs over many regions.", no_args_is_help=True)

MAX_REFUSED = 5
"""Jobs that were not taken, named one by one."""

Fleet = Annotated[Path, typer.Argument(metavar="FLEET.toml", help="Sites, links, prices and failures.")]
Jobs = Annotated[Path, typer.Option("--jobs", help="The trace: JOBS.csv.")]
Plot = Annotated[Path | None, typer.Option(help="Draw who has which devices, and who waits, to this PNG or SVG.")]
Charts = Annotated[
    Path | None,
    typer.Option(help="Draw completion times, use, queue and money over time, links and a map to this PNG or SVG."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


@fleet.command()
def simulate(
    path: Fleet,
    jobs: Jobs,
    policy: Annotated[str, typer.Option(help="Policy that decides; `farpipe fleet policies` lists them.")] = "farpipe",
    events: Annotated[Path | None, typer.Option(help="Write a line of JSON for every change to this file.")] = None,
    plot: Plot = None,
    charts: Charts = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a trace of jobs over regions under one policy."""
    from farpipe.fleet.play import play
    from farpipe.fleet.scenario import load_scenario
    from farpipe.fleet.traces import read_jobs

    _check_outputs(path, jobs, plot, charts)
    check_folder(events, keeping=(path, jobs))
    scenario, trace = load_scenario(path), read_jobs(jobs)
    with status(f"simulating {len(trace)} jobs under {policy}"):
        outcome = _logged(events, lambda log: play(scenario, trace, policy, log=log))
    _draw([outcome], scenario, plot, charts)
    if as_json:
        print_json(outcome.to_data())
    else:
        console().print(_table([outcome]))
        _print_refused(outcome)


@fleet.command()
def compare(
    path: Fleet,
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
    scenario, trace = load_scenario(path), read_jobs(jobs)
    quotes, outcomes = quotes_of(scenario), []
    for name in names:
        with status(f"simulating {len(trace)} jobs under {name}"):
            outcomes.append(play(scenario, trace, name, quotes=quotes))
    _draw(outcomes, scenario, plot, charts)
    if as_json:
        print_json([_without_jobs(outcome.to_data()) for outcome in outcomes])
    else:
        console().print(_table(outcomes))
        _print_refused(outcomes[0])


fleet.command()(sweep)


@fleet.command("policies")
def list_policies() -> None:
    """List the policies."""
    from farpipe.fleet.policies import POLICIES

    for name in POLICIES:
        typer.echo(name)


def _check_outputs(path: Path, jobs: Path, plot: Path | None, charts: Path | None) -> None:
    check_picture(plot)
    check_picture(charts, "--charts")
    check_folder(plot, charts, keeping=(path, jobs))


def _draw(outcomes: "list[Outcome]", scenario: "Scenario", plot: Path | None, charts: Path | None) -> None:
    if plot is not None:
        from farpipe.report.fleet import draw_fleet

        draw_fleet(outcomes, plot)
    if charts is not None:
        from farpipe.report.fleet_charts import draw_charts

        draw_charts(outcomes, charts, scenario.locations)


def _logged(path: Path | None, run: "Callable[[TextIO | None], Outcome]") -> "Outcome":
    """Outcome of `run`; its log is written whole or not at all."""
    import io

    from farpipe.strict import write_text

    log = io.StringIO() if path is not None else None
    outcome = run(log)
    if path is not None and log is not None:
        write_text(path, log.getvalue())
    return outcome


def _without_jobs(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != "jobs"}


def _table(outcomes: "list[Outcome]") -> "FittedTable":
    from farpipe.report import TableView, to_rich

    head = ("policy", "finished", "mean JCT", "p95 JCT", "p99 wait", "use", "energy", "electricity", "rent", "egress")
    rows = [_row(outcome) for outcome in outcomes]
    title = f"{len(outcomes[0].records)} jobs on {sum(outcomes[0].num_devices.values())} devices"
    return to_rich(TableView(title, head, tuple(rows), frozenset(range(1, len(head))), expendable=(6, 1, 3, 9)))


def _print_refused(outcome: "Outcome") -> None:
    """Jobs that can never run, with what would help; and decisions of the policy that were not possible."""
    refused = [record.refused for record in outcome.records if record.refused]
    for why in refused[:MAX_REFUSED]:
        typer.echo(f"not taken: {why}", err=True)
    if (more := len(refused) - MAX_REFUSED) > 0:
        typer.echo(f"not taken: {more} more jobs; --events names each with its reason", err=True)
    if outcome.num_refused:
        typer.echo(
            f"{outcome.num_refused} decisions of {outcome.policy} were not possible; --events names them", err=True
        )


def _row(outcome: "Outcome") -> tuple[str, ...]:
    from farpipe.units import format_percent

    data = outcome.to_data()
    hours = [_hours(data[key]) for key in ("mean_jct_s", "p95_jct_s", "p99_wait_s")]
    money = [_usd(sum(data["money"][kind].values())) for kind in ("electricity", "rent", "egress")]
    energy = f"{sum(data['energy_kwh']['jobs'].values()) / 1000:,.1f} MWh"
    finished = f"{data['num_finished']} of {data['num_jobs']}"
    return (outcome.policy, finished, *hours, format_percent(data["utilization"], 0), energy, *money)


def _usd(amount: float) -> str:
    """Whole dollars; energy may have a negative price."""
    return f"{'-' if round(amount) < 0 else ''}${abs(amount):,.0f}"


def _hours(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds / 3600:.2f} h"
