"""The Pareto front of a job's layouts: as a table, as data and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from farpipe.plan.objective import Objective, Option, is_known
from farpipe.report.pyplot import load_pyplot, save_figure
from farpipe.report.views import TableView
from farpipe.units import format_count, format_seconds

AXES: Final[Mapping[Objective, str]] = {
    "time": "step, s",
    "money": "$ per million tokens",
    "energy": "kWh per million tokens",
    "carbon": "g CO2 per million tokens",
}


def front_table(front: Sequence[Option], num_choices: int, left_out: str = "") -> TableView:
    """One row for every choice of the front, the fastest first; `left_out` says what was not looked at."""
    columns = ("sites", "layout", "devices", "step", "tokens/s", "$/Mtok", "kWh/Mtok", "gCO2/Mtok")
    note = (
        f"{len(front)} of {num_choices:,} choices. Estimates by closed forms: pin one ([layout]) for `farpipe plan` to "
        f"simulate it.{left_out and ' '}{left_out}"
    )
    return TableView(
        "Pareto front", columns, tuple(map(_row, front)), frozenset(range(2, 8)), note=note, expendable=(7, 6, 4)
    )


def _row(option: Option) -> tuple[str, ...]:
    quote, at = option.quote, option.quote.layout
    layout = f"p{at.pipeline} d{at.data} t{at.tensor}{' V' if option.quote.in_v else ''}"
    figures: tuple[Objective, ...] = ("money", "energy", "carbon")
    return (
        quote.where,
        layout,
        str(quote.num_devices),
        format_seconds(quote.step_s),
        format_count(quote.tokens_per_s),
        *(f"{option.figure(name):.3g}" if is_known(option, name) else "-" for name in figures),
    )


def front_data(choices: Sequence[Option], front: Sequence[Option]) -> list[dict[str, Any]]:
    """Every choice with its figures, and whether it is on the front."""
    return [_data(option) | {"on_front": any(option is one for one in front)} for option in choices]


def _data(option: Option) -> dict[str, Any]:
    quote, at = option.quote, option.quote.layout
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
        "per_million_tokens": option.money.to_data(),
    }


def draw_front(path: Path, choices: Sequence[Option], front: Sequence[Option], objectives: Sequence[Objective]) -> None:
    """Every choice as a dot over the first two objectives, the front as a line with the sites of its corners.

    InputError without matplotlib.
    """
    pyplot = load_pyplot()
    from matplotlib import ticker

    first, second = objectives[:2]
    figure, place = pyplot.subplots(figsize=(7.2, 4.4))
    others = [option for option in choices if not any(option is one for one in front)]
    place.scatter(*_points(others, first, second), s=14, color="#b4bac6", label="beaten")
    corners = sorted(front, key=lambda option: option.figure(first))
    place.plot(
        *_points(corners, first, second), "o-", color="#2f5fa8", markersize=5, drawstyle="steps-post", label="front"
    )
    _name_corners(place, corners, first, second)
    place.set(xlabel=AXES[first], ylabel=AXES[second], xscale="log")
    for kind in (place.xaxis.set_major_formatter, place.xaxis.set_minor_formatter):
        kind(ticker.StrMethodFormatter("{x:g}"))
    place.grid(color="#e3e6ec", linewidth=0.6)
    place.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    save_figure(figure, path, dpi=110)
    pyplot.close(figure)


def _points(options: Sequence[Option], first: Objective, second: Objective) -> tuple[list[float], list[float]]:
    return [option.figure(first) for option in options], [option.figure(second) for option in options]


def _name_corners(place: Any, corners: Sequence[Option], first: Objective, second: Objective) -> None:
    """Sites and devices of a corner, where they are not those of the one before it."""
    before = ""
    for option in corners:
        name = f"{option.quote.where}, {option.quote.num_devices}"
        if name != before:
            at = (option.figure(first), option.figure(second))
            place.annotate(name, at, xytext=(5, 5), textcoords="offset points", fontsize=7)
        before = name
