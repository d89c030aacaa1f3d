"""Tables of what a predicted step is made of."""

from collections.abc import Iterable

from farpipe.cost import JobCosts
from farpipe.plan import Plan
from farpipe.plan.derivation import DerivedQuantity, stage_lines, step_lines
from farpipe.report.views import TableView
from farpipe.units import format_seconds

_NESTED = "   "


def derivation_tables(plan: Plan, costs: JobCosts) -> tuple[TableView, TableView]:
    """The step, and F, I and W of its stages and layers, followed down to products, bytes and constants."""
    step = ("part", "seconds", "from")
    stages = ("one microbatch", "F", "I", "W", "from")
    return (
        TableView("What the step is made of", step, _rows(step_lines(plan, costs)), frozenset({1})),
        TableView("What F, I and W are made of", stages, _rows(stage_lines(plan, costs)), frozenset({1, 2, 3})),
    )


def _rows(lines: Iterable[DerivedQuantity]) -> tuple[tuple[str, ...], ...]:
    return tuple((_NESTED * line.depth + line.what, *map(format_seconds, line.seconds), line.how) for line in lines)
