"""Markdown tables of fleet_comparison.py's rows: python -m benchmarks.fleet.fleet_tables FOLDER

Nothing is simulated; the traces are made once more for the bounds (FARPIPE_DATA names the folder with them).
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.fleet.fleet_case import Row, StepTimes, jobs_of, load_rows, philly, scenario
from benchmarks.fleet.fleet_comparison import LIKE_BACE, LOADS, paired
from farpipe.fleet.outcome import quantile
from farpipe.fleet.scenario import Scenario

HEADS = {
    "mean JCT h": ("mean_h",),
    "median": ("median_h",),
    "p95": ("p95_h",),
    "queued p99 / max h": ("queued_p99_h", "queued_max_h"),
    "MWh": ("mwh",),
    "$/MWh": ("usd_per_mwh",),
    "electricity": ("electricity_usd",),
    "rent": ("rent_usd",),
    "egress": ("egress_usd",),
    "all": ("total_usd",),
    "carbon t": ("carbon_t",),
    "idle MWh / electricity": ("idle_mwh", "idle_usd"),
    "moves / stops": ("num_moves", "num_stops"),
    "use": ("utilization",),
}
"""Columns of the large tables: heads, and the figures below them."""
THOUSANDS = ("electricity_usd", "rent_usd", "egress_usd", "total_usd", "idle_usd")
DIGITS = {"mean_h": 1, "median_h": 1, "usd_per_mwh": 1, "electricity_usd": 1, "egress_usd": 1, "utilization": 2}
DIGITS |= {"idle_usd": 1}


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


def figure(column: str, value: float | None) -> str:
    """One cell."""
    if value is None:
        return ""
    return f"{value / (1e3 if column in THOUSANDS else 1):.{DIGITS.get(column, 0)}f}"


def main_table(rows: Sequence[Row], load: float, bounds: Callable[[float], Row]) -> None:
    """Every policy at one load, the bounds as its last line."""
    at = [row for row in chosen(rows, load) if row["part"] in ("main", "bandwidth")]
    names = sorted({row["policy"] for row in at}, key=lambda n: mean_of(at, n, "mean_h"))
    head("policy", "starts", *HEADS, "vs bace, JCT / electricity / all money, %")
    for name in names:
        cells = [" / ".join(figure(c, mean_of(at, name, c)) for c in columns) for columns in HEADS.values()]
        against = "" if name == "bace" else changes(at, name, "bace", "mean_h", "electricity_usd", "total_usd")
        line([f"`{name}`" if " " not in name else name, sum(r["policy"] == name for r in at), *cells, against])
    least = bounds(load)
    known = [all(c in least for c in columns) for columns in HEADS.values()]
    cells = [" / ".join(figure(c, least.get(c)) for c in columns) for columns in HEADS.values()]
    line(["bound", 12, *(cell if is_known else "-" for cell, is_known in zip(cells, known, strict=True)), ""])


def mean_of(rows: Sequence[Row], name: str, column: str) -> float:
    return statistics.fmean(row[column] for row in rows if row["policy"] == name)


def bounds_of(rows: Sequence[Row]) -> Callable[[float], Row]:
    """For a load the least that any policy could reach, mean over the starts, figure by figure."""
    steps = StepTimes()

    def of(load: float) -> Row:
        found = [_bound(rows, scenario(start), start, load, steps) for start in range(12)]
        return {column: statistics.fmean(bound[column] for bound in found) for column in found[0]}

    return of


def _bound(rows: Sequence[Row], case: Scenario, start: int, load: float, steps: StepTimes) -> Row:
    """Each job alone on its most devices; device-hours of its best size at the lowest rent; energy of that size, and
    the electricity of `bace` if drawn at the cheapest sites and hours."""
    jobs = jobs_of(philly(start, load), steps)
    alone = sorted(job.num_steps * steps(job.kind, job.max_devices) + case.stops.restart_s for job in jobs)
    sizes = [{job.min_devices, (job.min_devices + job.max_devices) // 2, job.max_devices} for job in jobs]
    held = sum(
        job.num_steps * min(number * steps(job.kind, number) for number in numbers)
        for job, numbers in zip(jobs, sizes, strict=True)
    )
    sites = case.cluster.sites
    watts = min((site.device.power_w or 0.0) * site.prices.pue for site in sites)
    bace = next(row for row in chosen(rows, load) if (row["policy"], row["start"]) == ("bace", start))
    mwh = held * watts / 3.6e9
    rent = held / 3600 * min(site.prices.rent_usd_per_device_hour or 0.0 for site in sites)
    electricity = bace["least_usd"] * min(1.0, mwh / bace["mwh"])
    return {
        "mean_h": statistics.fmean(alone) / 3600,
        "median_h": (quantile(alone, 0.5) or 0.0) / 3600,
        "p95_h": (quantile(alone, 0.95) or 0.0) / 3600,
        "queued_p99_h": 0.0,
        "queued_max_h": 0.0,
        "mwh": mwh,
        "usd_per_mwh": electricity / mwh,
        "electricity_usd": electricity,
        "rent_usd": rent,
        "egress_usd": 0.0,
        "total_usd": rent + electricity,
        "num_moves": 0.0,
        "num_stops": 0.0,
    }


def targets(rows: Sequence[Row]) -> None:
    """The aims of `farpipe` with BACE-Pipe's objective, and by default."""
    head("load", "elastic sizes", "target", "rigid sizes", "target")
    aims = (("-25 / -10", "0 / -15"), ("-20 / -8", "-11 / -8"), ("-40 / -5", "-38 / -8"))
    for load, (elastic, rigid) in zip(LOADS, aims, strict=True):
        cells = [
            changes(chosen(rows, load, rigid=r), LIKE_BACE, "bace", "mean_h", "electricity_usd") for r in (False, True)
        ]
        line([load, cells[0], elastic, cells[1], rigid])
    print()
    head(
        "load", "for JCT and electricity: JCT / electricity", "the same, rigid", "by default: JCT / all money", "rigid"
    )
    for load in LOADS:
        both = [chosen(rows, load, rigid=r) for r in (False, True)]
        like = [changes(at, LIKE_BACE, "srtf", "mean_h", "electricity_usd") for at in both]
        own = [changes(at, "farpipe", "srtf", "mean_h", "total_usd") for at in both]
        line([load, *like, *own])
    print()
    head("load", "`farpipe` against `bace`: JCT / all money", "rigid sizes")
    for load in LOADS:
        both = [chosen(rows, load, rigid=r) for r in (False, True)]
        line([load, *(changes(at, "farpipe", "bace", "mean_h", "total_usd") for at in both)])
    print()
    known = dict.fromkeys(row["policy"] for row in rows if row["part"] == "main")
    others = [name for name in known if name not in ("farpipe", "random")]
    head("load", *(name if " " in name else f"`{name}`" for name in others))
    for load in LOADS:
        at = chosen(rows, load)
        line([load, *(change(at, "farpipe", name, "total_usd") for name in others)])


def rigid_table(rows: Sequence[Row]) -> None:
    """Rigid sizes: mean JCT against `fcfs` and absolute figures."""
    head("load", "policy", "starts", "mean JCT h", "p95", "use", "all money", "vs fcfs, JCT / electricity, %")
    for load in LOADS:
        at = chosen(rows, load, rigid=True)
        for name in sorted({row["policy"] for row in at}, key=lambda n: mean_of(at, n, "mean_h")):
            cells = [figure(c, mean_of(at, name, c)) for c in ("mean_h", "p95_h", "utilization", "total_usd")]
            starts = sum(row["policy"] == name for row in at)
            line([load, name, starts, *cells, changes(at, name, "fcfs", "mean_h", "electricity_usd")])


def published(rows: Sequence[Row]) -> None:
    """BACE against the baselines."""
    others = ("easy", "delay-first", "cost-first", "atlas", "single-region")
    head("load", *(f"`{name}`" for name in others), "`easy`, rigid sizes")
    for load in LOADS:
        at = chosen(rows, load)
        cells = [changes(at, "bace", name, "mean_h", "electricity_usd") for name in others]
        rigid = changes(chosen(rows, load, rigid=True), "bace", "easy", "mean_h", "electricity_usd")
        line([load, *cells, rigid])


def ingredients(rows: Sequence[Row]) -> None:
    """Ablation, and BACE's places under other orders."""
    names = [name for name in dict.fromkeys(row["policy"] for row in rows) if name.startswith("without")]
    head("without", "starts", "load 0.6", "1.2")
    for name in names:
        cells = [changes(chosen(rows, load), name, LIKE_BACE, "mean_h", "electricity_usd") for load in (0.6, 1.2)]
        line([name.removeprefix("without "), paired(chosen(rows, 0.6), name, LIKE_BACE, "mean_h")[2], *cells])
    cells = [_rigid_change(rows, load) for load in (0.6, 1.2)]
    line(["elastic sizes (all are rigid)", 12, *cells])
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
        if not starts:
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
    bounds = bounds_of(rows)
    for load in LOADS:
        print(f"\n**Load {load}.**\n")
        main_table(rows, load, bounds)
    for title, show in (("Targets", targets), ("Rigid sizes", rigid_table), ("Published ranges", published)):
        print(f"\n**{title}**\n")
        show(rows)
    for title, show in (("Ingredients", ingredients), ("Links", rate_table)):
        print(f"\n**{title}**\n")
        show(rows)
    print("\n**Hops**\n")
    hops(formula, rows)


if __name__ == "__main__":
    main()
