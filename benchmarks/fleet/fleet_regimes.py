"""Map of regimes: `farpipe` beside the best other policy of each: python -m benchmarks.fleet.fleet_regimes FILE.jsonl

Regions, jobs and prices of bace_setting, dealt out anew by every draw, over a grid: jobs wide or narrow for the
regions, links, offered load, sizes rigid or elastic, number of regions. A cell's best other policy is chosen in
hindsight by its mean over the draws; changes against it are paired by draw, with 95 % intervals. With `--hour-value` an
hour of completion is worth so many device-hours to `farpipe`. Runs that FILE.jsonl has are not done again.
"""

import argparse
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import permutations, product
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.fleet.bace_setting import A6000, HOUR_S, MODELS, NUM_DEVICES, USD_PER_KWH, policies, step_times
from benchmarks.fleet.fleet_case import Row, load_rows, percent_change, resumed
from farpipe.core.spec import Cluster
from farpipe.fleet.job import FleetJob, Kind
from farpipe.fleet.play import play, quotes_of
from farpipe.fleet.policies.farpipe_policy import FarpipePolicy
from farpipe.fleet.policies.protocol import Policy
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.scenario import FleetFile, Scenario, resolve

OURS: Final = "farpipe"
OTHERS: Final = ("srtf", "sjf", "easy", "bace", "cr-ldf", "ldf")
NUM_JOBS: Final = 40


class Cell(NamedTuple):
    """One regime."""

    regions: int
    width: str
    """``wide``: jobs of up to the largest region and more than most; ``narrow``: regions four times as large."""
    rate: float
    """Times 25 to 100 Gbit/s."""
    load: float
    """Device-seconds requested over those between the first and the last submission."""
    elastic: bool

    @property
    def times(self) -> int:
        """Devices of a region as a multiple of bace_setting's."""
        return 4 if self.width == "narrow" else 1

    def draws(self, count: int) -> int:
        """Draws, of `count` in elastic cells: rigid wide jobs differ most by draw, policies of narrow ones least."""
        return count * (1 if self.elastic else 2 if self.width == "wide" else 5)


CELLS: Final = tuple(Cell(*c) for c in product((3, 6), ("wide", "narrow"), (0.02, 0.2, 1.0), (0.6, 1.2), (False, True)))
FIRST: Final = sorted(CELLS, key=lambda cell: cell.draws(1), reverse=True)


def scenario(draw: random.Random, cell: Cell) -> Scenario:
    """Regions, of which the first always has the most devices, so that every job fits the fleet."""
    numbers = [NUM_DEVICES[-1], *draw.choices(NUM_DEVICES[:-1], k=cell.regions - 1)]
    names = [f"region{index}" for index in range(cell.regions)]
    gbit = {name: draw.uniform(25, 100) for name in names}
    sites = [
        {
            "name": name,
            "device": A6000,
            "num_devices": cell.times * number,
            "machine_link": {"latency": "5.7 us", "bandwidth": "31.5 GB/s"},
            "site_link": {"latency": "5 us", "bandwidth": "100 Gbit/s"},
            "electricity": 1e3 * draw.choice(USD_PER_KWH),
        }
        for name, number in zip(names, numbers, strict=True)
    ]
    ms = {frozenset(pair): draw.choice((15, 40, 80, 120)) for pair in permutations(names, 2)}
    links = [
        {
            "between": sorted(pair),
            "latency": f"{latency} ms",
            "bandwidth": f"{cell.rate * sum(gbit[name] for name in pair) / 2} Gbit/s",
        }
        for pair, latency in sorted(ms.items(), key=lambda item: sorted(item[0]))
    ]
    return resolve(FleetFile.model_validate({"clock": {"start": "2025-01-01"}, "sites": sites, "links": links}), Path())


def trace(draw: random.Random, cell: Cell, num_devices: int, steps: Callable[[Kind, int], float]) -> list[FleetJob]:
    """Jobs of some hours, so far apart that the load is the cell's."""
    bodies, num_jobs = list[tuple[Kind, int, float]](), NUM_JOBS * (2 if cell.width == "narrow" else 1)
    for _ in range(num_jobs):
        model = draw.choice(list(MODELS))
        seconds = min(48.0, draw.lognormvariate(math.log(8), 0.8)) * HOUR_S
        bodies.append((Kind(model, 2048, 256), draw.choice(MODELS[model]), seconds))
    span_s = sum(number * seconds for _, number, seconds in bodies) / num_devices / cell.load
    gaps = [draw.expovariate(1.0) for _ in bodies[1:]]
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap * span_s / sum(gaps))
    jobs = list[FleetJob]()
    for index, (now_s, (kind, number, seconds)) in enumerate(zip(times, bodies, strict=True)):
        least, most = (max(8, number // 2), 2 * number) if cell.elastic else (number, number)
        jobs.append(FleetJob(f"job{index}", kind, now_s, max(1, round(seconds / steps(kind, number))), least, most))
    return jobs


def row(cell: Cell, draw: int, name: str, shared: dict[Any, Any]) -> Row:
    """The figures of one simulation."""
    if (cell, draw) not in shared:
        shared.clear()  # a cell's quotes are only its own
        case = scenario(random.Random(f"sites {draw} {cell.regions}"), cell)
        big = case.cluster.sites[0].model_copy(update={"name": "one", "num_devices": 1024})
        num_devices = sum(site.num_devices for site in case.cluster.sites)
        steps = step_times(PlannerQuotes(Cluster(sites=(big,))))
        shared[cell, draw] = case, quotes_of(case), trace(random.Random(f"jobs {draw}"), cell, num_devices, steps)
    case, quotes, jobs = shared[cell, draw]
    outcome = play(case, jobs, _policy(name), quotes=quotes, tick_s=0.0)
    data = outcome.to_data()
    waits = sorted(record.final.queued_s for record in outcome.records if record.final)
    return {
        "mean_h": data["mean_jct_s"] / HOUR_S,
        "finished": data["num_finished"],
        "electricity": sum(figure or 0.0 for figure in data["money"]["electricity"].values()),
        "crossed": sum(r.final is not None and len(r.final.spent.device_s) > 1 for r in outcome.records),
        "longest_wait_h": waits[-1] / HOUR_S if waits else math.nan,
    }


def _policy(name: str) -> Policy:
    """The policy of that name; `farpipe, 2048` is farpipe's with that `hour_value`."""
    _, _, hour_value = name.partition(", ")
    return FarpipePolicy(hour_value=float(hour_value)) if hour_value else policies()[name]


def table(rows: Mapping[str, Row], draws: int, ours: str) -> None:
    """Print every cell that is complete, and how often `ours` is below, level with and above the best other."""
    print("| regions | jobs | links | load | sizes | best other | its JCT h | ours h | JCT, % | electricity, % |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    verdicts = Counter[str]()
    for cell in CELLS:
        found = {n: [rows.get(f"{cell} {d} {n}") for d in range(cell.draws(draws))] for n in (ours, *OTHERS)}
        if not all(all(column) for column in found.values()):
            continue
        jct = {n: [r["mean_h"] for r in column if r] for n, column in found.items()}
        done = {n: sum(r["finished"] for r in column if r) for n, column in found.items()}
        fair = [n for n in OTHERS if done[n] == max(done.values())]
        best = min(fair, key=lambda n: statistics.fmean(jct[n]))
        usd = [[r["electricity"] for r in found[n] if r] for n in (ours, best)]
        (jct_mean, jct_half), (usd_mean, usd_half) = percent_change(jct[ours], jct[best]), percent_change(*usd)
        verdicts["below" if jct_mean + jct_half < 0 else "above" if jct_mean - jct_half > 0 else "level"] += 1
        sizes = "elastic" if cell.elastic else "rigid"
        print(
            f"| {cell.regions} | {cell.width} | x {cell.rate:g} | {cell.load:g} | {sizes} | `{best}` "
            f"| {statistics.fmean(jct[best]):.2f} | {statistics.fmean(jct[ours]):.2f} "
            f"| {jct_mean:+.1f} ± {jct_half:.1f} | {usd_mean:+.1f} ± {usd_half:.1f} |"
        )
    print("\n" + ", ".join(f"{word} in {number} cells" for word, number in verdicts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--draws", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--hour-value", type=float)
    given = parser.parse_args()
    ours = f"{OURS}, {given.hour_value:g}" if given.hour_value is not None else OURS
    shared = dict[Any, Any]()
    wanted = [
        (f"{cell} {draw} {name}", partial(row, cell, draw, name, shared))
        for cell in FIRST
        for draw, name in product(range(cell.draws(given.draws)), (ours, *OTHERS))
    ]
    table(resumed(given.file, wanted, given.seconds) if given.seconds else load_rows(given.file), given.draws, ours)


if __name__ == "__main__":
    main()
