import dataclasses
import io

import pytest
from rich.console import Console

from farpipe.report.summary import ComparisonRow, comparison_view, step_row, step_time_view
from farpipe.report.tables import TableView, to_rich
from report.steps import run_view


def printed(table):
    out = io.StringIO()
    Console(file=out, width=160).print(table)
    return out.getvalue()


def test_the_first_step_does_not_count_and_the_overhead_does():
    row = step_row(run_view(num_steps=4))
    assert row.measured_s == 2.0  # the first step took 6 s
    assert row.predicted_s == run_view().predicted.makespan_s + 0.25
    assert row.error == pytest.approx(row.predicted_s / 2.0 - 1)
    assert (row.first_loss, row.last_loss) == (5.0, 1.25)


def test_of_two_steps_the_second_counts():
    assert step_row(run_view(num_steps=2)).measured_s == 2.0
    assert step_row(run_view(num_steps=1)).measured_s == 6.0


def test_without_metrics_the_measured_timeline_counts():
    view = dataclasses.replace(run_view(num_steps=2), metrics=())
    row = step_row(view)
    assert row.measured_s == view.measured.makespan_s + 0.25
    assert row.bubble_ratio == view.measured.bubble_ratio
    assert row.exposed_inter_site_s == pytest.approx(view.measured.exposed_s[:, 0].mean())
    assert row.tokens_per_s is None


def test_what_was_only_predicted_has_no_measured_columns():
    view = step_time_view([step_row(run_view())])
    assert view.columns == ("run", "predicted step", "bubble", "exposed between sites", "exposed inside sites")
    assert "Measured" not in view.note


def test_the_step_time_table_shows_prediction_and_measurement():
    text = printed(
        to_rich(step_time_view([step_row(run_view(num_steps=4)), step_row(run_view(method="gpipe", num_steps=4))]))
    )
    for part in ("predicted step", "measured step", "1f1b", "gpipe", "5.000 → 1.250", "exposed between sites"):
        assert part in text


def test_a_run_beside_other_work_says_so():
    view = run_view(num_steps=4)
    assert "Other work" not in step_time_view([step_row(view)]).note
    busy = dataclasses.replace(view, metrics=[{**line, "cpu_share": 0.4} for line in view.metrics])
    assert "had the CPU for 60 %" in step_time_view([step_row(busy)]).note


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_actions_of_other_lengths_than_planned_are_told(factor):
    view = run_view(num_steps=4)
    actions = view.predicted.actions.copy()
    actions["start_s"], actions["end_s"] = factor * actions["start_s"], factor * actions["end_s"]
    changed = dataclasses.replace(view, measured=dataclasses.replace(view.predicted, actions=actions))
    alike = dataclasses.replace(view, measured=view.predicted)
    assert f"Actions took {factor:.2f} times as long as planned" in step_time_view([step_row(changed)]).note
    assert "as long as planned" not in step_time_view([step_row(alike)]).note


def test_schedules_are_compared_with_the_best():
    rows = [
        ComparisonRow("a", 2.0, 0.0, 0.1, 0.0, 0.0, 2.0**30, 0.5),
        ComparisonRow("b", 3.0),
        ComparisonRow("c", obstacle="no [x]"),
    ]
    view = comparison_view(rows)
    assert [row[2] for row in view.rows] == ["best", "+50.0 %"]
    assert view.chosen == 0
    assert "c: no [x]" in printed(to_rich(comparison_view(rows)))


def test_schedules_that_can_not_be_used_share_a_line_for_the_same_reason():
    rows = [
        ComparisonRow("a", obstacle="schedule 'a' needs a V placement"),
        ComparisonRow("b", obstacle="schedule 'b' needs a V placement"),
    ]
    view = comparison_view([*rows, ComparisonRow("c", obstacle="too big"), ComparisonRow("d", 1.0)])
    assert view.note == "a, b: need a V placement\nc: too big"
    assert [row[0] for row in view.rows] == ["d"]
    assert view.chosen == 0
    assert comparison_view([ComparisonRow("d", 1.0)]).note == ""


def test_brackets_in_a_table_are_shown_as_they_are():
    text = printed(to_rich(TableView("[red]t", ("[b]",), (("[/x] [bold]",),), note="n")))
    assert "[/x] [bold]" in text
    assert "[b]" in text
    assert "[red]t" in text


def test_a_plan_that_nobody_compared_says_so_beside_its_error():
    view = dataclasses.replace(run_view(num_steps=4), trust="~ predictions for cpu were never compared")
    assert ": ~ predictions for cpu were never compared" in step_time_view([step_row(view)]).note
    only_predicted = dataclasses.replace(view, measured=None)
    assert "nobody" not in step_time_view([step_row(only_predicted)]).note


def test_the_use_of_a_device_is_told_where_it_is_known():
    view = dataclasses.replace(run_view(num_steps=4), device_flops=1e12, device_peak=2e12, causal_share=0.9)
    row = step_row(view)
    assert (row.device_flops_per_s, row.model_flops_utilisation, row.causal_utilisation) == (5e11, 0.25, 0.225)
    assert {"FLOP/s per device", "MFU, full", "MFU, causal"} <= set(step_time_view([row]).columns)
    without_peak = step_row(dataclasses.replace(view, device_peak=0.0))
    assert without_peak.model_flops_utilisation is None
    assert "MFU, causal" not in step_time_view([without_peak]).columns


def test_device_hours_are_those_of_all_steps_on_all_devices():
    view = dataclasses.replace(run_view(num_steps=4), num_devices=3)
    row = step_row(view)
    assert row.device_hours == pytest.approx(3 * sum(line["step_s"] for line in view.metrics) / 3600)
    assert "device-hours" in step_time_view([row]).columns
    assert step_row(dataclasses.replace(view, num_devices=0)).device_hours is None
    assert step_row(dataclasses.replace(view, num_devices=3, metrics=())).device_hours is None
