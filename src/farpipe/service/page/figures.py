"""Small figures of the page, drawn without matplotlib: lines over the steps of an attempt."""

from collections.abc import Sequence
from typing import Final

from farpipe.core.units import format_seconds
from farpipe.report.axis import PLAIN, TIME, Quantity, Scale, shorten, ticks
from farpipe.report.figure import Block, Figure, Markup, at, join, scrolling, tag
from farpipe.service.reading import Step
from farpipe.service.store import Row

WIDTH: Final = 1100.0
HEIGHT: Final = 150.0
LEFT: Final = 60.0
LABELS: Final = 190.0
ROW: Final = 24.0
MOST_ROWS: Final = 30
"""Jobs that are drawn."""
DAY_S: Final = 86400.0


def step_charts(steps: Sequence[Step], quote_s: float | None) -> list[Markup]:
    """Time of a step against the quote, and loss; only those that have figures."""
    times = [(one.step, one.step_s) for one in steps if one.step_s is not None]
    losses = [(one.step, one.loss) for one in steps if one.loss is not None]
    said = f"; dashed: {format_seconds(quote_s)}, as quoted" if quote_s else ""
    found = []
    if times:
        found.append(_lines("step-time", f"Time of a step{said}", times, TIME, quote_s))
    if losses:
        found.append(_lines("loss", "Loss", losses, PLAIN, None))
    return found


def _lines(
    key: str, title: str, points: Sequence[tuple[int, float]], quantity: Quantity, level: float | None
) -> Markup:
    values = [y for _, y in points] + ([level] if level is not None else [])
    low = 0.0 if quantity is TIME else min(values)
    x = Scale(points[0][0], max(points[-1][0], points[0][0] + 1), LEFT, WIDTH - 20)
    y = Scale(low, 1.1 * max(values) if quantity is TIME else max(values) if max(values) > low else low + 1, HEIGHT, 10)
    marks = [
        tag("line", x1=LEFT, x2=WIDTH - 20, y1=y(one.value), y2=y(one.value), class_="grid")
        + tag("text", one.label, x=LEFT - 8, y=y(one.value) + 4, class_="end muted")
        for one in ticks(y.low, y.high, quantity, 4)
    ]
    marks += [
        tag("text", one.label, x=x(one.value), y=HEIGHT + 16, class_="mid muted")
        for one in ticks(x.low, x.high, PLAIN, 8, whole=True)
    ]
    if level is not None:
        marks.append(tag("line", x1=LEFT, x2=WIDTH - 20, y1=y(level), y2=y(level), class_="quote"))
    line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
    dots = [tag("circle", cx=x(a), cy=y(b), r=2.5, class_="held") for a, b in points] if len(points) < 40 else []
    body = join(
        [
            tag("text", title, x=0, y=0, class_="head"),
            *map(Markup, marks),
            tag("polyline", points=line, class_="curve"),
            *dots,
        ]
    )
    said = f"{title}: from {points[0][1]:.4g} at step {points[0][0]} to {points[-1][1]:.4g} at step {points[-1][0]}."
    figure = Figure(key, title, said, WIDTH, Block(at(0, 18, body), HEIGHT + 46))
    return scrolling(figure.inline(), title)


def holdings(rows: Sequence[Row], now_s: float) -> Markup:
    """Who had devices in the last day: a row for every job, a bar for every attempt."""
    names = list(dict.fromkeys(one["job"] for one in rows))[:MOST_ROWS]
    begin_s = min(max(now_s - DAY_S, one["began_s"]) for one in rows)
    x = Scale(begin_s - now_s, 0.0, LABELS, WIDTH - 20)
    height = ROW * len(names)
    bars = [tag("text", shorten(name, 28), x=0, y=ROW * k + 15) for k, name in enumerate(names)]
    for one in rows:
        if one["job"] in names:
            left, right = (x(max(begin_s, time_s) - now_s) for time_s in (one["began_s"], one["ended_s"] or now_s))
            said = tag("title", f"{one['job']}, attempt {one['attempt']}: {one['place']}")
            top = ROW * names.index(one["job"]) + 3
            bars.append(tag("rect", said, x=left, y=top, width=max(1.5, right - left), height=ROW - 6, class_="held"))
    for seconds in (x.low, x.low / 2, 0.0):
        label = "now" if not seconds else f"{format_seconds(-seconds)} ago"
        bars.append(
            tag("text", label, x=x(seconds), y=height + 16, class_="muted" if seconds == x.low else "mid muted")
        )
    told = f"Attempts of {len(names)} jobs over time; the table says the same."
    figure = Figure("holdings", "Who had devices", told, WIDTH, Block(join(bars), height + 24))
    return scrolling(figure.inline(), "Attempts over time")
