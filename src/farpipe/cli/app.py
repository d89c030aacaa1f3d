"""The commands under their names."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo, CommandInfo

from farpipe import __version__
from farpipe.core.strict import nearest

HOMES: Final = {
    "init": "init:init",
    "plan": "plan:plan",
    "explain": "explain:explain",
    "diff": "explain:diff",
    "explore": "explore:explore",
    "pareto": "pareto:pareto",
    "sweep": "sweep:sweep",
    "schedule": "schedule:schedule",
    "compare": "compare:compare",
    "simulate": "simulate:simulate",
    "profile": "profile:profile",
    "train": "train:train",
    "prepare": "prepare:prepare",
    "report": "report:report",
    "validate": "validate:validate",
    "export": "export:export",
    "list": "list_:list_",
    "import": "import_:import_",  # the word alone is Python's
    "check": "check:check",
    "optical": "optical:optical",
    "fleet": "fleet_serve:fleet",
    "job": "job:job",
    "lengths": "lengths:lengths",
    "sequences": "sequences:sequences",
    "wan": "wan:wan",
    "certs": "certs:certs",
    "probe": "probe:probe",
}
"""Home of every command or group of commands, in the order of the help."""
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


def __getattr__(name: str) -> typer.Typer:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _of(tuple(HOMES))


def called_by(words: Iterable[str]) -> typer.Typer:
    """The command that a line of `words` begins with; all commands, as in `app`, where it begins with none's name.

    To import the others and to make their options took 60 ms, a fiftieth of a plan.
    """
    first = next(iter(words), "")
    return _of((first,) if first in HOMES else tuple(HOMES))


@cache
def _of(names: tuple[str, ...]) -> typer.Typer:
    """The commands of these names."""
    app = typer.Typer(
        name="farpipe",
        cls=_Commands,
        help="Plan, simulate and run the training of one large model over several datacenters.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,
    )
    app.callback()(common)
    for name in names:
        module, _, attribute = HOMES[name].partition(":")
        found = getattr(import_module(f"farpipe.cli.{module}"), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    _name_values(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"farpipe {__version__}")
        raise typer.Exit


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


def _name_values(app: typer.Typer) -> None:
    """Names of values, as help shows them; what is no such value is told by whoever reads it."""
    for info in _registered(app):
        info.cls = _Command
        for name, annotation in getattr(info.callback, "__annotations__", {}).items():
            for option in getattr(annotation, "__metadata__", ()):
                option.readable = False  # to the parser it is wrong usage; whoever reads the file says it better
                if isinstance(option, ArgumentInfo):
                    option.metavar = name.upper()
                elif option.metavar is None:
                    option.metavar = _metavar(name, annotation.__origin__)
