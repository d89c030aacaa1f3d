"""BACE-Pipe's own setting, rebuilt: python -m benchmarks.fleet.bace_setting [--draws N] [--jobs N] [--elastic]

Six regions with 16 to 128 A6000, 25 to 100 Gbit/s at each (a link has the mean of its ends), constant electricity of
0.156 to 0.295 USD/kWh, jobs of 13B to 76B parameters, as two summaries of arXiv 2605.25375 have it. Sizes, prices,
rates, times of arrival and lengths of the jobs are our draws: a draw deals them out anew. Means over draws, and changes
against `bace` paired by draw with 95 % intervals.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from benchmarks.fleet.baselines import COMPARED, cheapest_region
from benchmarks.fleet.fleet_case import percent_change
from farpipe.core.spec import Cluster
from farpipe.fleet.job import FleetJob, JobState, Kind
from farpipe.fleet.play import play, quotes_of
from farpipe.fleet.policies import orders, places, policy_of
from farpipe.fleet.policies.farpipe_policy import FarpipePolicy
from farpipe.fleet.policies.protocol import Policy, View
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.scenario import FleetFile, Scenario, resolve
from farpipe.fleet.snapshot import Space

HOUR_S: Final = 3600.0
REGIONS: Final = ("ireland", "newyork", "frankfurt", "tokyo", "singapore", "sydney")
LATENCY_MS: Final = dict(
    zip(combinations(REGIONS, 2), (34, 13, 105, 88, 128, 44, 84, 115, 100, 112, 80, 140, 35, 52, 46), strict=True)
)
"""One way, round figures of ours."""
NUM_DEVICES: Final = (16, 32, 48, 64, 96, 128)
USD_PER_KWH: Final = (0.156, 0.18, 0.21, 0.24, 0.27, 0.295)
A6000: Final = {
    "name": "rtx-a6000",
    "peak": {"bf16": "154.8 TFLOP/s"},
    "memory": "48 GiB",
    "memory_bandwidth": "768 GB/s",
    "power": "300 W",
}
"""NVIDIA RTX A6000 datasheet, rates without sparsity."""
MODELS: Final = {
    "llama-2-13b": (16, 32),
    "megatron-18.4b": (16, 32, 48),
    "qwen2.5-32b": (32, 48, 64),
    "megatron-39.1b": (32, 48, 64),
    "llama-2-70b": (64, 96),
    "megatron-76.1b": (96,),
}
"""Models and the devices that jobs of them ask for."""


def scenario(draw: random.Random, rate: float) -> Scenario:
    """The regions with their devices, prices and rates dealt out by `draw`, rates times `rate`."""
    dealt = list(zip(draw.sample(NUM_DEVICES, 6), draw.sample(USD_PER_KWH, 6), strict=True))
    gbit = {name: draw.uniform(25, 100) for name in REGIONS}
    sites = [
        {
            "name": name,
            "device": A6000,
            "num_devices": number,
            "machine_link": {"latency": "5.7 us", "bandwidth": "31.5 GB/s"},
            "site_link": {"latency": "5 us", "bandwidth": "100 Gbit/s"},
            "electricity": 1e3 * usd,
        }
        for name, (number, usd) in zip(REGIONS, dealt, strict=True)
    ]
    links = [
        {"between": [a, b], "latency": f"{ms} ms", "bandwidth": f"{rate * (gbit[a] + gbit[b]) / 2} Gbit/s"}
        for (a, b), ms in LATENCY_MS.items()
    ]
    return resolve(FleetFile.model_validate({"clock": {"start": "2025-01-01"}, "sites": sites, "links": links}), Path())


def trace(draw: random.Random, num_jobs: int, elastic: bool, steps: Callable[[Kind, int], float]) -> list[FleetJob]:
    """Jobs of some hours that come within a day, for more devices than there are."""
    jobs, now_s = list[FleetJob](), 0.0
    for index in range(num_jobs):
        model = draw.choice(list(MODELS))
        kind, number = Kind(model, 2048, 256), draw.choice(MODELS[model])
        seconds = min(48.0, draw.lognormvariate(math.log(8), 0.8)) * HOUR_S
        least, most = (max(8, number // 2), 2 * number) if elastic else (number, number)
        jobs.append(FleetJob(f"job{index}", kind, now_s, max(1, round(seconds / steps(kind, number))), least, most))
        now_s += draw.expovariate(1 / HOUR_S)
    return jobs


def step_times(quotes: PlannerQuotes) -> Callable[[Kind, int], float]:
    """Steps inside one site that is large enough."""

    def step_s(kind: Kind, number: int) -> float:
        placement = quotes.placement(kind, (("one", number),), {})
        assert placement is not None, (kind, number)
        return placement.step_s

    return step_s


BACE: Final = partial(replace, policy_of("bace"))  # type: ignore[type-var]
"""`bace` but for some of its parts."""


def policies() -> dict[str, Policy]:
    """By the names of the table: the baselines of the paper, simple rules, BACE in two readings, and ours."""
    ageing = partial(orders.bace_priority, ageing_s=14 * 24 * HOUR_S)
    return {
        "bace": policy_of("bace"),
        "bace, ageing 14 days": BACE(order=ageing),
        "bace, the most devices": BACE(fastest=False),
        **{name: COMPARED[name] for name in ("lcf", "ldf", "cr-lcf", "cr-ldf", "easy", "sjf", "srtf", "farpipe")},
        "farpipe for JCT and electricity": FarpipePolicy(electricity_only=True),
    }


def _fastest_path(view: View, space: Space, job: JobState, num: int) -> Any:
    """Of the paths that don't stall the pipeline the one with the shortest step: `places.bace` blind to prices."""
    found = [*places.alone(space, num), *places.wide(view, space, job, num, view.usd_per_mwh)]
    free = [devices for devices in found if places.is_stall_free(view, space, job, devices)]
    placed = [placement for devices in free if (placement := view.start(space, job, devices))]
    best = min(placed, key=lambda p: (p.step_s, len(p.devices), p.devices), default=None)
    return best.devices if best else None


def ablation() -> dict[str, Policy]:
    """`bace` and `farpipe` whole, and without each of their parts."""
    return {
        "bace": policy_of("bace"),
        "bace without priority (arrival)": BACE(order=orders.by_arrival),
        "bace without paths (one region, the cheapest)": BACE(place=cheapest_region),
        "bace without prices (the fastest path)": BACE(place=_fastest_path),
        "farpipe": FarpipePolicy(),
        "farpipe without its order (arrival)": FarpipePolicy(order="arrival"),
        "farpipe without stops": FarpipePolicy(preempts=False),
        "farpipe without growth": FarpipePolicy(grows=False),
        "farpipe without moves": FarpipePolicy(moves=False),
        "farpipe without prices": FarpipePolicy(sees_prices=False),
    }


def row(draw: int, num_jobs: int, rate: float, elastic: bool, policy: Policy, shared: dict[int, Any]) -> dict[str, Any]:
    """The figures of one simulation."""
    if draw not in shared:
        case = scenario(random.Random(f"sites {draw}"), rate)
        big = case.cluster.sites[0].model_copy(update={"name": "one", "num_devices": 1024})
        steps = step_times(PlannerQuotes(Cluster(sites=(big,))))
        shared[draw] = case, quotes_of(case), trace(random.Random(f"jobs {draw}"), num_jobs, elastic, steps)
    case, quotes, jobs = shared[draw]
    began_s = time.process_time()
    outcome = play(case, jobs, policy, quotes=quotes, tick_s=0.0)
    data = outcome.to_data()
    held = sum(sum(r.final.spent.device_s.values()) for r in outcome.records if r.final)
    return {
        "mean_h": data["mean_jct_s"] / HOUR_S,
        "p95_h": data["p95_jct_s"] / HOUR_S,
        "finished": data["num_finished"],
        "electricity": sum(figure or 0.0 for figure in data["money"]["electricity"].values()),
        "crossed": sum(r.final is not None and len(r.final.spent.device_s) > 1 for r in outcome.records),
        "device_h": held / HOUR_S,
        "cpu_s": time.process_time() - began_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--ablation", action="store_true", help="bace and farpipe without each of their parts")
    parser.add_argument("--only", help="policies, with semicolons")
    given = parser.parse_args()
    known = ablation() if given.ablation else policies()
    names = given.only.split(";") if given.only else list(known)
    shared = dict[int, Any]()
    rows = {
        name: [row(draw, given.jobs, given.rate, given.elastic, known[name], shared) for draw in range(given.draws)]
        for name in names
    }
    for name, found in rows.items():
        base = rows[name.split(" without ")[0] if given.ablation else names[0]]
        mean = {key: round(statistics.fmean(r[key] for r in found), 2) for key in found[0]}
        for key in ("mean_h", "electricity"):
            change, half = percent_change([r[key] for r in found], [r[key] for r in base])
            mean[f"{key} %"] = f"{change:+.1f} ± {half:.1f}"
        print(json.dumps({"policy": name} | mean), flush=True)


if __name__ == "__main__":
    main()
