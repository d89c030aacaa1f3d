import dataclasses
import itertools
import re
from html.parser import HTMLParser

import pytest

from farpipe.core.errors import RunError
from farpipe.planning.workload import Chunk, Slice
from farpipe.report.page import render, write_report
from farpipe.report.tables import TableView
from farpipe.report.views import Picture, RunReport
from report.steps import run_view

EVIL = "<img src=x onerror=alert(1)>&\"'"
LOADING = ("src", "srcset", "data", "action", "poster", "background", "xlink:href")
EMPTY = {"meta", "link", "rect", "path", "br", "img", "input"}


class Page(HTMLParser):
    """All tags with their attributes, headings and text of a page; fails on tags that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def report(**changes):
    runs = (run_view(4, 4, "eager", 5), run_view(4, 4, "1f1b", 5))
    table = TableView("Runners-up", ("plan", "step"), (("best", "1 s"), ("other", "2 s")), frozenset({1}), 0, "why")
    whole = RunReport("tiny over east and west", runs, "a summary", (table,), "first\nsecond")
    return dataclasses.replace(whole, **changes)


def test_the_page_loads_nothing_and_runs_nothing():
    page = Page(render(report()))
    for name, attributes in page.tags:
        assert name not in ("script", "iframe", "object", "embed")
        loaded = [attributes[key] for key in LOADING if key in attributes]
        assert all(name == "img" and source.startswith("data:image/svg+xml;base64,") for source in loaded)
        assert not any(key.startswith("on") for key in attributes)
        assert attributes.get("href", "data:,") == "data:,"
    assert not re.findall(r"@import|url\(\s*['\"]?(?!#)", render(report()))
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")


def test_every_part_is_there():
    page = Page(render(report()))
    for heading in ("Step time", "Plan", "Timeline", "Memory", "Links", "Training"):
        assert heading in page.text
    for part in ("a summary", "Runners-up", "why", "second", "eager"):
        assert part in page.text
    pictures = " ".join(attributes["alt"] for attributes in page.all("img"))
    for part in (
        "rank 0, east. peak 16 GiB of ",
        "east → west. ",
        "Loss. nats per token. eager: from 5",
        "Time of a step",
    ):
        assert part in pictures
    keys = {
        attributes["aria-labelledby"].split("-title")[0] for attributes in page.all("svg") if "viewbox" in attributes
    }
    assert {"gantt-0", "gantt-1"} <= keys


def test_a_simulation_alone_has_no_measured_parts():
    page = Page(render(report(runs=(run_view(2, 2),))))
    assert "predicted" in page.text
    assert "measured" not in page.text
    assert "Training" not in page.text


@pytest.mark.parametrize("runs", [(), (run_view(1, 1),), (run_view(1, 1, num_steps=1),)])
def test_the_least_that_can_be_reported_is_a_page(runs):
    assert Page(render(RunReport("title", runs))).all("h1")


def test_what_comes_from_the_user_is_escaped_everywhere():
    run = dataclasses.replace(run_view(2, 2, num_steps=3), name=EVIL, sites=(EVIL, EVIL))
    problem = run.problem.model_copy(update={"links": {**run.problem.links, EVIL: run.problem.links["east>west"]}})
    links = tuple(EVIL if name == "east>west" else name for name in run.predicted.links)
    run = dataclasses.replace(run, problem=problem, predicted=dataclasses.replace(run.predicted, links=links))
    table = TableView(EVIL, (EVIL,), ((EVIL,),), note=EVIL)
    page = Page(render(RunReport(EVIL, (run, run), EVIL, (table,), EVIL)))
    assert all(attributes["src"].startswith("data:image/svg+xml;base64,") for attributes in page.all("img"))
    assert page.text.count(EVIL) > 10


OURS = run_view(2, 2).predicted._repr_svg_()


@pytest.mark.parametrize(("svg", "themed"), [("<svg/>", False), (OURS, True)])
def test_a_picture_has_a_white_ground_unless_it_follows_the_readers_colours(svg, themed):
    page = render(report(pictures=(Picture("drawn", svg),)))
    assert (' class="wide picture themed"' in page) == themed
    assert page.count(".picture:not(.themed) img") == 2


def test_a_page_of_chunks_says_which_step_it_draws_and_what_the_numbers_are():
    view = dataclasses.replace(run_view(2, 4), chunks=(Chunk((Slice(0, 0, 4, 4),)),) * 4)
    first, later = (Page(render(report(runs=(v,)))).text for v in (view, dataclasses.replace(view, drawn_step=29)))
    assert "Numbers are chunks" in first
    assert "Numbers are microbatches" in Page(render(report())).text
    assert "This is step 29: it has other documents than the first batch" in later
    assert "This is step" not in first


def test_ids_are_unique_and_every_reference_has_its_target():
    text = render(report())
    ids = [attributes["id"] for _, attributes in Page(text).tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = set(re.findall(r"url\(#([^)]+)\)", text))
    for attributes in Page(text).all("svg"):
        references |= set(attributes.get("aria-labelledby", "").split())
    assert references <= set(ids)


def test_people_who_hear_the_page_find_their_way():
    page = Page(render(report()))
    assert page.all("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert all(attributes.get("scope") in ("col", "row") for attributes in page.all("th"))
    charts = [attributes for attributes in page.all("svg") if attributes.get("class") == "figure"]
    assert all(attributes["role"] == "img" and attributes["aria-labelledby"] for attributes in charts)
    scrolling = [attributes for attributes in page.all("div") if attributes.get("class") == "scroll"]
    assert all(attributes["tabindex"] == "0" and attributes["aria-label"] for attributes in scrolling)


def test_steps_without_a_barrier_are_drawn_in_a_row():
    run = run_view(4, 4, "eager", 5)
    free = dataclasses.replace(run, problem=run.problem.model_copy(update={"barrier": False}))
    with_barrier, without = (Page(render(report(runs=(one,)))) for one in (run, free))
    assert "3 steps without a barrier, as predicted" in without.text
    assert "without a barrier" not in with_barrier.text
    labels = [tag.get("aria-label") for tag in without.all("div")]
    assert "Steps in a row" in labels


def test_the_same_report_is_the_same_page():
    assert render(report()) == render(report())


@pytest.mark.slow
def test_a_page_of_a_huge_step_stays_small():
    assert len(render(RunReport("huge", (run_view(64, 256, num_steps=2),)))) < 3_000_000


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    write_report(report(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").endswith("</html>\n")
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="can't be written"):
        write_report(report(), tmp_path / "file" / "report.html")
