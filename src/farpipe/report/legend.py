"""The legend of a Gantt chart: only what the picture really contains."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.report.figure import Block, Markup, at, join, stack, tag
from farpipe.report.gantt_frame import CRITICAL, SPARE, GanttFrame, Panel
from farpipe.simulate.timeline import MESSAGE_KINDS, Timeline
from farpipe.step import KINDS

_ACTIONS: Final = {
    "F": "F forward",
    "I": "I gradient of the input",
    "W": "W gradient of the weights",
    "B": "B backward, I and W at once",
}
_MESSAGES: Final = {
    "forward": "activation on its link",
    "backward": "gradient on its link",
    "gather": "parameters gathered",
    "reduce": "gradients reduced",
    "exchange": "gradients of a tied matrix exchanged",
}
_SLACK: Final = {CRITICAL: "no slack: the step waits for it", SPARE: "slack: it could take twice as long"}
_SWATCH_PX: Final = 14.0
_LETTER_PX: Final = 5.9
_LINE_PX: Final = 18.0

Entry = tuple[Markup, str]


def legend(panels: Sequence[Panel], frame: GanttFrame) -> Block:
    """Swatches with their names: what ranks do in the first line, what links carry in the next."""
    lines = [_line(_rank_entries(panels, frame), frame.width)]
    if frame.links:
        lines.append(_line(_link_entries(panels, frame), frame.width))
    drawn = stack([Block(Markup(""), 2), *lines])
    return Block(join([_hatches(frame.key), drawn.content]), drawn.height)


def _line(entries: Iterable[Entry], width: float) -> Block:
    """Entries beside each other, broken where the picture ends."""
    x, y, parts = 1.0, 0.0, []
    for swatch, name in entries:
        size = _SWATCH_PX + 5 + len(name) * _LETTER_PX + 14
        if x + size > width and x > 1:
            x, y = 1.0, y + _LINE_PX
        parts.append(at(x, y, swatch, tag("text", name, x=_SWATCH_PX + 5, y=10)))
        x += size
    return Block(join(parts), y + _LINE_PX)


def _rank_entries(panels: Sequence[Panel], frame: GanttFrame) -> Iterator[Entry]:
    kinds = np.unique(np.concatenate([panel.timeline.actions["kind"] for panel in panels]))
    for kind in (KINDS[index] for index in kinds):
        yield _box(class_=f"{kind}0"), _ACTIONS[kind]
    yield _box(class_="ground"), "idle (bubble)"
    if any(_stages_per_rank(panel) > 1 for panel in panels):
        shades = join(tag("rect", class_=f"F{i}", x=i * 5, width=4, height=12) for i in range(3))
        yield shades, "lighter: a later stage of its rank"
    across = {is_across for panel in panels for is_across in _waits_across(panel, frame)}
    if True in across:
        yield _box(fill=f"url(#{frame.key}-across)", class_="edge-across"), "waits for a message from another site"
    if False in across:
        yield _box(fill=f"url(#{frame.key}-inside)"), "waits for a message inside its site"


def _stages_per_rank(panel: Panel) -> int:
    placed = np.unique(panel.timeline.actions[["rank", "stage"]])
    return int(np.bincount(placed["rank"]).max(initial=0))


def _waits_across(panel: Panel, frame: GanttFrame) -> list[bool]:
    links = panel.timeline.links
    seen = np.unique(frame.visible(panel.waits)["link"])
    return [bool(index >= 0) and panel.timeline.is_between_sites(links[index]) for index in seen]


def _link_entries(panels: Sequence[Panel], frame: GanttFrame) -> Iterator[Entry]:
    kinds = np.unique(np.concatenate([_kinds_on(panel.timeline, frame.links) for panel in panels]))
    for kind in (MESSAGE_KINDS[index] for index in kinds):
        yield _box(class_=kind, y=2, height=8), _MESSAGES[kind]
    yield tag("path", class_="tail", d="M0 2L14 10"), "latency, until it arrives"
    drawn = {name for panel in panels for name in np.unique(panel.slack_classes[_is_on(panel.timeline, frame.links)])}
    for name in (name for name in _SLACK if name in drawn):
        yield _box(class_=f"{MESSAGE_KINDS[0]} {name}", y=2, height=8), _SLACK[name]


def _kinds_on(timeline: Timeline, links: Sequence[str]) -> NDArray[np.int32]:
    """The kinds of the messages that went over `links`."""
    return np.asarray(timeline.messages["kind"][_is_on(timeline, links)], np.int32)


def _is_on(timeline: Timeline, links: Sequence[str]) -> NDArray[np.bool_]:
    """Mask of the messages that went over `links`."""
    drawn = [index for index, name in enumerate(timeline.links) if name in links]
    return np.isin(timeline.messages["link"], drawn)


def _box(y: float = 0.0, height: float = 12.0, **attributes: str) -> Markup:
    return tag("rect", y=y, width=_SWATCH_PX, height=height, **attributes)


def _hatches(key: str) -> Markup:
    """Stripes for waits: strong and rising between sites, thin and falling inside a site."""
    across = tag("path", d="M0 0V5", class_="hatch-across")
    inside = tag("path", d="M0 0V5", class_="hatch-inside")
    return tag("defs", _pattern(f"{key}-across", across, 45), _pattern(f"{key}-inside", inside, -45))


def _pattern(name: str, content: Markup, turn: int) -> Markup:
    place = {"id": name, "patternUnits": "userSpaceOnUse", "patternTransform": f"rotate({turn})"}
    return tag("pattern", content, width=5, height=5, **place)
