"""Rules of the source that a machine can check: one-way imports, cheap imports, small functions."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import networkx
import pytest

from farpipe.cli.app import HOMES

SOURCE = Path(__file__).parent.parent / "src" / "farpipe"
MAY_IMPORT = {
    "core": "",
    "planning": "core",
    "optical": "core planning",
    "fleet": "core planning",
    "engine": "core planning",
    "report": "core planning optical fleet engine",
    "service": "core planning fleet engine report",
    "torch": "core planning engine",
    "testing": "core planning fleet engine service",
    "interop": "core planning",
    "cli": "core planning optical fleet engine service interop report",
}
"""The contract: what each package may import besides itself; `docs/design.md` says why."""
INSIDE = {
    "core": {
        "errors": "",
        "units": "errors",
        "strict": "errors units",
        "plugins": "errors",
        "cpu_share": "",
        "lazy": "",
        "hosts": "",
        "arguments": "errors units strict",
        "document": "errors units strict",
        "catalog": "errors units strict",
        "spec": "errors units strict arguments catalog",
        "step": "errors units strict arguments document",
        "schedule": "errors units strict arguments plugins step",
        "simulate": "errors units strict arguments document step schedule",
    },
    "planning": {
        "cost": "",
        "search": "",
        "workload": "cost search",
        "documents": "workload",
        "planner": "cost search workload documents",
        "explain": "cost search workload documents planner",
    },
    "engine": {
        "processes": "",
        "transport": "processes",
        "links": "processes transport",
    },
}
"""The same between the parts of a package; of the engine, for those that know nothing of a step."""
WITH_TORCH = ("engine", "torch")
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def tree_of(path):
    return ast.parse(path.read_text())


@cache
def nodes_of(tree):
    """All nodes of a syntax tree: to walk it takes longer than most rules need to look at them."""
    return [*ast.walk(tree)]


def parts_of(path):
    return path.relative_to(SOURCE).with_suffix("").parts


def room_of(path):
    return parts_of(path)[0]


def name_of(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def imports(tree):
    """Every imported module, absolute, with its node: of ``from farpipe import x`` and its like the module x too."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module, node


def test_every_package_and_part_has_its_line_in_the_contract():
    assert {room_of(path) for path in FILES} - {"__init__", "__main__"} == set(MAY_IMPORT)
    for package, parts in INSIDE.items():
        found = {parts_of(path)[1] for path in FILES if room_of(path) == package}
        assert found - {"__init__"} >= set(parts)
        assert package == "engine" or found - {"__init__"} == set(parts)


@pytest.mark.parametrize("contract", [MAY_IMPORT, *INSIDE.values()])
def test_the_contract_has_no_circle(contract):
    order = list(contract)
    for part, others in contract.items():
        assert all(order.index(other) < order.index(part) for other in others.split()), part


def test_an_import_of_a_package_s_module_is_seen():
    found = [name for name, _ in imports(ast.parse("from farpipe import cli\nfrom farpipe.core.step import Problem"))]
    assert found == ["farpipe.cli", "farpipe.core.step"]


def test_files_import_each_other_in_no_circle():
    """Imports inside functions count; a package's door (its `__init__`) is not looked behind."""
    graph = {
        module: {name for name, _ in imports(tree_of(path)) if name in MODULES and name != module}
        for module, path in MODULES.items()
        if path.name != "__init__.py"
    }
    circles = {
        frozenset(component)
        for component in networkx.strongly_connected_components(networkx.DiGraph(graph))
        if len(component) > 1
    }
    assert not circles


def allowed(path, name):
    """True if the contract lets a file import the module `name`."""
    own, (first, *rest) = parts_of(path), name.split(".")
    if first == "torch":
        return own[0] in WITH_TORCH
    if first != "farpipe" or not rest or own[0] not in MAY_IMPORT:
        return True
    if rest[0] != own[0]:
        return rest[0] in MAY_IMPORT[own[0]].split()
    inside = INSIDE.get(own[0], {}).get(own[1])
    return inside is None or rest[1:2] in ([], [own[1]]) or rest[1] in inside.split()


def test_packages_import_only_what_the_contract_allows():
    wrong = [
        f"{path}:{node.lineno} imports {name}"
        for path in FILES
        for name, node in imports(tree_of(path))
        if not allowed(path, name)
    ]
    assert not wrong, "imports that the contract does not allow:\n" + "\n".join(wrong)


def test_only_a_picture_in_a_notebook_is_found_by_the_name_of_a_package_above():
    named = re.compile(r"""import_module\(\s*["']farpipe""")
    assert [name_of(path) for path in FILES if named.search(path.read_text())] == ["farpipe.core.document"]


def test_files_stay_small():
    assert not [path for path in FILES if path.read_text().count("\n") > 400]


def test_functions_stay_small():
    functions = [
        (f"{path.relative_to(SOURCE).as_posix()}: {node.name}", node.end_lineno - node.lineno)
        for path in FILES
        for node in nodes_of(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert not [(name, lines) for name, lines in functions if lines >= 80]


@cache
def loaded_by(statement):
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("heavy", ["torch", "numba", "numpy", "pydantic", "matplotlib"])
def test_importing_farpipe_loads_nothing_heavy(heavy):
    assert heavy not in loaded_by("import farpipe")


@pytest.mark.parametrize("heavy", ["torch", "numba", "numpy", "matplotlib"])
def test_importing_the_command_line_loads_nothing_heavy(heavy):
    assert heavy not in loaded_by("import farpipe.cli")


def test_a_command_line_imports_its_own_command_alone():
    names = {f"farpipe.cli.{home.partition(':')[0]}" for home in HOMES.values()}
    assert names & set(loaded_by("from farpipe.cli.app import called_by; called_by(['plan', 'job.toml'])")) == {
        *("farpipe.cli.plan", "farpipe.cli.init")
    }
    assert names <= set(loaded_by("from farpipe.cli.app import called_by; called_by(['--help'])"))


@pytest.mark.parametrize(
    "modules",
    [
        "farpipe.planning.planner, farpipe.core.simulate, farpipe.report, farpipe.planning.cost",
        "farpipe.engine.transport, farpipe.engine.transport.link_probe, farpipe.engine.transport.security.authority",
        "farpipe.engine.launch.run",
    ],
)
def test_planning_simulating_probing_and_launching_need_no_torch(modules):
    assert "torch" not in loaded_by(f"import {modules}")


@cache
def graph_of_imports():
    """Who imports whom, inside functions too, but for checks of types."""
    graph = networkx.DiGraph()
    for name, path in MODULES.items():
        graph.add_node(name)
        tree = tree_of(path)
        of_types = {
            id(node)
            for block in nodes_of(tree)
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        graph.add_edges_from((name, imported) for imported, node in imports(tree) if id(node) not in of_types)
    return graph


def all_imports_of(module):
    """Every module that it may come to import."""
    return networkx.descendants(graph_of_imports(), module)


SAYS_NO_TORCH = sorted(name for name, path in MODULES.items() if re.search(r"(?i)\bno torch\b", path.read_text()))


@pytest.mark.parametrize("module", SAYS_NO_TORCH)
def test_a_module_that_says_that_it_needs_no_torch_never_imports_it(module):
    """Nor by an import inside a function, nor by what it imports."""
    assert not {name for name in all_imports_of(module) if name.partition(".")[0] in ("torch", "safetensors")}


def test_only_the_engine_and_the_command_line_ever_import_torch():
    rooms = {room_of(MODULES[name]) for name in networkx.ancestors(graph_of_imports(), "torch") if name in MODULES}
    assert rooms <= {"engine", "torch", "cli", "__main__"}
