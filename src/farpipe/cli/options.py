"""Options that mean nothing beside others are refused, and options that several commands share stand in one class."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from farpipe.errors import UsageError

if TYPE_CHECKING:
    import typer


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with every parameter whose type is a dataclass replaced by that class' fields, an option each.

    The command gets an instance of the class, so that commands with the same options share it.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        if is_dataclass(hint) and isinstance(hint, type):
            groups[name] = hint
            parameters += _options_of(hint)
        elif name != "return":
            default = inspect.signature(command).parameters[name].default
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))

    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    call.__name__, call.__doc__, call.__module__ = command.__name__, command.__doc__, command.__module__
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(call)["__signature__"] = inspect.Signature(parameters)
    return call


def _options_of(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


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
