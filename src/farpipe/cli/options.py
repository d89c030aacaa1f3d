"""Options that mean nothing beside others are refused, for a user who gives one expects something of it."""

from typing import TYPE_CHECKING

from farpipe.errors import UsageError

if TYPE_CHECKING:
    import typer


def typed(context: "typer.Context", **options: str) -> list[str]:
    """Those of `options` (parameter and how it is called) that stand on the command line."""
    sources = {parameter: context.get_parameter_source(parameter) for parameter in options}
    return [
        name for parameter, name in options.items() if (source := sources[parameter]) and source.name == "COMMANDLINE"
    ]


def refuse(options: list[str], because: str) -> None:
    """UsageError for the first of `options`, if there is one; `because` says what would make it mean something."""
    if options:
        raise UsageError(f"{options[0]} {because}")
