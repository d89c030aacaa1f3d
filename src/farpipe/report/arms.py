"""Tables of the arms of a plan, and of the changes that would help."""

from collections.abc import Sequence
from typing import Final

from farpipe.plan.plan import Arm, Change
from farpipe.report.views import TableView
from farpipe.units import format_bytes, format_change, format_count, format_seconds

SAME: Final = "same"
"""Name of training that does not differ from the job's."""


def arm_table(arms: Sequence[Arm]) -> TableView:
    """One row for each, the fastest first; the first that trains as the job says is the chosen one.

    Prices are the first to go where it is narrow and nothing has one; training stays, for it tells arms apart.
    """
    rows = [
        (
            f"{arm.kind}: {arm.where}",
            format_seconds(arm.step_s),
            format_count(arm.tokens_per_s),
            str(arm.num_devices),
            format_bytes(arm.inter_site_bytes) if arm.inter_site_bytes else "-",
            price(arm),
            arm.limited_by,
            arm.training or SAME,
        )
        for arm in arms
    ]
    columns = ("arm", "step", "tokens/s", "devices", "between sites", "USD/M tokens", "limited by", "training")
    chosen = next((index for index, arm in enumerate(arms) if arm.same_training), None)
    note = "Arms whose training is not the same have other semantics: compare their losses before their speed."
    differs = any(not arm.same_training for arm in arms)
    numbers = frozenset({1, 2, 3, 4, 5})
    expendable = (4, 3, 2, 6) if any(row[5] != "-" for row in rows) else (5, 4, 3, 2, 6)
    return TableView("Arms", columns, tuple(rows), numbers, chosen, note if differs else "", expendable)


def price(arm: Arm) -> str:
    """USD of a million tokens; with >= where a part has no price, and a dash where nothing has."""
    if not arm.usd_per_million_tokens:
        return "-"
    missing = {word.split()[0] for word in arm.unpriced} & {"rent", "egress"}
    return f"{'>= ' if missing else ''}{arm.usd_per_million_tokens:.3g}"


def change_table(changes: Sequence[Change]) -> TableView:
    """One row for each, the cheapest first."""
    rows = tuple(
        (one.what, format_change(one.gain), format_seconds(one.step_s), one.costs, one.training or SAME)
        for one in changes
    )
    columns = ("change", "tokens/s", "step", "costs", "training")
    return TableView("The cheapest changes that would help", columns, rows, frozenset({1, 2}), expendable=(2,))
