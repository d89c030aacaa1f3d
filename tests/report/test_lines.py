"""Line charts by matplotlib: what is in the picture, and the page without it."""

import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from farpipe.report.axis import PLAIN, TIME
from farpipe.report.charts import Curve, LineChart, link_charts, memory_charts
from farpipe.report.lines import MAX_POINTS, WITHOUT, _telling_points, draw_lines
from farpipe.report.page import render
from farpipe.report.views import RunReport
from report.steps import GIB, run_view

SVG = "{http://www.w3.org/2000/svg}"
SIZE = (3.6, 1.7)


def curve(values, name="a", look="run0", **options):
    y = np.array(values, dtype=np.float64)
    return Curve(name, np.arange(y.size, dtype=np.float64), y, look, **options)


def texts(svg):
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_titles_labels_units_and_a_key_of_the_curves_are_in_the_picture():
    charts = memory_charts(run_view(2, 4, memory_bytes=20 * GIB, num_steps=3)).charts
    found = texts(draw_lines(charts, 3, SIZE))
    for text in ("rank 0, east", "rank 1, west", "predicted", "measured", "limit", "20\N{NO-BREAK SPACE}GiB"):
        assert text in found
    assert found.count("predicted") == 1


def test_names_are_written_as_they_are():
    assert "<$x^2$> & co" in texts(draw_lines([LineChart("<$x^2$> & co", [curve([1, 2])], PLAIN, PLAIN)], 1, SIZE))


@pytest.mark.parametrize("values", [[3, 3, 3], [0, 0], [7]])
def test_a_constant_curve_and_a_single_point_can_be_drawn(values):
    svg = draw_lines([LineChart("t", [curve(values, step=True)], TIME, TIME, x_label="step", counts=True)], 1, SIZE)
    assert "nan" not in svg


def test_a_long_curve_keeps_its_extremes_and_its_ends():
    values = np.sin(np.arange(20_000) / 50)
    values[12_345], values[777] = 9.0, -9.0
    chosen = _telling_points(values)
    assert len(chosen) <= MAX_POINTS + 2
    assert {0, 777, 12_345, 19_999} <= set(chosen.tolist())


def test_the_same_charts_are_the_same_picture():
    charts = link_charts(run_view(4, 4, num_steps=2)).charts
    assert draw_lines(charts, 3, SIZE) == draw_lines(charts, 3, SIZE)


def test_the_description_says_where_a_curve_begins_and_ends():
    assert LineChart("Loss", [curve([5, 9, 2])], PLAIN, PLAIN).description == "Loss. a: from 5 to 2, at most 9."


def test_without_matplotlib_the_page_has_its_tables_and_says_what_is_missing(monkeypatch):
    report = RunReport("title", (run_view(2, 4, memory_bytes=20 * GIB, num_steps=5),))
    assert WITHOUT not in render(report)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = render(report)
    assert page.count(WITHOUT) == 3
    assert "<svg" in page, "Gantt charts need no library"
    assert "peak 12 GiB of 20 GiB" in page
    assert "<img" not in page
