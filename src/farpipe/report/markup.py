"""HTML and SVG as text that is escaped by construction: a plain str becomes text, only Markup passes as it is."""

from collections.abc import Iterable
from html import escape
from typing import Final

_EMPTY: Final = frozenset({"br", "circle", "input", "line", "link", "meta", "path", "polyline", "rect"})

Value = str | float | int | None


class Markup(str):
    """Text that is already valid markup."""

    __slots__ = ()


def safe(content: str) -> Markup:
    """`content` as markup: itself when it is Markup, escaped otherwise."""
    return content if isinstance(content, Markup) else Markup(escape(content, quote=False))


def join(parts: Iterable[str], between: str = "") -> Markup:
    """All `parts`, one after the other, each escaped where needed."""
    return Markup(between.join(safe(part) for part in parts))


def tag(name: str, *children: str, **attributes: Value) -> Markup:
    """One element.

    An attribute's ``_`` stands for ``-`` and a trailing one is dropped (``class_``); None leaves it out.
    """
    head = name + "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    if name in _EMPTY and not children:
        return Markup(f"<{head}/>")
    return Markup(f"<{head}>{join(children)}</{name}>")


def _attribute(key: str, value: Value) -> str:
    text = number(value) if isinstance(value, float | int) else escape(str(value))
    return f' {key.rstrip("_").replace("_", "-")}="{text}"'


def number(value: float) -> str:
    """A coordinate with at most two decimals and nothing superfluous: ``3.5``, ``12``."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
