"""Write docs/reference/commands.md from the help of every command: ``python docs/commands.py``."""

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
  it stands in [file formats](file-formats.md).
- A mistake ends in one message that begins with `farpipe:` and an [exit code](file-formats.md#exit-codes). A traceback
  is a bug of ours: please report it.
- A value that is rarely changed has no option: `--set KEY=VALUE` names a key of the [job](job.md) or a setting of
  [light paths](optical.md). An option's name means the same in every command.
- An option that would have no effect is refused (exit code 2), and the message says what it needs.
- Files are written whole or not at all, and never in place of one that the command reads. `plan`, `profile` and
  `schedule` keep their older file as `NAME.previous.json`.
"""


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
    sections = [_section(name, command) for name, command in interface().items()]
    return "\n".join([INTRODUCTION, *sections])


def _section(name: str, command: Any) -> str:
    usage = " ".join([name, *command.collect_usage_pieces(typer.Context(command))])
    rows = [_row(parameter) for parameter in command.params if "--help" not in parameter.opts]
    table = ["| argument or option | meaning | default |", "|---|---|---|", *rows, ""] if rows else []
    return "\n".join([f"## {name}", "", f"    {usage}", "", cleandoc(command.help), "", *table])


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return f"| {names} | {' '.join((parameter.help or '').split())} | {_default(parameter)} |"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.default, bool):
        return "yes" if parameter.default else "no"
    return "none" if parameter.default is None else f"`{parameter.default}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
