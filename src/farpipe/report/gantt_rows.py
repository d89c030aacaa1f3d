"""The rows of a Gantt chart: what one rank did, what one link carried; the low strip of the whole step; the legend."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.simulate import Slack
from farpipe.core.simulate.timeline import MESSAGE_KINDS, Timeline
from farpipe.core.step import KINDS, site_of
from farpipe.core.units import format_bytes
from farpipe.report.axis import TIME, Scale, covered, duration, lanes, moment, span, ticks
from farpipe.report.figure import Block, Markup, at, join, number, stack, tag
from farpipe.report.gantt_frame import CRITICAL, SPARE, GanttFrame, Panel

NUM_SHADES: Final = 4
"""Virtual stages of a rank are distinguished by this many shades; more share them."""

BOX_PX: Final = 9.0
"""Height of a message on its link."""
FALL_PX: Final = 9.0
"""Height that the latency tail of a message falls through until it arrives."""
MAX_LANES: Final = 3

NUMBER_CLASS: Final = 'class="n on-'
"""Beginning of the class of a number in a box."""
_SEAM_PX: Final = 0.7
_DIGIT_PX: Final = 0.6
"""Width of a digit, as a share of the size of the type."""
_MIN_FONT_PX: Final = 8.0


def shades(actions: NDArray[np.void]) -> dict[int, int]:
    """The shade of every stage of one rank: its place among them."""
    stages = np.unique(actions["stage"]).tolist()
    return {stage: place * NUM_SHADES // max(NUM_SHADES, len(stages)) for place, stage in enumerate(stages)}


def action_boxes(
    timeline: Timeline,
    actions: NDArray[np.void],
    shade: Mapping[int, int],
    scale: Scale,
    height: float,
    font: float,
) -> Iterator[Markup]:
    """One box per action, with its microbatch inside where there is room for the longest one (`font` 0: nowhere)."""
    longest = len(str(timeline.actions["microbatch"].max(initial=0)))
    for action in actions:
        left, right = _clip(scale, action["start_s"], action["end_s"])
        kind = f"{KINDS[action['kind']]}{shade[int(action['stage'])]}"
        title = tag("title", f"{timeline.label(action)} · {span(action['start_s'], action['end_s'])}")
        yield tag("rect", title, class_=kind, x=left, width=_box_width(left, right), height=height)
        text = str(action["microbatch"])
        size = min(font, (right - left - 2) / (longest * _DIGIT_PX))
        if size >= _MIN_FONT_PX:
            place = {"x": (left + right) / 2, "y": height / 2 + size * 0.36}
            yield tag("text", text, class_=f"n on-{kind}", font_size=size, **place)


def wait_boxes(timeline: Timeline, waited: NDArray[np.void], scale: Scale, height: float, key: str) -> Iterator[Markup]:
    """A hatched box for every wait for a message; waits between sites have an edge as well."""
    for wait in waited:
        left, right = _clip(scale, wait["start_s"], wait["end_s"])
        name = link_name(timeline, int(wait["link"]))
        across = wait["link"] >= 0 and timeline.is_between_sites(name)
        title = tag("title", f"waits {duration(wait['end_s'] - wait['start_s'])} for a message {_direction(name)}")
        hatch = "across" if across else "inside"
        box = {"x": left, "width": right - left, "height": height}
        yield tag("rect", title, fill=f"url(#{key}-{hatch})", class_="edge-across" if across else None, **box)


def link_row(panel: Panel, chosen: NDArray[np.intp], scale: Scale) -> Iterator[Markup]:
    """A link's messages, the `chosen` ones, as boxes while they occupy it; a thin tail falls to where each arrives."""
    messages = panel.timeline.messages[chosen]
    yield tag("path", class_="tail", d=" ".join(_tails(messages, scale)))
    lane = np.minimum(lanes(messages["start_s"], messages["end_s"]), MAX_LANES - 1)
    num_lanes = int(lane.max(initial=0)) + 1
    height = BOX_PX / num_lanes
    for index, message, place in zip(chosen.tolist(), messages, lane.tolist(), strict=True):
        left, right = _clip(scale, message["start_s"], message["end_s"])
        kind = f"{MESSAGE_KINDS[message['kind']]} {panel.slack_classes[index]}".rstrip()
        box = {"x": left, "y": place * height, "width": max(1.0, _box_width(left, right)), "height": height}
        yield tag("rect", tag("title", message_title(panel, index)), class_=kind, **box)


def outer_row(timeline: Timeline, source: str, frame: GanttFrame) -> Iterator[Markup]:
    """What came from the sites `source`: a box from its arrival until it was needed; hatched where the step waited."""
    for came in (one for one in timeline.outer if one.source == source):
        what = f"{came.what} from {source} · {format_bytes(came.bytes)}"
        if came.slack_s < 0:
            title, look = f"{what} · waited {duration(-came.slack_s)} for it", {"fill": f"url(#{frame.key}-across)"}
        else:
            title, look = f"{what} · slack {duration(came.slack_s)}", {"class_": "exchange"}
        left, right = _clip(frame.scale, *sorted((came.arrival_s, came.needed_s)))
        if left <= right:
            yield tag("rect", tag("title", title), x=left, width=max(1.0, right - left), height=BOX_PX, **look)


def _tails(messages: NDArray[np.void], scale: Scale) -> Iterable[str]:
    for end, arrival in zip(scale.map(messages["end_s"]), scale.map(messages["arrival_s"]), strict=True):
        last = max(scale.start, scale.end)
        if arrival - end > 0.5 and end < last:
            share = min(1.0, (last - end) / (arrival - end))
            yield f"M{number(end)} {number(BOX_PX)}l{number((arrival - end) * share)} {number(FALL_PX * share)}"


def message_title(panel: Panel, index: int) -> str:
    """Message `index` of the timeline in words, for people who point at it."""
    message = panel.timeline.messages[index]
    kind, stage = MESSAGE_KINDS[message["kind"]], message["stage"]
    what = f"{kind} of stage {stage}"
    if message["microbatch"] >= 0:
        what += f", microbatch {message['microbatch']}, rank {message['source']} to rank {message['target']}"
    on_link = span(message["start_s"], message["end_s"])
    arrival = moment(message["arrival_s"], message["end_s"] - message["start_s"])
    text = f"{what} · {format_bytes(message['bytes'])} · on the link {on_link} · arrives at {arrival}"
    return text if panel.slack is None else f"{text} · {_slack_text(panel.slack, index)}"


def _slack_text(slack: Slack, index: int) -> str:
    """The slack of a message: by how much later it could have arrived."""
    if slack.critical_messages[index]:
        return "no slack: were it later, the step would be longer"
    return f"slack {duration(slack.messages_s[index])}"


def link_name(timeline: Timeline, link: int) -> str:
    """The link's name; a hop without a link is called that."""
    return timeline.links[link] if link >= 0 else "a hop without a link"


def _direction(link: str) -> str:
    """``from a to b`` between sites, ``inside a`` where both ends are at one."""
    source, arrow, target = link.partition(">")
    if not arrow:
        return f"over {link}"
    return f"inside {site_of(source)}" if site_of(source) == site_of(target) else f"from {source} to {target}"


def _clip(scale: Scale, start: float, end: float) -> tuple[float, float]:
    return max(scale.start, scale(start)), min(scale.end, scale(end))


def _box_width(left: float, right: float) -> float:
    """Slightly narrower than its time, so that neighbours show a seam, but never invisible."""
    return max(0.4, right - left - min(_SEAM_PX, (right - left) / 4))


NUM_BINS: Final = 240
_STRIP_PX: Final = 34.0


def strips(panels: Sequence[Panel], frame: GanttFrame) -> Block:
    """One strip per panel on an axis over the whole step, the drawn window framed."""
    scale = Scale(*frame.whole, frame.scale.start, frame.scale.end)
    blocks = [_strip(panel, frame, scale) for panel in panels]
    marks = ticks(*frame.whole, TIME, 10)
    labels = [tag("text", tick.label, class_="mid muted", x=scale(tick.value), y=13) for tick in marks]
    return stack([_head(), stack(blocks, 5), Block(join(labels), 18)], 2)


def _head() -> Block:
    return Block(tag("text", "Whole step: share of the ranks that compute", class_="muted", x=0, y=16), 22)


def _strip(panel: Panel, frame: GanttFrame, scale: Scale) -> Block:
    ground = tag("rect", class_="ground", x=scale.start, width=scale.end - scale.start, height=_STRIP_PX)
    label = tag("text", panel.title, class_="end", x=scale.start - 6, y=_STRIP_PX / 2 + 4)
    left, right = scale(frame.low), scale(frame.high)
    window = tag("rect", class_="frame", x=left, y=-1, width=max(2.0, right - left), height=_STRIP_PX + 2)
    return Block(join([label, ground, *_areas(panel.timeline, frame.whole, scale), window]), _STRIP_PX)


def _areas(timeline: Timeline, whole: tuple[float, float], scale: Scale) -> Iterator[Markup]:
    """One area per kind of action, stacked."""
    edges = np.linspace(*whole, NUM_BINS + 1)
    below = np.zeros(NUM_BINS)
    for index, kind in enumerate(KINDS):
        actions = timeline.actions[timeline.actions["kind"] == index]
        if len(actions):
            busy = covered(actions["start_s"], actions["end_s"], edges)
            above = below + busy / (timeline.num_ranks * (edges[1] - edges[0]))
            yield tag("path", class_=f"{kind}0", d=_between(below, above, scale.map(edges)))
            below = above


def _between(below: NDArray[np.float64], above: NDArray[np.float64], x: NDArray[np.float64]) -> str:
    """The outline of what lies between two step functions."""
    forth = [f"{number(at)} {number(_STRIP_PX * (1 - share))}" for at, share in _corners(x, above)]
    back = [f"{number(at)} {number(_STRIP_PX * (1 - share))}" for at, share in reversed([*_corners(x, below)])]
    return f"M{'L'.join(forth)}L{'L'.join(back)}Z"


def _corners(x: NDArray[np.float64], shares: NDArray[np.float64]) -> Iterator[tuple[float, float]]:
    for left, right, share in zip(x[:-1], x[1:], shares, strict=True):
        yield float(left), float(share)
        yield float(right), float(share)


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
    of_panels = [panel.timeline.messages["kind"][_is_on(panel.timeline, frame.links)] for panel in panels]
    kinds = np.unique(np.concatenate(of_panels))
    for kind in (MESSAGE_KINDS[index] for index in kinds):
        yield _box(class_=kind, y=2, height=8), _MESSAGES[kind]
    yield tag("path", class_="tail", d="M0 2L14 10"), "latency, until it arrives"
    drawn = {name for panel in panels for name in np.unique(panel.slack_classes[_is_on(panel.timeline, frame.links)])}
    for name in (name for name in _SLACK if name in drawn):
        yield _box(class_=f"{MESSAGE_KINDS[0]} {name}", y=2, height=8), _SLACK[name]


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
