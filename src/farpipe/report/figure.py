"""Figures: SVG for a page or a file of its own; its text is escaped by construction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Final

from farpipe.core.strict import write_text

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

    An attribute's ``_`` becomes ``-`` and a trailing one is dropped (``class_``); None leaves it out.
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


_MARGIN_PX: Final = 12.0
"""White space around a picture that is a file of its own."""


def figures_css() -> str:
    """Colours and type of all figures."""
    return (files("farpipe.report") / "figures.css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Block:
    """A piece of a picture with the height that it takes, drawn from its own top left corner."""

    content: Markup
    height: float


def stack(blocks: Sequence[Block], gap: float = 0.0) -> Block:
    """The blocks under each other."""
    top, parts = 0.0, []
    for block in blocks:
        parts.append(at(0, top, block.content) if top else block.content)
        top += block.height + gap
    return Block(join(parts, "\n"), max(0.0, top - gap))


def at(x: float, y: float, *content: str) -> Markup:
    """`content` moved to (x, y)."""
    place = number(x) if y == 0 else f"{number(x)} {number(y)}"
    return tag("g", *content, transform=f"translate({place})")


def scrolling(content: Markup, label: str) -> Markup:
    """What scrolls by itself, also by the keyboard, where the screen is narrow."""
    return tag("div", content, class_="scroll", role="region", aria_label=label, tabindex=0)


@dataclass(frozen=True)
class Figure:
    """A picture with its size in pixels; `key` makes its ids unique within a page."""

    key: str
    title: str
    description: str
    width: float
    body: Block

    def svg(self) -> str:
        """The picture as the text of a file of its own, colours and type inside."""
        return self._element(tag("style", Markup(figures_css())), _MARGIN_PX) + "\n"

    def inline(self) -> Markup:
        """The picture as an element of a page that has `figures_css`."""
        return self._element(Markup(""), 0.0)

    def _element(self, style: Markup, margin: float) -> Markup:
        width, height = self.width + 2 * margin, self.body.height + 2 * margin
        label = tag("title", self.title, id=f"{self.key}-title") + tag("desc", self.description, id=f"{self.key}-desc")
        return tag(
            "svg",
            Markup(label),
            style,
            self.body.content,
            xmlns="http://www.w3.org/2000/svg",
            class_="figure",
            viewBox=" ".join(map(number, (-margin, -margin, width, height))),
            width=width,
            height=height,
            role="img",
            aria_labelledby=f"{self.key}-title {self.key}-desc",
        )

    def save(self, path: Path | str) -> None:
        """Write the picture as a file of its own, whole or not at all."""
        write_text(path, self.svg())
