"""Gap between rules of placement and the exact place of a job: python -m benchmarks.fleet.fleet_gap [--decisions N]

Random moments of a fleet of 6 and of 12 sites: free devices, electricity prices, rates of links from too thin to wide;
a job of 16 to 64 devices is placed by every rule and by the oracle (all paths and divisions that don't stall it).
`missed`: a place exists, the rule finds none. `stalls`: it takes a place where links slow the job. `gap`: electricity
of a step above the exact place's, where neither. Hops are quoted by the formula, for the oracle asks for thousands.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.fleet.baselines import anywhere, atlas, cost_first, delay_first
from benchmarks.fleet.exact_place import exact
from benchmarks.fleet.fleet_traces import SIZES
from farpipe.core.spec import Cluster, preset_site
from farpipe.core.spec.cluster import SiteLink
from farpipe.fleet.events import Price, PriceChanged
from farpipe.fleet.job import FleetJob, JobState
from farpipe.fleet.policies import places, policy_of
from farpipe.fleet.policies.places import is_stall_free
from farpipe.fleet.policies.protocol import View
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.state import first_state

RULES = {
    "bace": places.bace,
    "fcfs, easy, srtf, ...": places.compact,
    "cr-lcf": cost_first,
    "cr-ldf": delay_first,
    "single-region": places.single_region,
    "atlas": atlas,
    "random": anywhere,
}


def moments(num_sites: int, count: int) -> Iterator[tuple[View, JobState, int]]:
    """Views of a fleet with what is free drawn at random, and a job."""
    draw = random.Random(num_sites)
    names = [f"s{index}" for index in range(num_sites)]
    most = Cluster(sites=tuple(preset_site(name, "a100-80gb", 64) for name in names))
    quotes = PlannerQuotes(_linked(most, names, draw), hop_quotes="closed-form")
    for index in range(count):
        sites = tuple(preset_site(name, "a100-80gb", 8 * draw.randint(1, 5)) for name in names)
        cluster = _linked(Cluster(sites=sites), names, draw)
        state = first_state(cluster, policy_of("fcfs"), quotes)
        prices = {name: Price(draw.lognormvariate(3.7, 0.7), 0.0) for name in names}
        number = draw.choice([16, 32, 64])
        job = FleetJob(f"job{index}", draw.choice(SIZES[number]), 0.0, 100, number, number)
        yield View(state.handle(PriceChanged(0.0, prices))[0]), JobState(job), number


def _linked(cluster: Cluster, names: list[str], draw: random.Random) -> Cluster:
    links = [
        SiteLink(
            source=a,
            target=b,
            latency_s=draw.uniform(0.005, 0.12),
            bandwidth_bytes_per_s=draw.lognormvariate(21.3, 0.8),
        )
        for a in names
        for b in names
        if a != b
    ]
    return cluster.model_copy(update={"links": tuple(links)})


def gaps(num_sites: int, count: int) -> dict[str, Any]:
    """Rules against the exact place."""
    found: dict[str, list[float]] = {name: [] for name in RULES}
    missed, stalls, num_placed, seconds = dict.fromkeys(RULES, 0), dict.fromkeys(RULES, 0), 0, []
    for view, job, number in moments(num_sites, count):
        begin = time.perf_counter()
        best = exact(view, view.space(), job, number)
        seconds.append(time.perf_counter() - begin)
        if best is None:
            continue
        num_placed += 1
        least = _usd(view, job, best)
        for name, rule in RULES.items():
            devices = rule(view, view.space(), job, number)
            if devices is None:
                missed[name] += 1
            elif not is_stall_free(view, view.space(), job, devices):
                stalls[name] += 1
            else:
                found[name].append(100 * (_usd(view, job, devices) / least - 1))
    lines = [_line(name, found[name], missed[name], stalls[name]) for name in RULES]
    times = sorted(seconds)
    p99 = round(1e3 * times[int(0.99 * (len(times) - 1))], 1)
    return {"decisions": count, "with a place": num_placed, "oracle p99 ms": p99, f"{num_sites} sites": lines}


def _line(name: str, found: list[float], missed: int, stalls: int) -> dict[str, Any]:
    mean, most = (round(statistics.fmean(found), 2), round(max(found), 1)) if found else ("", "")
    return {"rule": name, "missed": missed, "stalls": stalls, "mean gap %": mean, "largest gap %": most}


def _usd(view: View, job: JobState, devices: Any) -> float:
    placement = view.start(view.space(), job, devices)
    assert placement is not None
    return places.electricity_usd_per_step(view, placement)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--decisions", type=int, default=300)
    given = parser.parse_args()
    print(json.dumps({f"{sites} sites": gaps(sites, given.decisions) for sites in (6, 12)}, indent=1))


if __name__ == "__main__":
    main()
