"""Tables for terminals of every width."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from farpipe.core.units import format_seconds
from farpipe.planning.planner.plan import Strategy
from farpipe.report.plan_tables import strategy_table
from farpipe.report.summary import ComparisonRow, StepRow, comparison_view, step_time_view
from farpipe.report.tables import TableView, fitted, to_rich

ROWS = [
    ComparisonRow(name, 6.26 + i, 0.015 * i, 0.055, 0.0564, 0.0338, 73.7 * 2**30, 0.111)
    for i, name in enumerate(("zb-2p", "zb-1p", "zb-h1", "1f1b", "eager", "interleaved"))
]
RUN = StepRow("1f1b", 0.773, 0.716, 0.522, 0.171, 0.0, 5719.0, 5.571, 2.725)


def printed(table, width):
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [50, 60, 72, 80, 100, 120, 200])
def test_no_name_and_no_figure_is_cut_at_any_width(width):
    text = printed(to_rich(comparison_view(ROWS)), width)
    assert "…" not in text
    for row in ROWS:
        assert any(line.split()[:3] == [row.method, *format_seconds(row.step_s).split()] for line in text.splitlines())


def test_a_table_of_many_rows_says_which_columns_it_leaves_out():
    text = printed(to_rich(comparison_view(ROWS)), 60)
    assert "Not shown at this width: " in text
    assert "busiest link" in text
    assert "Not shown" not in printed(to_rich(comparison_view(ROWS)), 140)


def test_a_table_of_few_rows_is_turned_and_loses_nothing():
    text = printed(to_rich(step_time_view([RUN, RUN])), 60)
    assert re.search(r"^  predicted step +773 ms +773 ms", text, re.MULTILINE)
    for figure in ("716 ms", "+8.0 %", "52.2 %", "171 ms (23.9 %)", "5,719", "5.571 → 2.725"):
        assert text.count(figure) == 2
    assert "Not shown" not in text


def test_expendable_columns_go_first():
    view = TableView("t", ("name", "a" * 20, "b" * 20, "c" * 20), (("x", "1", "2", "3"),) * 5, expendable=(2,))
    assert fitted(view, 60).columns == ("name", "a" * 20, "c" * 20)
    assert fitted(view, 40).columns == ("name", "a" * 20)
    assert fitted(view, 40).note == f"Not shown at this width: {'b' * 20}, {'c' * 20}."


def test_a_wide_table_is_left_as_it_is():
    view = TableView("t", ("name", "a"), (("x", "1"),))
    assert fitted(view, 40) is view


words = st.text("abcdefgh ", min_size=1, max_size=30).map(lambda text: " ".join(text.split()) or "a")


@given(st.lists(st.tuples(words, words, words, words), min_size=2, max_size=7), st.integers(20, 200))
def test_what_is_shown_is_never_wider_than_the_terminal_nor_cut_within_a_word(cells, width):
    head, *rows = cells
    view = TableView("t", head, tuple(rows), frozenset({2}))
    shown = fitted(view, width)
    text = printed(to_rich(view), width)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    longest = max(len(word) for row in (shown.columns, *shown.rows) for cell in row for word in cell.split())
    if longest < width // 4 and len(shown.columns) > 2:  # below, two columns may be wider than the terminal
        for word in {word for row in shown.rows for cell in row for word in cell.split()}:
            assert word in text


def arm(step_s, usd=0.0, training=""):
    figures = {"step_s": step_s, "tokens_per_s": 8004.0, "num_devices": 2, "inter_site_bytes": 2.0**20}
    words = {"what": "p2 d1 t1", "limited_by": "optimizer and other overhead", "training": training}
    return Strategy(kind="pipeline", where="zurich > lugano", usd_per_million_tokens=usd, **figures, **words)


def test_steps_of_arms_that_nobody_compared_are_marked():
    assert "~519 ms" in printed(to_rich(strategy_table([arm(0.519)], is_rough=True)), 80)
    assert "~" not in printed(to_rich(strategy_table([arm(0.519)])), 80)


def test_arms_that_train_otherwise_are_told_apart_on_a_narrow_terminal():
    text = printed(to_rich(strategy_table([arm(0.512, training="int8 or fp8 messages"), arm(0.519), arm(0.6)] * 2)), 80)
    assert "int8 or fp8 messages" in text
    assert "USD/M" not in text.split("Not shown")[0]
    rows = [arm(0.512, 0.2, "int8 or fp8 messages"), arm(0.519, 0.3), arm(0.6, 0.4)] * 2
    priced = printed(to_rich(strategy_table(rows)), 80)
    assert "int8 or fp8 messages" in priced
    assert "0.3" in priced
