"""Size and shape of the source, of two commits side by side; writes the tables of docs/reference/benchmarks/house.md.

    python -m benchmarks.house [--before ff2d523b] [--after HEAD] [--write]

`--after .` counts the working tree. Options are counted by the command line's own parser, in this environment.
Without `--write` the tables are printed.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "benchmarks" / "house.md"
BEGIN, END = "<!-- written by benchmarks/house.py -->", "<!-- end -->"
LONG, MANY = 30, 7
"""Lines of a function and parameters of one: more than these are counted."""
PARSER = """
import typer
from farpipe.cli.app import app
def options(command):
    inner = getattr(command, "commands", None)
    if inner:
        return sum(map(options, inner.values()))
    return sum(p.param_type_name == "option" and "--help" not in p.opts and not p.hidden for p in command.params)
print(options(typer.main.get_command(app)))
"""
PLANS = re.compile(r"\b(\w*Layout|Placement|Schedule|ScheduleData|\w*Candidate|ChunkPipeline|\w*Plan)\b")
"""Fields of these types make a class mean a plan, more or less: it says who computes what, where, or in which order."""
NOW_IN = {
    "core": "errors units strict notebook document catalog spec step schedule simulate",
    "planning": "cost search sequences plan data",
    "engine": "runtime transport emulate control run processes",
}
"""Packages of before this layout, by the package that they are in now."""
DOCS = {
    "README": "README.md",
    "tutorial, concepts, status": "docs/tutorial/*.md docs/concepts.md docs/index.md docs/status.md",
    "how-to": "docs/how-to/*.md",
    "reference": "docs/reference/*.md",
    "benchmarks": "docs/reference/benchmarks/*.md",
    "design and decisions": "docs/design.md docs/decisions.md docs/decisions/*.md",
    "CHANGELOG": "CHANGELOG.md",
}
"""Pages that people read, by kind; tables that scripts write and the notes of each month are counted apart."""
APART = {
    "tables of benchmarks": "docs/reference/benchmarks/raw/*.md",
    "notes of each month": "notes/*.md docs/log/*.md",
}

Figures = dict[str, int]
Tree = dict[Path, ast.Module]


def main() -> None:
    """Count both, and show or write the tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--before", default="ff2d523b")
    options.add_argument("--after", default="HEAD")
    options.add_argument("--write", action="store_true", help="into docs/reference/benchmarks/house.md")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counted = [
            count(checkout(name, Path(folder) / str(index))) for index, name in enumerate((given.before, given.after))
        ]
    text = "\n".join(table(title, *(one[title] for one in counted), given.before) for title in counted[0])
    if not given.write:
        print(text)
        return
    content = PAGE.read_text(encoding="utf-8")
    before, _, rest = content.partition(BEGIN)
    if END not in rest:
        sys.exit(f"{PAGE}: put {BEGIN} and {END} where the tables go")
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def checkout(name: str, folder: Path) -> Path:
    """Folder with the files of a commit; of ``.`` the working tree itself."""
    if name == ".":
        return ROOT
    archive = subprocess.run(["git", "archive", name], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


def count(root: Path) -> dict[str, Figures]:
    """Figures of a checkout, by table and row."""
    source, tests = root / "src" / "farpipe", root / "tests"
    paths = sorted(source.rglob("*.py"))
    trees = {path.relative_to(source): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    packages: Counter[str] = Counter()
    for path in paths:
        packages[package_of(path.relative_to(source))] += num_lines([path])
    whole = {
        "lines of src/": num_lines(paths),
        "lines of tests/": num_lines(tests.rglob("*.py")),
        "files of src/": len(paths),
        "packages": len({package for package in packages if package != "farpipe"}),
        "folders": len({path.parent for path in paths}),
        "options of all commands": num_options(root),
        "lines of comments": num_comments(paths),
    }
    pages = {name: num_words(root, kinds) for name, kinds in DOCS.items()}
    apart = {name: num_words(root, kinds) for name, kinds in APART.items()}
    return {
        "figure": whole | functions(trees),
        "lines of a package": dict(sorted(packages.items())),
        "words": pages | {"all of these": sum(pages.values())} | apart,
    }


def package_of(path: Path) -> str:
    """The package that a file is in, by today's names."""
    first = path.parts[0].removesuffix(".py")
    home = next((package for package, rooms in NOW_IN.items() if first in rooms.split()), first)
    return "farpipe" if home in ("__init__", "__main__") else home


def num_lines(paths: Iterable[Path]) -> int:
    """Lines of files."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def num_comments(paths: Iterable[Path]) -> int:
    """Lines that are a comment and nothing else."""
    lines = (line.strip() for path in paths for line in path.read_text(encoding="utf-8").splitlines())
    return sum(line.startswith("#") for line in lines)


def functions(trees: Tree) -> Figures:
    """Functions, and those that are long or have many parameters; names of classes that are used twice."""
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    planning = [node for path, tree in trees.items() if package_of(path) == "planning" for node in ast.walk(tree)]
    return {
        "functions": len(found),
        f"functions above {LONG} lines": sum((node.end_lineno or 0) - node.lineno >= LONG for node in found),
        f"functions above {MANY} parameters": sum(num_parameters(node) > MANY for node in found),
        "classes": len(classes),
        "classes of planning with a layout, order or plan in them": sum(map(holds_plan, planning)),
        "class names used twice or more": sum(number > 1 for number in classes.values()),
    }


def holds_plan(node: ast.AST) -> bool:
    """True for a class of which a field is a layout, a placement, an order, or another plan."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    fields = [ast.unparse(one.annotation) for one in body if isinstance(one, ast.AnnAssign)]
    return any(PLANS.search(field) for field in fields if "ClassVar" not in field)


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters but for self and cls."""
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def num_options(root: Path) -> int:
    """Options of all commands, a switch with its opposite counted once, `--help` not."""
    environment = {"PYTHONPATH": str(root / "src"), "PATH": ""}
    command = [sys.executable, "-c", PARSER]
    return int(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def num_words(root: Path, kinds: str) -> int:
    """Words of the pages that the patterns find."""
    pages = {page for kind in kinds.split() for page in root.glob(kind)}
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def table(title: str, before: Mapping[str, int], after: Mapping[str, int], name: str) -> str:
    """Both as a table of Markdown."""
    rows = [f"| {row} | {before.get(row, 0):,} | {after.get(row, 0):,} |" for row in {**before, **after}]
    return "\n".join([f"| {title} | {name} | now |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    main()
