"""The report page: one HTML file that needs nothing else: no network, and no script but that of its dials."""

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Final

from farpipe.core.simulate import Timeline, steps_in_a_row
from farpipe.core.strict import write_text
from farpipe.core.units import format_change, format_percent, format_seconds
from farpipe.report.charts import ChartGroup, LineChart, link_charts, loss_chart, memory_charts, step_time_chart
from farpipe.report.chunk_map import draw_chunk_map, stage_table
from farpipe.report.figure import Markup, figures_css, join, scrolling, tag
from farpipe.report.gantt import draw_gantt
from farpipe.report.gantt_frame import Panel, fitting_window
from farpipe.report.gantt_rows import NUMBER_CLASS
from farpipe.report.lines import WITHOUT, draw_lines
from farpipe.report.membership import draw_membership, outer_message_view, site_event_view
from farpipe.report.summary import StepRow, link_event_view, step_row, step_time_view
from farpipe.report.tables import MAX_TURNED, TableView, turned
from farpipe.report.views import Picture, RunReport, RunView
from farpipe.report.what_if import what_if_section

_ZOOMS: Final = (1, 2, 4)
"""Largest width of a Gantt chart, in widths of the page."""
_IN_A_ROW: Final = 3
"""Steps without a barrier that are drawn one after the other."""
_GANTT_NOTE: Final = (
    "point at a box for its times. The line across the ranks is the end of the step. "
    "A message with an edge has no slack: were it later, the step would be longer; a pale one could take twice as "
    "long. A wait counts from when the rank was free and the message ready; in the rest of its idle time a rank waits "
    "for the work of another."
)


def write_report(report: RunReport, path: Path | str) -> None:
    """Write the page to `path`, whole or not at all."""
    write_text(path, render(report))


def render(report: RunReport) -> str:
    """The page as HTML text."""
    rows = [step_row(view) for view in report.runs]
    sections = [
        _section("Step time", list(_step_time(rows, report.step_s))),
        *(_section(picture.title, list(draw_picture(picture))) for picture in report.pictures),
        _section("Timeline", list(_timelines(report.runs))),
        _section("What if", list(what_if_section(report.what_if)) if report.what_if else []),
        _section("Plan", list(_plan(report))),
        _section("Chunks", list(_chunks(report.runs))),
        _section("Memory", list(_groups(report.runs, memory_charts))),
        _section("Links", [*_groups(report.runs, link_charts), *_link_events(report.runs)]),
        _section("Training", list(_training(report.runs))),
    ]
    header = _header(report.title, report.verdict, report.summary, report.notices)
    script = tag("script", Markup(_text_of("what_if.js"))) if report.what_if else Markup("")
    body = tag("body", header, tag("main", *sections), script)
    is_served = report.what_if is not None and report.what_if["cells"] is None
    return f"<!doctype html>\n{tag('html', _head(report.title, policy(is_served)), body, lang='en')}\n"


def render_sections(
    title: str, verdict: Sequence[str], sections: Mapping[str, Sequence[Markup]], notices: Sequence[str] = ()
) -> str:
    """A page like a report's about something else, as HTML text; sections without content are left out."""
    main = tag("main", *(_section(name, content) for name, content in sections.items()))
    body = tag("body", _header(title, verdict, "", notices), main)
    return f"<!doctype html>\n{tag('html', _head(title, policy()), body, lang='en')}\n"


def _header(title: str, verdict: Sequence[str], summary: str, notices: Sequence[str]) -> Markup:
    lines = [tag("p", line, class_="verdict") for line in verdict]
    shown = [tag("pre", notice, class_="notice", role="status") for notice in notices]
    return tag("header", tag("h1", title), *lines, tag("p", summary) if summary else "", *shown)


def policy(is_served: bool = False) -> str:
    """What the browser lets a page do: nothing but its own style and the script of its dials, told by their hashes; of
    a page that is served, ask its own server."""
    style, script = source_of(page_css()), source_of(_text_of("what_if.js"))
    asks = " connect-src 'self';" if is_served else ""
    return f"default-src 'none'; style-src {style}; script-src {script};{asks} img-src data:"


def source_of(text: str) -> str:
    """A style or script as a policy names it: by its hash."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def page_css() -> str:
    """Style of the page and of its figures."""
    return figures_css() + _text_of("page.css")


def _text_of(name: str) -> str:
    return (files("farpipe.report") / name).read_text(encoding="utf-8")


def _head(title: str, allowed: str) -> Markup:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=allowed),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Markup(page_css())),
    )


def _section(title: str, content: Sequence[str]) -> Markup:
    return tag("section", tag("h2", title), *content) if content else Markup("")


def _step_time(rows: Sequence[StepRow], step_s: float | None) -> Iterator[Markup]:
    if rows:
        if step_s is None:
            yield described(_key_figures(rows[0], named=len(rows) > 1), rows[0].name)
        else:
            yield described([("predicted step", format_seconds(step_s))], "the step")
        view = step_time_view(rows)
        table = draw_table(turned(view) if len(rows) <= MAX_TURNED else view, captioned=False)
        is_alone = len(rows) == 1 and rows[0].measured_s is None
        yield folded("All figures of the step", table) if is_alone else table


def _key_figures(row: StepRow, named: bool) -> list[tuple[str, str]]:
    """The few numbers that people look for first, of the first run."""
    figures = [("run", row.name)] if named else []
    figures.append(("predicted step", format_seconds(row.predicted_s)))
    if row.measured_s is not None and row.error is not None:
        figures += [("measured step", format_seconds(row.measured_s)), ("prediction error", format_change(row.error))]
    figures.append(("bubble", format_percent(row.bubble_ratio)))
    step_s = row.measured_s or row.predicted_s
    figures.append(("exposed between sites", format_percent(row.exposed_inter_site_s / step_s if step_s else 0.0)))
    if row.last_loss is not None:
        figures.append(("last loss", f"{row.last_loss:.3f}"))
    return figures


def described(figures: Sequence[tuple[str, str]], whose: str) -> Markup:
    """Key figures, as (name, value), large."""
    cells = [tag("div", tag("dt", name), tag("dd", value)) for name, value in figures]
    return tag("dl", *cells, class_="key-figures", aria_label=f"Key figures of {whose}")


def folded(title: str, *content: str) -> Markup:
    """What is there for who opens it."""
    return tag("details", tag("summary", title), *content)


def draw_table(view: TableView, *, captioned: bool = True) -> Markup:
    """A table that scrolls by itself where the screen is narrow; a cell may be Markup, any other text is escaped."""
    head = tag("tr", *(_cell(view, i, name, "th", "col") for i, name in enumerate(view.columns)))
    rows = [_row(view, index) for index in range(len(view.rows))]
    caption = tag("caption", view.title) if captioned else ""
    table = tag("table", caption, tag("thead", head), tag("tbody", *rows))
    notes = [tag("p", line, class_="note") for line in view.note.splitlines()]
    return join([scrolling(table, view.title), *notes])


def _row(view: TableView, index: int) -> Markup:
    first, *rest = view.rows[index]
    bars = {column: lengths[index] for column, lengths in view.bars}
    cells = [_cell(view, i, text, "td", bar=bars.get(i)) for i, text in enumerate(rest, 1)]
    chosen = "chosen" if index == view.chosen else None
    return tag("tr", _cell(view, 0, first, "th", "row"), *cells, class_=chosen)


def _cell(
    view: TableView, index: int, text: str, name: str, scope: str | None = None, bar: float | None = None
) -> Markup:
    drawn = Markup("") if bar is None else _bar(bar)
    return tag(name, text, drawn, scope=scope, class_="number" if index in view.numbers else None)


def _bar(length: float) -> Markup:
    """A bar under the number of a cell, which says the same."""
    box = tag("rect", width=100 * length, height=6)
    return tag("svg", box, class_="bar", viewBox="0 0 100 6", preserveAspectRatio="none", aria_hidden="true")


def _plan(report: RunReport) -> Iterator[Markup]:
    yield from (tag("p", line, class_="text") for line in report.plan_text.splitlines() if line.strip())
    for view in report.plan_tables:
        yield draw_table(view)
    if report.folded:
        yield folded("What every second is made of", *map(draw_table, report.folded))


def draw_picture(picture: Picture) -> Iterator[Markup]:
    """A picture, and below it what is to be seen."""
    yield _image(picture.svg, picture.title, "wide")
    if picture.note:
        yield tag("p", picture.note, class_="note")


def _image(svg: str, alt: str, size: str) -> Markup:
    """A picture that stands in the page as it would in a file."""
    data = b64encode(svg.encode()).decode()
    image = tag("img", src=f"data:image/svg+xml;base64,{data}", alt=alt)
    # Our own figures follow the reader's colours also as an image; matplotlib's are dark on white, and turned around.
    themed = " themed" if "prefers-color-scheme" in svg else ""
    return tag("figure", scrolling(image, alt), class_=f"{size} picture{themed}")


def _chunks(runs: Sequence[RunView]) -> Iterator[Markup]:
    """Chunk map of the drawn step for every run on chunks, with the time and memory of its stages."""
    for index, view in enumerate(runs):
        if view.chunks:
            yield _run_heading(view, runs)
            figure = draw_chunk_map(
                view.chunks, f"chunks-{index}", view.recomputed, keeps_attention=view.keeps_attention
            )
            yield tag("figure", scrolling(figure.inline(), _of_run(figure.title, view, runs)), class_="wide")
            yield tag("p", f"{figure.description}{_drawn(view)}", class_="note")
            stages = stage_table(view)
            yield draw_table(replace(stages, title=_of_run(stages.title, view, runs)))


def _drawn(view: RunView) -> str:
    """Sentence on which step is drawn, where it is not that of the plan."""
    if view.drawn_step is None:
        return ""
    return f" This is step {view.drawn_step}: it has other documents than the first batch, of which the plan tells."


def _timelines(runs: Sequence[RunView]) -> Iterator[Markup]:
    """A Gantt chart for every run, all with the same scale."""
    panels = [_panels(view) for view in runs]
    window = fitting_window([panel for group in panels for panel in group], max(_ZOOMS)) if panels else None
    charts = []
    for index, (view, group) in enumerate(zip(runs, panels, strict=True)):
        yield _run_heading(view, runs)
        figure = draw_gantt(group, window=window, key=f"gantt-{index}")
        charts.append(figure.inline())
        scrolled = scrolling(charts[-1], _of_run(figure.title, view, runs))
        yield tag("figure", *_zooms(index), scrolled, class_="wide")
        yield from _in_a_row(view, index, runs)
        if (band := draw_membership(view.metrics, f"membership-{index}")) is not None:
            yield tag("figure", scrolling(band.inline(), _of_run(band.title, view, runs)), class_="wide")
            yield tag("p", band.description, class_="note")
    if panels:
        numbered = "chunks" if any(view.chunks for view in runs) else "microbatches"
        numbers = f"Numbers are {numbered}; " if any(NUMBER_CLASS in chart for chart in charts) else ""
        note = f"{numbers}{_GANTT_NOTE}"
        yield tag("p", f"{note[0].upper()}{note[1:]}", class_="note")


def _in_a_row(view: RunView, index: int, runs: Sequence[RunView]) -> Iterator[Markup]:
    """A few steps one after the other, where they have no barrier between them."""
    if view.problem.barrier:
        return
    timeline = steps_in_a_row(view.problem, view.predicted, _IN_A_ROW)
    text = f"{_IN_A_ROW} steps without a barrier, as predicted: {format_seconds(timeline.makespan_s)}"
    figure = draw_gantt([Panel("in a row", timeline, view.sites, text)], key=f"in-a-row-{index}")
    yield tag("figure", scrolling(figure.inline(), _of_run("Steps in a row", view, runs)), class_="wide")
    yield tag("p", "A rank begins the next step when its own part is done; the optimizer is left out.", class_="note")


def _zooms(index: int) -> Iterator[Markup]:
    """Controls for the size of a chart; the page's style does the rest, without a script."""
    for zoom in _ZOOMS:
        checked = "checked" if zoom == _ZOOMS[0] else None
        name = f"zoom-{index}-{zoom}"
        yield tag("input", type="radio", name_=f"zoom-{index}", id=name, class_=f"zoom x{zoom}", checked=checked)
        yield tag("label", "whole step" if zoom == 1 else f"{zoom} times", for_=name, class_="zoom")


def _panels(view: RunView) -> list[Panel]:
    timelines = [timeline for timeline in (view.predicted, view.measured) if timeline is not None]
    return [Panel(timeline.source, timeline, view.sites, _step_text(timeline)) for timeline in timelines]


def _step_text(timeline: Timeline) -> str:
    inter, intra = timeline.exposed_s.mean(axis=0) / (timeline.makespan_s or 1.0)
    waits = (
        f", waiting {format_percent(inter)} between sites and {format_percent(intra)} inside"
        if len(timeline.messages)
        else ""
    )
    return f"makespan {format_seconds(timeline.makespan_s)}, bubble {format_percent(timeline.bubble_ratio)}{waits}"


def _run_heading(view: RunView, runs: Sequence[RunView]) -> Markup:
    """The name of a run where there are several."""
    return tag("h3", view.name) if len(runs) > 1 else Markup("")


def _of_run(title: str, view: RunView, runs: Sequence[RunView]) -> str:
    """A title that no other region of the page has, where there are several runs."""
    return f"{title}, {view.name}" if len(runs) > 1 else title


def _groups(runs: Sequence[RunView], draw: Callable[[RunView], ChartGroup]) -> Iterator[Markup]:
    """A group of small charts for every run that has any, and below what they show; a table without matplotlib."""
    drawn = [(view, group) for view in runs if (group := draw(view)).charts]
    for view, group in drawn:
        yield _run_heading(view, runs)
        if (svg := draw_lines(group.charts, 3, (3.6, 1.7))) is not None:
            yield _chart_image(group.charts, svg)
        else:
            rows = tuple((chart.title, chart.text) for chart in group.charts)
            yield draw_table(TableView(" and ".join(group.columns), group.columns, rows, note=WITHOUT), captioned=False)
        if group.left_out:
            yield tag("p", group.left_out, class_="note")
    if drawn:
        yield tag("p", drawn[0][1].note, class_="note")


def _chart_image(charts: Sequence[LineChart], svg: str) -> Markup:
    return _image(svg, " ".join(chart.description for chart in charts), "wide")


def _link_events(runs: Sequence[RunView]) -> Iterator[Markup]:
    """Events of the links and messages between sites, of every run that has some."""
    for view in runs:
        table = link_event_view(view.metrics, view.name if len(runs) > 1 else "")
        further = site_event_view(view.metrics), outer_message_view(view.metrics)
        yield from (draw_table(one) for one in (table, *further) if one is not None)


def _training(runs: Sequence[RunView]) -> Iterator[Markup]:
    if charts := [chart for chart in (loss_chart(runs), step_time_chart(runs)) if chart is not None]:
        svg = draw_lines(charts, 2, (5.4, 2.8))
        yield tag("p", WITHOUT, class_="note") if svg is None else _chart_image(charts, svg)
