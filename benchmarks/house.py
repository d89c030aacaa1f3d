"""Size and shape of the source, of two commits side by side; writes the tables of docs/reference/benchmarks/house.md.

    python -m benchmarks.house [--before 6930e1a] [--after HEAD] [--write]

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
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "benchmarks" / "house.md"
BEGIN, END = "<!-- written by benchmarks/house.py -->", "<!-- end -->"
LONG, MANY, SHORT = 30, 7, 60
"""Lines of a function, its parameters, lines of a file: more, more, fewer than these are counted."""
FRAGMENT = re.compile(
    r"(of|from|for|by|with|those|between|in|on|at|to|so|up|what|whether|which|see|as)\b", re.IGNORECASE
)
"""First words of docstrings that do not name their subject."""
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
RULES = {
    "decodings of an action (`& 3`, `>> 2`) outside step/": (r"& 3\b|>> 2\b", ("step",)),
    "`/ ...bandwidth_bytes_per_s` outside step/ and emulate/": (r"/ [\w.]*bandwidth_bytes_per_s", ("step", "emulate")),
    "tolerances of memory outside step/": (r"1 \+ 5e-10|\(1 \+ 1e-9\)|1 \+ TOLERANCE", ("step",)),
}
"""Patterns of arithmetic that has its home in step/, and the rooms that may have them."""

Tree = dict[Path, ast.Module]


def main() -> None:
    """Count both, and show or write the tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--before", default="6930e1a")
    options.add_argument("--after", default="HEAD")
    options.add_argument("--write", action="store_true", help="into docs/reference/benchmarks/house.md")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counted = [
            count(checkout(name, Path(folder) / str(index))) for index, name in enumerate((given.before, given.after))
        ]
    text = tables(*counted, (given.before, "now"))
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


def count(root: Path) -> dict[str, dict[str, int]]:
    """Figures of a checkout, by table and row."""
    source = root / "src" / "farpipe"
    trees = {
        path.relative_to(source): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(source.rglob("*.py"))
    }
    lines = {path: (source / path).read_text(encoding="utf-8").count("\n") for path in trees}
    rooms: Counter[str] = Counter()
    for path, number in lines.items():
        rooms[path.parts[0]] += number
    figures = {"lines of Python in src/": sum(lines.values()), "files": len(lines)}
    figures |= {f"files below {SHORT} lines": sum(number < SHORT for number in lines.values())}
    return {"figures": figures | names(trees) | functions(trees) | rules(source) | words(root), "rooms": dict(rooms)}


def names(trees: Tree) -> dict[str, int]:
    """File and class names that are used more than once."""
    files = Counter(path.name for path in trees if path.stem not in ("__init__", "__main__"))
    classes = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {
        "file names used twice or more": sum(number > 1 for number in files.values()),
        "class names used twice or more": sum(number > 1 for number in classes.values()),
    }


def functions(trees: Tree) -> dict[str, int]:
    """Functions, and those that are long or have many parameters."""
    found = [
        node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {
        "functions": len(found),
        f"functions above {LONG} lines": sum((node.end_lineno or 0) - node.lineno >= LONG for node in found),
        f"functions above {MANY} parameters": sum(parameters(node) > MANY for node in found),
        "docstrings that don't begin with their subject": sum(map(is_fragment, docstrings(trees))),
    }


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters but for self and cls."""
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def docstrings(trees: Tree) -> Iterator[str]:
    """Texts of modules, classes, functions and of what a line above assigns."""
    for tree in trees.values():
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            for statement in body if isinstance(body, list) else ():
                match statement:
                    case ast.Expr(ast.Constant(str() as text)):
                        yield text


def is_fragment(text: str) -> bool:
    """True if the first word is not of the subject."""
    return FRAGMENT.match(text.strip()) is not None


def rules(source: Path) -> dict[str, int]:
    """Places of arithmetic outside its home."""
    found = {}
    for name, (pattern, homes) in RULES.items():
        texts = [
            p.read_text(encoding="utf-8") for p in source.rglob("*.py") if p.relative_to(source).parts[0] not in homes
        ]
        found[name] = sum(len(re.findall(pattern, text)) for text in texts)
    return found


def words(root: Path) -> dict[str, int]:
    """Options of all commands; words of the documentation."""
    environment = {"PYTHONPATH": str(root / "src"), "PATH": ""}
    command = [sys.executable, "-c", PARSER]
    options = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    pages = [root / "README.md", *root.glob("docs/**/*.md")]
    log = [page for page in pages if page.stem == "log" or page.parent.name == "log"]
    raw = [page for page in pages if page.parent.name == "raw"]
    commands = (root / "src" / "farpipe" / "cli").rglob("*.py")
    defined = sum(path.read_text(encoding="utf-8").count("typer.Option(") for path in commands)
    return {
        "options, those that several commands share once": defined,
        "options of all commands": int(options),
        "words of README and docs, without the next two": sum(map(num_words, set(pages) - {*log, *raw})),
        "words of the log": sum(map(num_words, log)),
        "words of figures that scripts write to files": sum(map(num_words, raw)),
        "lines of README": (root / "README.md").read_text(encoding="utf-8").count("\n"),
    }


def num_words(page: Path) -> int:
    """Words of a page."""
    return len(page.read_text(encoding="utf-8").split())


def tables(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]], titles: tuple[str, str]) -> str:
    """Both tables as Markdown."""
    parts = []
    for title, heading in (("figures", "figure"), ("rooms", "lines of a room")):
        rows = sorted(before[title].keys() | after[title].keys()) if title == "rooms" else [*after[title]]
        lines = [f"| {row} | {before[title].get(row, 0):,} | {after[title].get(row, 0):,} |" for row in rows]
        parts.append("\n".join([f"| {heading} | {titles[0]} | {titles[1]} |", "|---|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
