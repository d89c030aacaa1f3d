"""``farpipe fleet serve`` and what its operators ask of it: status, drain, undrain, token."""

from pathlib import Path
from typing import Annotated

import typer

from farpipe.cli.client import Server
from farpipe.cli.fleet import fleet
from farpipe.cli.options import need_service, with_groups
from farpipe.cli.output import check_folder, console, print_json
from farpipe.core.strict import write_text
from farpipe.report.tables import TableView, to_rich

Site = Annotated[str, typer.Argument(help="Name of the site.")]


@fleet.command()
def serve(
    fleet: Annotated[Path, typer.Argument(metavar="FLEET.toml", help="Sites, links and prices.")],
    database: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Its database, as postgresql+psycopg://...; default: a file of SQLite."),
    ] = None,
    run_dir: Annotated[
        Path, typer.Option(help="Directory of the runs, the first token and, without --database, the database.")
    ] = Path("fleet"),
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8470,
    certs: Annotated[Path | None, typer.Option(help="Folder with the certificate of this host.")] = None,
    policy: Annotated[str, typer.Option(help="Policy that decides; `farpipe list policies` shows them.")] = "farpipe",
) -> None:
    """Run a fleet: take jobs, decide, start, watch and stop them, until SIGTERM; what runs goes on.

    Needs the extra service: pip install "farpipe[service]".
    """
    for library in ("fastapi", "uvicorn", "sqlalchemy", "alembic", "jinja2", "prometheus_client"):
        need_service("farpipe fleet serve", library)
    from farpipe.cli.runs import page_of
    from farpipe.service.serve import Address, serve

    serve(fleet, run_dir, database, Address(host, port, certs), policy, page_of)


@fleet.command()
@with_groups
def status(server: Server) -> None:
    """Show the sites of a fleet's service, their devices and jobs."""
    _print_sites(server, server.ask("GET", "sites"))


@fleet.command()
@with_groups
def drain(site: Site, server: Server) -> None:
    """Stop what runs at a site, with checkpoints, and start nothing there."""
    _print_sites(server, server.ask("POST", "sites", site, "drain"))


@fleet.command()
@with_groups
def undrain(site: Site, server: Server) -> None:
    """Let jobs have a drained site's devices again."""
    _print_sites(server, server.ask("POST", "sites", site, "undrain"))


@fleet.command()
@with_groups
def token(
    role: Annotated[str, typer.Argument(help="viewer, submitter or operator.")],
    tenant: Annotated[str, typer.Argument(help="Whose jobs it is for.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the token to this file.")],
    server: Server,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days for which it is valid.")] = 30,
) -> None:
    """Make a token for the service, in a file that its owner alone can read."""
    check_folder(output)
    found = server.ask("POST", "tokens", body={"role": role, "tenant": tenant, "days": days})
    write_text(output, found.pop("token") + "\n", private=True)
    print_json(found) if server.as_json else typer.echo(f"token {found['id']} of {tenant}, a {role}, in {output}")


def _print_sites(server: Server, found: list[dict[str, object]]) -> None:
    if server.as_json:
        return print_json(found)
    columns = ("site", "state", "used", "free", "jobs")
    rows = tuple(
        (*(f"{one[k]}" for k in ("name", "state", "num_used", "num_free")), _names(one["jobs"])) for one in found
    )
    return console().print(to_rich(TableView("", columns, rows, frozenset({2, 3}))))


def _names(jobs: object) -> str:
    return ", ".join(jobs) if isinstance(jobs, list) else ""
