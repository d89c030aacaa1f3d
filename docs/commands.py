"""Write docs/reference/commands.md from the help of every command: ``python docs/commands.py``."""

from collections import Counter
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

import typer

from farpipe.cli.app import app
from farpipe.engine.launch import rank_main

PAGE = Path(__file__).parent / "reference" / "commands.md"
RANK_MAIN = "python -m farpipe.engine.launch.rank_main"
INTRODUCTION = """# Commands

Every command with its options, written from its `--help` by `python docs/commands.py`.

- Figures and tables go to stdout, progress to stderr. `--json` prints one JSON document instead of tables; what is in
  it is in [file formats](file-formats.md).
- A mistake ends in one message that begins with `farpipe:` and an [exit code](file-formats.md#exit-codes). Please
  report tracebacks.
- A value that is rarely changed has no option: `--set KEY=VALUE` names a key of the [job](job.md) or a setting of
  [light paths](optical.md). An option's name means the same in every command.
- Flags are off by default. An option without effect is refused (exit code 2), and the message says what it needs.
- Files are written whole or not at all, and never over one that the command reads. `plan`, `profile` and `schedule`
  keep their older file as `NAME.previous.json`.
"""
HEAD = "| argument or option | meaning |\n|---|---|"
MANY = 3
"""Commands from which on a row that they share is written once, at the top; of two with one name the commoner."""


def interface() -> dict[str, Any]:
    """Every command, by the words that call it, as the parser sees it."""
    alone = typer.Typer(add_completion=False)
    alone.command()(rank_main.main)
    ours = {f"farpipe {name}": command for name, command in typer.main.get_command(app).commands.items()}  # type: ignore[attr-defined]
    return dict(_singly(ours)) | {RANK_MAIN: typer.main.get_command(alone)}


def _singly(commands: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every command of a group under its own words, as in ``farpipe wan up``."""
    for words, command in commands.items():
        inner = getattr(command, "commands", {})
        yield from _singly({f"{words} {name}": one for name, one in inner.items()}) if inner else [(words, command)]


def page() -> str:
    """The page as it should be."""
    commands = interface()
    counts = Counter(row for command in commands.values() for row in _rows(command))
    most = {_name(row): row for row, _ in reversed(counts.most_common())}
    shared = [row for row, count in counts.most_common() if count >= MANY and most[_name(row)] == row]
    sections = [_section(name, command, shared) for name, command in commands.items()]
    return "\n".join([INTRODUCTION, "Shared by several commands:", "", HEAD, *shared, "", *sections])


def _section(name: str, command: Any, shared: list[str]) -> str:
    usage = " ".join([name, *command.collect_usage_pieces(typer.Context(command))])
    rows = _rows(command)
    own = [row for row in rows if row not in shared]
    table = [HEAD, *own, ""] if own else []
    names = ", ".join(_name(row) for row in rows if row in shared)
    also = [f"Shared: {names}.", ""] if names else []
    return "\n".join([f"## {name}", "", f"    {usage}", "", cleandoc(command.help), "", *table, *also])


def _rows(command: Any) -> list[str]:
    return [_row(parameter) for parameter in command.params if "--help" not in parameter.opts]


def _name(row: str) -> str:
    return row.split(" | ")[0].removeprefix("| ")


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return f"| {names} | {' '.join((parameter.help or '').split())}{_default(parameter)} |"


def _default(parameter: Any) -> str:
    if parameter.required:
        return " Required."
    if parameter.default is None or parameter.default is False:
        return ""
    return f" Default: `{'yes' if parameter.default is True else parameter.default}`."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
