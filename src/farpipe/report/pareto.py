"""The Pareto front of a job's layouts: as a table and as data."""

from collections.abc import Sequence
from typing import Any

from farpipe.plan.objective import Objective, is_known
from farpipe.plan.quote import Quote
from farpipe.report.views import TableView
from farpipe.units import format_count, format_seconds


def front_table(front: Sequence[Quote], num_choices: int, left_out: str = "") -> TableView:
    """One row for every choice of the front, the fastest first; `left_out` says what was not looked at."""
    columns = ("sites", "layout", "devices", "step", "tokens/s", "$/Mtok", "kWh/Mtok", "gCO2/Mtok")
    note = (
        f"{len(front)} of {num_choices:,} choices. Estimates by closed forms: pin one ([layout]) for `farpipe plan` to "
        f"simulate it.{left_out and ' '}{left_out}"
    )
    return TableView(
        "Pareto front", columns, tuple(map(_row, front)), frozenset(range(2, 8)), note=note, expendable=(7, 6, 4)
    )


def _row(quote: Quote) -> tuple[str, ...]:
    at = quote.layout
    layout = f"p{at.pipeline} d{at.data} t{at.tensor}{' V' if quote.in_v else ''}"
    figures: tuple[Objective, ...] = ("money", "energy", "carbon")
    return (
        quote.where,
        layout,
        str(quote.num_devices),
        format_seconds(quote.step_s),
        format_count(quote.tokens_per_s),
        *(f"{quote.figure(name):.3g}" if is_known(quote, name) else "-" for name in figures),
    )


def front_data(choices: Sequence[Quote], front: Sequence[Quote]) -> list[dict[str, Any]]:
    """Every choice with its figures, and whether it is on the front."""
    return [_data(quote) | {"on_front": any(quote is one for one in front)} for quote in choices]


def _data(quote: Quote) -> dict[str, Any]:
    at = quote.layout
    return {
        "where": quote.where,
        "sites": list(quote.sites),
        "pipeline": at.pipeline,
        "data": at.data,
        "tensor": at.tensor,
        "virtual": at.virtual,
        "in_v": quote.in_v,
        "microbatch_size": at.microbatch_size,
        "num_microbatches": at.num_microbatches,
        "num_devices": quote.num_devices,
        "step_s": quote.step_s,
        "tokens_per_s": quote.tokens_per_s,
        "per_million_tokens": quote.per_million_tokens.to_data(),
    }
