import re
from xml.etree import ElementTree

import numpy as np

from farpipe.report.axis import PLAIN, TIME
from farpipe.report.charts import MAX_POINTS, Curve, LineChart

SVG = "{http://www.w3.org/2000/svg}"


def curve(values, name="a", **options):
    y = np.array(values, dtype=np.float64)
    return Curve(name, np.arange(y.size, dtype=np.float64), y, "run0", **options)


def paths(chart):
    tree = ElementTree.fromstring(chart.figure().svg())
    return [path.get("d") for path in tree.iter(f"{SVG}path") if (path.get("class") or "").startswith("curve")]


def test_a_long_curve_keeps_its_extremes_and_its_ends():
    values = np.sin(np.arange(20_000) / 50)
    values[12_345], values[777] = 9.0, -9.0
    chart = LineChart("k", "t", [curve(values)], PLAIN, PLAIN)
    points = [tuple(map(float, point.split())) for point in re.split("[ML]", paths(chart)[0])[1:]]
    assert len(points) <= MAX_POINTS + 2
    heights = [y for _, y in points]
    assert abs(min(heights) - chart.y(9.0)) < 0.01
    assert abs(max(heights) - chart.y(-9.0)) < 0.01
    assert abs(points[-1][0] - chart.x(19_999)) < 0.01


def test_a_step_holds_its_value_until_the_next_and_says_nothing_after_its_last():
    chart = LineChart("k", "t", [curve([1, 2], step=True)], PLAIN, PLAIN, named=False, x_range=(0, 3))
    found = re.fullmatch(r"M[\d.]+ ([\d.]+)H([\d.]+)V[\d.]+", paths(chart)[0])
    assert float(found[2]) == round(chart.x(1), 2)


def test_curves_that_end_together_have_names_that_do_not_overlap():
    chart = LineChart("k", "t", [curve([5, 2], "first"), curve([5, 2], "second")], PLAIN, PLAIN)
    tree = ElementTree.fromstring(chart.figure().svg())
    heights = [float(text.get("y")) for text in tree.iter(f"{SVG}text") if text.text in ("first", "second")]
    assert abs(heights[0] - heights[1]) >= 12


def test_a_constant_curve_and_a_single_point_can_be_drawn():
    for values in ([3, 3, 3], [0, 0], [7]):
        figure = LineChart("k", "t", [curve(values)], TIME, TIME, x_label="step", counts=True).figure()
        assert "nan" not in figure.svg()


def test_the_description_says_where_a_curve_begins_and_ends():
    figure = LineChart("k", "Loss", [curve([5, 9, 2])], PLAIN, PLAIN).figure()
    assert figure.description == "Line chart. a: from 5 to 2, at most 9."
