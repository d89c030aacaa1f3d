"""The commands under their names."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo, CommandInfo

from farpipe import __version__
from farpipe.cli.certs import certs
from farpipe.cli.check import check
from farpipe.cli.compare import compare
from farpipe.cli.explain import diff, explain
from farpipe.cli.explore import explore
from farpipe.cli.export import export
from farpipe.cli.fleet import fleet
from farpipe.cli.fleet_serve import drain, serve, status, token, undrain
from farpipe.cli.import_ import import_
from farpipe.cli.init import init
from farpipe.cli.job import job
from farpipe.cli.lengths import lengths
from farpipe.cli.list_ import list_
from farpipe.cli.optical import optical
from farpipe.cli.pareto import pareto
from farpipe.cli.plan import plan
from farpipe.cli.prepare import prepare
from farpipe.cli.probe import probe
from farpipe.cli.profile import profile
from farpipe.cli.report import report
from farpipe.cli.schedule import schedule
from farpipe.cli.sequences import sequences
from farpipe.cli.simulate import simulate
from farpipe.cli.sweep import sweep
from farpipe.cli.train import train
from farpipe.cli.validate import validate
from farpipe.cli.wan import wan
from farpipe.core.strict import nearest

METAVARS: Final = {Path: "FILE", str: "NAME", int: "N", float: "X"}
"""Names of values in help, by type."""
QUANTITIES: Final = {"latency": "TIME", "jitter": "TIME", "bandwidth": "RATE", "run_dir": "FOLDER", "certs": "FOLDER"}
"""And by option."""


class _Command(TyperCommand):
    """A command whose usage names its arguments as JOB, not {JOB}."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class _Commands(TyperGroup):
    """The commands; a choice that is misspelt is answered with the nearest one."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            found = re.fullmatch(r"(?:Value error, )?'(.*?)' is not one of (.*)\.", error.message)
            if found is not None:
                known = re.findall("'([^']*)'", found[2])
                error.message = f"{found[1]!r} is not one of {', '.join(known)}{nearest(found[1], known)}"
            raise


app = typer.Typer(
    name="farpipe",
    cls=_Commands,
    help="Plan, simulate and run the training of one large model over several datacenters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
for command in (
    init,
    plan,
    explain,
    diff,
    explore,
    pareto,
    sweep,
    schedule,
    compare,
    simulate,
    profile,
    train,
    prepare,
    report,
    validate,
    export,
):
    app.command()(command)
app.command("list")(list_)
app.command("import")(import_)  # the word alone is Python's
app.command()(check)
app.add_typer(optical, name="optical")
for command in (serve, status, drain, undrain, token):
    fleet.command()(command)
app.add_typer(fleet, name="fleet")
app.add_typer(job, name="job")
app.command()(lengths)
app.add_typer(sequences, name="sequences")
app.add_typer(wan, name="wan")
app.add_typer(certs, name="certs")
app.command()(probe)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"farpipe {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Plan, simulate and run the training of one large model over several datacenters."""


def _registered(commands: typer.Typer) -> Iterator[CommandInfo]:
    yield from commands.registered_commands
    for group in commands.registered_groups:
        yield from _registered(group.typer_instance) if group.typer_instance else ()


def _metavar(name: str, kind: Any) -> str | None:
    """Name of an option's value in help; None for a flag or a choice, which the parser names."""
    if name in QUANTITIES:
        return QUANTITIES[name]
    kinds = {kind, *get_args(kind), *(one for inner in get_args(kind) for one in get_args(inner))}
    found = next((one for one in METAVARS if one in kinds), None)
    if found is float and name.endswith(("_s", "seconds", "time_limit")):
        return "SECONDS"
    return METAVARS[found] if found else None


for info in _registered(app):
    info.cls = _Command
    for name, annotation in getattr(info.callback, "__annotations__", {}).items():
        for option in getattr(annotation, "__metadata__", ()):
            option.readable = False  # to the parser it is wrong usage; whoever reads the file says it better
            if isinstance(option, ArgumentInfo):
                option.metavar = name.upper()
            elif option.metavar is None:
                option.metavar = _metavar(name, annotation.__origin__)
