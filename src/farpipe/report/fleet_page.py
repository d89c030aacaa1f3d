"""A page on policies that have simulated the same fleet, and their figures as CSV; the first one is today's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.units import counted, format_change, format_seconds
from farpipe.fleet.outcome import ALIKE, FleetOutcome, most_finished, verdict
from farpipe.fleet.policies import known_policies
from farpipe.fleet.policies.worth import GRAMS_PER_TONNE
from farpipe.report.figure import Markup
from farpipe.report.fleet import Location, draw_charts, draw_fleet
from farpipe.report.lines import WITHOUT
from farpipe.report.page import draw_picture, draw_table, folded, render_sections
from farpipe.report.tables import TableView, bar_lengths, csv_text
from farpipe.report.views import Picture

CSV_HEAD: Final = "policy,finished,jobs"
"""Beginning of the CSV, by which a command knows it again."""
_CHARTS: Final = (
    "Completion times, use, queue and money over time: grey are policies that are neither among the best nor the last. "
    "Links and map are those of the last policy."
)
_GANTT: Final = "Which job had which devices: under today's policy, and under the one with the shortest mean time."


def fleet_page(
    outcomes: Sequence[FleetOutcome],
    notices: Sequence[str] = (),
    locations: Mapping[str, Location] | None = None,
    all_figures: TableView | None = None,
) -> str:
    """The page as HTML text; `all_figures` has what the terminal shows."""
    title = f"{counted(len(outcomes[0].records), 'job')} on {sum(outcomes[0].num_devices.values()):,} devices"
    table = [draw_table(beside_today(outcomes), captioned=False), draw_table(descriptions(outcomes))]
    table += [] if all_figures is None else [folded("All figures", draw_table(all_figures))]
    sections = {"Policies": table, **dict(_pictures(outcomes, locations))}
    return render_sections(title, verdict_lines(outcomes), sections, notices)


def verdict_lines(outcomes: Sequence[FleetOutcome]) -> list[str]:
    """What the best policy is worth beside today's, and the winners in time and money."""
    best, today, winners = best_of(outcomes), outcomes[0], [line for line in [verdict(outcomes)] if line]
    if best is None:
        return winners
    if best is today:
        return [f"Today's policy, {today.policy}, has the shortest mean completion time.", *winners]
    usd, tonnes = _difference(best, today, _usd), _difference(best, today, _tonnes)
    parts = [f"mean completion time {format_change(_mean_s(best) / _mean_s(today) - 1)}" if today.jcts_s else ""]
    parts += [] if usd is None else [f"money {_signed(usd, _dollars)}"]
    parts += [] if tonnes is None else [f"carbon {_signed(tonnes, _tons)}"]
    return [f"{best.policy} instead of {today.policy}, today's policy: {', '.join(filter(None, parts))}.", *winners]


def best_of(outcomes: Sequence[FleetOutcome]) -> FleetOutcome | None:
    """The shortest mean completion time of those that finished most jobs, and of those that tie with it the least
    money, then carbon; None where none finished one."""
    able = most_finished(outcomes)
    least_s = min(map(_mean_s, able), default=0.0)
    tied = [one for one in able if _mean_s(one) - least_s <= ALIKE * least_s]
    return min(tied, key=lambda one: (_usd(one) or 0.0, _tonnes(one) or 0.0), default=None)


def beside_today(outcomes: Sequence[FleetOutcome]) -> TableView:
    """A row for every policy: its figures beside those of the first."""
    today = outcomes[0]
    columns = {
        "policy": [one.policy + (" (today)" if one is today else "") for one in outcomes],
        "finished": [f"{len(one.jcts_s)} of {len(one.records)}" for one in outcomes],
        "mean completion": [format_seconds(_mean_s(one)) if one.jcts_s else "-" for one in outcomes],
        "beside today": [_change(one, today) for one in outcomes],
    }
    for name, value, write in (("money", _usd, _dollars), ("carbon", _tonnes, _tons)):
        columns[name] = [write(value(one)) for one in outcomes]
        columns[f"{name} beside today"] = [
            "-" if one is today else _signed(_difference(one, today, value), write) for one in outcomes
        ]
    rows = tuple(zip(*columns.values(), strict=True))
    bars = [(2, bar_lengths([_mean_s(one) if one.jcts_s else 0.0 for one in outcomes]))]
    bars += [(4, bar_lengths([_usd(one) or 0.0 for one in outcomes]))] if today.is_priced else []
    best = best_of(outcomes)
    chosen = None if best is None else outcomes.index(best)
    return TableView("Policies", tuple(columns), rows, frozenset(range(1, 8)), chosen=chosen, bars=tuple(bars))


def descriptions(outcomes: Sequence[FleetOutcome]) -> TableView:
    """Every policy in a line."""
    about = known_policies()
    rows = tuple((one.policy, about.get(one.policy, "-")) for one in outcomes)
    return TableView("What each policy does", ("policy", "description"), rows)


def fleet_csv(outcomes: Sequence[FleetOutcome]) -> str:
    """The figures of every policy, and their differences to the first, as CSV in SI units and dollars."""
    return csv_text([_figures(one, outcomes[0]) for one in outcomes])


def _figures(one: FleetOutcome, today: FleetOutcome) -> dict[str, Any]:
    data = one.to_data()
    figures = {"policy": one.policy, "finished": data["num_finished"], "jobs": data["num_jobs"]}
    figures |= {key: data[key] for key in ("mean_jct_s", "p95_jct_s", "p99_wait_s", "max_wait_s", "utilization")}
    for kind in ("rent", "electricity", "egress"):
        total = sum(value or 0.0 for value in data["money"][kind].values())
        figures[f"{kind}_usd"] = total if one.is_known(kind) else None
    figures |= {"total_usd": _usd(one), "usd_beside_today": _difference(one, today, _usd)}
    figures |= {"carbon_t": _tonnes(one), "carbon_t_beside_today": _difference(one, today, _tonnes)}
    figures |= {"deadlines_met": data["num_deadlines_met"], "deadlines": data["num_deadlines"]}
    about = known_policies().get(one.policy, "")
    return {key: "" if value is None else value for key, value in figures.items()} | {"what_it_does": about}


def _pictures(
    outcomes: Sequence[FleetOutcome], locations: Mapping[str, Location] | None
) -> Iterator[tuple[str, list[Markup]]]:
    best = best_of(outcomes)
    two = [outcomes[0]] + ([best] if best is not None and best is not outcomes[0] else [])
    drawings: dict[str, tuple[Callable[[Path], None], str]] = {
        "Times, use and money": (lambda path: draw_charts(outcomes, path, locations), _CHARTS),
        "Devices over time": (lambda path: draw_fleet(two, path), _GANTT),
    }
    with TemporaryDirectory() as folder:
        for title, (draw, note) in drawings.items():
            path = Path(folder) / "picture.svg"
            try:
                draw(path)
            except InputError:  # without matplotlib
                yield title, [draw_table(TableView(title, ("",), ((WITHOUT,),)), captioned=False)]
                return
            svg = path.read_text(encoding="utf-8")
            yield title, list(draw_picture(Picture(title, svg, note)))


def _mean_s(one: FleetOutcome) -> float:
    return one.mean_jct_s or 0.0


def _change(one: FleetOutcome, today: FleetOutcome) -> str:
    if one is today or not one.jcts_s or not today.jcts_s:
        return "-"
    return format_change(_mean_s(one) / _mean_s(today) - 1)


def _usd(one: FleetOutcome) -> float | None:
    return one.spent.total_usd if one.is_priced else None


def _tonnes(one: FleetOutcome) -> float | None:
    return sum(one.spent.carbon_g.values()) / GRAMS_PER_TONNE if one.is_known("carbon") else None


def _difference(one: FleetOutcome, today: FleetOutcome, value: Callable[[FleetOutcome], float | None]) -> float | None:
    mine, its = value(one), value(today)
    return None if mine is None or its is None else mine - its


def _dollars(usd: float | None) -> str:
    return "-" if usd is None else f"${usd:,.0f}" if abs(usd) >= 100 else f"${usd:,.2f}"


def _tons(tonnes: float | None) -> str:
    if tonnes is None:
        return "-"
    return f"{tonnes:,.2f} t" if abs(tonnes) >= 1 else f"{1000 * tonnes:,.1f} kg"


def _signed(value: float | None, write: Callable[[float | None], str]) -> str:
    if value is None:
        return "-"
    size = write(abs(value))
    return f"{'-' if value < 0 else '+'}{size}" if set(size) & set("123456789") else "0"
