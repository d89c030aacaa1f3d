"""The commands under their names."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from farpipe import __version__
from farpipe.cli.certs import certs
from farpipe.cli.compare import compare
from farpipe.cli.export import export
from farpipe.cli.fleet import fleet
from farpipe.cli.import_ import import_
from farpipe.cli.lengths import lengths
from farpipe.cli.list_ import list_
from farpipe.cli.optical import optical
from farpipe.cli.pareto import pareto
from farpipe.cli.plan import plan
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

app = typer.Typer(
    name="farpipe",
    help="Plan, simulate and run the training of one large model over several datacenters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
for command in (plan, pareto, sweep, schedule, compare, simulate, profile, train, report, validate):
    app.command()(command)
app.command()(export)
app.command("list")(list_)
app.command("import")(import_)  # the word alone is Python's
app.add_typer(optical, name="optical")
app.add_typer(fleet, name="fleet")
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


def _functions(commands: typer.Typer) -> Iterator[Callable[..., Any]]:
    yield from (command.callback for command in commands.registered_commands if command.callback)
    for group in commands.registered_groups:
        yield from _functions(group.typer_instance) if group.typer_instance else ()


for function in _functions(app):
    for annotation in function.__annotations__.values():
        for option in getattr(annotation, "__metadata__", ()):
            option.readable = False  # to the parser it is wrong usage; whoever reads the file says it better
