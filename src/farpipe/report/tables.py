"""Tables for the terminal: a TableView as a rich.Table, and the three tables that commands print."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from farpipe.report.summary import (
    ComparisonRow,
    PlanRow,
    StepRow,
    comparison_view,
    plan_view,
    step_time_view,
)
from farpipe.report.views import TableView

if TYPE_CHECKING:
    from rich.table import Table


def to_rich(view: TableView) -> "Table":
    """The table for a terminal; its text is shown as it is, brackets included."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    note = Text(view.note) if view.note else None
    table = Table(title=Text(view.title, "bold"), title_justify="left", caption=note, caption_justify="left")
    table.box = box.SIMPLE_HEAD
    for index, name in enumerate(view.columns):
        table.add_column(Text(name), justify="right" if index in view.numbers else "left")
    for index, row in enumerate(view.rows):
        table.add_row(*(Text(cell) for cell in row), style="bold" if index == view.chosen else None)
    return table


def step_time_table(rows: Sequence[StepRow]) -> "Table":
    """Predicted and measured step time of runs."""
    return to_rich(step_time_view(rows))


def plan_table(rows: Sequence[PlanRow]) -> "Table":
    """The chosen plan and why the others lost."""
    return to_rich(plan_view(rows))


def comparison_table(rows: Sequence[ComparisonRow]) -> "Table":
    """Schedules side by side."""
    return to_rich(comparison_view(rows))
