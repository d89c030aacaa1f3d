"""Spellings of earlier versions that are read for one version more."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from farpipe.cli.output import log

RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "sweep": {"--jobs": "--processes"},
    "certs issue": {"--ip": "--host"},
}
"""Options of a command that have another name now."""
_OF_PATHS: Final = {"--k", "--by", "--rates"}
SET: Final[Mapping[str, Collection[str]]] = {
    "optical blocking": _OF_PATHS | {"--requests", "--warm-up", "--truncate"},
    "optical simulate": _OF_PATHS
    | {"--mean-holding", "--trace-modulation", "--begin", "--units", "--setup", "--release", "--retry", "--skipped"},
}
"""Options of a command that are settings of ``--set`` now."""
FLAGS: Final[Mapping[str, str]] = {
    "--directed": "directed=true",
    "--ahead": "ahead=true",
    "--no-ahead": "ahead=false",
    "--one-per-hop": "one_per_hop=true",
}
"""Settings that options without a value are now."""


def with_moved_command(args: Sequence[str]) -> list[str]:
    """The command line, with ``train --prepare`` as the command that it has become."""
    if [*args[:1]] != ["train"] or "--prepare" not in args:
        return [*args]
    log("farpipe: `train --prepare` is now `farpipe prepare`; the old spelling goes in the next version")
    return ["prepare", *(word for word in args[1:] if word != "--prepare")]


def with_renamed_options(command: str, args: Sequence[str]) -> list[str]:
    """`args` with the present names of options."""
    found, rest = [], iter(args)
    for word in rest:
        name, equals, value = word.partition("=")
        if (new := RENAMED.get(command, {}).get(name)) is not None:
            _report(command, name, new)
            found.append(f"{new}{equals}{value}")
        elif (setting := _setting(command, name, value if equals else None, rest)) is not None:
            _report(command, name, f"--set {setting}")
            found += ["--set", setting]
        else:
            found.append(word)
    return found


def _setting(command: str, name: str, value: str | None, rest: Iterator[str]) -> str | None:
    """NAME=VALUE of an option that is a setting now; its value is the next word, if it is not behind a sign."""
    known = "optical simulate" if command == "optical compare" else command
    if known == "optical simulate" and name in FLAGS:
        return FLAGS[name]
    if name not in SET.get(known, ()):
        return None
    return f"{name.removeprefix('--').replace('-', '_')}={next(rest, '') if value is None else value}"


def _report(command: str, name: str, new: str) -> None:
    log(f"farpipe: {name} of `{command}` is now {new}; the old spelling goes in the next version")
