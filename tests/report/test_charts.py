import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from farpipe.core.schedule import memory_curve
from farpipe.core.simulate import simulate
from farpipe.core.units import format_percent
from farpipe.report.charts import (
    MAX_CHARTS,
    Curve,
    _identical,
    link_charts,
    loss_chart,
    memory_charts,
    memory_over_time,
    metric,
    step_time_chart,
)
from report.steps import GIB, run_view
from strategies import POSITIVE_SECONDS, problems_with_schedules

SOME = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.slow
@SOME
@given(problems_with_schedules(seconds=POSITIVE_SECONDS))
def test_memory_over_time_has_the_peak_and_the_end_of_the_memory_curve(step):
    problem, schedule = step
    timeline = simulate(problem, schedule)
    for rank in range(problem.num_ranks):
        times, held = memory_over_time(problem, timeline, rank)
        expected = memory_curve(problem, schedule, rank)
        assert held.max() == pytest.approx(expected.max())
        assert held[-1] == pytest.approx(expected[-1])
        assert (np.diff(times) >= 0).all()


def test_memory_is_taken_when_a_forward_starts_and_given_back_when_its_backward_ends():
    view = run_view(1, 2)
    times, held = memory_over_time(view.problem, view.predicted, 0)
    assert times.tolist() == [0.0, 0.0, 2.5, 2.5, 5.0, 5.0]
    assert (held / GIB).tolist() == [8, 10, 8, 10, 8, 8]


@pytest.mark.parametrize("charts", [memory_charts, link_charts])
def test_a_prediction_ends_with_its_own_step_where_the_measured_one_took_longer(charts):
    view = run_view(2, 4, num_steps=3, latency_s=0.25)
    slow = view.measured
    assert slow.makespan_s > 1.02 * view.predicted.makespan_s
    for chart in charts(view).charts:
        predicted, measured = (curve.x[-1] for curve in chart.curves)
        assert predicted == pytest.approx(view.predicted.makespan_s)
        assert measured == pytest.approx(slow.makespan_s)
        assert chart.x[1] >= measured


def test_memory_over_its_limit_is_said():
    over = memory_charts(run_view(2, 4, memory_bytes=20 * GIB)).charts[0]
    assert "too much" not in over.text
    problem = run_view(2, 4).problem
    small = tuple(rank.model_copy(update={"memory_bytes": 10 * GIB}) for rank in problem.ranks)
    view = dataclasses.replace(run_view(2, 4), problem=problem.model_copy(update={"ranks": small}))
    assert memory_charts(view).charts[0].text == "peak 12 GiB of 10 GiB, 2 GiB too much"


def test_every_rank_has_a_memory_chart_with_its_limit():
    charts = memory_charts(run_view(4, 4, memory_bytes=20 * GIB)).charts
    assert [chart.title for chart in charts] == ["rank 0, east", "rank 1, east", "rank 2, west", "rank 3, west"]
    assert all(chart.limit_is_drawn for chart in charts)
    assert charts[0].text == "peak 16 GiB of 20 GiB"


def test_a_limit_far_above_the_peak_does_not_flatten_the_curves():
    charts = memory_charts(run_view(2, 2, memory_bytes=1000 * GIB)).charts
    assert not any(chart.limit_is_drawn for chart in charts)
    assert charts[0].y[1] < 20 * GIB
    assert charts[0].text.endswith("of 1000 GiB")


def test_of_many_ranks_those_nearest_to_their_limit_are_drawn():
    group = memory_charts(run_view(40, 4))
    assert len(group.charts) == MAX_CHARTS
    assert f"{MAX_CHARTS} of" in group.left_out


def test_nothing_is_drawn_where_nothing_has_a_size():
    view = run_view(2, 2)
    stages = [
        stage.model_copy(update={"activation_bytes": 0.0, "weight_stash_bytes": 0.0}) for stage in view.problem.stages
    ]
    ranks = [rank.model_copy(update={"static_bytes": 0.0}) for rank in view.problem.ranks]
    bare = view.problem.model_copy(update={"stages": tuple(stages), "ranks": tuple(ranks)})
    assert not memory_charts(dataclasses.replace(view, problem=bare)).charts


def test_link_charts_show_how_much_of_the_time_a_link_is_used():
    view = run_view(2, 16, num_steps=3)
    charts = link_charts(view).charts
    assert [chart.title for chart in charts] == ["east → west", "west → east"]
    for chart, name in zip(charts, ("east>west", "west>east"), strict=True):
        assert [curve.name for curve in chart.curves] == ["predicted", "measured"]
        use = chart.curves[0].y
        assert use.mean() == pytest.approx(view.predicted.link_busy_ratio()[name], abs=0.02)
        assert 0 <= use.min() <= use.max() <= 1


def test_a_link_on_which_replicas_take_turns_shows_the_messages_of_all():
    view = run_view(2, 16)
    alone = [chart.curves[0].y for chart in link_charts(view).charts]
    staggered = dataclasses.replace(view.predicted, copies=(3,) * len(view.predicted.links))
    of_staggered = dataclasses.replace(view, predicted=staggered, measured=None)
    used = view.predicted.link_busy_ratio()
    for chart, before in zip(link_charts(of_staggered).charts, alone, strict=True):
        name = chart.title.replace(" → ", ">")
        assert chart.text.startswith(format_percent(3 * used[name]))
        assert chart.curves[0].y.mean() == pytest.approx(3 * before.mean(), rel=0.1)


def test_links_inside_sites_are_left_out_where_they_hardly_matter():
    group = link_charts(run_view(4, 4))
    assert [chart.title for chart in group.charts] == ["east → west", "west → east"]
    assert group.left_out.startswith("Not drawn: 4 more links")


def test_a_link_that_is_always_busy_shows_as_the_wall():
    view = run_view(2, 16, latency_s=0.0)
    slow = {name: link.model_copy(update={"bandwidth_bytes_per_s": 0.1}) for name, link in view.problem.links.items()}
    problem = view.problem.model_copy(update={"links": slow})
    jammed = dataclasses.replace(view, problem=problem, predicted=simulate(problem, _order(problem)))
    chart = link_charts(jammed).charts[0]
    at_the_wall = np.isclose(chart.curves[0].y, 1.0).mean()
    assert 0.35 < at_the_wall < 0.5  # gpipe: forwards first, then backwards, which use the other direction


def _order(problem):
    from farpipe.core.schedule.library import order

    return order("gpipe", problem)


def test_the_loss_of_every_run_is_drawn():
    first, second = run_view(num_steps=5), dataclasses.replace(run_view(num_steps=4), name="other")
    chart = loss_chart([first, second])
    assert [(curve.name, curve.y.size) for curve in chart.curves] == [("1f1b", 5), ("other", 4)]
    assert chart.curves[0].y.tolist() == [5.0, 2.5, 5 / 3, 1.25, 1.0]


def test_predicted_step_time_stands_beside_the_measured_one():
    view = run_view(num_steps=5)
    chart = step_time_chart([view])
    assert [curve.name for curve in chart.curves] == ["1f1b", "1f1b predicted"]
    assert chart.curves[1].y.tolist() == [view.predicted.makespan_s + 0.25] * 2


@pytest.mark.parametrize("num_steps", [0, 1])
def test_without_steps_there_is_no_curve(num_steps):
    assert loss_chart([run_view(num_steps=num_steps)]) is None
    assert step_time_chart([run_view(num_steps=num_steps)]) is None


def test_a_metric_that_is_missing_or_no_number_is_passed_over():
    lines = [
        {"step": 0, "loss": None},
        {"step": 1},
        {"step": 2, "loss": float("nan")},
        {"step": 3, "loss": 2.5},
        {"loss": "x"},
    ]
    steps, values = metric(lines, "loss")
    assert (steps.tolist(), values.tolist()) == ([3.0], [2.5])


def test_ranks_with_equal_curves_and_limits_share_a_chart():
    x = np.arange(3.0)
    curves = {rank: [Curve("predicted", x, x + (rank == 1), "predicted")] for rank in range(4)}
    assert _identical(curves, {0: 8.0, 1: 8.0, 2: 8.0, 3: None}) == [(0, 2), (1,), (3,)]


def test_a_link_that_is_hardly_used_is_no_flat_line():
    view = run_view(2, 16)
    messages = view.predicted.messages.copy()
    messages["end_s"] = messages["start_s"] + (messages["end_s"] - messages["start_s"]) / 50
    quick = dataclasses.replace(view, predicted=dataclasses.replace(view.predicted, messages=messages), measured=None)
    charts = link_charts(quick).charts
    assert len(charts) == 2
    for chart in charts:
        assert chart.curves[0].y.max() <= chart.y_range[1] <= 0.1
