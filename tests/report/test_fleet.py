"""Pictures of a simulated fleet: their bars and their queue against the log of the same fleet."""

import random
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from matplotlib.figure import Figure

from benchmarks.fleet.baselines import COMPARED
from farpipe.fleet.events import Price, PriceChanged
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import StopCosts
from farpipe.fleet.simulator import Simulator
from farpipe.fleet.state import first_state
from farpipe.report.fleet import (
    MARKS,
    _bars,
    _draw_completion,
    _draw_map,
    _draw_marks,
    _draw_prices,
    coastlines,
    coloured,
    draw_charts,
    draw_fleet,
    has_prices,
    levels,
    link_use,
    queue_levels,
    spent_usd,
)
from farpipe.report.pyplot import load_pyplot, save_figure
from farpipe.testing.policies import SITES, SimpleQuotes, random_cluster, random_events, random_jobs


def outcome(seed, policy="bace"):
    draw = random.Random(seed)
    cluster = random_cluster(draw)
    jobs = random_jobs(20, draw)
    state = first_state(cluster, COMPARED[policy], SimpleQuotes(), StopCosts(restart_s=60.0))
    return Simulator(state).run(jobs, [PriceChanged(0.0, dict.fromkeys(SITES, Price(50.0, 100.0)))])


@pytest.mark.parametrize("policy", ["fcfs", "bace"])
@pytest.mark.parametrize("seed", range(4))
def test_bars_are_what_jobs_held(seed, policy):
    done = outcome(seed, policy)
    drawn, rows = defaultdict(float), defaultdict(list)
    for site, job, first, count, begin_s, end_s, _ in _bars(done):
        assert first >= 0
        assert first + count <= done.num_devices[site]
        assert begin_s <= end_s
        drawn[job] += count * (end_s - begin_s)
        for row in range(first, first + count):
            rows[site, row].append((begin_s, end_s))
    for spans in rows.values():
        spans.sort()
        assert all(end_s <= begin_s for (_, end_s), (begin_s, _) in pairwise(spans)), "one job each"
    held: dict[str, tuple[float, int]] = {}
    expected = defaultdict(float)
    for change in done.changes:
        since_s, number = held.get(change.job, (change.time_s, 0))
        expected[change.job] += number * (change.time_s - since_s)
        held[change.job] = change.time_s, sum(change.devices.values())
    assert sum(expected.values()) > 0
    assert drawn == pytest.approx({job: expected[job] for job in drawn})
    assert sum(drawn.values()) == pytest.approx(sum(expected.values()))


@pytest.mark.parametrize("seed", range(4))
def test_the_queue_is_never_negative_and_ends_empty(seed):
    times_s, levels = queue_levels(outcome(seed))
    assert times_s == sorted(times_s)
    assert min(levels) == 0 == levels[-1]
    assert max(levels) > 0


@pytest.mark.parametrize("seed", range(3))
def test_charts_add_up_to_what_jobs_held_spent_and_reserved(seed):
    done = outcome(seed, "random")
    span_s = done.end_s - done.begin_s
    times_s, held = levels(done.changes, lambda change: sum(change.devices.values()))
    ends_s = [*times_s[1:], done.end_s]
    area = sum(number * (end_s - begin_s) for begin_s, end_s, number in zip(times_s, ends_s, held, strict=True))
    assert area == pytest.approx(sum(done.spent.device_s.values()))
    assert held[-1] == 0
    first, middle, last = spent_usd(done, [done.begin_s, (done.begin_s + done.end_s) / 2, done.end_s])
    assert 0 == first < middle < last
    assert last == pytest.approx(done.spent.total_usd)
    for link, (mean, most) in link_use(done).items():
        assert 0 < mean <= most <= 1 + 1e-9
        reserved = mean * span_s * done.link_bytes_per_s[link]
        sent = done.spent.sent_bytes[link]
        assert 0.5 * reserved < sent <= reserved * (1 + 1e-9), "a start reserves more than it sends"
    assert link_use(done), "some job used a link"


def test_the_curve_of_completion_times_begins_with_none_and_ends_with_all_jobs():
    done, axis = outcome(0), Figure().subplots()
    _draw_completion(axis, done, {})
    (line,) = axis.lines
    assert list(line.get_xdata()) == [seconds / 3600 for seconds in (done.jcts_s[0], *done.jcts_s)]
    assert list(line.get_ydata()) == pytest.approx([index / len(done.jcts_s) for index in range(len(done.jcts_s) + 1)])


@pytest.mark.slow
def test_charts_are_drawn_with_and_without_locations(tmp_path):
    done = [outcome(0, "fcfs"), outcome(0)]
    known = {site: (10.0 * index, 20.0 * index) for index, site in enumerate(done[0].num_devices)}
    for name, locations in (("map.svg", known), ("circle.svg", {})):
        draw_charts(done, tmp_path / name, locations)
        assert (tmp_path / name).read_text().count('<g id="axes_') >= 6


def test_a_map_of_sites_without_locations_has_no_figures_along_its_axes():
    done = outcome(0)
    for locations, has_figures in (
        ({site: (1.5 * i, 2.5 * i) for i, site in enumerate(done.num_devices)}, True),
        ({}, False),
    ):
        axis = Figure().subplots()
        _draw_map(axis, done, locations)
        assert (bool(len(axis.get_xticks())), bool(len(axis.get_yticks()))) == (has_figures, has_figures)


def test_of_many_policies_the_best_and_the_last_have_colours():
    done = [outcome(0, "bace")] * 3 + [outcome(0, "fcfs")]
    assert coloured(done) == done
    best = replace(done[0], policy="best")
    late = replace(done[0], policy="late", records=done[0].records[:1])
    many = [late, *(replace(best, policy=f"best {index}") for index in range(6)), replace(late, policy="last")]
    assert [one.policy for one in coloured(many)] == [*(f"best {index}" for index in range(5)), "last"]


@pytest.mark.slow
def test_the_picture_has_a_gantt_and_a_queue_for_every_policy(tmp_path):
    draw_fleet([outcome(0, "fcfs"), outcome(0)], tmp_path / "fleet.svg")
    text = (tmp_path / "fleet.svg").read_text()
    assert text.count('<g id="axes_') == 4


class Axis:
    """Keeps what is drawn."""

    def __init__(self):
        self.marks = {}

    def scatter(self, hours, rows, label, **style):
        self.marks[label] = list(zip(hours, rows, strict=True))

    def legend(self, *names, **style):
        pass


@pytest.mark.parametrize("stop_s", [0.0, 600.0])
def test_every_stop_and_move_has_a_mark_on_the_devices_that_the_job_had(stop_s):
    draw = random.Random(5)
    state = first_state(random_cluster(draw), POLICIES["srtf"], SimpleQuotes(), StopCosts(stop_s=stop_s))
    done = Simulator(state).run(random_jobs(20, draw), random_events(draw))
    bases = dict(zip(done.num_devices, (0, 1000, 2000), strict=True))
    axis = Axis()
    _draw_marks(axis, done, _bars(done), bases)
    ended = [change for change in done.changes if change.event in MARKS]
    assert {MARKS[change.event][1] for change in ended} == set(axis.marks) != set()
    assert {h for places in axis.marks.values() for h, _ in places} == {change.time_s / 3600 for change in ended}
    for _, row in (place for places in axis.marks.values() for place in places):
        assert any(low < row < low + done.num_devices[site] for site, low in bases.items())


def test_prices_are_drawn_where_they_differ():
    assert not has_prices(outcome(1))
    draw = random.Random(1)
    state = first_state(random_cluster(draw), POLICIES["bace"], SimpleQuotes())
    changed = [
        PriceChanged(0.0, dict.fromkeys(SITES, Price(50.0, 1.0))),
        PriceChanged(7200.0, {SITES[0]: Price(90.0, 1.0)}),
    ]
    done = Simulator(state).run(random_jobs(5, draw), changed)
    axis = Figure().subplots()
    _draw_prices(axis, done)
    assert has_prices(done)
    lines = {
        line.get_label(): [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]
        for line in axis.get_lines()
    }
    assert lines[SITES[0]][1:] == [(2.0, 90.0), (done.end_s / 3600, 90.0)]
    assert lines[SITES[1]][0][1] == lines[SITES[1]][-1][1] == 50.0
    assert axis.get_ylim()[1] > 100, "room for the legend"


def test_coasts_lie_on_the_globe_and_pass_by_known_places():
    points = [point for line in coastlines() for point in line]
    assert all(-180 <= x <= 180 and -60 < y < 84 for x, y in points)
    for x, y in ((-5.6, 36.0), (18.5, -34.0), (-34.9, -8.0)):  # Gibraltar, the Cape, Recife
        assert min(abs(x - a) + abs(y - b) for a, b in points) < 4


@pytest.mark.parametrize(
    ("low", "high", "labels"), [(0.1, 8.0, {"0.1", "0.2", "5"}), (1e-3, 1e4, {"0.001", "1", "10000"})]
)
def test_labels_of_logarithmic_axes_are_numbers_and_no_formulas(tmp_path, low, high, labels):
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots()
    axis.plot([low, high], [low, high])
    axis.set(xscale="log", yscale="log", xlabel="costs $ and $")
    for name in ("axes.svg", "axes.png"):
        save_figure(figure, tmp_path / name, dpi=80)
    text = (tmp_path / "axes.svg").read_text()
    assert "mathdefault" not in text
    assert labels <= set(re.findall(r"<!-- (.*?) -->", text))
    assert "costs $ and $" in text


def test_charts_of_fleets_have_no_formula_in_a_label(tmp_path):
    draw_charts([outcome(0)], tmp_path / "charts.svg")
    assert "mathdefault" not in (tmp_path / "charts.svg").read_text()
