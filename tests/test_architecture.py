"""Rules of the source that a machine can check: one-way imports, cheap imports, small functions."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import networkx
import pytest

SOURCE = Path(__file__).parent.parent / "src" / "farpipe"
WAIST = "errors units strict notebook document processes catalog spec step"
SEARCH = f"{WAIST} cost schedule simulate search"
ENGINE = f"{SEARCH} sequences data plan emulate transport runtime control run"
MAY_IMPORT = {
    "errors": "",
    "units": "errors",
    "strict": "errors units",
    "notebook": "",
    "document": "errors units strict notebook",
    "processes": "errors units strict",
    "catalog": "errors units strict",
    "spec": "errors units strict catalog",
    "step": "errors units strict document",
    "cost": WAIST,
    "schedule": "errors units strict step",
    "simulate": "errors units strict document step schedule",
    "search": "errors units strict step schedule simulate",
    "sequences": SEARCH,
    "data": f"{WAIST} sequences",
    "optical": SEARCH,
    "plan": f"{SEARCH} sequences data",
    "fleet": f"{SEARCH} plan",
    "emulate": WAIST,
    "transport": "errors units strict processes emulate",
    "runtime": f"{SEARCH} sequences data emulate transport",
    "control": f"{SEARCH} sequences emulate transport runtime",
    "torch": f"{SEARCH} sequences plan emulate transport runtime control",
    "run": f"{SEARCH} sequences data plan emulate transport runtime control",
    "interop": f"{SEARCH} sequences plan",
    "report": f"{SEARCH} sequences plan runtime fleet optical",
    "cli": f"{ENGINE} fleet optical interop report",
}
"""The contract: what each room may import besides itself; `docs/design.md` says why."""
WITH_TORCH = ("runtime", "torch")
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def tree_of(path):
    return ast.parse(path.read_text())


@cache
def nodes_of(tree):
    """All nodes of a syntax tree: to walk it takes longer than most rules need to look at them."""
    return [*ast.walk(tree)]


def room_of(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


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


def test_rooms_import_only_what_the_contract_allows():
    wrong = []
    for path in FILES:
        room = room_of(path)
        allowed = {room, *MAY_IMPORT.get(room, " ".join(MAY_IMPORT)).split()}
        for name, node in imports(tree_of(path)):
            first, *rest = name.split(".")
            if (first == "farpipe" and rest and rest[0] not in allowed) or (
                first == "torch" and room not in WITH_TORCH
            ):
                wrong.append(f"{path}:{node.lineno} imports {name}")
    assert not wrong, "imports that a room may not have (only runtime/ and torch/ have torch):\n" + "\n".join(wrong)


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
            if isinstance(block, ast.If) and text_of(block.test) == "TYPE_CHECKING"
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
    assert rooms <= {"runtime", "torch", "control", "run", "cli", "__main__"}


BY_HAND = {(ast.BitAnd, "3"), (ast.BitAnd, "~3"), (ast.RShift, "2"), (ast.LShift, "2")}
KINDS = {"kind", "kinds", *"FIWB"}


def decodings(tree):
    """Nodes that read or write a code of an action by hand: ``& 3``, ``>> 2``, ``<< 2``, ``& ~3``, ``4 * x + kind``."""
    for node in nodes_of(tree):
        if isinstance(node, ast.BinOp) and not isinstance(node.left, ast.Constant):
            left, right = text_of(node.left), text_of(node.right)
            written = isinstance(node.op, ast.Add) and left.startswith("4 * ") and right.strip("_") in KINDS
            if written or (type(node.op), right) in BY_HAND:
                yield node


def kinds_by_number(tree):
    """Assignments to a letter of an action."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Assign):
            targets = [name for target in node.targets for name in getattr(target, "elts", [target])]
            names = {ast.unparse(name).strip("_") for name in targets}
            if {"F", "W"} & names or names in ({"I"}, {"B"}):
                yield node


def seconds_by_hand(tree):
    """Divisions by the bandwidth of a link."""
    for node in nodes_of(tree):
        parts = ast.walk(node.right) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) else ()
        if any(getattr(part, "attr", "") == "bandwidth_bytes_per_s" for part in parts):
            yield node


@cache
def text_of(node):
    return "" if node is None else ast.unparse(node)


def called(node, *names):
    """True for a call of one of these functions, whatever module they are of."""
    return isinstance(node, ast.Call) and text_of(node.func).rpartition(".")[2] in names


def divided(node, over, under):
    """True if a quotient of two texts like these is in it."""
    return any(
        isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Div | ast.FloorDiv)
        and re.search(over, text_of(part.left))
        and re.search(under, text_of(part.right))
        for part in ast.walk(node)
    )


def memory_tolerances(tree):
    """Bytes that are forgiven a share: ``limit_bytes * (1 + 1e-9)``."""
    for node in nodes_of(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            left, right = text_of(node.left), text_of(node.right)
            if re.search("bytes|headroom|memory", left) and re.match(
                r"\(?1(\.0)? \+ ([\d.]+e-|\w*(ROUND|TOLER))", right
            ):
                yield node


def fitting_by_hand(tree):
    """Numbers of things that fit memory: ``floor(headroom / held)``."""
    for node in nodes_of(tree):
        if called(node, "floor", "int", "floor_divide") and divided(
            node, "bytes|headroom|memory", "held|size|bytes|each"
        ):
            yield node


def queues_of_links(tree):
    """Writing when a link is free again."""
    for node in nodes_of(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Subscript) and "link_free" in text_of(one.value) for one in targets):
            yield node


def level_loops(tree):
    """Bytes taken less bytes freed, summed up."""
    for node in nodes_of(tree):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Sub):
            left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
            if re.search(r"^taken|memory\[0\]", text_of(left)) and re.search(
                r"^(freed|given)|memory\[1\]", text_of(right)
            ):
                yield node


def chain_orders(tree):
    """Walking the slices of `follows` one by one, or sorting backwards along chains."""
    for node in nodes_of(tree):
        if called(node, "enumerate") and node.args and text_of(node.args[0]).rpartition(".")[2] == "follows":
            yield node
        if called(node, "lexsort") and "-own" in text_of(node):
            yield node


def hiding_by_hand(tree):
    """Forwards that hide a round trip: ``ceil(round_trip_s / pace_s)``."""
    for node in nodes_of(tree):
        if called(node, "ceil") and divided(node, "trip|travel", "pace"):
            yield node


def places_of(found, *rooms):
    return [
        f"{path}:{node.lineno}"
        for path in FILES
        if not {room_of(path), path.relative_to(SOURCE).as_posix()} & {"step", *rooms}
        for node in found(tree_of(path))
    ]


COPIES = {
    memory_tolerances: ("plan/partition.py", "take step.forgiving or step.exceeds"),
    fitting_by_hand: ("plan/partition.py plan/lattice_kernel.py", "take step.num_fitting"),
    queues_of_links: ("", "take step.inlined.put or step.links.free_again_s"),
    level_loops: ("", "take step.levels, step.peaks or step.inlined.level_after"),
    chain_orders: ("", "take Problem.chains or step.chains"),
    hiding_by_hand: ("plan/in_flight.py plan/lattice_kernel.py", "take step.hiding_forwards"),
}
"""Rules of a step that are written in step/ alone, with the places that have a closed form of their own."""
SEEN = {
    memory_tolerances: ("a = limit_bytes * (1 + 1e-9)", "headroom[:, None] * (1 + _TOLERANCE)"),
    fitting_by_hand: ("math.floor(free_bytes / held)", "int(headroom[rank] / held.min() + 1e-9)"),
    queues_of_links: ("link_free[link] = max(ready_s, link_free[link]) + occupies_s",),
    level_loops: ("used[rank] += taken[code] - freed[code]", "taken[1:] -= freed[:-1]"),
    chain_orders: ("[i for i, before in enumerate(problem.follows)]", "np.lexsort((-own, last))"),
    hiding_by_hand: ("math.ceil(round_trip_s / pace_s - 1e-9)", "np.ceil(np.minimum(trips_s / pace, most))"),
}


@pytest.mark.parametrize("found", COPIES, ids=lambda found: found.__name__)
def test_a_rule_of_a_step_is_written_once(found):
    elsewhere, instead = COPIES[found]
    assert not places_of(found, *elsewhere.split()), instead


@pytest.mark.parametrize(("found", "text"), [(found, text) for found, texts in SEEN.items() for text in texts])
def test_copies_of_a_rule_are_seen(found, text):
    assert list(found(ast.parse(text)))


@pytest.mark.parametrize(
    "text", ["makespan_s * (1 + 1e-9)", "math.ceil(num_bytes / chunk_bytes)", "int(seconds / pace_s)", "taken - cost"]
)
def test_other_rules_are_not_taken_for_copies(text):
    assert not any(list(found(ast.parse(text))) for found in COPIES)


def test_only_step_knows_how_codes_of_actions_are_written():
    assert not places_of(decodings), "take farpipe.step.codes, in compiled loops farpipe.step.inlined"
    assert not places_of(kinds_by_number), "import F, I, W and B from farpipe.step.codes"


def test_only_step_and_emulated_links_divide_by_a_bandwidth():
    assert not places_of(seconds_by_hand, "emulate"), "take Link's methods or farpipe.step.occupied_s"


@pytest.mark.parametrize("text", ["size / link.bandwidth_bytes_per_s", "1 / min(a.bandwidth_bytes_per_s for a in b)"])
def test_divisions_by_a_bandwidth_are_seen(text):
    assert list(seconds_by_hand(ast.parse(text)))


@pytest.mark.parametrize("text", ["code & 3", "codes[at] >> 2", "slot << 2", "code & ~3", "4 * (s * m + j) + kind"])
def test_codes_read_by_hand_are_seen(text):
    assert list(decodings(ast.parse(text)))


@pytest.mark.parametrize("text", ["64 << 20", "size >> 20", "1 << 2", "4 * x + y", "bits & 1"])
def test_other_arithmetic_is_not_taken_for_codes(text):
    assert not list(decodings(ast.parse(text)))


@pytest.mark.parametrize("text", ["_F, _W = 0, 2", "F = 0", "_I = KINDS.index('I')", "_F, _I, _W, _B = range(4)"])
def test_kinds_written_as_numbers_are_seen(text):
    assert list(kinds_by_number(ast.parse(text)))
