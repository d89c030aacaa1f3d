"""Run every benchmark, one after the other, and write what they print as tables for the docs."""

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
    """Nested JSON as (path, value) rows."""
    if isinstance(data, dict):
        return [row for key, value in data.items() for row in rows(value, (*path, str(key)))]
    if isinstance(data, list):
        return [row for index, value in enumerate(data) for row in rows(value, (*path, str(index)))]
    text = f"{data:.4g}" if isinstance(data, float) else str(data)
    return [(": ".join(path).replace("_", " "), text)]


def section(script: Path) -> str:
    """Run one benchmark; its docstring's first line and its figures as a table."""
    print(f"{script.name} ...", file=sys.stderr, flush=True)
    run = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, check=True)
    data = json.loads(run.stdout)
    data.pop("benchmark", None)
    about = script.read_text(encoding="utf-8").split('"""')[1].strip().split("\n\n")[0].replace("\n", " ")
    table = "\n".join(f"| {name} | {value} |" for name, value in rows(data))
    head = f"\n## {script.stem}\n\n{about}\n\n    python benchmarks/{script.name}\n\n"
    return f"{head}| figure | value |\n|---|---|\n{table}\n"


def _is_script(path: Path) -> bool:
    return 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")


def main() -> None:
    """Run them all."""
    scripts = sorted(path for path in HERE.glob("*.py") if path.name != "run_all.py" and _is_script(path))
    page = HEAD.format(machine=machine()) + "".join(section(script) for script in scripts)
    PAGE.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
