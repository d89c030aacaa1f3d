"""Policies of a fleet side by side: FARPIPE_DATA=folder python -m benchmarks.fleet.fleet_comparison [--seconds S]

Six AWS regions with 64 A100 each, measured links, hourly prices of 2024, 600 jobs of the Philly trace; offered loads
0.6, 0.9 and 1.2; up to 12 starts over the half year, paired: every policy meets the same jobs, prices, size bounds,
right to cross and costs of stopping. Results go line by line into a folder (`--folder`) and are not computed again;
with `--seconds` it stops after so long, and the next call goes on. The tables are those of what there is so far.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fleet.baselines import COMPARED
from benchmarks.fleet.fleet_case import StepTimes, jobs_of, percent_change, philly, resumed, scenario
from farpipe.fleet.outcome import FleetOutcome
from farpipe.fleet.play import play
from farpipe.fleet.policies import orders, places
from farpipe.fleet.policies.farpipe_policy import FarpipePolicy
from farpipe.fleet.policies.protocol import Policy
from farpipe.fleet.policies.queueing import QueuePolicy
from farpipe.fleet.quotes import HopQuotes, PlannerQuotes
from farpipe.fleet.scenario import Scenario

LOADS = (0.6, 0.9, 1.2)
LIKE_BACE = "farpipe for JCT and electricity"
OWN = FarpipePolicy()
DAY_S = 86400.0
BY_RATE = ("bace", "atlas", "single-region", LIKE_BACE, "farpipe")
"""Those for which rates of links are varied."""
MAIN = ("bace", LIKE_BACE, "farpipe", "srtf", "easy")
RIGID = ("bace", LIKE_BACE, "srtf", "farpipe", "fcfs", "easy")
"""Those that are also tried with rigid sizes."""


def variants() -> dict[str, Policy]:
    """Policies by the names of the tables, those of `COMPARED` and what differs from them in one thing."""
    electricity = replace(OWN, electricity_only=True)
    found: dict[str, Policy] = {**COMPARED, LIKE_BACE: electricity}
    for name in ("fcfs", "easy", "sjf", "srtf", "las"):
        found[f"{name} with bace's places"] = replace(COMPARED[name], place=places.bace)  # type: ignore[type-var]
    for days in (1, 7, 14, 30):
        order = partial(orders.bace_priority, ageing_s=days * DAY_S)
        found[f"bace ageing {days} d"] = QueuePolicy("bace", order, places.bace)
    found |= {
        "without its order": replace(electricity, order="arrival"),
        "without preemption": replace(electricity, preempts=False),
        "without moves": replace(electricity, moves=False),
        "without other sizes": replace(electricity, grows=False),
        "without prices": replace(electricity, sees_prices=False),
    }
    return found


class Cell(NamedTuple):
    """One simulation."""

    part: str
    policy: str
    load: float
    start: int
    bandwidth: float = 1.0
    rigid: bool = False

    @property
    def key(self) -> str:
        """Its key in the file of results."""
        return f"{self.policy}|{self.load}|{self.start}|{self.bandwidth}|{self.rigid}"


def cells() -> Iterator[Cell]:
    """All simulations, the most needed first."""
    rest = [name for name in COMPARED if name not in MAIN]
    aged = [name for name in variants() if "ageing" in name]
    placed = [name for name in variants() if "places" in name]
    without = [LIKE_BACE, *(name for name in variants() if name.startswith("without"))]
    grids: list[tuple[str, Sequence[str], Sequence[float], range, tuple[float, ...], bool]] = [
        ("main", MAIN, LOADS, range(4), (1.0,), False),
        ("rigid", RIGID, LOADS, range(4), (1.0,), True),
        ("main", rest, LOADS, range(2), (1.0,), False),
        ("ageing", aged, LOADS, range(2), (1.0,), False),
        ("ablation", without, (0.6, 1.2), range(2), (1.0,), False),
        ("main", MAIN, LOADS, range(4, 12), (1.0,), False),
        ("bandwidth", BY_RATE, LOADS, range(4), (0.25, 1.0, 4.0), False),
        ("places", placed, LOADS, range(12), (1.0,), False),
        ("rigid", RIGID, LOADS, range(4, 12), (1.0,), True),
        ("main", rest, LOADS, range(2, 12), (1.0,), False),
        ("ablation", without, (0.6, 1.2), range(2, 12), (1.0,), False),
        ("ageing", aged, LOADS, range(2, 6), (1.0,), False),
    ]
    for part, names, loads, starts, rates, rigid in grids:
        for start in starts:
            yield from (Cell(part, n, load, start, r, rigid) for load in loads for r in rates for n in names)


class Bench:
    """Runs cells; what cells share is made once."""

    def __init__(self, hop_quotes: HopQuotes = "planner") -> None:
        self._steps = StepTimes()
        self._quotes = PlannerQuotes(scenario().cluster, hop_quotes=hop_quotes)
        self._policies = variants()
        self.scenario: Callable[[int, float], Scenario] = cache(scenario)

    def run(self, cell: Cell) -> dict[str, Any]:
        """The row of one cell."""
        case = self.scenario(cell.start, cell.bandwidth)
        jobs = jobs_of(philly(cell.start, cell.load), self._steps, rigid=cell.rigid)
        outcome = play(case, jobs, self._policies[cell.policy], quotes=self._quotes, tick_s=0.0)
        alone = [job.num_steps * self._steps(job.kind, job.max_devices) + case.stops.restart_s for job in jobs]
        bounds = {"alone_h": statistics.fmean(alone) / 3600, "least_usd": least_usd(case, outcome)}
        return cell._asdict() | figures(outcome) | bounds


def figures(outcome: FleetOutcome) -> dict[str, float]:
    """The columns of the tables."""
    data = outcome.to_data()
    money = {kind: sum(figure or 0.0 for figure in by_site.values()) for kind, by_site in data["money"].items()}
    kwh = {kind: sum(figure or 0.0 for figure in by_site.values()) for kind, by_site in data["energy_kwh"].items()}
    return {
        "mean_h": data["mean_jct_s"] / 3600,
        "median_h": data["median_jct_s"] / 3600,
        "p95_h": data["p95_jct_s"] / 3600,
        "queued_p99_h": data["p99_wait_s"] / 3600,
        "queued_max_h": data["max_wait_s"] / 3600,
        "mwh": kwh["jobs"] / 1e3,
        "usd_per_mwh": money["electricity"] / kwh["jobs"] * 1e3,
        "electricity_usd": money["electricity"],
        "rent_usd": money["rent"],
        "egress_usd": money["egress"],
        "carbon_t": sum(figure or 0.0 for figure in data["carbon_g"].values()) / 1e6,
        "idle_mwh": kwh["idle"] / 1e3,
        "idle_usd": money["idle_electricity"],
        "total_usd": data["total_usd"],
        "num_moves": data["num_moves"],
        "num_stops": data["num_preemptions"],
        "utilization": data["utilization"],
        "num_finished": data["num_finished"],
        "num_refused": data["num_refused"],
    }


def least_usd(case: Scenario, outcome: FleetOutcome) -> float:
    """Electricity if the same energy were drawn at the cheapest sites and hours of the span: a lower bound."""
    kwh = sum(outcome.spent.energy_kwh.values())
    slots: list[tuple[float, float]] = []
    for event in case.events:
        if event.time_s <= outcome.end_s:
            for name, price in getattr(event, "prices", {}).items():
                site = case.cluster.site(name)
                slots.append((price.usd_per_mwh, site.num_devices * (site.device.power_w or 0) * site.prices.pue / 1e3))
    usd = 0.0
    for price, room in sorted(slots):
        usd += min(room, kwh) * price / 1e3
        kwh -= min(room, kwh)
    return usd


def paired(rows: Sequence[dict[str, Any]], name: str, other: str, column: str) -> tuple[float, float, int]:
    """Mean change of `name` against `other` in percent, half its 95 % interval, and the starts that both have."""
    by_start = {(row["policy"], row["start"]): row[column] for row in rows}
    starts = sorted({start for policy, start in by_start if policy == name} & {s for p, s in by_start if p == other})
    if not starts:
        return math.nan, math.nan, 0
    return *percent_change([by_start[name, s] for s in starts], [by_start[other, s] for s in starts]), len(starts)


AGAINST = {"mean_h": "jct_vs_bace", "electricity_usd": "electricity_vs_bace", "total_usd": "money_vs_bace"}
SHOWN = (
    *("mean_h", "median_h", "p95_h", "queued_p99_h", "queued_max_h", "mwh", "usd_per_mwh", "electricity_usd"),
    *("rent_usd", "egress_usd", "carbon_t", "idle_mwh", "idle_usd", "total_usd"),
    *("num_moves", "num_stops", "utilization"),
)


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the starts of every policy, with the paired change of JCT and electricity against BACE."""
    lines = []
    for name in dict.fromkeys(row["policy"] for row in rows):
        mine = [row for row in rows if row["policy"] == name]
        line: dict[str, Any] = {"policy": name, "starts": len(mine)}
        for column, head in AGAINST.items():
            mean, half, num = paired(rows, name, "bace", column)
            line[head] = "" if not num or name == "bace" else f"{mean:+.1f} ± {half:.1f} %"
        line |= {column: _short(statistics.fmean(row[column] for row in mine)) for column in SHOWN}
        lines.append(line)
    return lines


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A table for every part and load, and the bounds."""
    found: dict[str, Any] = {
        "offered_load": "device-seconds requested over those that there are from first to last submission"
    }
    shared = [row for row in rows if row["part"] in ("main", "ageing", "places", "ablation")]
    for load in LOADS:
        at = [row for row in shared if row["load"] == load and not row["rigid"] and row["bandwidth"] == 1.0]
        found[f"load {load}"] = table(at)
        found[f"load {load}: bounds"] = {
            "mean JCT, each job alone, h": _mean(at, "alone_h"),
            "electricity at the cheapest sites and hours, usd": _mean(at, "least_usd"),
        }
        found[f"load {load}, rigid sizes"] = table([r for r in rows if r["rigid"] and r["load"] == load])
        for rate in (0.25, 1.0, 4.0):
            at = [r for r in rows if r["load"] == load and r["bandwidth"] == rate and not r["rigid"]]
            found[f"load {load}, links x {rate:g}"] = table([r for r in at if r["policy"] in BY_RATE])
    return found


def _mean(rows: Sequence[dict[str, Any]], column: str) -> float | None:
    return round(statistics.fmean(row[column] for row in rows), 1) if rows else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after so long; the next call goes on")
    parser.add_argument("--parts", default="", help="only these, with commas between them")
    parser.add_argument("--policies", default="", help="only these, with commas between them")
    parser.add_argument("--starts", type=int, default=12, help="only the first so many")
    parser.add_argument("--hop-quotes", default="planner", choices=("closed-form", "planner"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "farpipe_fleet_comparison")
    given = parser.parse_args()
    path = given.folder / ("rows.jsonl" if given.hop_quotes == "planner" else "rows_closed_form.jsonl")
    bench, wanted = Bench(given.hop_quotes), [c for c in cells() if not given.parts or c.part in given.parts.split(",")]
    wanted = [cell for cell in wanted if not given.policies or cell.policy in given.policies.split(",")]
    runs = [(cell.key, partial(bench.run, cell)) for cell in wanted if cell.start < given.starts]
    rows = resumed(path, runs, given.seconds)
    print(json.dumps(tables(list(rows.values())), indent=1))


if __name__ == "__main__":
    main()
