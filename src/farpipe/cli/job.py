"""``farpipe job``: jobs of a fleet's service."""

import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from farpipe.cli.client import Server
from farpipe.cli.options import with_groups
from farpipe.cli.output import console, print_json
from farpipe.core.errors import DivergedError, RunError, RunStoppedError, UsageError
from farpipe.core.strict import read_text
from farpipe.core.units import format_percent, format_seconds
from farpipe.report.tables import TableView, to_rich

job = typer.Typer(help="Jobs of a fleet's service.", no_args_is_help=True)

ASK_EVERY_S: Final = 1.0
Name = Annotated[str, typer.Argument(help="Name of the job.")]


@job.command()
@with_groups
def submit(
    name: Name,
    path: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job; its own cluster is not used.")],
    server: Server,
    devices: Annotated[
        str | None, typer.Option(metavar="MIN-MAX", help="Devices that it may have; default: those of its cluster.")
    ] = None,
) -> None:
    """Submit a job; sent twice under one name, it is taken once.

    Exit code 4: the fleet can never run it.
    """
    body: dict[str, Any] = {"name": name, "job": read_text(path)}
    if devices is not None:
        body |= dict(zip(("min_devices", "max_devices"), _range(devices), strict=True))
    _print(server, server.ask("POST", "jobs", body=body))


@job.command("list")
@with_groups
def list_jobs(server: Server) -> None:
    """List the jobs, the ended ones last."""
    found = server.ask("GET", "jobs")
    if server.as_json:
        return print_json(found)
    columns = ("job", "tenant", "phase", "done", "where", "step", "ends or ended", "usd")
    rows = tuple(_row(one) for one in found["jobs"])
    return console().print(to_rich(TableView("", columns, rows, frozenset({3, 5, 7}), expendable=(7, 1))))


@job.command()
@with_groups
def show(name: Name, server: Server) -> None:
    """Show a job and its attempts, with the reason of each end."""
    found, attempts = server.ask("GET", "jobs", name), server.ask("GET", "jobs", name, "attempts")
    if server.as_json:
        return print_json(found | {"attempts": attempts})
    _print(server, found)
    for one in attempts:
        end = f"{one['result']} {_time(one['ended_s'])}" if one["ended_s"] else "goes on"
        typer.echo(f"attempt {one['attempt']}: {one['place']}, {_time(one['began_s'])}, {end}")
        for line in (one["why"] or "").splitlines():
            typer.echo(f"    {line}")
    return None


@job.command()
@with_groups
def why(name: Name, server: Server) -> None:
    """Say why a job waits, and what would start it."""
    found = server.ask("GET", "jobs", name, "why")
    print_json(found) if server.as_json else typer.echo(found["why"])


@job.command()
@with_groups
def logs(name: Name, server: Server) -> None:
    """Print the end of the log of a job's newest attempt."""
    found = server.ask("GET", "jobs", name, "logs")
    print_json(found) if server.as_json else typer.echo(found["text"], nl=False)


@job.command()
@with_groups
def cancel(name: Name, server: Server) -> None:
    """End a job; what runs writes a checkpoint and leaves."""
    _print(server, server.ask("POST", "jobs", name, "cancel"))


@job.command()
@with_groups
def wait(
    name: Name,
    server: Server,
    time_limit: Annotated[float | None, typer.Option(min=0, help="Wait no longer than this.")] = None,
) -> None:
    """Wait for the end of a job.

    Exit codes: 0 it has done its steps, 6 it failed, or the time limit is over, 7 it diverged, 75 it was cancelled.
    """
    limit_s = float("inf") if time_limit is None else time.monotonic() + time_limit
    while (found := server.ask("GET", "jobs", name))["phase"] != "ended":
        if time.monotonic() > limit_s:
            raise RunError(f"job {name!r} is {found['phase']} after {time_limit:g} s")
        time.sleep(ASK_EVERY_S)
    _print(server, found)
    said = f"job {name!r}: {found['why']}"
    if found["result"] == "cancel":
        raise RunStoppedError(said)
    if found["result"] == "fail":
        raise DivergedError(said) if "exit code 7" in found["why"] else RunError(said)


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    try:
        return int(least), int(most or least)
    except ValueError:
        raise UsageError(f"--devices {text}: expected a number, or two such as 4-8") from None


def _print(server: Server, found: dict[str, Any]) -> None:
    if server.as_json:
        print_json(found)
        return
    name, tenant, phase, done, where, step, end, usd = _row(found)
    parts = {"of": tenant, "phase": phase, "done": done, "on": where, "step": step, "end": end, "usd": usd}
    typer.echo(f"job {name}: " + ", ".join(f"{key} {value}" for key, value in parts.items() if value))
    if found["why"]:
        typer.echo(found["why"])


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    return (
        found["name"],
        found["tenant"],
        found["result"] or found["phase"],
        format_percent(found["num_done"] / found["num_steps"], 0),
        " > ".join(f"{number} at {site}" for site, number in found["devices"].items()),
        format_seconds(found["step_s"]) if found["step_s"] else "",
        _time(found["end_s"]),
        f"{found['usd']:.2f}",
    )


def _time(time_s: float | None) -> str:
    return f"{datetime.fromtimestamp(time_s):%Y-%m-%d %H:%M:%S}" if time_s else ""
