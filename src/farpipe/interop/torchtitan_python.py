"""Configurations of torchtitan in Python (after version 0.2) as tables of its TOML, by their syntax; nothing is run."""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from farpipe.core.errors import InputError

_TABLES: Final = ("training", "parallelism", "compile", "activation_checkpoint", "optimizer", "model", "model_spec")
_MODES: Final = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget"}
_CONVERTERS: Final = {"Float8": "float8", "MXFP8": "mxfp8", "NVFP4": "nvfp4", "LoRA": "lora"}
_MODELS: Final = re.compile(r"(llama3|llama4|qwen3|deepseek_v3|gpt_oss)")
_MAX_DEPTH: Final = 8

Tables = dict[str, dict[str, Any]]


def is_python_of_torchtitan(text: str) -> bool:
    """True if a module makes configurations of torchtitan's trainer."""
    return "torchtitan" in text and "Trainer.Config" in text


def tables_of_python(text: str, source: str, wanted: str | None = None) -> tuple[Tables, list[str]]:
    """The tables of the configuration that the function `wanted` returns, and expressions that could not be read.

    InputError for a file that is no Python, and where several functions return one and none of them is wanted.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InputError(f"{source}: not Python: {error.msg} (line {error.lineno})") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and _is_config(node)}
    if not functions:
        raise InputError(f"{source}: no function returns a Trainer.Config of torchtitan")
    if wanted is None and len(functions) > 1:
        raise InputError(f"{source}: name one of its configurations with --set config=NAME: {', '.join(functions)}")
    name = wanted or next(iter(functions))
    if name not in functions:
        raise InputError(f"{source}: no configuration {name!r}; it has {', '.join(functions)}")
    reader = _Interpreter(functions)
    tables = reader.tables_of(name, 0)
    if (model := _MODELS.search(f"{name} {source}")) is not None:
        tables["model"].setdefault("name", model[1])
    return tables, reader.unread


def _is_config(node: ast.FunctionDef) -> bool:
    return node.returns is not None and ast.unparse(node.returns).strip("'\"").endswith("Trainer.Config")


class _Interpreter:
    """Follows the statements of functions that return a configuration."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        self.functions = functions
        self.unread: list[str] = []

    def tables_of(self, name: str, depth: int) -> Tables:
        """The tables after all statements of a function; it may begin with what another one returns."""
        tables: Tables = {table: {} for table in _TABLES}
        local: dict[str, ast.expr] = {}
        for statement in ast.walk(self.functions[name]) if depth <= _MAX_DEPTH else ():
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target = statement.targets[0]
                begun = _called(statement.value) or ""
                if isinstance(target, ast.Name) and begun in self.functions:
                    tables = self.tables_of(begun, depth + 1)
                elif isinstance(target, ast.Name):
                    local[target.id] = statement.value
                else:
                    self._assign(ast.unparse(target).split(".")[1:], statement.value, tables, local)
            if isinstance(statement, ast.Return | ast.Assign) and isinstance(call := statement.value, ast.Call):
                if (begun := ast.unparse(call.func)).endswith("Trainer.Config"):
                    for keyword in call.keywords:
                        self._assign([keyword.arg or ""], keyword.value, tables, local)
                elif isinstance(statement, ast.Return) and begun in self.functions:
                    tables = self.tables_of(begun, depth + 1)
        return tables

    def _assign(self, path: list[str], value: ast.expr, tables: Tables, local: Mapping[str, ast.expr]) -> None:
        """Put a value at ``table`` or ``table.key`` of a configuration."""
        value = local.get(value.id, value) if isinstance(value, ast.Name) else value
        if not path or path[0] not in _TABLES:
            return
        if len(path) == 2:
            self._put(tables[path[0]], path[1], value)
        elif path[0] in ("model", "model_spec"):
            _put_model(tables["model"], value)
        elif path[0] == "activation_checkpoint":
            self._checkpointing(tables, value)
        elif isinstance(value, ast.Call):
            tables[path[0]] = {}
            for key, found in _keywords(value):
                self._put(tables[path[0]], key, found)

    def _put(self, table: dict[str, Any], key: str, value: ast.expr) -> None:
        try:
            table[key] = _plain(value)
        except ValueError:
            if not isinstance(value, ast.Call | ast.List):
                self.unread.append(f"{key} = {ast.unparse(value)[:60]} (line {value.lineno})")

    def _checkpointing(self, tables: Tables, value: ast.expr) -> None:
        kind = (_called(value) or "").partition(".")[0]
        options = {key: _plain(found) for key, found in _keywords(value)} if isinstance(value, ast.Call) else {}
        mode = "none" if isinstance(value, ast.Constant) else options.get("mode", _MODES.get(kind, kind or "none"))
        tables["activation_checkpoint"] = {"mode": mode}


def _called(value: ast.expr | None) -> str | None:
    """The name of what an expression calls."""
    return ast.unparse(value.func) if isinstance(value, ast.Call) else None


def _keywords(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Keyword arguments of a call and of the calls inside of its arguments, as an optimizer's groups have them."""
    for node in ast.walk(call):
        if isinstance(node, ast.Call):
            yield from ((keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg)
        elif isinstance(node, ast.Dict):
            yield from (
                (key.value, value)
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            )


def _put_model(table: dict[str, Any], value: ast.expr) -> None:
    if not isinstance(value, ast.Call):
        return
    flavors = [node.value for node in value.args if isinstance(node, ast.Constant)]
    table |= {"flavor": flavors[0]} if flavors else {}
    named = [_called(node) or "" for node in ast.walk(value) if isinstance(node, ast.Call)]
    table["converters"] = [kind for name in named for mark, kind in _CONVERTERS.items() if name.startswith(mark)]


def _plain(value: ast.expr) -> Any:
    """A literal, or arithmetic of numbers; ValueError for anything else."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.FloorDiv | ast.Add | ast.Sub | ast.Pow):
        one, other = _plain(value.left), _plain(value.right)
        if isinstance(one, int) and isinstance(other, int) and max(abs(one), abs(other)) < 2**32:
            return _arithmetic(value.op, one, other)
        raise ValueError
    return ast.literal_eval(value)


def _arithmetic(sign: ast.operator, one: int, other: int) -> int:
    match sign:
        case ast.Mult():
            return one * other
        case ast.Add():
            return one + other
        case ast.Sub():
            return one - other
        case ast.FloorDiv() if other:
            return one // other
        case ast.Pow() if 0 <= other <= 64:
            return int(one**other)
    raise ValueError
