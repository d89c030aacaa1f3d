"""Markdown tables of fleet_comparison.py's rows, as on the page: python -m benchmarks.fleet.fleet_tables FOLDER"""

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.fleet.baselines import COMPARED
from benchmarks.fleet.fleet_case import Row, load_rows
from benchmarks.fleet.fleet_comparison import LIKE_BACE, LOADS, paired

FIRST = ("farpipe", LIKE_BACE, "srtf", "srtf with bace's places", "bace", "easy")
"""Policies of the first tables, in their order."""
THOUSANDS = ("electricity_usd", "egress_usd", "total_usd")
DIGITS = {"mean_h": 1, "electricity_usd": 1, "egress_usd": 1}


def chosen(rows: Iterable[Row], load: float, *, rigid: bool = False, rate: float = 1.0) -> list[Row]:
    """Rows of one load, kind of sizes and factor of the links' rates."""
    return [row for row in rows if (row["load"], row["rigid"], row["bandwidth"]) == (load, rigid, rate)]


def change(rows: Sequence[Row], name: str, other: str, column: str) -> str:
    """The paired change in percent with half its 95 % interval."""
    mean, half, count = paired(rows, name, other, column)
    if not count:
        return "-"
    return f"{mean:+.1f}" + ("" if math.isnan(half) else f" ± {half:.1f}")


def changes(rows: Sequence[Row], name: str, other: str, *columns: str) -> str:
    """Several of them."""
    return " / ".join(change(rows, name, other, column) for column in columns)


def line(cells: Iterable[object]) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def head(*cells: str) -> None:
    line(cells)
    print("|" + "---|" * len(cells))


def figure(column: str, value: float) -> str:
    """One cell."""
    return f"{value / (1e3 if column in THOUSANDS else 1):.{DIGITS.get(column, 0)}f}"


def named(name: str) -> str:
    """A policy's name; as code if it is one that users can give."""
    return f"`{name}`" if name in COMPARED and name != "random" else name


def mean_of(rows: Sequence[Row], name: str, column: str) -> float:
    found = [row[column] for row in rows if row["policy"] == name]
    return statistics.fmean(found) if found else math.nan


def first_table(rows: Sequence[Row], *, rigid: bool) -> None:
    """The policies that matter, against `bace` and `srtf`."""
    against = "against `bace`, JCT / electricity / all money, %", "against `srtf`, the same"
    head("load", "policy", "mean JCT h", "p95", "longest wait h", "all money", *against)
    for load in LOADS:
        at = chosen(rows, load, rigid=rigid)
        for name in (name for name in FIRST if any(row["policy"] == name for row in at)):
            columns = ("mean_h", "p95_h", "queued_max_h", "total_usd")
            cells = [figure(column, mean_of(at, name, column)) for column in columns]
            for other in ("bace", "srtf"):
                more = changes(at, name, other, "mean_h", "electricity_usd", "total_usd")
                cells.append("-" if name == other else more)
            line([load, named(name), *cells])


def other_policies(rows: Sequence[Row]) -> None:
    """Mean JCT in h of the others, and their change against `bace`."""
    head("policy", *(f"load {load}" for load in LOADS))
    names = [name for name in COMPARED if name not in FIRST]
    at = {load: chosen(rows, load) for load in LOADS}
    for name in sorted(names, key=lambda name: mean_of(at[LOADS[0]], name, "mean_h")):
        cells = [
            f"{mean_of(at[load], name, 'mean_h'):.1f} ({changes(at[load], name, 'bace', 'mean_h', 'electricity_usd')})"
            for load in LOADS
        ]
        line([named(name), *cells])


def ageing(rows: Sequence[Row]) -> None:
    """Mean JCT in h and longest wait in h under `bace` by its ageing."""
    names = [f"bace ageing {days} d" for days in (1, 7, 14, 30)] + ["bace"]
    head("load", "1 day", "7", "14", "30", "none")
    for load in LOADS:
        at = chosen(rows, load)
        line([load, *(f"{mean_of(at, n, 'mean_h'):.1f}, {mean_of(at, n, 'queued_max_h'):.0f}" for n in names)])


def ingredients(rows: Sequence[Row]) -> None:
    """Ablation, and BACE's places under other orders."""
    names = [name for name in dict.fromkeys(row["policy"] for row in rows) if name.startswith("without")]
    head("without", "starts", "load 0.6", "1.2")
    for name in names:
        cells = [changes(chosen(rows, load), name, LIKE_BACE, "mean_h", "electricity_usd") for load in (0.6, 1.2)]
        line([name.removeprefix("without "), paired(chosen(rows, 0.6), name, LIKE_BACE, "mean_h")[2], *cells])
    cells = [_rigid_change(rows, load) for load in (0.6, 1.2)]
    line(["elastic sizes (all are rigid)", len({row["start"] for row in chosen(rows, 0.6, rigid=True)}), *cells])
    print()
    head("order", "starts", *(f"load {load}" for load in LOADS))
    for name in ("fcfs", "easy", "sjf", "srtf", "las"):
        both = f"{name} with bace's places"
        cells = [changes(chosen(rows, load), both, name, "mean_h", "electricity_usd") for load in LOADS]
        line([f"`{name}`", paired(chosen(rows, 0.6), both, name, "mean_h")[2], *cells])


def _rigid_change(rows: Sequence[Row], load: float) -> str:
    at = [row | {"policy": f"{row['policy']}{row['rigid']}"} for row in rows if row["load"] == load]
    at = [row for row in at if row["bandwidth"] == 1.0]
    return changes(at, f"{LIKE_BACE}True", f"{LIKE_BACE}False", "mean_h", "electricity_usd")


def rate_table(rows: Sequence[Row]) -> None:
    """Links at multiples of what was measured, over the starts that all three have."""
    head("load", "policy", "starts", *(f"x {rate:g}" for rate in _RATES))
    for load in LOADS:
        for name in ("bace", "atlas", "single-region", LIKE_BACE, "farpipe"):
            by_rate = [[r for r in chosen(rows, load, rate=rate) if r["policy"] == name] for rate in _RATES]
            if starts := set.intersection(*({row["start"] for row in at} for at in by_rate)):
                line([load, name, len(starts), *(_rated(at, starts) for at in by_rate)])


def _rated(at: Sequence[Row], starts: set[int]) -> str:
    means = [statistics.fmean(row[column] for row in at if row["start"] in starts) for column in _RATED]
    return " / ".join(figure(column, mean) for column, mean in zip(_RATED, means, strict=True))


_RATES = (0.25, 1.0, 4.0)
_RATED = ("mean_h", "electricity_usd", "egress_usd", "total_usd")


def hops(formula: Sequence[Row], planner: Sequence[Row]) -> None:
    """Policies for which it matters: hops quoted by the planner beside the closed form, over the same starts."""
    head("load", "policy", "starts", "mean JCT h: formula", "planner", "all money: formula", "planner", "rank by JCT")
    for load in LOADS:
        by_planner = chosen(planner, load)
        starts = [row["start"] for row in by_planner if row["policy"] == "bace"]
        names = list(dict.fromkeys(row["policy"] for row in by_planner))
        by_formula = [r for r in chosen(formula, load) if r["start"] in starts]
        if not by_formula:
            continue
        ranks = [sorted(names, key=lambda n, at=at: mean_of(at, n, "mean_h")) for at in (by_formula, by_planner)]  # type: ignore[misc]
        for name in (n for n in names if mean_of(by_formula, n, "total_usd") != mean_of(by_planner, n, "total_usd")):
            cells = [
                figure(column, mean_of(at, name, column))
                for column in ("mean_h", "total_usd")
                for at in (by_formula, by_planner)
            ]
            line([load, name, len(starts), *cells, " / ".join(str(rank.index(name) + 1) for rank in ranks)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    rows = list(load_rows(folder / "rows.jsonl").values())
    formula = list(load_rows(folder / "rows_closed_form.jsonl").values())
    for rigid in (False, True):
        print("\n**Rigid sizes**\n" if rigid else "")
        first_table(rows, rigid=rigid)
    shown = (
        ("Other policies", other_policies),
        ("Ageing", ageing),
        ("Ingredients", ingredients),
        ("Links", rate_table),
    )
    for title, show in shown:
        print(f"\n**{title}**\n")
        show(rows)
    print("\n**Hops**\n")
    hops(formula, rows)


if __name__ == "__main__":
    main()
