"""Run the benchmarks one after the other, and write what they print as tables for the docs.

python benchmarks/run_all.py [NAME ...]

Without names: all whose figures stand between marks on one of the pages. A page is written after each. What is replaced
stands between the marks below the heading of its script; everything else is written by hand and kept. One that fails
says so in its section, the others are run all the same, and the exit code is 1.
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs" / "reference" / "benchmarks"

BEGIN, END = "<!-- {}: written by make bench -->", "<!-- {}: end -->"
"""Around what was written for the script of this name."""


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


def run(script: Path) -> Run:
    """Run one benchmark; what it writes to stderr is shown as it comes."""
    print(f"{script.name} ...", file=sys.stderr, flush=True)
    last_words = ""
    with (
        tempfile.TemporaryFile("w+") as printed,
        subprocess.Popen([sys.executable, script], stdout=printed, stderr=subprocess.PIPE, text=True) as process,
    ):
        for line in process.stderr or ():
            sys.stderr.write(line)
            last_words = line.strip() or last_words
        exit_code = process.wait()
        printed.seek(0)
        with contextlib.suppress(json.JSONDecodeError):
            return Run(exit_code, json.loads(printed.read()), last_words)
    return Run(exit_code or 1, None, last_words)


def block(script: Path, found: Run) -> str:
    """One benchmark's docstring's first paragraph, its picture if it draws one, and its figures as tables."""
    data = dict(found.data or {})
    data.pop("benchmark", None)
    picture = data.pop("picture", None)
    about = script.read_text(encoding="utf-8").split('"""')[1].strip().split("\n\n")[0].replace("\n", " ")
    text = f"{about}\n\n    python benchmarks/{script.name}\n\nOn {machine()}.\n"
    if found.exit_code:
        text += f"\n{failure(found)}\n"
    if found.data is None:
        return text
    shown = f"\n![{about.partition('.')[0]}](../../pictures/{picture})\n" if picture else ""
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


def page_of(name: str) -> Path | None:
    """Page that has the section of this script."""
    heading = f"\n## {name}\n"
    return next((page for page in sorted(PAGES.glob("*.md")) if heading in page.read_text(encoding="utf-8")), None)


def is_marked(name: str) -> bool:
    """True if the figures of this script stand between marks."""
    page = page_of(name)
    return page is not None and BEGIN.format(name) in page.read_text(encoding="utf-8")


def with_block(page: Path, name: str, text: str) -> str:
    """Content of the page with this block of a script: in place of the last one, or below its heading."""
    begin, end = BEGIN.format(name), END.format(name)
    marked, heading = f"{begin}\n\n{text.strip()}\n\n{end}", f"\n## {name}\n"
    content = page.read_text(encoding="utf-8")
    before, begins, rest = content.partition(begin)
    _, ends, after = rest.partition(end)
    if begins and not ends:
        sys.exit(f"{page}: {begin} has no {end} behind it: put that where the figures of {name} end")
    if begins:
        return f"{before}{marked}{after}"
    return content.replace(heading, f"{heading}\n{marked}\n", 1)


def main() -> None:
    """Run those that are named, or all whose figures are marked."""
    options = argparse.ArgumentParser(description=str(__doc__))
    options.add_argument("names", nargs="*", metavar="NAME", help="such as kernel_speed; default: all that are marked")
    scripts = {path.stem: path for path in sorted(HERE.glob("*.py")) if path.name != "run_all.py" and _is_script(path)}
    wanted = options.parse_args().names or [name for name in scripts if is_marked(name)]
    if unknown := [name for name in wanted if name not in scripts]:
        options.error(f"there is no benchmark {unknown[0]!r}; known: {', '.join(scripts)}")
    if homeless := [name for name in wanted if page_of(name) is None]:
        options.error(f"no page in {PAGES} has a heading '## {homeless[0]}': put one where its figures belong")
    failed = [name for name in wanted if not refresh(scripts[name])]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def refresh(script: Path) -> bool:
    """Run one benchmark and put its block on its page; True if it went well."""
    page = page_of(script.stem)
    assert page is not None
    result = run(script)
    page.write_text(with_block(page, script.stem, block(script, result)), encoding="utf-8")
    return not result.exit_code


if __name__ == "__main__":
    main()
