"""Tables of the strategies of a plan, and of the changes that would help."""

from collections.abc import Sequence
from typing import Final

from farpipe.plan.plan import Change, Strategy
from farpipe.report.views import TableView
from farpipe.units import format_about, format_bytes, format_change, format_count, format_seconds

SAME: Final = "same"
"""Name of training that does not differ from the job's."""


def strategy_table(strategies: Sequence[Strategy], *, is_rough: bool = False) -> TableView:
    """One row for each, the fastest first; the first that trains as the job says is the chosen one.

    `is_rough`: mark the steps, for nobody compared such predictions with measurements. Prices are the first to go where
    it is narrow and nothing has one; training stays, for it tells strategies apart.
    """
    rows = [
        (
            f"{one.kind}: {one.where}",
            format_about(one.step_s, is_rough=is_rough),
            format_count(one.tokens_per_s),
            str(one.num_devices),
            format_bytes(one.inter_site_bytes) if one.inter_site_bytes else "-",
            price(one),
            one.limited_by,
            one.training or SAME,
        )
        for one in strategies
    ]
    columns = ("strategy", "step", "tokens/s", "devices", "between sites", "USD/M tokens", "limited by", "training")
    chosen = next((index for index, one in enumerate(strategies) if one.same_training), None)
    note = "Strategies whose training is not the same have other semantics: compare their losses before their speed."
    differs = any(not one.same_training for one in strategies)
    numbers = frozenset({1, 2, 3, 4, 5})
    expendable = (4, 3, 2, 6) if any(row[5] != "-" for row in rows) else (5, 4, 3, 2, 6)
    return TableView("Strategies", columns, tuple(rows), numbers, chosen, note if differs else "", expendable)


def price(one: Strategy) -> str:
    """USD of a million tokens; with >= where a part has no price, and a dash where nothing has."""
    if not one.usd_per_million_tokens:
        return "-"
    missing = {word.split()[0] for word in one.unpriced} & {"rent", "egress"}
    return f"{'>= ' if missing else ''}{one.usd_per_million_tokens:.3g}"


def change_table(changes: Sequence[Change]) -> TableView:
    """One row for each, the cheapest first."""
    rows = tuple(
        (one.what, format_change(one.gain), format_seconds(one.step_s), one.costs, one.training or SAME)
        for one in changes
    )
    columns = ("change", "tokens/s", "step", "costs", "training")
    note = "Each change is planned anew: layout, placement and order may be others."
    return TableView(
        "The cheapest changes that would help", columns, rows, frozenset({1, 2}), note=note, expendable=(2,)
    )
