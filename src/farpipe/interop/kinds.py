"""Values of settings as files of all kinds write them: flags, counts, sizes and kinds of layers."""

import ast
from typing import Any, Final

from farpipe.core.spec.hugging_face_keys import MAX_LAYERS


def as_flag(value: Any) -> bool:
    """True or false, as files of all kinds write it."""
    if isinstance(value, bool):
        return value
    if value is None or value == "":
        return True  # a switch without a value
    texts = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    return texts[str(value).lower()] if str(value).lower() in texts else _refuse(value)


def as_count(value: Any) -> int:
    """A whole number; text such as ``1e6`` is one too."""
    if isinstance(value, bool):
        raise TypeError
    number = float(value)
    return int(number) if number == int(number) else _refuse(value)


def as_size(value: Any) -> int:
    """A whole number from 1."""
    return count if (count := as_count(value)) > 0 else _refuse(value)


def as_layers(value: Any) -> list[int]:
    """1 or 0 for each layer, by a list or an expression such as ``([0]*3+[1,0]*29)``; ValueError for anything else."""
    if isinstance(value, list):
        return [int(kind) for kind in value]
    try:
        return _listed(ast.parse(str(value).strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        raise ValueError(value) from None


def _listed(node: ast.expr) -> list[int]:
    match node:
        case ast.List():
            return [int(kind) for kind in ast.literal_eval(node)]
        case ast.BinOp(left, ast.Add(), right):
            return _listed(left) + _listed(right)
        case ast.BinOp(left, ast.Mult(), ast.Constant(int(times))) if times * len(kinds := _listed(left)) <= MAX_LAYERS:
            return kinds * times
    raise ValueError


def _refuse(value: Any) -> Any:
    raise ValueError(value)


KIND_NAMES: Final[dict[Any, str]] = {
    as_count: "a whole number",
    as_size: "a whole number from 1",
    float: "a number",
    as_flag: "true or false",
}
"""Kinds of values in words, for messages."""
