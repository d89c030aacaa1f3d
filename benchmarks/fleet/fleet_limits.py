"""Where fleet_comparison's figures do not hold: FARPIPE_DATA=folder python -m benchmarks.fleet.fleet_limits

`windows`: four disjoint parts of its trace, each in the order in which the jobs came, where the comparison deals the
same jobs out anew for every start. `one rent`: its starts with 2.3 USD per device-hour at every site, where the
comparison's listed rents are round figures of ours. `wide jobs`: 24 rigid jobs of 14B to 70B, most of them wider than a
region, over six regions of 16 to 128 devices with links of 25 to 100 Gbit/s, which is BACE-Pipe's own regime.
"""

import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from benchmarks.fleet.fleet_case import DEVICES, REGIONS, StepTimes, jobs_of, philly, scenario
from benchmarks.fleet.fleet_comparison import LOADS, paired, variants
from benchmarks.fleet.fleet_traces import at_load, read_philly
from benchmarks.shared.data import data_folder
from farpipe.fleet.job import FleetJob, Kind
from farpipe.fleet.outcome import FleetOutcome
from farpipe.fleet.play import play
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.scenario import Scenario
from farpipe.spec import Cluster
from farpipe.spec.cluster import SiteLink

NUM_JOBS, NUM_WINDOWS = 604, 4
KINDS = (Kind("llama-2-13b", 4096, 512), Kind("qwen2.5-32b", 4096, 512), Kind("llama-3-70b", 4096, 1024))
Case = Callable[[int, float], tuple[Scenario, Sequence[FleetJob]]]
Row = dict[str, float | str]
STEPS = StepTimes()
SCENARIO = cache(scenario)


def window(index: int, load: float) -> tuple[Scenario, Sequence[FleetJob]]:
    """A quarter of the trace as it came, on the first start's prices."""
    size = NUM_JOBS // NUM_WINDOWS
    jobs = read_philly(data_folder("jobs/, prices/ and wan/") / "jobs" / "philly_first_half.csv")
    raw = jobs[index * size : (index + 1) * size]
    moved = [replace(j, submit_s=j.submit_s - raw[0].submit_s, num_devices=2 * j.num_devices) for j in raw]
    return SCENARIO(0), jobs_of(at_load(moved, len(REGIONS) * DEVICES, load), STEPS)


def one_rent(start: int, load: float) -> tuple[Scenario, Sequence[FleetJob]]:
    """A start of the comparison where every region's devices cost the same."""
    case = SCENARIO(start)
    sites = tuple(
        site.model_copy(update={"prices": site.prices.model_copy(update={"rent_usd_per_device_hour": 2.3})})
        for site in case.cluster.sites
    )
    cluster = case.cluster.model_copy(update={"sites": sites})
    return replace(case, cluster=cluster), jobs_of(philly(start, load), STEPS)


def wide_jobs(seed: int, load: float) -> tuple[Scenario, Sequence[FleetJob]]:
    """One job every ten minutes, each of about half an hour to three hours; `load` plays no part."""
    draw, case = random.Random(f"wide {seed}"), SCENARIO(0)
    room = dict(zip(REGIONS, draw.sample((16, 32, 48, 64, 96, 128), 6), strict=True))
    rate = {name: draw.uniform(25e9, 100e9) / 8 for name in REGIONS}
    sites = tuple(site.model_copy(update={"num_devices": room[site.name]}) for site in case.cluster.sites)
    links = tuple(_fast(link, (rate[link.source] + rate[link.target]) / 2) for link in case.cluster.links)
    jobs = []
    for index in range(24):
        kind, number = draw.choice(KINDS), draw.choice((64, 96, 128, 160))
        num_steps = round(draw.uniform(0.5, 3.0) * 3600 / STEPS(kind, number))
        jobs.append(FleetJob(f"j{index}", kind, 600.0 * index, num_steps, number, number))
    return replace(case, cluster=Cluster(sites=sites, links=links)), jobs


def _fast(link: SiteLink, bytes_per_s: float) -> SiteLink:
    return link.model_copy(update={"bandwidth_bytes_per_s": bytes_per_s})


def rows(case: Case, names: Sequence[str], load: float) -> list[Row]:
    """Completion time and money of every policy in four cases."""
    found: list[Row] = []
    for start in range(4):
        made, jobs = case(start, load)
        quotes = PlannerQuotes(made.cluster)
        for name in names:
            outcome = play(made, jobs, variants()[name], quotes=quotes, tick_s=0.0)
            found.append({"policy": name, "start": start} | _figures(outcome))
    return found


def _figures(outcome: FleetOutcome) -> dict[str, float]:
    data = outcome.to_data()
    assert data["num_finished"] == data["num_jobs"], [r.unfinished or r.refused for r in outcome.records]
    return {"mean_h": data["mean_jct_s"] / 3600, "total_usd": data["total_usd"]}


def against(found: list[Row], names: Sequence[str]) -> dict[str, str]:
    """Changes of `farpipe` against each other policy, JCT / all money, with 95 % intervals over the four."""
    changes = {name: [paired(found, "farpipe", name, column) for column in ("mean_h", "total_usd")] for name in names}
    return {name: " / ".join(f"{mean:+.1f} ± {half:.1f}" for mean, half, _ in pair) for name, pair in changes.items()}


def main() -> None:
    others = ("bace", "bace ageing 14 d", "srtf", "easy")
    found = {}
    for title, case in (("windows", window), ("one rent", one_rent)):
        for load in LOADS:
            found[f"{title}, load {load}"] = against(rows(case, ("farpipe", *others), load), others)
    names = ("farpipe", "easy", "srtf", "bace")
    wide = rows(wide_jobs, names, 0.0)
    means = {name: [float(row["mean_h"]) for row in wide if row["policy"] == name] for name in names}
    found["wide jobs, mean JCT h"] = {name: f"{statistics.fmean(h):.2f}" for name, h in means.items()}
    found["wide jobs"] = against(wide, names[1:])
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
