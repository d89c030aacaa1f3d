"""The house rules that a machine can check: one-way imports, cheap imports, small functions."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "farpipe"
ROOMS = [
    *("errors", "units", "strict", "processes", "catalog", "spec", "step", "cost", "schedule", "simulate", "search"),
    *("sequences", "optical", "plan", "fleet"),
    *("emulate", "transport", "runtime", "control", "run", "report", "cli"),
]
"""Each room may import only from rooms before it."""
FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imports(tree):
    """Every imported module name, absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            yield node.module, node


def test_every_room_is_known():
    assert {room_of(path) for path in FILES} - {"__init__", "__main__"} <= set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_rooms_import_only_from_rooms_before_them(path):
    if room_of(path) in ("__init__", "__main__"):
        return
    mine = ROOMS.index(room_of(path))
    for name, node in imports(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] == "farpipe" and len(parts) > 1:
            assert ROOMS.index(parts[1]) <= mine, f"{path}:{node.lineno} imports {name}"
        if parts[0] == "torch":
            assert room_of(path) == "runtime", f"{path}:{node.lineno}: only runtime/ may import torch"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_functions_and_files_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 100, f"{path}:{node.lineno} {node.name} is too long"


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
