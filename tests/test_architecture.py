"""Rules of the source that a machine can check: one-way imports, cheap imports, small functions."""

import ast
import subprocess
import sys
from pathlib import Path

import networkx
import pytest

SOURCE = Path(__file__).parent.parent / "src" / "farpipe"
WAIST = "errors units strict document processes catalog spec step"
SEARCH = f"{WAIST} cost schedule simulate search"
ENGINE = f"{SEARCH} sequences plan emulate transport runtime control run"
MAY_IMPORT = {
    "errors": "",
    "units": "errors",
    "strict": "errors units",
    "document": "errors units strict",
    "processes": "errors units strict",
    "catalog": "errors units strict",
    "spec": "errors units strict catalog",
    "step": "errors units strict document",
    "cost": WAIST,
    "schedule": "errors units strict step",
    "simulate": "errors units strict document step schedule",
    "search": "errors units strict step schedule simulate",
    "sequences": SEARCH,
    "optical": SEARCH,
    "plan": f"{SEARCH} sequences",
    "fleet": f"{SEARCH} plan",
    "emulate": WAIST,
    "transport": "errors units strict processes emulate",
    "runtime": f"{SEARCH} sequences emulate transport",
    "control": f"{SEARCH} sequences emulate transport runtime",
    "run": f"{SEARCH} sequences plan emulate transport runtime control",
    "report": f"{ENGINE} fleet optical",
    "cli": f"{ENGINE} fleet optical report",
}
"""The contract: what each room may import besides itself; `docs/design.md` says why."""
LONG_FUNCTIONS = {"cli/train.py: train"}
"""Above 80 lines: the options of a command with their help."""
FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def name_of(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def imports(tree):
    """Every imported module, absolute, with its node: of ``from farpipe import x`` and its like the module x too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module, node


def test_every_room_has_its_line_in_the_contract():
    assert {room_of(path) for path in FILES} - {"__init__", "__main__"} <= set(MAY_IMPORT)


def test_the_contract_has_no_circle():
    order = list(MAY_IMPORT)
    for room, others in MAY_IMPORT.items():
        assert all(order.index(other) < order.index(room) for other in others.split()), room


def test_an_import_of_a_package_s_module_is_seen():
    found = [name for name, _ in imports(ast.parse("from farpipe import cli\nfrom farpipe.step import Problem"))]
    assert found == ["farpipe.cli", "farpipe.step"]


def test_files_import_each_other_in_no_circle():
    """Imports inside functions count; a package's door (its `__init__`) is not looked behind."""
    graph = {
        module: {name for name, _ in imports(ast.parse(path.read_text())) if name in MODULES and name != module}
        for module, path in MODULES.items()
        if path.name != "__init__.py"
    }
    circles = {
        frozenset(component)
        for component in networkx.strongly_connected_components(networkx.DiGraph(graph))
        if len(component) > 1
    }
    assert not circles


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_rooms_import_only_what_the_contract_allows(path):
    if room_of(path) in ("__init__", "__main__"):
        return
    allowed = {room_of(path), *MAY_IMPORT[room_of(path)].split()}
    for name, node in imports(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] == "farpipe" and len(parts) > 1:
            assert parts[1] in allowed, f"{path}:{node.lineno} imports {name}"
        if parts[0] == "torch":
            assert room_of(path) == "runtime", f"{path}:{node.lineno}: only runtime/ may import torch"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_functions_and_files_stay_small(path):
    text = path.read_text()
    place = path.relative_to(SOURCE).as_posix()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            limit = 100 if f"{place}: {node.name}" in LONG_FUNCTIONS else 80
            assert node.end_lineno - node.lineno < limit, f"{path}:{node.lineno} {node.name} is too long"


def loaded_by(statement):
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("heavy", ["torch", "numba", "numpy", "pydantic", "matplotlib"])
def test_importing_farpipe_loads_nothing_heavy(heavy):
    assert heavy not in loaded_by("import farpipe")


@pytest.mark.parametrize("heavy", ["torch", "numba", "numpy", "matplotlib"])
def test_importing_the_command_line_loads_nothing_heavy(heavy):
    assert heavy not in loaded_by("import farpipe.cli")


@pytest.mark.parametrize(
    "modules",
    [
        "farpipe.plan, farpipe.simulate, farpipe.report, farpipe.cost",
        "farpipe.transport, farpipe.transport.link_probe, farpipe.transport.security.authority",
        "farpipe.run.run",
    ],
)
def test_planning_simulating_probing_and_launching_need_no_torch(modules):
    assert "torch" not in loaded_by(f"import {modules}")
