"""Options that several commands share, and refusals of options that mean nothing beside others."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from farpipe.core.errors import InputError, UsageError
from farpipe.core.strict import validate

if TYPE_CHECKING:
    from pydantic import BaseModel

    from farpipe.core.spec import Job

SettingsType = TypeVar("SettingsType", bound="BaseModel")

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Full = Annotated[
    bool, typer.Option("--full", help="Show all: every table, and what every predicted second is made of.")
]
Plot = Annotated[Path | None, typer.Option(help="Draw the result as a picture to this file.")]
Csv = Annotated[Path | None, typer.Option(help="Write the figures to this file as CSV, in SI units.")]
Perfetto = Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the result to this file.")]
Processes = Annotated[int | None, typer.Option(min=1, max=1024, help="Processes at a time; default: all cores.")]
AllowPlaintext = Annotated[
    bool,
    typer.Option("--allow-plaintext", help="Send without encryption: on a private network, or with --wan."),
]
LengthColumn = Annotated[
    str | None,
    typer.Option("--column", help="Column of a CSV, or key of JSON lines, that has the lengths; length: an array has."),
]
ProfileFiles = Annotated[
    list[Path] | None,
    typer.Option("--profile", metavar="FILE", help="Measured times from `farpipe profile`; may be repeated."),
]

JobKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key of the job, such as training.global_batch=512 or 'cluster.links.latency=30 ms'; may be "
        "repeated.",
    ),
]
Given = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting that is rarely changed, such as setup=1 (docs: Light paths); may be repeated.",
    ),
]


def settings(kind: type[SettingsType], given: list[str] | None) -> SettingsType:
    """The settings of `--set` as a `kind`; UsageError for one that it does not have or whose value it refuses."""
    try:
        return validate(kind, pairs(given), "--set")
    except InputError as error:
        raise UsageError(str(error)) from None


def pairs(given: list[str] | None, option: str = "--set") -> dict[str, str]:
    """The NAME=VALUE of `option` by name."""
    for text in given or ():
        if "=" not in text.lstrip("="):
            raise typer.BadParameter(f"expected NAME=VALUE, found {text!r}", param_hint=option)
    return dict(text.split("=", 1) for text in given or ())


def changes(given: list[str] | None) -> dict[str, Any]:
    """The keys of a job and their values that `--set` gives."""
    from farpipe.core.spec import value_of

    return {key.strip(): value_of(text.strip()) for key, text in pairs(given).items()}


def job_with(path: Path, given: list[str] | None) -> "Job":
    """The job in the file at `path` with the keys of `--set`."""
    from farpipe.core.spec import load_job

    return load_job(path, changes(given), option="--set")


def expect_job(path: Path, given: list[str] | None) -> None:
    """UsageError for `--set` beside a file that is no job."""
    if given:
        raise UsageError(f"--set changes a job, and {path} is none: give the job (.toml)")


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
            given = [field.name for field in fields(group) if field.name in values]
            values[name] = group(**{field: values.pop(field) for field in given})
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


def typed(context: typer.Context, **options: str) -> list[str]:
    """Names of the `options` (parameter and name) that are on the command line."""
    sources = {parameter: context.get_parameter_source(parameter) for parameter in options}
    return [
        name for parameter, name in options.items() if (source := sources[parameter]) and source.name == "COMMANDLINE"
    ]


def refuse(options: list[str], because: str) -> None:
    """UsageError for the first of `options`, if there is one; `because` says what would make it mean something."""
    if options:
        raise UsageError(f"{options[0]} {because}")


def need_torch(what: str) -> None:
    """InputError naming the extra to install where PyTorch is missing; `what` needs it."""
    if not _is_there("torch"):
        raise InputError(f"{what} needs PyTorch: pip install 'farpipe[train]'")


def need_service(what: str, library: str) -> None:
    """InputError naming the extra to install where a `library` of the service is missing; `what` needs it."""
    if not _is_there(library):
        raise InputError(f"{what} needs {library}: pip install 'farpipe[service]'")


def _is_there(library: str) -> bool:
    """True if `library` can be found, without the seconds that importing it may take."""
    try:
        return find_spec(library) is not None
    except (ImportError, ValueError):
        return False
