"""Run the benchmarks one after the other, and write what they print as tables for the docs.

python -m benchmarks.run_all [NAME ...] [-- OPTION ...]

Without names: all whose file in docs/reference/benchmarks/raw says that `make bench` writes it. The pages beside those
files are written by hand, with the headlines. A script prints figures (one JSON document), rows (a JSON document a
line), a table (Markdown) or text. Its file begins with what the command prints without options, and has a section for
each set of options; what was not run stays. One that fails has that in its file, the others are run all the same, and
the exit code is 1. One that can't be measured here, for want of data or rights, keeps its figures.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared.outcome import NOT_MEASURED

HERE = Path(__file__).parent
"""Folder of the benchmarks; their folders are packages, and commands run in the one above."""
PAGES = HERE.parent / "docs" / "reference" / "benchmarks"
IN_MAKE_BENCH = "Written by `make bench`"
TABLE = re.compile(r"^\|(---\|)+$", re.M)
"""A Markdown table's second line."""


def machine() -> str:
    """The machine that was measured on, in words."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores ({platform.machine()}), {platform.system()}, Python {platform.python_version()}"


def rows(data: Any, path: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Nested JSON as (path, value) rows, without what `tables` shows."""
    if _is_table(data):
        return []
    if isinstance(data, dict):
        return [row for key, value in data.items() for row in rows(value, (*path, str(key)))]
    if isinstance(data, list) and not any(isinstance(item, list | dict) for item in data):
        return [(": ".join(path).replace("_", " "), ", ".join(map(cell, data)))]
    if isinstance(data, list):
        return [row for index, value in enumerate(data) for row in rows(value, (*path, str(index)))]
    return [(": ".join(path).replace("_", " "), cell(data))]


def _is_table(data: Any) -> bool:
    """A list of objects with the same keys, such as a grid of measurements."""
    return (
        isinstance(data, list) and bool(data) and all(isinstance(r, dict) and r.keys() == data[0].keys() for r in data)
    )


def tables(data: dict[str, Any]) -> str:
    """Every list of alike objects as a table under its name."""
    found = ""
    for name, lines in data.items():
        if _is_table(lines):
            body = "\n".join(f"| {' | '.join(map(cell, line.values()))} |" for line in lines)
            found += (
                f"\n**{name.replace('_', ' ')}**\n\n| {' | '.join(lines[0])} |\n{'|---' * len(lines[0])}|\n{body}\n"
            )
    return found


def cell(value: Any) -> str:
    """One value: four digits of a number, a dash where there is none."""
    if value is None:
        return "\N{EN DASH}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Run(NamedTuple):
    """Outcome of one benchmark."""

    exit_code: int
    data: dict[str, Any] | None
    """The figures that it printed; None where it printed none."""
    last_words: str
    """The last line that it wrote to stderr."""
    text: str = ""
    """What it printed in place of one JSON document, as Markdown."""


def module_of(script: Path) -> str:
    """The script's name for ``python -m``."""
    return ".".join(("benchmarks", *script.relative_to(HERE).with_suffix("").parts))


def run(script: Path, options: list[str]) -> Run:
    """Run one benchmark; what it writes to stderr is shown as it comes."""
    print(f"{script.name} ...", file=sys.stderr, flush=True)
    last_words, command = "", [sys.executable, "-m", module_of(script), *options]
    with (
        tempfile.TemporaryFile("w+") as printed,
        subprocess.Popen(command, cwd=HERE.parent, stdout=printed, stderr=subprocess.PIPE, text=True) as process,
    ):
        for line in process.stderr or ():
            sys.stderr.write(line)
            last_words = line.strip() or last_words
        exit_code = process.wait()
        printed.seek(0)
        text = printed.read()
        with contextlib.suppress(json.JSONDecodeError):
            return Run(exit_code, json.loads(text), last_words)
    if text.strip():
        return Run(exit_code, None, last_words, markdown(text))
    return Run(exit_code or 1, None, last_words)


def markdown(text: str) -> str:
    """What a script printed: a table as it is, rows as a table, and everything else as it looks."""
    if TABLE.search(text):
        return text
    with contextlib.suppress(json.JSONDecodeError):
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
        if _is_table(lines):
            return tables({"rows": lines}).lstrip()
    return f"```text\n{text.rstrip()}\n```\n"


def block(script: Path, options: list[str], found: Run) -> str:
    """One benchmark's docstring's first paragraph, its picture if it draws one, and its figures as tables."""
    data = dict(found.data or {})
    data.pop("benchmark", None)
    picture = data.pop("picture", None)
    about = script.read_text(encoding="utf-8").split('"""')[1].strip().split("\n\n")[0].replace("\n", " ")
    command = shlex.join(["python", "-m", module_of(script), *options])
    text = f"{about}\n\n    {command}\n\nOn {machine()}, {datetime.date.today()}.\n"
    if found.exit_code:
        text += f"\n{failure(found)}\n"
    if found.data is None:
        return f"{text}\n{found.text}" if found.text else text
    shown = f"\n![{about.partition('.')[0]}](../../../pictures/{picture})\n" if picture else ""
    lines = [f"| {name} | {value} |\n" for name, value in rows(data)]
    figures = "".join(["\n| figure | value |\n|---|---|\n", *lines]) if lines else ""
    return f"{text}{shown}{figures}{tables(data)}"


def failure(found: Run) -> str:
    """A benchmark that prints figures and fails has not kept a limit; one without figures broke."""
    if found.data is not None:
        return f"**A limit was not kept** (exit code {found.exit_code})."
    said = f": `{found.last_words}`" if found.last_words else ""
    return f"**It failed** (exit code {found.exit_code}){said}"


def _is_script(path: Path) -> bool:
    return 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")


def page_of(script: Path) -> Path | None:
    """Page that names this script's command."""
    command = re.compile(rf"\b{module_of(script)}\b")
    return next((page for page in sorted(PAGES.glob("*.md")) if _names(page, command)), None)


def _names(page: Path, command: re.Pattern[str]) -> bool:
    return page.stem != "index" and bool(command.search(page.read_text(encoding="utf-8")))


def raw(name: str) -> Path:
    """File with the figures of this script."""
    return PAGES / "raw" / f"{name}.md"


def in_make_bench(name: str) -> bool:
    """True if this script's file is one of those that `make bench` writes."""
    return raw(name).exists() and IN_MAKE_BENCH in raw(name).read_text(encoding="utf-8")


def main() -> None:
    """Run those that are named, or all of `make bench`."""
    parser = argparse.ArgumentParser(description=str(__doc__))
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as kernel_speed; default: those of `make bench`")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, options = sys.argv[1:cut], sys.argv[cut + 1 :]
    scripts = {path.stem: path for path in sorted(HERE.glob("*/*.py")) if _is_script(path)}
    wanted = parser.parse_args(given).names or [name for name in scripts if in_make_bench(name)]
    if unknown := [name for name in wanted if name not in scripts]:
        parser.error(f"there is no benchmark {unknown[0]!r}; known: {', '.join(scripts)}")
    if homeless := [name for name in wanted if page_of(scripts[name]) is None]:
        parser.error(f"no page in {PAGES} names {module_of(scripts[homeless[0]])}: put it where its headline belongs")
    failed = [name for name in wanted if not refresh(scripts[name], options)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def refresh(script: Path, options: list[str]) -> bool:
    """Run one benchmark and write its part of its file, if it was measured; True if it went well."""
    page = page_of(script)
    assert page is not None
    result = run(script, options)
    if result.exit_code == NOT_MEASURED and result.data is None:
        return True
    file = raw(script.stem)
    file.parent.mkdir(exist_ok=True)
    writer = f"Written by `python -m benchmarks.run_all {script.stem}`" if result.text else IN_MAKE_BENCH
    head = f"# {script.stem}\n\n{writer}; its meaning is on [the page](../{page.name}).\n"
    before = file.read_text(encoding="utf-8") if file.exists() else head
    first, *sections = re.split(r"^(?=## )", before, flags=re.M)
    written = block(script, options, result)
    title = f"## {shlex.join(options)}\n"
    if not options:
        first = f"{head}\n{written}"
    else:
        sections = [text for text in sections if not text.startswith(title)] + [f"{title}\n{written}"]
    file.write_text("\n".join(part.strip("\n") + "\n" for part in (first, *sections)), encoding="utf-8")
    return not result.exit_code


if __name__ == "__main__":
    main()
