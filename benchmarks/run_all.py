"""Run every benchmark, one after the other, and write what they print as tables for the docs.

python benchmarks/run_all.py [NAME ...]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "reference" / "benchmarks.md"

HEAD = """\
# Benchmarks

Written by `make bench`. Run it on your own machine: figures of different machines, or of a busy one, don't compare.
Each table is one script in `benchmarks/`, whose docstring says what is measured and against which limit.

Measured on {machine}.
"""


def machine() -> str:
    """What was measured on, in words."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores ({platform.machine()}), {platform.system()}, Python {platform.python_version()}"


def rows(data: Any, path: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Nested JSON as (path, value) rows, without what `tables` shows."""
    if _is_table(data):
        return []
    if isinstance(data, dict):
        return [row for key, value in data.items() for row in rows(value, (*path, str(key)))]
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


def section(script: Path) -> str:
    """Run one benchmark; its docstring's first paragraph, its picture if it draws one, and its figures as tables."""
    print(f"{script.name} ...", file=sys.stderr, flush=True)
    run = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, check=True)
    data = json.loads(run.stdout)
    data.pop("benchmark", None)
    picture = data.pop("picture", None)
    about = script.read_text(encoding="utf-8").split('"""')[1].strip().split("\n\n")[0].replace("\n", " ")
    head = f"\n## {script.stem}\n\n{about}\n\n    python benchmarks/{script.name}\n\n"
    shown = f"![{about.partition('.')[0]}](../pictures/{picture})\n\n" if picture else ""
    table = "\n".join(f"| {name} | {value} |" for name, value in rows(data))
    return f"{head}{shown}| figure | value |\n|---|---|\n{table}\n{tables(data)}"


def _is_script(path: Path) -> bool:
    return 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")


def sections(page: str) -> dict[str, str]:
    """The sections of the page as it is, by the names of their scripts."""
    return {part.split("\n", 1)[0]: f"\n## {part.rstrip()}\n" for part in page.split("\n## ")[1:]}


def main() -> None:
    """Run those that are named, or all of them; the sections of the others stay as they are."""
    options = argparse.ArgumentParser(description=str(__doc__))
    options.add_argument("names", nargs="*", metavar="NAME", help="such as kernel_speed; default: all")
    scripts = {path.stem: path for path in sorted(HERE.glob("*.py")) if path.name != "run_all.py" and _is_script(path)}
    wanted = options.parse_args().names or [*scripts]
    if unknown := [name for name in wanted if name not in scripts]:
        options.error(f"there is no benchmark {unknown[0]!r}; known: {', '.join(scripts)}")
    kept = {} if set(wanted) == set(scripts) else sections(PAGE.read_text(encoding="utf-8"))
    found = kept | {name: section(scripts[name]) for name in wanted}
    page = HEAD.format(machine=machine()) + "".join(found[name] for name in sorted(found) if name in scripts)
    PAGE.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
