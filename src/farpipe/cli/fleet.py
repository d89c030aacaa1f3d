"""``farpipe fleet``: many jobs over many regions, simulated under one policy or several."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from farpipe.cli.fleet_units import ENERGIES, MASSES, TIMES, in_unit, in_usd
from farpipe.cli.options import AsJson, Csv, with_groups
from farpipe.cli.output import check_folder, check_picture, console, print_json, status
from farpipe.core.errors import InfeasibleError, UsageError
from farpipe.core.strict import nearest, write_text
from farpipe.core.units import counted, format_percent
from farpipe.report.tables import FittedTable, TableView, to_rich

if TYPE_CHECKING:
    from farpipe.fleet.outcome import FleetOutcome
    from farpipe.fleet.scenario import Scenario
    from farpipe.fleet.waiting import Waits

fleet = typer.Typer(help="Decide and simulate many jobs over many regions.", no_args_is_help=True)

MAX_NAMED = 5
"""Jobs that were not taken or did not finish, named one by one."""

FleetFile = Annotated[Path, typer.Argument(metavar="FLEET.toml", help="Fleet: sites, links, prices and failures.")]
Jobs = Annotated[Path, typer.Option("--jobs", help="The trace: JOBS.csv.")]
Pictures = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        help="Draw which job had which devices to this PNG or SVG, and to NAME.charts.png completion times, use, "
        "queue, money, links and a map.",
    ),
]


@dataclass(frozen=True)
class FleetOptions:
    """Regions, a trace of jobs, the policy, and what is to be drawn and written."""

    path: FleetFile
    jobs: Jobs
    policy: Annotated[str, typer.Option(help="Policy that decides; `farpipe list policies` shows them.")] = "farpipe"
    events: Annotated[Path | None, typer.Option(help="Write a line of JSON for every change to this file.")] = None
    plot: Pictures = None
    waits: Annotated[str | None, typer.Option(metavar="JOB", help="Show why this job waits, and what would help.")] = (
        None
    )
    as_json: AsJson = False


@fleet.command()
@with_groups
def simulate(options: FleetOptions) -> None:
    """Simulate a trace of jobs over regions under one policy.

    Exit code 4: no job can ever run in this fleet, or none finished; the reasons are on stderr.
    """
    from farpipe.fleet.play import play
    from farpipe.fleet.scenario import load_scenario
    from farpipe.fleet.traces import read_jobs
    from farpipe.fleet.waiting import Waits

    _check_outputs(options.path, options.jobs, options.plot, options.events)
    scenario, why = load_scenario(options.path), options.waits
    trace = read_jobs(options.jobs, scenario.start)
    names = [job.name for job in trace]
    if why is not None and why not in names:
        raise UsageError(f"--waits {why}: {options.jobs} has no such job{nearest(why, names)}")
    waits = Waits(why or "")
    with status(f"simulating {len(trace)} jobs under {options.policy}"):
        outcome = _logged(options.events, lambda log: play(scenario, trace, options.policy, log=log, after=waits))
    _print_series_ends(scenario, outcome.end_s)
    _draw([outcome], scenario, options.plot)
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
    policy: Annotated[
        str, typer.Option(metavar="NAMES", help="Policies with commas between them, today's first, or all.")
    ] = "all",
    plot: Pictures = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page: the verdict, and every policy beside the first.")
    ] = None,
    csv: Csv = None,
    as_json: AsJson = False,
) -> None:
    """Simulate the same trace under several policies, side by side.

    --html and --csv give the money and carbon of every policy beside those of the first.
    """
    from farpipe.fleet.play import play, quotes_of
    from farpipe.fleet.policies import POLICIES, policy_of
    from farpipe.fleet.scenario import load_scenario
    from farpipe.fleet.traces import read_jobs

    names = list(POLICIES) if policy == "all" else [name.strip() for name in policy.split(",")]
    for name in names:
        policy_of(name)
    _check_outputs(path, jobs, plot, html, csv)
    scenario = load_scenario(path)
    trace = read_jobs(jobs, scenario.start)
    quotes, outcomes = quotes_of(scenario), []
    for name in names:
        with status(f"simulating {len(trace)} jobs under {name}"):
            outcomes.append(play(scenario, trace, name, quotes=quotes))
    _print_series_ends(scenario, max(outcome.end_s for outcome in outcomes))
    _draw(outcomes, scenario, plot)
    _write_files(outcomes, scenario, html, csv)
    if as_json:
        print_json([{k: v for k, v in outcome.to_data().items() if k != "jobs"} for outcome in outcomes])
    else:
        _print_tables(outcomes)
    _print_left(outcomes)


def _print_outcome(outcome: "FleetOutcome", waits: "Waits") -> None:
    _print_tables([outcome])
    for time_s, reason in waits.found:
        typer.echo(f"{time_s:,.0f} s: {reason or 'it no longer waits'}")
    if waits.name and not waits.found:
        typer.echo(f"{waits.name!r} never waits")


def _print_tables(outcomes: "list[FleetOutcome]") -> None:
    from farpipe.report.fleet_page import verdict_lines

    console().print(_table(outcomes))
    if len(outcomes[0].tenants()) > 1:
        console().print(_tenants_table(outcomes))
    verdict = verdict_lines(outcomes) if len(outcomes) > 1 else []
    for line in filter(None, (*verdict, _left_out(outcomes[0]), _one_site_only(outcomes[0]))):
        typer.echo(line)


def _left_out(outcome: "FleetOutcome") -> str:
    """Sentence on sites that lack a figure which others have: sums are without them."""
    missing = "; ".join(f"{kind} at {', '.join(sites)}" for kind, sites in outcome.half_known.items())
    return f"Sums leave out sites without figures: {missing}." if missing else ""


def _one_site_only(outcome: "FleetOutcome") -> str:
    """Sentence on jobs that no policy can spread over sites, as only their duration is known."""
    timed = sum(bool(record.job.kind.num_devices) for record in outcome.records)
    jobs = counted(len(outcome.records), "job")
    return (
        f"{timed:,} of {jobs} are known by their duration alone (duration_s), as imported jobs are, and run at one "
        "site only, whatever the policy; with model, sequence_length, global_batch and num_steps they could span sites."
        if timed
        else ""
    )


def _charts(plot: Path) -> Path:
    """The second picture, beside the first."""
    return plot.with_name(f"{plot.stem}.charts{plot.suffix}")


def _check_outputs(path: Path, jobs: Path, plot: Path | None, *files: Path | None) -> None:
    check_picture(plot)
    check_folder(plot, plot and _charts(plot), *files, keeping=(path, jobs))


def _write_files(outcomes: "list[FleetOutcome]", scenario: "Scenario", html: Path | None, csv: Path | None) -> None:
    """The page and the figures of several policies."""
    from farpipe.report.fleet_page import fleet_csv, fleet_page

    if html is not None:
        notices = [line for line in (_left_out(outcomes[0]), _one_site_only(outcomes[0])) if line]
        write_text(html, fleet_page(outcomes, notices, scenario.locations, _table(outcomes).view))
    if csv is not None:
        write_text(csv, fleet_csv(outcomes))


def _draw(outcomes: "list[FleetOutcome]", scenario: "Scenario", plot: Path | None) -> None:
    if plot is not None:
        from farpipe.report.fleet import draw_charts, draw_fleet

        draw_fleet(outcomes, plot)
        draw_charts(outcomes, _charts(plot), scenario.locations)


def _print_series_ends(scenario: "Scenario", end_s: float) -> None:
    """Series of prices and carbon that end before the jobs."""
    for name, last_s in scenario.series_end_s.items():
        if end_s > last_s + 3600.0:
            hours = (end_s - last_s) / 3600.0
            typer.echo(f"{name}: its last figure is also used for the {hours:,.0f} hours after it", err=True)


def _logged(path: Path | None, run: "Callable[[TextIO | None], FleetOutcome]") -> "FleetOutcome":
    """Outcome of `run`; its log is written whole or not at all."""
    log = io.StringIO() if path is not None else None
    outcome = run(log)
    if path is not None and log is not None:
        write_text(path, log.getvalue())
    return outcome


def _table(outcomes: "list[FleetOutcome]") -> "FittedTable":
    data = [outcome.to_data() for outcome in outcomes]
    columns = {"policy": [outcome.policy for outcome in outcomes]}
    columns["finished"] = [f"{one['num_finished']} of {one['num_jobs']}" for one in data]
    times = {"mean JCT": "mean_jct_s", "p95 JCT": "p95_jct_s", "p99 wait": "p99_wait_s", "max wait": "max_wait_s"}
    every = [one[key] for key in times.values() for one in data]
    columns |= {name: in_unit([one[key] for one in data], TIMES, 2, every) for name, key in times.items()}
    columns["use"] = [format_percent(one["utilization"], 0) for one in data]
    energies = _sums(outcomes, "energy", [one["energy_kwh"]["jobs"] for one in data])
    idle = _sums(outcomes, "idle energy", [one["energy_kwh"]["idle"] for one in data])
    columns["energy"], columns["idle"] = in_unit(energies, ENERGIES, 1, idle), in_unit(idle, ENERGIES, 1, energies)
    columns["carbon"] = in_unit(_sums(outcomes, "carbon", [one["carbon_g"] for one in data]), MASSES, 1)
    for kind in ("electricity", "rent", "egress"):
        columns[kind] = in_usd(_sums(outcomes, kind, [one["money"][kind] for one in data]))
    if any(record.job.deadline_s is not None for record in outcomes[0].records):
        columns["in time"] = [_in_time(outcome) for outcome in outcomes]
    title = f"{len(outcomes[0].records)} jobs on {sum(outcomes[0].num_devices.values())} devices"
    return _shown(title, columns, (8, 9, 7, 1, 3, 5, 12))


def _sums(outcomes: "list[FleetOutcome]", kind: str, amounts: "list[Mapping[str, float | None]]") -> list[float | None]:
    """Sums over the sites that have a figure for `kind`; None where no site has one."""
    each = [sum(value or 0.0 for value in of_sites.values()) for of_sites in amounts]
    return [total if one.is_known(kind) else None for one, total in zip(outcomes, each, strict=True)]


def _shown(title: str, columns: "dict[str, list[str]]", expendable: tuple[int, ...] = ()) -> "FittedTable":
    rows = tuple(zip(*columns.values(), strict=True))
    right = frozenset(index for index, name in enumerate(columns) if name not in ("policy", "tenant"))
    return to_rich(TableView(title, tuple(columns), rows, right, expendable=expendable))


def _print_left(outcomes: "list[FleetOutcome]") -> None:
    """Jobs that can never run, with what would help; jobs that did not finish; and decisions that were not possible.

    InfeasibleError if none can ever run, or none did finish or end by itself.
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
                f"{outcome.num_refused} decisions of {outcome.policy} could not be carried out; --events names them",
                err=True,
            )
    if all(record.refused or record.unfinished for outcome in outcomes for record in outcome.records):
        names = ", ".join(outcome.policy for outcome in outcomes)
        raise InfeasibleError(
            f"none of the {len(outcomes[0].records)} jobs finished under {names}; see the reasons above"
        )


def _print_named(what: str, reasons: list[str]) -> None:
    for why in reasons[:MAX_NAMED]:
        typer.echo(f"{what}: {why}", err=True)
    if (more := len(reasons) - MAX_NAMED) > 0:
        typer.echo(f"{what}: {more} more jobs; `farpipe fleet simulate --json` gives each reason", err=True)


def _in_time(outcome: "FleetOutcome") -> str:
    found = [record.is_in_time for record in outcome.records if record.is_in_time is not None]
    return f"{sum(found)} of {len(found)}"


def _tenants_table(outcomes: "list[FleetOutcome]") -> "FittedTable":
    """A row for every tenant, under every policy where there are several."""
    found = [(outcome.policy, name, one) for outcome in outcomes for name, one in outcome.tenants().items()]
    tenants = [one for _, _, one in found]
    columns = {"tenant": [name or "-" for _, name, _ in found]}
    if len(outcomes) > 1:
        columns["policy"] = [policy for policy, _, _ in found]
    columns["jobs"] = [str(one["num_jobs"]) for one in tenants]
    times = {"mean JCT": "mean_jct_s", "max wait": "max_wait_s"}
    every = [one[key] for key in times.values() for one in tenants]
    columns |= {name: in_unit([one[key] for one in tenants], TIMES, 2, every) for name, key in times.items()}
    num_digits = 0 if max(one["device_hours"] for one in tenants) >= 10 else 2
    columns["device-hours"] = [f"{one['device_hours']:,.{num_digits}f}" for one in tenants]
    columns["money"] = in_usd([one["total_usd"] for one in tenants])
    return _shown("tenants", columns)
