"""Variables (``${TP:-2}``) and references of OmegaConf (``${.hidden_size}``) in files of tables, none of them run."""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from farpipe.interop.shell import UNKNOWN

_MAX_DEPTH: Final = 16
_PRODUCT: Final = "multiply"
"""The resolver that configurations of NeMo name."""
_ABSENT: Final = object()
_VARIABLE: Final = re.compile(
    r"\$\{(?:oc\.env:|env:)?([A-Za-z_]\w*)(?:(?::?[-=]|,|:)([^{}]*))?\}|\$([A-Za-z_]\w*)|\{\{\s*([A-Za-z_]\w*)\s*\}\}"
)
"""``$NAME``, ``${NAME}``, ``${NAME:-default}``, ``${NAME:default}``, ``${oc.env:NAME,default}`` and ``{{ NAME }}``."""


class Given(dict[str, str]):
    """Values from outside by the names of variables; it remembers which of them a file asked for."""

    def __init__(self, values: Mapping[str, str]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name`, which then counts as asked for."""
        self.asked.add(name)
        return super().get(name, default)

    @property
    def unused(self) -> list[str]:
        """Names that no file asked for."""
        return [name for name in self if name not in self.asked]


def with_variables(data: Any, known: Given) -> tuple[Any, list[str]]:
    """`data` with the values of variables in its texts, and notes on defaults that were taken.

    One without a value is marked as such, unless a key of the file has its name: that is a reference of OmegaConf.
    """
    notes: dict[str, None] = {}
    keys = {str(key) for key in data} if isinstance(data, Mapping) else set[str]()

    def value_of(match: re.Match[str]) -> str:
        name, default = match[1] or match[3] or match[4], match[2]
        if name in known:
            return known[name]
        if name in keys or name == _PRODUCT:
            return match[0]
        if default is None:
            return f"{UNKNOWN}${name}{UNKNOWN}"
        if default.strip().isdigit():
            notes[f"{name} is not set in the file; its default {default} was taken"] = None
        return default

    def put_in(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: put_in(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [put_in(inner) for inner in value]
        return _VARIABLE.sub(value_of, value) if isinstance(value, str) else value

    return put_in(data), [*notes]


def interpolated(data: Mapping[Any, Any]) -> dict[Any, Any]:
    """The tables with every reference replaced whose value stands in the file; the others are left as they are."""
    return {key: _in(value, data, (key,)) for key, value in data.items()}


def _in(value: Any, root: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
    if isinstance(value, Mapping):
        return {key: _in(inner, root, (*path, key)) for key, inner in value.items()}
    return _resolved(value, root, path, 0)


def _resolved(value: Any, root: Mapping[Any, Any], path: tuple[Any, ...], depth: int) -> Any:
    """The value of a text that is one reference; any other value as it is."""
    if not isinstance(value, str) or not value.startswith("${") or depth > _MAX_DEPTH:
        return value
    inner = value[2:-1]
    if not value.endswith("}") or _end(value) != len(value):
        return value
    name, colon, arguments = inner.partition(":")
    if not colon:
        found = _at(inner.strip(), root, path)
        return value if found is _ABSENT else _resolved(found, root, path, depth + 1)
    factors = [_number(_resolved(part.strip(), root, path, depth + 1)) for part in _split(arguments)]
    if name.strip() != _PRODUCT or None in factors:
        return value
    product = math.prod(factor for factor in factors if factor is not None)
    return int(product) if product == int(product) else product


def _end(text: str) -> int:
    """The place behind the bracket that closes the first one."""
    depth = 0
    for place, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if char == "}" and not depth:
            return place + 1
    return -1


def _split(text: str) -> list[str]:
    """Parts between the commas outside of brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "{") - (char == "}")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value) if "." in str(value) else int(value)
    except (ValueError, TypeError, OverflowError):
        return None


def _at(name: str, root: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
    """The value at a dotted path, which leading dots make relative to the table that it stands in.

    Files of NeMo's launcher are mounted below ``training``, which their paths then begin with.
    """
    num_dots = len(name) - len(name.lstrip("."))
    keys = name.lstrip(".").split(".")
    if num_dots:
        return _walk(root, [*path[: max(0, len(path) - num_dots)], *keys])
    found = _walk(root, keys)
    return _walk(root, keys[1:]) if found is _ABSENT and len(keys) > 1 else found


def _walk(table: Any, keys: list[Any]) -> Any:
    for key in keys:
        if not isinstance(table, Mapping) or key not in table:
            return _ABSENT
        table = table[key]
    return table
